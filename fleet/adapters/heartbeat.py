"""Whether the event loop of a child still turns: it says so every second, on the pipe on which it said that it was ready.

A process that is stopped, or whose loop is stuck, keeps its sockets, and with `SO_REUSEPORT` its share of new connections too.
"""

import asyncio
import os
from contextlib import suppress

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30  # of a router: its event loop turns within milliseconds, on a slow machine within a few seconds


def beat(descriptor: int) -> None:
    """Say so for as long as the running event loop turns; a pipe that nobody reads may fill up."""
    os.set_blocking(descriptor, False)
    loop = asyncio.get_running_loop()

    def again() -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b".")
        loop.call_later(BEAT_SECONDS, again)

    again()


async def fell_silent(beats: asyncio.StreamReader, seconds: int) -> bool:
    """Wait until a child has said nothing for so long; False: it has ended, or closed its end.

    Seconds are counted one by one as they are lived through here, so that those count for nothing in which this process did not
    run either: on a machine that was asleep, or so busy that nobody gets anything done.
    """
    silent = 0
    while silent < seconds:
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                if not await beats.read(1 << 16):
                    return False
            silent = 0
        except TimeoutError:
            silent += 1
    return True
