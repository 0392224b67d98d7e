"""Durations as counts in fixed buckets, so that a report is small, and the counts of several routers can be added exactly."""

from bisect import bisect_left
from itertools import accumulate
from math import log

EDGES = tuple(0.001 * 10 ** (step / 8) for step in range(8 * 6 + 1))
"""Upper edges of the buckets in seconds: eight per decade from 1 ms to 1,000 s. One more bucket counts longer durations."""

STEP: float = 10 ** (1 / 8)
"""Ratio of an edge to the edge before it."""

Counts = tuple[int, ...]
"""Number of values in each bucket: `len(EDGES) + 1` numbers, or none at all if nothing was counted."""


def bucket_of(seconds: float) -> int:
    """Return the index of the bucket in which a duration is counted."""
    return bisect_left(EDGES, seconds)


def added(one: Counts, other: Counts) -> Counts:
    """Return the sums of two sets of counts, bucket by bucket."""
    if not one or not other:
        return one or other
    return tuple(a + b for a, b in zip(one, other, strict=True))


def percentile(counts: Counts, share: float) -> float | None:
    """Return the upper edge in seconds of the bucket in which the percentile `share` lies; None if there are no values."""
    total = sum(counts)
    if not total:
        return None
    for index, below in enumerate(accumulate(counts)):
        if below >= share * total:
            return EDGES[min(index, len(EDGES) - 1)]
    raise AssertionError("the last bucket completes the sum")


def within(counts: Counts, seconds: float) -> float:
    """Return the estimated number of values up to a duration.

    The values in the duration's bucket count as spread evenly on a logarithmic scale.
    """
    index = bucket_of(seconds)
    if not counts or index == len(EDGES):
        return float(sum(counts))
    return sum(counts[:index]) + counts[index] * (1.0 - log(EDGES[index] / seconds) / log(STEP))


def interpolated(counts: Counts, share: float) -> float | None:
    """Return the estimated percentile in seconds; the values of a bucket count as spread evenly on a logarithmic scale."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for index, count in enumerate(counts):
        if below + count >= wanted:
            upper = EDGES[min(index, len(EDGES) - 1)]
            share_of_bucket = (wanted - below) / count
            return float(upper * STEP ** (share_of_bucket - 1.0))
        below += count
    raise AssertionError("the last bucket completes the sum")
