"""Worker threads: a fixed number of daemon threads for calls that may hang."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Result = TypeVar("Result")

Task = Callable[[], None]


class ThreadCall(Generic[Result]):
    """One call: waiting for a thread, running, or finished."""

    def __init__(self, outcome: "asyncio.Future[Result]") -> None:
        self.outcome = outcome
        """Result or exception of the call. Cancelling it does not end the call."""
        self._begun = threading.Lock()

    def begin(self) -> bool:
        """Return whether the call may begin; it may not if it was withdrawn."""
        return self._begun.acquire(blocking=False)

    def withdraw(self) -> bool:
        """Prevent the call from beginning; return False if it has begun."""
        return self._begun.acquire(blocking=False)


class WorkerThreads:
    """Daemon threads of one tier: a hanging disk holds up no other tier and no exit."""

    def __init__(self, name: str, threads: int):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = threads
        for index in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True).start()

    def call(self, act: Callable[[], Result]) -> ThreadCall[Result]:
        """Call `act` in a thread as soon as one is free."""
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
            except BaseException as error:  # noqa: BLE001 - given to the caller
                failure = error
                outcome: Callable[[], None] = lambda: done.set_exception(failure)  # noqa: E731
            else:
                outcome = lambda: done.set_result(result)  # noqa: E731
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, outcome)

        self._tasks.put(task)
        return call

    def close(self) -> None:
        """End the threads after the calls that were made before; nobody waits for them."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
