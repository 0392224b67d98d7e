"""Waiting in tests: for a condition, for turns of the event loop, and for time if its length is an input of the test.

No other module of the tests sleeps (`tests/support/source_rules.py` checks this). A test waits in one of four ways:

1. For a condition, with a deadline that even a busy machine keeps: `eventually` blocks the thread, `until` and `until_answered` do not.
2. For tasks of its own event loop that are ready to run: `turns`.
3. To see that something does not happen: the test waits for an event that would come after it. If there is no such event: `stays`.
4. For time, because the length of the time is the input of the test or of a fake: `pace` and `pace_thread`, with the reason.
"""

import asyncio
import faulthandler
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

SECONDS = 60.0
BETWEEN_SECONDS = 0.01

Found = TypeVar("Found")
Complaint = Callable[[], object]


class NotMet(AssertionError):
    """Raised if a condition was not met in time."""


def _not_met() -> str:
    return "the condition was not met in time"


def eventually(look: Callable[[], Found], seconds: float = SECONDS, otherwise: Complaint = _not_met) -> Found:
    """Wait until `look` returns a true value and return it; the thread is blocked meanwhile.

    Args:
        look: Returns the condition. It may raise an AssertionError if the condition cannot become true any more.
        seconds: Deadline. An idle machine needs a small part of it.
        otherwise: Returns the text of the failure after the deadline.
    """
    ends = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() >= ends:
            raise NotMet(otherwise())
        time.sleep(BETWEEN_SECONDS)
    return found


async def until(
    look: Callable[[], Found],
    seconds: float = SECONDS,
    otherwise: Complaint = _not_met,
    *,
    between_seconds: float = BETWEEN_SECONDS,
) -> Found:
    """Wait until `look` returns a true value and return it; other tasks run meanwhile.

    Args:
        look: As for `eventually`.
        seconds: As for `eventually`.
        otherwise: As for `eventually`.
        between_seconds: Pause between two calls of `look`; 0: call it in every round of the event loop.
    """
    ends = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() >= ends:
            raise NotMet(otherwise())
        await asyncio.sleep(between_seconds)
    return found


async def until_answered(
    ask: Callable[[], Awaitable[Found]], seconds: float = SECONDS, otherwise: Complaint = _not_met
) -> Found:
    """Call `ask` until it answers with a true value, and return this value; cancel a call that runs at the deadline."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            while not (found := await ask()):
                await asyncio.sleep(BETWEEN_SECONDS)
            return found
    except TimeoutError:
        if not deadline.expired():
            raise
        raise NotMet(otherwise()) from None


async def until_still(progress: Callable[[], object], seconds: float = 0.5) -> None:
    """Wait until `progress` has returned the same value for `seconds`, that is, until what it measures has stopped."""
    ends = time.monotonic() + SECONDS
    value, since = progress(), time.monotonic()
    while time.monotonic() - since < seconds:
        await asyncio.sleep(BETWEEN_SECONDS)
        if (now := progress()) != value:
            if time.monotonic() >= ends:
                raise NotMet(f"it still moves: {now}")
            value, since = now, time.monotonic()


async def stays(look: Callable[[], object], seconds: float, because: str) -> None:
    """Check again and again for `seconds` that `look` returns a true value. A wrong product would change it in this time.

    Args:
        look: Returns the condition that has to stay true.
        seconds: Duration of the checks.
        because: The reason why the test cannot wait for a later event, or the time limits of the product that pass meanwhile.
    """
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert look(), f"it changed; {because}"
        await asyncio.sleep(BETWEEN_SECONDS)
    assert look(), f"it changed; {because}"


async def turns(count: int = 1) -> None:
    """Let the event loop run `count` rounds; in each round, every task that is ready makes a step.

    Bytes that one socket of this process has sent to another one are read after two rounds.
    """
    for _ in range(count):
        await asyncio.sleep(0)


async def pace(seconds: float, because: str) -> None:
    """Let time pass whose length is an input of the test: the delay of a slow peer, the period of a load, a random moment.

    Args:
        seconds: The length of the time.
        because: The meaning of this time. It must not be a time that the product needs.
    """
    assert because
    await asyncio.sleep(seconds)


def pace_thread(seconds: float, because: str) -> None:
    """Let time pass as `pace` does, in a thread or in a test without an event loop."""
    assert because
    time.sleep(seconds)


def thread_stacks() -> str:
    """Return the stacks of all threads of this process, for the error message of a wait that was too long."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
