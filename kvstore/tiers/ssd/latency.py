"""How long operations on disk took: counts by bounds, as a metrics endpoint wants them."""

from bisect import bisect_left

from msgspec import Struct

from kvstore.clock import Nanos, seconds

BOUNDS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Latency(Struct, frozen=True, kw_only=True):
    """Of the operations since the tier was opened."""

    counts: tuple[int, ...]  # operations up to each of `BOUNDS_SECONDS`, not cumulative; the last ones were longer
    total_seconds: float


class LatencyCounts:
    """Its owner holds the lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._total = 0

    def add(self, span: Nanos) -> None:
        self._counts[bisect_left(BOUNDS_SECONDS, seconds(span))] += 1
        self._total += span

    def read(self) -> Latency:
        return Latency(counts=tuple(self._counts), total_seconds=seconds(self._total))
