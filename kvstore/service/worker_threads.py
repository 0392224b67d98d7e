"""Threads for calls that may hang: a few at a time, none of which keeps the process from ending."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Result = TypeVar("Result")

Task = Callable[[], None]


class ThreadCall(Generic[Result]):
    """One call: waiting for a thread, in one, or over."""

    def __init__(self, outcome: "asyncio.Future[Result]") -> None:
        self.outcome = outcome
        """What it returned or raised. Cancelling it does not end the call."""
        self._begun = threading.Lock()

    def begin(self) -> bool:
        """Whether it may: not when it was withdrawn."""
        return self._begun.acquire(blocking=False)

    def withdraw(self) -> bool:
        """Whether it has not begun, and so never will."""
        return self._begun.acquire(blocking=False)


class WorkerThreads:
    """Threads of their own, which are daemons: a disk that hangs holds up nobody else, and no exit."""

    def __init__(self, name: str, threads: int):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = threads
        for index in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True).start()

    def call(self, act: Callable[[], Result]) -> ThreadCall[Result]:
        """Have `act` called in a thread, once one is free."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        call = ThreadCall(done)

        def settle(set_outcome: Callable[[], None]) -> None:
            if not done.cancelled():
                set_outcome()

        def task() -> None:
            if not call.begin():
                return
            try:
                result = act()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                failure = error
                outcome: Callable[[], None] = lambda: done.set_exception(failure)  # noqa: E731
            else:
                outcome = lambda: done.set_result(result)  # noqa: E731
            with suppress(RuntimeError):  # the loop is closed, or just being closed: nobody waits any more
                loop.call_soon_threadsafe(settle, outcome)

        self._tasks.put(task)
        return call

    def close(self) -> None:
        """Threads end after the calls that were made before; nobody waits for them."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
