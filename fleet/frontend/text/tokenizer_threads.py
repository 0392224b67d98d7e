"""Tokenizer threads: tokenize long prompts, and convert large bodies and answers, outside the event loop, which they would block.

Rules:

1. Waiting tasks are kept in this module and not in the executor. An executor keeps a cancelled task until a thread reaches
   it, so a client that sends long prompts and disconnects could fill the memory.
2. A task that a thread has begun counts as running until it is done, even if its request was cancelled, because a thread
   cannot be interrupted.
3. Very long texts (some MiB of white space may take a second or more) never occupy all threads, and only a limited number of
   them may wait. So if a client sends many very long texts, a thread and places to wait remain for other long prompts.
4. Each very long text is tokenized in a new thread, which then ends. A tokenizer keeps scratch memory for each thread, and
   only frees it when the thread ends. For white space, this memory is 43 times as large as the text: 320 MB for 7.5 MB.
5. Large bodies and answers are converted in one further thread. This work holds the interpreter lock, and the event loop gets
   the lock in turn with every thread that wants it. So a second thread would only delay the event loop. Answers go before bodies.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fleet.core.errors import Reason, RequestRejected

THREADS = 2
# Maximum number of tokenizing tasks that wait or run; further ones are rejected. The texts of this many tasks take half a GiB if all
# have the largest size. The conversions of bodies have a limit of their own, which is the same number.
MAX_TASKS = 64
VERY_LONG_BYTES = 256 << 10  # texts above this size are "very long": about 60,000 tokens of prose, tokenized in 0.1 s
MAX_VERY_LONG_TASKS = 16  # maximum number of tasks with very long texts that wait or run; further ones are rejected
RETRY_AFTER_MS = 1000
# Seconds from the end of a very long text's task to the call of `trim`. In this time, the thread and the request free their memory.
TRIM_SECONDS = 1.0

Result = TypeVar("Result")


class TokenizerThreads:
    """Runs tokenizing tasks and conversions in threads, for all frontends and models of one router process."""

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        """Create the executor; its threads start with the first task.

        Args:
            trim: Function that returns freed memory to the system, called in a thread `TRIM_SECONDS` after a very long text.
        """
        self._trim = trim
        self._trim_due: asyncio.TimerHandle | None = None
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._very_long = _ThreadShare(THREADS - 1, MAX_VERY_LONG_TASKS)
        self._others = _ThreadShare(THREADS, MAX_TASKS)
        self._converter = ThreadPoolExecutor(1, thread_name_prefix="convert")
        self._answers = _ThreadShare(1, MAX_TASKS)
        self._bodies = _ThreadShare(1, MAX_TASKS)
        # Tasks with very long texts begin first, but may not take all threads.
        self._lanes = (self._very_long, self._others)

    def run(self, work: Callable[[], Result], size: int) -> "asyncio.Future[Result]":
        """Run a task in a thread. If the future is cancelled before a thread begins the task, the task is dropped.

        Args:
            work: Function to call in the thread.
            size: Approximate size of the text in bytes or characters.

        Raises:
            RequestRejected: QUEUE_FULL; `MAX_TASKS` tasks or, for a very long text, `MAX_VERY_LONG_TASKS` such tasks wait or run.
        """
        lane = self._very_long if size > VERY_LONG_BYTES else self._others
        if lane.full or sum(map(len, self._lanes)) >= MAX_TASKS:
            raise RequestRejected(
                Reason.QUEUE_FULL, "too many long prompts wait to be tokenised", retry_after_ms=RETRY_AFTER_MS
            )
        return self._enter(lane, work)

    def convert(self, work: Callable[[], Result], *, is_answer: bool = False) -> "asyncio.Future[Result]":
        """Convert a large body or answer in a thread (rule 5).

        Args:
            work: Function to call in the thread.
            is_answer: True for an answer, which is never rejected, because its tokens were computed already.

        Raises:
            RequestRejected: QUEUE_FULL; `MAX_TASKS` conversions of bodies wait or run.
        """
        if self._bodies.full and not is_answer:
            raise RequestRejected(
                Reason.QUEUE_FULL, "too many large bodies wait to be read", retry_after_ms=RETRY_AFTER_MS
            )
        return self._enter(self._answers if is_answer else self._bodies, work)

    def _enter(self, lane: "_ThreadShare", work: Callable[[], Result]) -> "asyncio.Future[Result]":
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        lane.waiting[future] = work
        future.add_done_callback(lane.forget)
        self._begin()
        return future

    @property
    def waiting_conversions(self) -> int:
        """Number of large bodies and answers whose conversion has not begun."""
        return len(self._answers.waiting) + len(self._bodies.waiting)

    def close(self) -> None:
        """Shut the threads down. All callers of `run` and `convert` must have ended before."""
        if self._trim_due is not None:
            self._trim_due.cancel()
        for lane in (*self._lanes, self._answers, self._bodies):
            lane.waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._converter.shutdown(wait=False, cancel_futures=True)

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
        lane = self._answers if self._answers.waiting else self._bodies
        if lane.waiting and not self._answers.running + self._bodies.running:
            future = next(iter(lane.waiting))
            begun = loop.run_in_executor(self._converter, lane.waiting.pop(future))
            lane.running += 1
            begun.add_done_callback(partial(self._done, lane, future))

    @staticmethod
    def _run_alone(work: Callable[[], Result]) -> Result:
        """Run a task in a new thread, which ends after it (rule 4)."""
        with ThreadPoolExecutor(1, thread_name_prefix="tokenise-very-long") as thread:
            return thread.submit(work).result()

    def _done(self, lane: "_ThreadShare", future: "asyncio.Future[Any]", begun: "asyncio.Future[Any]") -> None:
        lane.running -= 1
        if begun.cancelled():
            return  # `close` has cancelled the task
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
    """Keeps the waiting tasks of one kind (very long texts, other texts, answers or bodies) in order, and counts the running ones."""

    def __init__(self, threads: int, most: int) -> None:
        self.threads = threads  # limit for running tasks of this kind
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
