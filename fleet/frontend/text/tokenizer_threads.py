"""Tokenizer threads: long prompts are tokenized in threads, because they would block the event loop.

Rules:

1. Waiting work is kept here and not in the executor, which keeps cancelled work until a thread reaches it: a client that
   sends long prompts and leaves could fill the memory.
2. Work that a thread has begun counts until it is done, even if nobody waits for it.
3. Very long texts (which may take a second or more, such as some MiB of white space) never occupy all threads, nor more than
   a share of the places. A client that sends many of them waits for itself, and other long prompts pass.
4. Each very long text is tokenized in a thread that ends with it. A tokenizer keeps its scratch memory with the thread, about 43
   bytes for a byte of white space (320 MB for 7.5 MB), and never frees it before the thread ends.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fleet.core.errors import Reason, RequestRejected

THREADS = 2
MAX_TASKS = 64  # tasks that wait or run: half a GiB at the largest request size
VERY_LONG_BYTES = 256 << 10  # about 60,000 tokens of prose, and up to 0.1 s for any text
MAX_VERY_LONG_TASKS = 16  # very long tasks that wait or run
RETRY_AFTER_MS = 1000
TRIM_SECONDS = 1.0  # delay after a very long text, in which its thread and its request free their memory

Result = TypeVar("Result")


class TokenizerThreads:
    """The tokenizer threads of one router process, for all frontends and models."""

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        """Start without threads.

        Args:
            trim: Returns freed memory to the system; called in a thread some time after very long texts. None: nothing is called.
        """
        self._trim = trim
        self._trim_due: asyncio.TimerHandle | None = None
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._very_long = _ThreadShare(THREADS - 1, MAX_VERY_LONG_TASKS)
        self._others = _ThreadShare(THREADS, MAX_TASKS)
        self._lanes = (self._very_long, self._others)  # the share with fewer threads begins first

    def run(self, work: Callable[[], Result], size: int) -> "asyncio.Future[Result]":
        """Run work in a thread. Cancelling the future gives up work that has not begun.

        Args:
            work: The function to call.
            size: The approximate size of the text in bytes or characters.

        Raises:
            RequestRejected: QUEUE_FULL; too much work waits.
        """
        lane = self._very_long if size > VERY_LONG_BYTES else self._others
        if lane.full or sum(map(len, self._lanes)) >= MAX_TASKS:
            raise RequestRejected(
                Reason.QUEUE_FULL, "too many long prompts wait to be tokenised", retry_after_ms=RETRY_AFTER_MS
            )
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        lane.waiting[future] = work
        future.add_done_callback(lane.forget)
        self._begin()
        return future

    def close(self) -> None:
        """Give up the threads; all callers of `run` must have ended."""
        if self._trim_due is not None:
            self._trim_due.cancel()
        for lane in self._lanes:
            lane.waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        for lane in self._lanes:
            while lane.waiting and lane.running < lane.threads and sum(each.running for each in self._lanes) < THREADS:
                future = next(iter(lane.waiting))
                work = lane.waiting.pop(future)
                if lane is self._very_long:
                    work = partial(self._run_alone, work)
                begun = loop.run_in_executor(self._executor, work)
                lane.running += 1
                begun.add_done_callback(partial(self._done, lane, future))

    @staticmethod
    def _run_alone(work: Callable[[], Result]) -> Result:
        """Run work in a thread that ends with it (rule 4)."""
        with ThreadPoolExecutor(1, thread_name_prefix="tokenise-very-long") as thread:
            return thread.submit(work).result()

    def _done(self, lane: "_ThreadShare", future: "asyncio.Future[Any]", begun: "asyncio.Future[Any]") -> None:
        lane.running -= 1
        if begun.cancelled():
            return  # the threads were closed
        if lane is self._very_long and self._trim is not None and self._trim_due is None:
            self._trim_due = future.get_loop().call_later(TRIM_SECONDS, self._trim_now, self._trim)
        error = begun.exception()
        if not future.done():
            if error is None:
                future.set_result(begun.result())
            else:
                future.set_exception(error)
        self._begin()

    def _trim_now(self, trim: Callable[[], None]) -> None:
        self._trim_due = None
        self._executor.submit(trim)


class _ThreadShare:
    """Work of one kind, in the order of its arrival."""

    def __init__(self, threads: int, most: int) -> None:
        self.threads = threads  # the most threads for this kind
        self.waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        self.running = 0
        self._most = most

    def __len__(self) -> int:
        """Return the number of tasks that wait or run."""
        return len(self.waiting) + self.running

    @property
    def full(self) -> bool:
        return len(self) >= self._most

    def forget(self, future: "asyncio.Future[Any]") -> None:
        self.waiting.pop(future, None)
