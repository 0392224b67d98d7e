"""Lease expiry: a Lease has ended when it has not changed for its duration."""

from fleet.core.clock import Nanos
from fleet.membership.discovery.lease_expiry import ExpiredLease, LeaseExpiry


def test_a_lease_counts_from_when_its_version_was_first_seen():
    leases = LeaseExpiry()
    leases.saw("a", "1", Nanos(10), Nanos(100))
    leases.saw("a", "1", Nanos(10), Nanos(105))  # listed again without a change

    assert leases.ended(Nanos(109)) == []
    leases.saw("a", "2", Nanos(10), Nanos(109))
    assert leases.ended(Nanos(118)) == []
    assert leases.ended(Nanos(119)) == [ExpiredLease("a", "2")]


def test_expired_lease_is_reported_once_and_deleted_one_never():
    leases = LeaseExpiry()
    for name in ("a", "b", "c"):
        leases.saw(name, "1", Nanos(10), Nanos(0))
    leases.gone("a")
    leases.gone("a")
    leases.only(["b", "d"])

    assert leases.ended(Nanos(10)) == [ExpiredLease("b", "1")]
    assert leases.ended(Nanos(20)) == []
