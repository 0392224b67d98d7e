"""Waiting for what comes by itself: by looking again and again, until a deadline that nothing comes near on an idle machine."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

SECONDS = 60.0
BETWEEN_SECONDS = 0.01

Found = TypeVar("Found")


def eventually(look: Callable[[], Found], seconds: float = SECONDS) -> Found:
    """What `look` gives once that is true; nothing else runs in this thread meanwhile."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(BETWEEN_SECONDS)
    return found


async def until(look: Callable[[], Found], seconds: float = SECONDS) -> Found:
    """What `look` gives once that is true; other tasks run meanwhile."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(BETWEEN_SECONDS)
    return found


async def until_answered(ask: Callable[[], Awaitable[Found]], seconds: float = SECONDS) -> Found:
    """What `ask` answers once that is true. One that does not answer at all is cut off at the deadline."""
    async with asyncio.timeout(seconds):
        while not (found := await ask()):
            await asyncio.sleep(BETWEEN_SECONDS)
        return found
