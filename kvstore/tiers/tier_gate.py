"""Whether a tier takes a call: until it is closed, and until the call's deadline. Said once, for all tiers that count alike."""

from kvstore.clock import Clock, Nanos
from kvstore.errors import TierFailed
from kvstore.tiers.statistics import TierStatistics


class TierGate:
    """Of one tier. Thread-safe."""

    def __init__(self, statistics: TierStatistics, clock: Clock):
        self._statistics = statistics
        self._clock = clock
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def require_open(self) -> None:
        """Begin nothing more once the tier is closed.

        Raises:
            TierFailed: It is.
        """
        if self._closed:
            raise self.refusal()

    def refusal(self) -> TierFailed:
        """What a call meets that the end of the tier overtakes."""
        return TierFailed(f"the {self._statistics.name} tier is closed")

    def is_late(self, deadline: Nanos) -> bool:
        """Whether the deadline is over before anything was begun; that is counted as a failure."""
        late = self._clock.now() >= deadline
        self._statistics.count(failures=late)
        return late

    def close(self) -> None:
        self._closed = True
