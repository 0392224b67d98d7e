"""Disk threads: run a limited number of disk operations at the same time, each with its own buffers.

Rules:

1. The calling thread runs operations too. At most `threads` operations run at a time, including those in calling
   threads. If a call has only one operation, it runs in the calling thread, because passing it on would take as long as
   a small read.
2. A call of `DiskThreads.run` has a deadline. An operation that has not begun by then never begins. The call waits for
   each operation that has begun, because a read that hangs in the system cannot be cancelled, and uses its buffers
   until it returns.
3. The threads are daemon threads, so the process can end while a disk hangs.
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
"""Maximum number of records in one system call. A record has up to three pieces (header, payload, partial page), and
the system allows 1,024 pieces."""

LEAST_BATCH_BYTES = 256 << 10
"""`batches` fills an operation up to about this many bytes before it begins another one, even if threads are idle.
Passing a smaller operation to another thread costs more than it saves."""


class Scratch:
    """Page-aligned buffers of one disk operation, for bytes that cannot go directly between disk and caller."""

    def __init__(self) -> None:
        self.headers = aligned(BATCH_RECORDS * PAGE_BYTES).reshape(BATCH_RECORDS, PAGE_BYTES)
        self.tails = aligned(BATCH_RECORDS * PAGE_BYTES).reshape(BATCH_RECORDS, PAGE_BYTES)
        self._payloads = aligned(PAGE_BYTES)

    def payloads(self, size_bytes: int) -> ByteArray:
        """Return a buffer for payloads that are not aligned. A later call may return the same memory."""
        if self._payloads.nbytes < size_bytes:
            self._payloads = aligned(size_bytes)
        return self._payloads[:size_bytes]


Job = Callable[[Scratch], None]
"""A disk operation, which gets buffers that no other operation uses meanwhile."""


def batches(sizes: Sequence[int], most_bytes: int, threads: int) -> list[slice]:
    """Divide the blocks of a call into disk operations, and return one slice of the blocks for each operation.

    An operation has at most `most_bytes`, unless a single block is larger. There are enough operations for all threads,
    unless they would be smaller than `LEAST_BATCH_BYTES`.
    """
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
    """Runs the disk operations of one tier, by the rules of this module."""

    def __init__(self, name: str, threads: int, clock: Clock) -> None:
        self._clock = clock
        self._threads = threads
        self.scratch: queue.LifoQueue[Scratch] = queue.LifoQueue()
        self._calls: queue.SimpleQueue[tuple[_JobGroup, Nanos] | None] = queue.SimpleQueue()
        for _ in range(threads):
            self.scratch.put(Scratch())
        for index in range(threads - 1):
            threading.Thread(target=self._help, name=f"{name}-{index}", daemon=True).start()

    def run(self, jobs: Sequence[Job], deadline: Nanos) -> None:
        """Run disk operations in any order, several at a time; skip the operations that cannot begin by the deadline.

        Raises:
            Exception: An operation raised it; other operations may have been skipped.
        """
        call = _JobGroup(jobs)
        for _ in range(min(len(jobs), self._threads) - 1):
            self._calls.put((call, deadline))
        self._work(call, deadline)
        call.wait()

    def close(self) -> None:
        """Let the threads end after the operations of earlier calls; do not wait for this."""
        for _ in range(self._threads - 1):
            self._calls.put(None)

    def _help(self) -> None:
        while (entry := self._calls.get()) is not None:
            self._work(*entry)
            del entry  # releases the buffers of the finished call before the thread waits for the next one

    def _work(self, call: "_JobGroup", deadline: Nanos) -> None:
        while call.has_more() and (left := deadline - self._clock.now()) > 0:
            try:
                scratch = self.scratch.get(timeout=seconds(left))
            except queue.Empty:
                return
            try:
                if self._clock.now() < deadline:
                    call.do_next(scratch)
            finally:
                self.scratch.put(scratch)


class _JobGroup:
    """Holds the disk operations of one call of `DiskThreads.run`, and the exception that one of them raised."""

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
        except BaseException as error:  # noqa: BLE001 - `wait` raises it again in the calling thread
            failure = error
        with self._changed:
            self._running -= 1
            if failure is not None:
                self._failure = failure
                self._jobs.clear()
            if not self._running:
                self._changed.notify_all()

    def wait(self) -> None:
        """Drop the operations that have not begun, and wait for the others.

        Raises:
            Exception: An operation raised it.
        """
        with self._changed:
            self._jobs.clear()
            while self._running:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
