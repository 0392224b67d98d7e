"""Life cycle of a block: its states, and the table of transitions between them."""

from collections.abc import Mapping
from enum import StrEnum


class BlockState(StrEnum):
    RESERVED = "reserved"  # has a place in the pool, into which a writer may write the bytes
    HELD = "held"  # readable; may be evicted
    PINNED = "pinned"  # readable; a lease prevents its eviction
    CONDEMNED = "condemned"  # the bytes are wrong; the place is reused after the last pin has ended
    GONE = "gone"


class BlockTransition(StrEnum):
    PUBLISH = "publish"
    ABANDON = "abandon"
    PIN = "pin"  # a block without a pin gets one; further pins change no state
    UNPIN = "unpin"  # the last pin of the block ends
    EVICT = "evict"
    CONDEMN = "condemn"


NEXT: Mapping[tuple[BlockState, BlockTransition], BlockState] = {
    (BlockState.RESERVED, BlockTransition.PUBLISH): BlockState.HELD,
    (BlockState.RESERVED, BlockTransition.ABANDON): BlockState.GONE,
    (BlockState.HELD, BlockTransition.PIN): BlockState.PINNED,
    (BlockState.HELD, BlockTransition.EVICT): BlockState.GONE,
    (BlockState.HELD, BlockTransition.CONDEMN): BlockState.GONE,
    (BlockState.PINNED, BlockTransition.UNPIN): BlockState.HELD,
    (BlockState.PINNED, BlockTransition.CONDEMN): BlockState.CONDEMNED,
    (BlockState.CONDEMNED, BlockTransition.UNPIN): BlockState.GONE,
}

READABLE = frozenset({BlockState.HELD, BlockState.PINNED})


class IllegalBlockTransition(AssertionError):
    """The table `NEXT` has no such transition from this state, so the pool machine has a bug."""


def advance(state: BlockState, step: BlockTransition) -> BlockState:
    """Return the state that follows a transition; raise IllegalBlockTransition if the table `NEXT` has none."""
    following = NEXT.get((state, step))
    if following is None:
        raise IllegalBlockTransition(f"a block in state {state} cannot {step}")
    return following
