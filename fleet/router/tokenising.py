"""Threads for prompts that are long enough to hold up everybody else, were they tokenised in the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fleet.errors import Reason, Refused

THREADS = 2
MOST = 64  # that wait or run: half a GiB at the largest size that fronts take
RETRY_AFTER_MS = 1000

Result = TypeVar("Result")


class TokenisingThreads:
    """One router process has these, whatever its fronts and models."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._taken = 0

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """Have a thread do it. Cancelling the future gives up what has not begun.

        Raises:
            Refused: QUEUE_FULL; too many wait.
        """
        if self._taken >= MOST:
            raise Refused(
                Reason.QUEUE_FULL, "too many long prompts wait to be tokenised", retry_after_ms=RETRY_AFTER_MS
            )
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._taken += 1
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Give the threads up; who has waited must have ended."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: "asyncio.Future[Result]") -> None:
        self._taken -= 1
