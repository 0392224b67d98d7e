"""Ages of Leases: they do not depend on the clocks of the writers."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.net.kubernetes.views import KubernetesLease, LeaseSpec, ObjectMetadata

NOW = datetime(2026, 11, 22, tzinfo=UTC)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)


def a_lease(renewed):
    spec = LeaseSpec(holder_identity="pod", lease_duration_seconds=9, renew_time=renewed.isoformat())
    return KubernetesLease(metadata=ObjectMetadata(name="pod"), spec=spec)


@pytest.mark.parametrize("off", [-HOUR, HOUR], ids=["behind", "ahead"])
def test_news_of_a_lease_counts_as_renewed_on_arrival(off):
    assert a_lease(NOW + off).with_renewal_time(NOW, None, news=True).renewed == NOW


def test_first_listed_lease_keeps_its_age():
    assert a_lease(NOW - HOUR).with_renewal_time(NOW, None, news=False).renewed == NOW - HOUR
    assert a_lease(NOW + HOUR).with_renewal_time(NOW, None, news=False).renewed == NOW


def test_a_renewal_is_no_change_unless_it_had_ended():
    first = a_lease(NOW).with_renewal_time(NOW, None, news=True)

    in_time = a_lease(NOW).with_renewal_time(NOW + 8 * SECOND, first, news=True)
    late = a_lease(NOW).with_renewal_time(NOW + 9 * SECOND, first, news=True)

    assert in_time.essence() == first.essence()
    assert late.essence() != first.essence()
    assert late.with_renewal_time(NOW + 10 * SECOND, late, news=True).essence() == late.essence()
