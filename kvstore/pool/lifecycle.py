"""The life of a block, as data: what may follow what."""

from collections.abc import Mapping
from enum import StrEnum


class BlockState(StrEnum):
    RESERVED = "reserved"  # its writer is at work
    HELD = "held"  # readable; may be evicted
    PINNED = "pinned"  # readable; a lease counts on it
    CONDEMNED = "condemned"  # bad bytes; the place waits for its readers to go
    GONE = "gone"


class BlockTransition(StrEnum):
    """What happens to a block."""

    PUBLISH = "publish"
    ABANDON = "abandon"
    PIN = "pin"  # the first
    UNPIN = "unpin"  # the last
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
    """A bug in the machine."""


def advance(state: BlockState, step: BlockTransition) -> BlockState:
    """The state after a step; the missing pairs are the specification.

    Raises:
        IllegalTransition: A bug in the machine.
    """
    following = NEXT.get((state, step))
    if following is None:
        raise IllegalBlockTransition(f"{step} of a block that is {state}")
    return following
