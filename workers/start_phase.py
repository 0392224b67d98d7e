"""Phases of a starting process, shown to a person who waits for it.

Code that starts something calls `note_phase`. A caller that wants the phases runs this code inside `telling_phases`, and
passes a function that gets each phase. Otherwise `note_phase` has no effect.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum


class StartPhase(StrEnum):
    """A phase in the start of a process, such as a worker. Its value is the text that a person sees who waits for the process."""

    FETCH = "fetching the model"
    LOAD = "loading"
    WARM_UP = "warming up"


TellPhase = Callable[[StartPhase], None]
"""A function that gets the phase that a process has reached; it must neither block nor raise."""


def _to_nobody(_: StartPhase) -> None:
    pass


_TELL: ContextVar[TellPhase] = ContextVar("tell_phase", default=_to_nobody)


def note_phase(phase: StartPhase) -> None:
    """Pass the phase that the start has reached to the function of `telling_phases`; do nothing outside of `telling_phases`.

    Tasks and `asyncio.to_thread` calls of the start may call this function too.
    """
    _TELL.get()(phase)


@contextmanager
def telling_phases(tell: TellPhase) -> Iterator[None]:
    """Pass to `tell` each phase that is noted in this context, or in a task or `asyncio.to_thread` call started in it."""
    token = _TELL.set(tell)
    try:
        yield
    finally:
        _TELL.reset(token)
