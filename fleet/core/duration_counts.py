"""Duration counts: count durations in fixed buckets, so that the counts of several routers can be added exactly."""

from bisect import bisect_left
from itertools import accumulate
from math import log

EDGES = tuple(0.001 * 10 ** (step / 8) for step in range(8 * 6 + 1))
"""Upper edges of the buckets in seconds: eight per decade, from 1 ms to 1,000 s. A last bucket counts longer
durations."""

STEP: float = 10 ** (1 / 8)
"""Ratio of each edge to the next lower edge."""

Counts = tuple[int, ...]
"""Number of durations in each bucket: `len(EDGES) + 1` numbers, or an empty tuple if nothing was counted."""


def bucket_of(seconds: float) -> int:
    """Return the index of the bucket that counts durations of `seconds` seconds."""
    return bisect_left(EDGES, seconds)


def added(one: Counts, other: Counts) -> Counts:
    """Return the sum of two counts, bucket by bucket."""
    if not one or not other:
        return one or other
    return tuple(a + b for a, b in zip(one, other, strict=True))


def percentile(counts: Counts, share: float) -> float | None:
    """Return, in seconds, the upper edge of the bucket that contains the percentile `share` (0 to 1); None if nothing was counted.

    If this bucket is the last one, which has no upper edge, the largest edge is returned.
    """
    total = sum(counts)
    if not total:
        return None
    for index, below in enumerate(accumulate(counts)):
        if below >= share * total:
            return EDGES[min(index, len(EDGES) - 1)]
    raise AssertionError("the last bucket completes the sum")


def within(counts: Counts, seconds: float) -> float:
    """Estimate the number of durations that are not longer than `seconds`.

    The durations within one bucket are assumed to be spread evenly on a logarithmic scale. The first bucket is treated as
    if its lower edge were its upper edge divided by `STEP`. If `seconds` is above the largest edge, all durations are counted.
    """
    index = bucket_of(seconds)
    if not counts or index == len(EDGES):
        return float(sum(counts))
    return sum(counts[:index]) + counts[index] * max(0.0, 1.0 - log(EDGES[index] / seconds) / log(STEP))


def interpolated(counts: Counts, share: float) -> float | None:
    """Estimate the percentile `share` (0 to 1) in seconds; return None if nothing was counted, or if `share` is 0.

    The durations within one bucket are assumed to be spread evenly on a logarithmic scale. Durations above the largest
    edge are treated like durations in the bucket below that edge.
    """
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
