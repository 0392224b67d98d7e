"""What all processes of a cluster do alike: they say that they are ready, and hear that they are to end."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

Announce = Callable[[Mapping[str, str]], None]
"""Told the endpoints by protocol, once, when everything is ready."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def cancelled_by_signals() -> AsyncIterator[None]:
    """End the context at a signal, for as long as nobody else (`stop_signal`, within) listens to it: until a process serves, that may be minutes.

    Nothing would end it there by itself: signals that nobody listens to do nothing to the first process of a container.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = False

    def ask() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, ask)
    try:
        yield
    except asyncio.CancelledError:
        if not asked:
            raise
        task.uncancel()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; another signal after that ends the process as if nobody listened."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def ask() -> None:
        stop.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, ask)
    try:
        yield stop
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
