"""Start and end of every process of a cluster: readiness announcement and stop signals."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

Announce = Callable[[Mapping[str, str]], None]
"""Called once with the endpoints, by protocol, when everything is ready."""


class ServiceDefinition(Struct, frozen=True):
    """Definition of one kind of process; `fleet.app.serving` finds it by the entry points `fleet.services`."""

    settings: type[Struct]
    run: Callable[[Any, Announce], Coroutine[Any, Any, None]]
    """Runs the process until a stop signal. It takes the settings and the announcement of readiness."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def cancelled_by_signals() -> AsyncIterator[None]:
    """Cancel the body when a stop signal comes, as long as no inner `stop_signal` handles it.

    It covers the start of a process, which may take minutes. Without a handler, the first process of a container would
    ignore the signals.
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
    """Yield an event that SIGTERM and SIGINT set. A second signal ends the process as if there were no handler."""
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
