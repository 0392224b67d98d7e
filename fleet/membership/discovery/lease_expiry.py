"""Which Leases somebody has seen for so long without a renewal that they have ended. Pure.

Rules:

1. A Lease counts from when its present version was first seen, by the clock of whoever sees it: clocks of two machines are never compared.
2. Which version that was is said too. Who removes a Lease names it, so that one that was renewed meanwhile, unseen, stays.
"""

from collections.abc import Iterable

from msgspec import Struct

from fleet.core.clock import Nanos


class ExpiredLease(Struct, frozen=True):
    """A Lease that is over."""

    name: str
    version: str


class _ObservedVersion(Struct, frozen=True):
    version: str
    ends: Nanos


class LeaseExpiry:
    """What is known of the Leases of one directory. Its size is that of the directory."""

    def __init__(self) -> None:
        self._held: dict[str, _ObservedVersion] = {}

    def saw(self, name: str, version: str, lease: Nanos, now: Nanos) -> None:
        """It is there, in this version."""
        known = self._held.get(name)
        if known is None or known.version != version:
            self._held[name] = _ObservedVersion(version, Nanos(now + lease))

    def gone(self, name: str) -> None:
        """It is not there."""
        self._held.pop(name, None)

    def only(self, names: Iterable[str]) -> None:
        """No others are there."""
        there = set(names)
        for name in [each for each in self._held if each not in there]:
            del self._held[name]

    def ended(self, now: Nanos) -> list[ExpiredLease]:
        """Those that are over, each once in a version."""
        over = [ExpiredLease(name, held.version) for name, held in self._held.items() if held.ends <= now]
        for each in over:
            del self._held[each.name]
        return over
