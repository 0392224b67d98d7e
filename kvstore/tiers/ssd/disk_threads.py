"""The threads that read and write: a few operations on disk at a time, each with buffers of its own.

Rules:

1. At most as many operations run at a time as there are threads, callers included: whoever calls works too, and does
   not hand a single operation to another thread, which would take as long as a small read.
2. A job that has not begun by the deadline of its call never begins. A job that has begun is waited for, however long
   it takes: a read that hangs in the system cannot be called back, and its buffers are not ours until it returns.
3. Threads are daemons, so a disk that hangs keeps no process from ending.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.buffers import ByteArray
from kvstore.clock import Clock, Nanos, seconds
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.ssd.disk import aligned

BATCH_RECORDS = 256
"""In one system call: a header, a payload and what does not fill a page are three pieces of the 1,024 allowed."""

LEAST_BATCH_BYTES = 256 << 10
"""Less than this is not worth a thread of its own."""


class Scratch:
    """Page-aligned buffers of one operation: for what does not come from, or go to, a caller's buffers directly."""

    def __init__(self) -> None:
        self.headers = aligned(BATCH_RECORDS * PAGE_BYTES).reshape(BATCH_RECORDS, PAGE_BYTES)
        self.tails = aligned(BATCH_RECORDS * PAGE_BYTES).reshape(BATCH_RECORDS, PAGE_BYTES)
        self._payloads = aligned(PAGE_BYTES)

    def payloads(self, size_bytes: int) -> ByteArray:
        """Room for payloads that are not aligned; stays as large as it ever had to be."""
        if self._payloads.nbytes < size_bytes:
            self._payloads = aligned(size_bytes)
        return self._payloads[:size_bytes]


Job = Callable[[Scratch], None]


def batches(sizes: Sequence[int], most_bytes: int, threads: int) -> list[slice]:
    """Cut a call's blocks into operations: as many as there are threads, if that leaves enough to do for each."""
    target = min(max(sum(sizes) // (2 * threads), LEAST_BATCH_BYTES), most_bytes)
    cuts, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and (total + size > target or index - first == BATCH_RECORDS):
            cuts.append(slice(first, index))
            first, total = index, 0
        total += size
    if sizes:
        cuts.append(slice(first, len(sizes)))
    return cuts


class DiskThreads:
    """See the module."""

    def __init__(self, name: str, threads: int, clock: Clock) -> None:
        self._clock = clock
        self._threads = threads
        self._scratch: queue.LifoQueue[Scratch] = queue.LifoQueue()
        self._calls: queue.SimpleQueue[tuple[_JobGroup, Nanos] | None] = queue.SimpleQueue()
        for _ in range(threads):
            self._scratch.put(Scratch())
        for index in range(threads - 1):
            threading.Thread(target=self._help, name=f"{name}-{index}", daemon=True).start()

    def run(self, jobs: Sequence[Job], deadline: Nanos) -> None:
        """Do jobs in any order, several at a time; those that could not begin by the deadline are left undone.

        Raises:
            Exception: What a job raised; others may have been left undone.
        """
        call = _JobGroup(jobs)
        for _ in range(min(len(jobs), self._threads) - 1):
            self._calls.put((call, deadline))
        self._work(call, deadline)
        call.wait()

    def close(self) -> None:
        """Threads end when they have nothing to do."""
        for _ in range(self._threads - 1):
            self._calls.put(None)

    def _help(self) -> None:
        while (entry := self._calls.get()) is not None:
            self._work(*entry)
            del entry  # holds the buffers of a call that is over

    def _work(self, call: "_JobGroup", deadline: Nanos) -> None:
        while call.has_more() and (left := deadline - self._clock.now()) > 0:
            try:
                scratch = self._scratch.get(timeout=seconds(left))
            except queue.Empty:
                return
            try:
                if self._clock.now() < deadline:
                    call.do_next(scratch)
            finally:
                self._scratch.put(scratch)


class _JobGroup:
    """Jobs that one caller waits for."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = deque(jobs)
        self._running = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def has_more(self) -> bool:
        return bool(self._jobs)

    def do_next(self, scratch: Scratch) -> None:
        with self._changed:
            if not self._jobs:
                return
            job = self._jobs.popleft()
            self._running += 1
        failure: BaseException | None = None
        try:
            job(scratch)
        except BaseException as error:  # noqa: BLE001 - supervisor: raised again in the thread that waits
            failure = error
        with self._changed:
            self._running -= 1
            if failure is not None:
                self._failure = failure
                self._jobs.clear()
            if not self._running:
                self._changed.notify_all()

    def wait(self) -> None:
        """Returns when nothing runs any more; what has not begun never will.

        Raises:
            Exception: What a job raised.
        """
        with self._changed:
            self._jobs.clear()
            while self._running:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
