"""Lease expiry: finds Kubernetes Leases that their holders have not renewed in time.

Rules:

1. The duration of a Lease counts from the instant at which this process first saw the Lease's present version, by the
   clock of this process. The clocks of two machines are never compared.
2. The version in which a Lease was not renewed is part of the result. A deletion names this version, so that a Lease that
   was renewed meanwhile is not deleted.
"""

from collections.abc import Iterable

from msgspec import Struct

from fleet.core.clock import Nanos


class ExpiredLease(Struct, frozen=True):
    """A Lease that has ended, and the version in which it was not renewed."""

    name: str
    version: str


class _ObservedVersion(Struct, frozen=True):
    version: str
    ends: Nanos


class LeaseExpiry:
    """Finds the Leases of one directory that have ended. It remembers when it first saw the present version of each Lease."""

    def __init__(self) -> None:
        self._held: dict[str, _ObservedVersion] = {}

    def saw(self, name: str, version: str, lease: Nanos, now: Nanos) -> None:
        """Record that a Lease exists in this version. If the version is new, the duration `lease` begins now."""
        known = self._held.get(name)
        if known is None or known.version != version:
            self._held[name] = _ObservedVersion(version, Nanos(now + lease))

    def gone(self, name: str) -> None:
        """Record that a Lease no longer exists."""
        self._held.pop(name, None)

    def only(self, names: Iterable[str]) -> None:
        """Record that only these Leases exist, and forget all others."""
        there = set(names)
        for name in [each for each in self._held if each not in there]:
            del self._held[name]

    def ended(self, now: Nanos) -> list[ExpiredLease]:
        """Return the Leases that have ended. A Lease is returned only once, unless `saw` reports it again."""
        over = [ExpiredLease(name, held.version) for name, held in self._held.items() if held.ends <= now]
        for each in over:
            del self._held[each.name]
        return over
