"""Waits for a condition, with a deadline that an idle machine never reaches."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

SECONDS = 60.0
BETWEEN_SECONDS = 0.01

Found = TypeVar("Found")


def eventually(look: Callable[[], Found], seconds: float = SECONDS) -> Found:
    """Wait until `look` returns a true value and return it; the thread is blocked meanwhile."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < ends, "the condition was not met in time"
        time.sleep(BETWEEN_SECONDS)
    return found


async def until(look: Callable[[], Found], seconds: float = SECONDS) -> Found:
    """Wait until `look` returns a true value and return it; other tasks run meanwhile."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < ends, "the condition was not met in time"
        await asyncio.sleep(BETWEEN_SECONDS)
    return found


async def until_answered(ask: Callable[[], Awaitable[Found]], seconds: float = SECONDS) -> Found:
    """Wait until `ask` answers with a true value and return it; cancel a call that outlasts the deadline."""
    async with asyncio.timeout(seconds):
        while not (found := await ask()):
            await asyncio.sleep(BETWEEN_SECONDS)
        return found
