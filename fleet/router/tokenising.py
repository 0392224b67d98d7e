"""Threads for prompts that are long enough to hold up everybody else, were they tokenised in the event loop.

Rules:

1. What waits is kept here and not in the executor, which keeps what was cancelled until a thread comes upon it: a client that
   sends long prompts and leaves would fill the memory so.
2. What a thread has begun counts until it is done, whoever still waits for it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fleet.errors import Reason, Refused

THREADS = 2
MOST = 64  # that wait or run: half a GiB at the largest size that fronts take
RETRY_AFTER_MS = 1000

Result = TypeVar("Result")


class TokenisingThreads:
    """One router process has these, whatever its fronts and models."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        self._running = 0

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """Have a thread do it. Cancelling the future gives up what has not begun.

        Raises:
            Refused: QUEUE_FULL; too many wait.
        """
        if len(self._waiting) + self._running >= MOST:
            raise Refused(
                Reason.QUEUE_FULL, "too many long prompts wait to be tokenised", retry_after_ms=RETRY_AFTER_MS
            )
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[future] = work
        future.add_done_callback(self._forget)
        self._begin()
        return future

    def close(self) -> None:
        """Give the threads up; who has waited must have ended."""
        self._waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._running < THREADS:
            future = next(iter(self._waiting))
            begun = loop.run_in_executor(self._executor, self._waiting.pop(future))
            self._running += 1
            begun.add_done_callback(partial(self._done, future))

    def _done(self, future: "asyncio.Future[Any]", begun: "asyncio.Future[Any]") -> None:
        self._running -= 1
        if begun.cancelled():
            return  # the threads were given up
        error = begun.exception()
        if not future.done():
            if error is None:
                future.set_result(begun.result())
            else:
                future.set_exception(error)
        self._begin()

    def _forget(self, future: "asyncio.Future[Any]") -> None:
        self._waiting.pop(future, None)
