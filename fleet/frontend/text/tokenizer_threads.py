"""Threads for prompts that are long enough to hold up everybody else, were they tokenised in the event loop.

Rules:

1. What waits is kept here and not in the executor, which keeps what was cancelled until a thread comes upon it: a client that
   sends long prompts and leaves would fill the memory so.
2. What a thread has begun counts until it is done, whoever still waits for it.
3. Texts that take very long (a second and more for some MiB of white space, say) never have all threads at once, nor more than
   a share of the places: who sends many of them waits for himself, and long prompts of the usual kind go past.
4. Each very long text is tokenised in a thread that ends with it. A tokenizer keeps its scratch memory with the thread, some 43
   bytes for a byte of white space (320 MB for 7.5 MB), and would keep it for ever; the end of the thread frees it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fleet.core.errors import Reason, RequestRejected

THREADS = 2
MOST = 64  # that wait or run: half a GiB at the largest size that fronts take
VERY_LONG_BYTES = 256 << 10  # of text; some 60,000 tokens of prose, and up to 0.1 s of whatever else it may be
MOST_VERY_LONG = 16  # that wait or run
RETRY_AFTER_MS = 1000
TRIM_SECONDS = 1.0  # after a very long text: until then its thread and its request have freed what they had

Result = TypeVar("Result")


class TokenizerThreads:
    """One router process has these, whatever its fronts and models."""

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        """Begin without threads.

        Args:
            trim: Gives memory that was freed back to the system; called in a thread some time after very long texts. None:
                nobody does.
        """
        self._trim = trim
        self._trim_due: asyncio.TimerHandle | None = None
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._very_long = _ThreadShare(THREADS - 1, MOST_VERY_LONG)
        self._others = _ThreadShare(THREADS, MOST)
        self._lanes = (self._very_long, self._others)  # who gets fewer threads begins first

    def run(self, work: Callable[[], Result], size: int) -> "asyncio.Future[Result]":
        """Have a thread do it. Cancelling the future gives up what has not begun.

        Args:
            work: To do.
            size: Of the text, about, in bytes or characters.

        Raises:
            Refused: QUEUE_FULL; too many wait.
        """
        lane = self._very_long if size > VERY_LONG_BYTES else self._others
        if lane.full or sum(map(len, self._lanes)) >= MOST:
            raise RequestRejected(
                Reason.QUEUE_FULL, "too many long prompts wait to be tokenised", retry_after_ms=RETRY_AFTER_MS
            )
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        lane.waiting[future] = work
        future.add_done_callback(lane.forget)
        self._begin()
        return future

    def close(self) -> None:
        """Give the threads up; who has waited must have ended."""
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
        """Do it in a thread that ends with it (rule 4)."""
        with ThreadPoolExecutor(1, thread_name_prefix="tokenise-very-long") as thread:
            return thread.submit(work).result()

    def _done(self, lane: "_ThreadShare", future: "asyncio.Future[Any]", begun: "asyncio.Future[Any]") -> None:
        lane.running -= 1
        if begun.cancelled():
            return  # the threads were given up
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
    """Work of one kind, in the order in which it came."""

    def __init__(self, threads: int, most: int) -> None:
        self.threads = threads  # that may do it at once
        self.waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        self.running = 0
        self._most = most

    def __len__(self) -> int:
        """What waits or runs."""
        return len(self.waiting) + self.running

    @property
    def full(self) -> bool:
        return len(self) >= self._most

    def forget(self, future: "asyncio.Future[Any]") -> None:
        self.waiting.pop(future, None)
