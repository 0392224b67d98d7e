"""Segment eviction: computes the scores that decide which segment is evicted when the disk space is used up. No I/O.

The segment with the lowest score is evicted first. Segments from which a call reads at that time are evicted only if
there are no others. Blocks that are written together belong to requests of the same time, and mostly become useless
together. Therefore a whole segment has one score. Blocks that are read often may be copied out of a segment before its
eviction.
"""

import math
from collections.abc import Callable, Mapping

from msgspec import Struct

from kvstore.clock import SECOND, Nanos
from kvstore.tiers.ssd.settings import SegmentEviction


class SegmentUse(Struct, frozen=True, kw_only=True):
    """How much a segment is used; the input of a `Score`."""

    sequence: int  # sequence number of the segment; a segment that is begun later has a higher one
    blocks: int  # number of readable blocks
    live_share: float  # share of the segment's bytes that readable blocks occupy, from 0 to 1
    hits: int  # number of block reads since the segment was begun, or since the tier was opened, whichever was later
    used_at: Nanos  # instant of the last read or write of a block; without one, the instant since which `hits` counts


Score = Callable[[SegmentUse, Nanos], float]
"""A function that returns how valuable it is to keep a segment, at a given instant. Among segments with equal scores,
the oldest is evicted first."""


def reuse(use: SegmentUse, now: Nanos) -> float:
    """Score by the time since the last use. This time counts less for segments whose blocks are read often.

    The number of reads counts logarithmically, so that a busy conversation that has ended does not keep its segment for
    hours. The smaller the share of readable bytes is, the lower is the score. The score has no time constant, so a disk
    that fills in a minute is treated like one that fills in a week.
    """
    if not use.blocks:
        return -math.inf
    idle_seconds = (now - use.used_at) / SECOND
    return -idle_seconds / (use.live_share * (1 + math.log2(1 + use.hits / use.blocks)))


def least_recent(use: SegmentUse, now: Nanos) -> float:  # noqa: ARG001 - the signature of a `Score`
    """Score by the time of the last use only, so that the least recently used segment is evicted first."""
    return float(use.used_at)


def oldest(use: SegmentUse, now: Nanos) -> float:  # noqa: ARG001 - the signature of a `Score`
    """Score by the order of writing, so that the oldest segment is evicted first."""
    return float(use.sequence)


SCORES: Mapping[SegmentEviction, Score] = {
    SegmentEviction.REUSE: reuse,
    SegmentEviction.LEAST_RECENT: least_recent,
    SegmentEviction.OLDEST: oldest,
}
