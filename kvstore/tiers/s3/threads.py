"""The threads that make requests: several at a time, none of which keeps the process from ending.

The client library bounds each wait for a piece of an answer's head, not all of them: a server that drips holds its thread for as long
as it likes.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class S3Threads:
    """Of one tier. Thread-safe."""

    def __init__(self, name: str, threads: int):
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = threads
        self._lock = threading.Lock()
        self._closed = False
        for index in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True).start()

    def submit(self, act: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have `act` called once a thread is free.

        Raises:
            RuntimeError: They are closed.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._waiting.put((future, partial(act, *arguments)))
        return future

    def close(self) -> None:
        """What waits is cancelled. Threads end with what they are at; nobody waits for them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(queue.Empty):
                while (waiting := self._waiting.get_nowait()) is not None:
                    waiting[0].cancel()
            for _ in range(self._threads):
                self._waiting.put(None)

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            _run(*waiting)
            del waiting  # it holds the buffers of a call that is over


def _run(future: Future[Any], act: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
        future.set_exception(error)
        del future, act  # which the error would hold in a circle, and with it the library's sockets
