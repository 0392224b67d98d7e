"""SSD tier: keeps blocks in append-only segment files, verifies every read, and recovers the blocks after a crash.

Rules:

1. A block enters the index only after its whole record is written. A record that a killed process left incomplete is
   detected when the tier is opened, or by its checksum when it is read, and is a miss.
2. A block that fails its checksum or cannot be decoded is CORRUPT. The block is dropped, and the header of its record
   is overwritten. If a later recovery lists the block all the same, a read of it is a miss.
3. While a call reads from a segment, its file is not reused (`kvstore.tiers.ssd.segments.segment`).
4. No operation begins after its call's deadline. An operation that hangs in the system cannot be cancelled: its call
   returns only when the operation does, and its buffers stay in use. A caller that cannot wait so long has to make the
   call in another thread. Calls that wait for a thread behind a hanging operation end at their deadline, and calls
   beyond `max_calls` end at once.
5. If an operation fails, only its own blocks are lost. A call raises `TierFailed` only if the tier is closed, or if an
   operation failed and the call has no result for any block.
6. Writes are synced only if the settings demand it. If the process is killed, no written bytes are lost. After a power
   cut, a block is either complete or a miss.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.buffers import ByteArray
from kvstore.clock import Clock, Nanos
from kvstore.errors import TierFailed
from kvstore.messages import GONE, BlockKey, FetchResult, TierStatus
from kvstore.pool.extents import PAGE_BYTES
from kvstore.ports import Codec
from kvstore.tiers.ssd.disk import open_disk
from kvstore.tiers.ssd.disk_threads import DiskThreads
from kvstore.tiers.ssd.index import block_key
from kvstore.tiers.ssd.opening import Disks, open_volumes
from kvstore.tiers.ssd.reader import SsdReader
from kvstore.tiers.ssd.segments.eviction import SCORES, Score
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.state import SsdState
from kvstore.tiers.ssd.volume import AdmitRewrite, Volume
from kvstore.tiers.ssd.writer import SsdWriter

NAME = "ssd"
CLOSE_SECONDS = 5.0  # maximum time for which `close` waits until the running calls have ended

log = logging.getLogger(__name__)


def refuse_rewrites(size_bytes: int) -> bool:  # noqa: ARG001 - the signature of an `AdmitRewrite`
    """Return False, so that no blocks are copied out of evicted segments."""
    return False


class SsdTier:
    """Backing tier on SSDs; `open` makes one."""

    def __init__(self, settings: SsdSettings, state: SsdState, volumes: Sequence[Volume], clock: Clock) -> None:
        self._settings = settings
        self.state = state
        self.volumes = volumes
        self._clock = clock
        self.disk_threads = DiskThreads(NAME, settings.threads, clock)
        self._writer = SsdWriter(settings, state, volumes, self.disk_threads, clock)
        self._reader = SsdReader(settings, state, volumes, self.disk_threads, clock)
        self.calls = 0  # number of running calls; guarded by the lock of `state`
        self._closed = False

    @classmethod
    def open(
        cls,
        settings: SsdSettings,
        *,
        codecs: Callable[[bytes], Codec],
        clock: Clock,
        disks: Disks | None = None,
        admit_rewrite: AdmitRewrite = refuse_rewrites,
        score: Score | None = None,
    ) -> "SsdTier":
        """Open the directories, and recover the blocks in them.

        Args:
            settings: The settings of the tier.
            codecs: Returns the codec for a namespace digest; raises `NamespaceUnknown` if the namespace is not open.
            clock: The clock of deadlines.
            disks: Opens a directory; by default `open_disk` does it.
            admit_rewrite: Decides whether blocks may be copied out of an evicted segment; called from any thread.
            score: Computes the scores of segments for eviction; by default, the function that `settings.eviction`
                names.

        Raises:
            StoreNotStarted: A setting cannot be used here; the message begins with its name. Nothing is left open.
        """
        state = SsdState(codecs)
        volumes = open_volumes(
            settings,
            state,
            clock,
            disks=disks or (lambda folder: open_disk(folder, direct=settings.direct)),
            score=score or SCORES[settings.eviction],
            admit_rewrite=admit_rewrite,
        )
        return cls(settings, state, volumes, clock)

    @property
    def name(self) -> str:
        return NAME

    @property
    def finds_in_memory(self) -> bool:
        return True

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:  # noqa: ARG002 - the index is in memory, so the call never waits
        if self._closed:
            raise TierFailed("the SSD tier is closed")
        known = {digest for digest in {key.digest for key in keys} if self.state.codec(digest) is not None}
        return self.state.index.leading(keys, known)

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        return [self.find([key], deadline) == 1 for key in keys]

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        assert len(keys) == len(blocks), (len(keys), len(blocks))
        with self._running_call() as is_admitted:
            if is_admitted and self._clock.now() < deadline:
                return self._writer.put(keys, blocks, deadline, checksums)
            self._note_failure()
            return [False] * len(keys)

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        assert len(keys) == len(into), (len(keys), len(into))
        with self._running_call() as is_admitted:
            if is_admitted and self._clock.now() < deadline:
                return self._reader.get(keys, into, deadline)
            self._note_failure(misses=len(keys))
            return [GONE] * len(keys)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        with self.state.lock:
            if self._closed:
                return
            self.calls += 1
        try:
            self._reader.discard(keys)
        finally:
            self._end_call()

    def gone(self) -> list[BlockKey]:
        return self.state.gone()

    def held(self) -> list[BlockKey]:
        return [block_key(key) for key in self.state.index.names()]

    def status(self) -> TierStatus:
        with self.state.lock:
            count = self.state.count
            return TierStatus(
                name=NAME,
                blocks=len(self.state.index),
                bytes=self.state.index.live_pages * PAGE_BYTES,
                capacity_bytes=self._settings.capacity_bytes,
                hits=count.hits,
                misses=count.misses,
                bytes_read=count.bytes_read,
                bytes_written=count.bytes_written,
                refused=count.refused,
                evicted=count.evicted,
                corrupt=count.corrupt,
                failures=count.failures,
            )

    @property
    def rescued(self) -> int:
        """Number of blocks since the opening that were copied from evicted segments to new segments, to keep them."""
        return self.state.count.rescued

    def close(self) -> None:
        """Wait at most `CLOSE_SECONDS` for running calls, then write the missing footers and close the directories.

        If a call still runs after this time, no footer is written, and the files and locks stay open until the process
        ends.
        """
        with self.state.lock:
            if self._closed:
                return
            self._closed = True
            is_idle = self.state.lock.wait_for(lambda: not self.calls, CLOSE_SECONDS)
        self.disk_threads.close()
        # While a read runs, its file must not be closed: the system could give the same descriptor to another file.
        if not is_idle:
            log.warning("SSD tier: closed while the disk hangs, its files stay open until the process ends")
            return
        for volume in self.volumes:
            volume.close()

    def check(self) -> None:
        """Assert that the index, the segments and the counts agree. For tests; no call may be running."""
        with self.state.lock:
            segments = [segment for volume in self.volumes for segment in volume.segments]
            self.state.index.check(segments)
            assert not self.state.writing, self.state.writing
            assert not self.calls, self.calls
            for segment in segments:
                assert not segment.readers, segment.name
                assert not segment.writers, segment.name

    @contextmanager
    def _running_call(self) -> Iterator[bool]:
        """Count a running call while the context is open; yield False if `max_calls` others run already.

        Raises:
            TierFailed: The tier is closed.
        """
        with self.state.lock:
            if self._closed:
                raise TierFailed("the SSD tier is closed")
            is_admitted = self.calls < self._settings.max_calls
            self.calls += 1
        try:
            yield is_admitted
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self.state.lock:
            self.calls -= 1
            self.state.lock.notify_all()

    def _note_failure(self, misses: int = 0) -> None:
        with self.state.lock:
            self.state.count.failures += 1
            self.state.count.misses += misses
