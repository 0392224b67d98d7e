"""Tier gate: decides whether a tier takes a call, which it does until it is closed and until the call's deadline."""

from kvstore.clock import Clock, Nanos
from kvstore.errors import TierFailed
from kvstore.tiers.statistics import TierStatistics


class TierGate:
    """The gate of one tier. Thread-safe."""

    def __init__(self, statistics: TierStatistics, clock: Clock):
        self._statistics = statistics
        self._clock = clock
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def require_open(self) -> None:
        """Check that the tier is open.

        Raises:
            TierFailed: It is closed.
        """
        if self._closed:
            raise TierFailed(f"the {self._statistics.name} tier is closed")

    def is_late(self, deadline: Nanos) -> bool:
        """Return whether the deadline has passed, and count that as a failure."""
        late = self._clock.now() >= deadline
        self._statistics.count(failures=late)
        return late

    def close(self) -> None:
        self._closed = True
