"""The SSD tier: blocks in append-only segment files, verified on every read, found again after a crash.

Rules:

1. A block is in the index only when all of its record is written. What a killed process left half written is noticed
   when the tier is opened, or by the checksum when it is read: it is a miss.
2. A block that fails its checksum is CORRUPT, and so is one that its codec refuses: it is dropped, and its record is
   overwritten, so that it does not come back.
3. While a call reads from a segment, its file is not begun anew; see `kvstore.tiers.ssd.segments.segment`.
4. Nothing is begun after a call's deadline. An operation that hangs in the system cannot be called back: the call that
   made it returns when it returns, and until then its buffers are in use. Whoever cannot wait, waits outside with a
   deadline of its own. Calls behind it give up at their deadline, and calls beyond `max_calls` at once.
5. An operation that fails costs the blocks it was for. Only when nothing else came of a call does it raise `TierFailed`.
6. Nothing is synced unless the settings ask for it: a killed process loses nothing that was written, and after a power
   cut a block is whole or a miss.
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
CLOSE_SECONDS = 5.0  # for calls under way when the tier is closed

log = logging.getLogger(__name__)


def refuse_rewrites(size_bytes: int) -> bool:  # noqa: ARG001 - an `AdmitRewrite`
    """Nothing is copied out of a segment that goes."""
    return False


class SsdTier:
    """See the module, and `kvstore.ports.BackingTier`; made by `SsdTier.open`."""

    def __init__(self, settings: SsdSettings, state: SsdState, volumes: Sequence[Volume], clock: Clock) -> None:
        self._settings = settings
        self._state = state
        self._volumes = volumes
        self._clock = clock
        self._disk_threads = DiskThreads(NAME, settings.threads, clock)
        self._writer = SsdWriter(settings, state, volumes, self._disk_threads, clock)
        self._reader = SsdReader(settings, state, volumes, self._disk_threads, clock)
        self._calls = 0  # under way; guarded by the lock of `state`
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
        """Take the directories, and find out what they hold.

        Args:
            settings: What the tier is told.
            codecs: The codec of a namespace, by digest; `NamespaceUnknown` where there is none.
            clock: Of deadlines.
            disks: How to open a directory; the real thing by default.
            admit_rewrite: Asked before bytes are written that nobody asked to be written; from any thread.
            score: Which segment goes first; the one that the settings name by default.

        Raises:
            StoreNotStarted: A setting cannot be obeyed here; the message begins with its name. Nothing is left open.
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

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:  # noqa: ARG002 - it takes no time
        if self._closed:
            raise TierFailed("the SSD tier is closed")
        known = {digest for digest in {key.digest for key in keys} if self._state.codec(digest) is not None}
        return self._state.index.leading(keys, known)

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
        with self._call() as is_admitted:
            if is_admitted and self._clock.now() < deadline:
                return self._writer.put(keys, blocks, deadline, checksums)
            self._note_failure()
            return [False] * len(keys)

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        assert len(keys) == len(into), (len(keys), len(into))
        with self._call() as is_admitted:
            if is_admitted and self._clock.now() < deadline:
                return self._reader.get(keys, into, deadline)
            self._note_failure(misses=len(keys))
            return [GONE] * len(keys)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        with self._state.lock:
            if self._closed:
                return
            self._calls += 1
        try:
            self._reader.discard(keys)
        finally:
            self._leave()

    def gone(self) -> list[BlockKey]:
        return self._state.gone()

    def held(self) -> list[BlockKey]:
        return [block_key(key) for key in self._state.index.names()]

    def status(self) -> TierStatus:
        with self._state.lock:
            count = self._state.count
            return TierStatus(
                name=NAME,
                blocks=len(self._state.index),
                bytes=self._state.index.live_pages * PAGE_BYTES,
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
        """Blocks that were copied out of segments that went."""
        return self._state.count.rescued

    def close(self) -> None:
        """Let the directories go, with footers in all segments; waits a few seconds for calls that are under way."""
        with self._state.lock:
            if self._closed:
                return
            self._closed = True
            is_idle = self._state.lock.wait_for(lambda: not self._calls, CLOSE_SECONDS)
        self._disk_threads.close()
        if not is_idle:  # a file that is read from must not be closed: its number could become another file's
            log.warning("SSD tier: closed while the disk hangs; its files stay open until the process ends")
            return
        for volume in self._volumes:
            volume.close()

    def check(self) -> None:
        """Asserts what always holds while no call is under way; for tests."""
        with self._state.lock:
            segments = [segment for volume in self._volumes for segment in volume.segments]
            self._state.index.check(segments)
            assert not self._state.writing, self._state.writing
            assert not self._calls, self._calls
            for segment in segments:
                assert not segment.readers, segment.name
                assert not segment.writers, segment.name

    @contextmanager
    def _call(self) -> Iterator[bool]:
        """A call under way; false when there are too many already."""
        with self._state.lock:
            if self._closed:
                raise TierFailed("the SSD tier is closed")
            is_admitted = self._calls < self._settings.max_calls
            self._calls += 1
        try:
            yield is_admitted
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._state.lock:
            self._calls -= 1
            self._state.lock.notify_all()

    def _note_failure(self, misses: int = 0) -> None:
        with self._state.lock:
            self._state.count.failures += 1
            self._state.count.misses += misses
