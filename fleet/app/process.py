"""Process life: defines how every process of a cluster announces that it is ready, and how stop signals end it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

Announce = Callable[[Mapping[str, str]], None]
"""Function that a process calls once, when it is ready, with its endpoints by protocol."""


class ServiceDefinition(Struct, frozen=True):
    """Definition of one kind of process; `fleet.app.serving` finds it by the entry points `fleet.services`."""

    settings: type[Struct]
    run: Callable[[Any, Announce], Coroutine[Any, Any, None]]
    """Function that runs the process until a stop signal. It gets the settings, and the function that announces readiness."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def cancelled_by_signals() -> AsyncIterator[None]:
    """Cancel the body of the `with` block when a stop signal comes, unless a `stop_signal` within it handles the signal.

    Use it for the start of a process, which may take minutes. It is needed because process 1 of a container ignores
    stop signals for which it has no handler.
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
    """Yield an event that is set by SIGTERM or SIGINT.

    A second signal ends the process at once, because no handler is left. As process 1 of a container, however, it ignores
    a second SIGTERM, because process 1 ignores signals for which it has no handler.
    """
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
