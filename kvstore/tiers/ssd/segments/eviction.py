"""Which segment goes when the space is used up. Pure: a score of what is known of a segment; the lowest goes first.

Blocks that are written together belong to requests of the same time, and mostly lose their use together; so a segment
is judged as a whole, and whatever in it is still in demand may be copied out of it before it goes.
"""

import math
from collections.abc import Callable, Mapping

from msgspec import Struct

from kvstore.clock import SECOND, Nanos
from kvstore.tiers.ssd.settings import SegmentEviction


class SegmentUse(Struct, frozen=True, kw_only=True):
    """What is known of a segment that may go."""

    sequence: int  # grows from segment to segment
    blocks: int  # in it that could still be read
    live_share: float  # of its bytes, that they take
    hits: int  # of its blocks, since they were written
    used_at: Nanos  # when one was last read, or else written


Score = Callable[[SegmentUse, Nanos], float]
"""Value of keeping a segment, at a moment; of equal ones the older goes first."""


def reuse(use: SegmentUse, now: Nanos) -> float:
    """By the time since its last use, which passes more slowly for a segment whose blocks were read more often.

    Logarithmic in the reads a block, so that a conversation that was busy and is over does not keep its segment for hours;
    and by the share of the segment that can still be read, since the rest is of no use to anybody. There is no time
    constant in it: a disk that is filled in a minute is treated like one that is filled in a week.
    """
    if not use.blocks:
        return -math.inf
    idle_seconds = (now - use.used_at) / SECOND
    return -idle_seconds / (use.live_share * (1 + math.log2(1 + use.hits / use.blocks)))


def least_recent(use: SegmentUse, now: Nanos) -> float:  # noqa: ARG001 - a `Score`
    """By the last use alone."""
    return float(use.used_at)


def oldest(use: SegmentUse, now: Nanos) -> float:  # noqa: ARG001 - a `Score`
    """In the order of writing."""
    return float(use.sequence)


SCORES: Mapping[SegmentEviction, Score] = {
    SegmentEviction.REUSE: reuse,
    SegmentEviction.LEAST_RECENT: least_recent,
    SegmentEviction.OLDEST: oldest,
}
