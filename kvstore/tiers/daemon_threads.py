"""Daemon threads: a fixed number of threads for calls that may hang.

A disk that hangs, a server that sends the head of a response byte by byte, or a name server that does not answer, can
keep a thread busy for any time. Therefore each owner, such as a tier, has its own threads, so that its hanging calls do
not block those of other owners. A process can end while these threads are busy; threads of `concurrent.futures` would
keep it running.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads:
    """Makes the calls of one owner in a fixed number of threads. Thread-safe."""

    def __init__(self, name: str, threads: int):
        self.waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = threads
        self._lock = threading.Lock()
        self._closed = False
        for index in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True).start()

    def submit(self, act: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Let the next free thread call `act` with these arguments; return the future of the result.

        Raises:
            RuntimeError: The threads are closed.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self.waiting.put((future, partial(act, *arguments)))
        return future

    def close(self) -> None:
        """Cancel the calls that no thread has begun, and return without waiting for the threads.

        Each thread ends after its current call.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(queue.Empty):
                while (waiting := self.waiting.get_nowait()) is not None:
                    waiting[0].cancel()
            for _ in range(self._threads):
                self.waiting.put(None)

    def _work(self) -> None:
        while (waiting := self.waiting.get()) is not None:
            _run(*waiting)
            del waiting  # releases the buffers of the finished call before the thread waits for the next one


def _run(future: Future[Any], act: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:  # noqa: BLE001 - the future passes the exception to the submitter
        future.set_exception(error)
        del future, act  # breaks a reference cycle that would keep the sockets of a client library open
