"""Segment eviction: scores that decide which segment is evicted when the space is used up. Does no I/O.

The segment with the lowest score goes first. Blocks that are written together belong to requests of the same time, and
mostly become useless together. So a segment is judged as a whole, and blocks in demand may be copied out of it before.
"""

import math
from collections.abc import Callable, Mapping

from msgspec import Struct

from kvstore.clock import SECOND, Nanos
from kvstore.tiers.ssd.settings import SegmentEviction


class SegmentUse(Struct, frozen=True, kw_only=True):
    """How a segment is used."""

    sequence: int  # grows from segment to segment
    blocks: int  # readable blocks
    live_share: float  # share of the segment's bytes in readable blocks
    hits: int  # reads of its blocks since they were written
    used_at: Nanos  # when a block was last read or written


Score = Callable[[SegmentUse, Nanos], float]
"""Returns the value of keeping a segment; of equal segments, the older one is evicted first."""


def reuse(use: SegmentUse, now: Nanos) -> float:
    """Score by the time since the last use, reduced for segments whose blocks are read often.

    The number of reads counts logarithmically, so that a busy conversation that has ended does not keep its segment for
    hours. The share of readable bytes counts too. The score has no time constant, so a disk that fills in a minute is
    treated like one that fills in a week.
    """
    if not use.blocks:
        return -math.inf
    idle_seconds = (now - use.used_at) / SECOND
    return -idle_seconds / (use.live_share * (1 + math.log2(1 + use.hits / use.blocks)))


def least_recent(use: SegmentUse, now: Nanos) -> float:  # noqa: ARG001 - a `Score`
    """Score by the last use only."""
    return float(use.used_at)


def oldest(use: SegmentUse, now: Nanos) -> float:  # noqa: ARG001 - a `Score`
    """Score by the order of writing."""
    return float(use.sequence)


SCORES: Mapping[SegmentEviction, Score] = {
    SegmentEviction.REUSE: reuse,
    SegmentEviction.LEAST_RECENT: least_recent,
    SegmentEviction.OLDEST: oldest,
}
