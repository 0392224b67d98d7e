"""The life of a block, as data: what may follow what."""

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    RESERVED = "reserved"  # its writer is at work
    HELD = "held"  # readable; may be evicted
    PINNED = "pinned"  # readable; a lease counts on it
    CONDEMNED = "condemned"  # bad bytes; the place waits for its readers to go
    GONE = "gone"


class Step(StrEnum):
    """What happens to a block."""

    PUBLISH = "publish"
    ABANDON = "abandon"
    PIN = "pin"  # the first
    UNPIN = "unpin"  # the last
    EVICT = "evict"
    CONDEMN = "condemn"


NEXT: Mapping[tuple[State, Step], State] = {
    (State.RESERVED, Step.PUBLISH): State.HELD,
    (State.RESERVED, Step.ABANDON): State.GONE,
    (State.HELD, Step.PIN): State.PINNED,
    (State.HELD, Step.EVICT): State.GONE,
    (State.HELD, Step.CONDEMN): State.GONE,
    (State.PINNED, Step.UNPIN): State.HELD,
    (State.PINNED, Step.CONDEMN): State.CONDEMNED,
    (State.CONDEMNED, Step.UNPIN): State.GONE,
}

READABLE = frozenset({State.HELD, State.PINNED})


class IllegalTransition(AssertionError):
    """A bug in the machine."""


def advance(state: State, step: Step) -> State:
    """The state after a step; the missing pairs are the specification.

    Raises:
        IllegalTransition: A bug in the machine.
    """
    following = NEXT.get((state, step))
    if following is None:
        raise IllegalTransition(f"{step} of a block that is {state}")
    return following
