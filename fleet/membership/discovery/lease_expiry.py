"""Lease expiry: finds Kubernetes Leases that nobody has renewed in time.

Rules:

1. A Lease counts from the time at which its present version was first seen, by the clock of this process. Clocks of two
   machines are never compared.
2. The result names the version. A removal states it, so that a Lease that was renewed meanwhile stays.
"""

from collections.abc import Iterable

from msgspec import Struct

from fleet.core.clock import Nanos


class ExpiredLease(Struct, frozen=True):
    """A Lease that has ended."""

    name: str
    version: str


class _ObservedVersion(Struct, frozen=True):
    version: str
    ends: Nanos


class LeaseExpiry:
    """Known versions of the Leases of one directory. Its size is that of the directory."""

    def __init__(self) -> None:
        self._held: dict[str, _ObservedVersion] = {}

    def saw(self, name: str, version: str, lease: Nanos, now: Nanos) -> None:
        """Record that the Lease exists in this version."""
        known = self._held.get(name)
        if known is None or known.version != version:
            self._held[name] = _ObservedVersion(version, Nanos(now + lease))

    def gone(self, name: str) -> None:
        """Record that the Lease does not exist."""
        self._held.pop(name, None)

    def only(self, names: Iterable[str]) -> None:
        """Record that no other Leases exist."""
        there = set(names)
        for name in [each for each in self._held if each not in there]:
            del self._held[name]

    def ended(self, now: Nanos) -> list[ExpiredLease]:
        """Return the Leases that have ended, each once per version."""
        over = [ExpiredLease(name, held.version) for name, held in self._held.items() if held.ends <= now]
        for each in over:
            del self._held[each.name]
        return over
