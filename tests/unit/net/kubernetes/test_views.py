"""Leases as they are heard of, whatever the clocks of those who wrote them say."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.net.kubernetes.views import KubernetesLease, LeaseSpec, ObjectMetadata

NOW = datetime(2026, 11, 22, tzinfo=UTC)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)


def a_lease(renewed):
    spec = LeaseSpec(holder_identity="pod", lease_duration_seconds=9, renew_time=renewed.isoformat())
    return KubernetesLease(metadata=ObjectMetadata(name="pod"), spec=spec)


@pytest.mark.parametrize("off", [-HOUR, HOUR], ids=["behind", "ahead"])
def test_what_is_news_was_renewed_when_it_was_heard_of(off):
    assert a_lease(NOW + off).heard(NOW, None, news=True).renewed == NOW


def test_what_was_there_before_us_is_as_old_as_it_says_and_never_younger_than_now():
    assert a_lease(NOW - HOUR).heard(NOW, None, news=False).renewed == NOW - HOUR
    assert a_lease(NOW + HOUR).heard(NOW, None, news=False).renewed == NOW


def test_a_renewal_is_no_change_unless_it_had_ended():
    first = a_lease(NOW).heard(NOW, None, news=True)

    in_time = a_lease(NOW).heard(NOW + 8 * SECOND, first, news=True)
    late = a_lease(NOW).heard(NOW + 9 * SECOND, first, news=True)

    assert in_time.essence() == first.essence()
    assert late.essence() != first.essence()
    assert late.heard(NOW + 10 * SECOND, late, news=True).essence() == late.essence()
