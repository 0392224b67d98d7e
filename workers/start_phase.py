"""Phases of a starting process, shown to a person who waits for it.

Code that starts something calls `note_phase`. Its caller may run it inside `telling_phases`, and so decides who gets
the phases. Without such a caller, nobody gets them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum


class StartPhase(StrEnum):
    """A phase of the start. Its value is the text for the person."""

    FETCH = "fetching the model"
    LOAD = "loading"
    WARM_UP = "warming up"


TellPhase = Callable[[StartPhase], None]
"""A function that gets the phase that a process has reached; it must neither block nor raise."""


def _to_nobody(_: StartPhase) -> None:
    pass


_TELL: ContextVar[TellPhase] = ContextVar("tell_phase", default=_to_nobody)


def note_phase(phase: StartPhase) -> None:
    """Report that the start has reached a phase. Threads and tasks that run in the context may call this too."""
    _TELL.get()(phase)


@contextmanager
def telling_phases(tell: TellPhase) -> Iterator[None]:
    """Pass the phases to `tell` that code in this context notes, and also the tasks that it starts."""
    token = _TELL.set(tell)
    try:
        yield
    finally:
        _TELL.reset(token)
