"""A backing tier in the memory of one process: the simplest thing that keeps the port's promises."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray, crc32c
from kvstore.clock import Clock, Nanos
from kvstore.codecs.checked import encoded
from kvstore.errors import NamespaceUnknown, TierFailed, UndecodableBlock
from kvstore.messages import CORRUPT, GONE, BlockKey, Fetched, Outcome, TierStatus
from kvstore.ports import Codec

GONE_KEYS = 1 << 20
"""Names that wait for `gone` to be asked; older ones are forgotten, which costs a router a wrong guess."""


class MemoryBackingTier:
    """A `BackingTier` for tests, and for whoever wants to see what the others do. The block least recently used goes first."""

    def __init__(
        self, capacity_bytes: int, *, codecs: Callable[[bytes], Codec], clock: Clock, name: str = "memory"
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._codecs = codecs
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()
        self._kept: OrderedDict[BlockKey, _Kept] = OrderedDict()
        self._gone: deque[BlockKey] = deque(maxlen=GONE_KEYS)
        self._count = _Counters()
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def finds_in_memory(self) -> bool:
        return True

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:  # noqa: ARG002 - it takes no time
        self._check_open()
        with self._lock:
            for count, key in enumerate(keys):
                if key not in self._kept or self._codec(key) is None:
                    return count
        return len(keys)

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]:
        self._check_open()
        sums = checksums if checksums is not None else [None] * len(keys)
        return [self._put(*each, deadline) for each in zip(keys, blocks, sums, strict=True)]

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[Fetched]:
        self._check_open()
        return [self._get(key, buffer, deadline) for key, buffer in zip(keys, into, strict=True)]

    def discard(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def gone(self) -> list[BlockKey]:
        with self._lock:
            names = [key for key in dict.fromkeys(self._gone) if key not in self._kept]
            self._gone.clear()
        return names

    def held(self) -> list[BlockKey]:
        with self._lock:
            return list(self._kept)

    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(
                name=self._name,
                blocks=len(self._kept),
                bytes=self._count.bytes,
                capacity_bytes=self._capacity_bytes,
                hits=self._count.hits,
                misses=self._count.misses,
                bytes_read=self._count.bytes_read,
                bytes_written=self._count.bytes_written,
                refused=self._count.refused,
                evicted=self._count.evicted,
                corrupt=self._count.corrupt,
                failures=self._count.failures,
            )

    def close(self) -> None:
        self._closed = True

    def damage(self, key: BlockKey) -> None:
        """Flip one bit of a block that is held, for tests of those who read it."""
        with self._lock:
            self._kept[key].content[0] ^= 1

    def _put(self, key: BlockKey, block: ByteArray, checksum: int | None, deadline: Nanos) -> bool:
        codec = self._codec(key)
        with self._lock:
            if self._clock.now() >= deadline:
                self._count.failures += 1
                return False
            if key in self._kept:
                return True
            if codec is None:
                self._count.refused += 1
                return False
        found = encoded(codec, key, block, checksum)
        if found is None:
            with self._lock:
                self._count.corrupt += 1
            return False
        content = np.array(found[0])
        kept = _Kept(codec_id=codec.codec_id, content=content, crc32c=found[1])
        with self._lock:
            if content.nbytes > self._capacity_bytes:
                self._count.refused += 1
                return False
            self._drop(key)
            while self._count.bytes + content.nbytes > self._capacity_bytes:
                self._drop(next(iter(self._kept)))
                self._count.evicted += 1
            self._kept[key] = kept
            self._count.bytes += content.nbytes
            self._count.bytes_written += content.nbytes
        return True

    def _get(self, key: BlockKey, into: ByteArray, deadline: Nanos) -> Fetched:
        codec = self._codec(key)
        with self._lock:
            late = self._clock.now() >= deadline
            kept = None if late else self._kept.get(key)
            if kept is None or codec is None:
                self._count.failures += late
                self._count.misses += 1
                return GONE
            self._kept.move_to_end(key)
        answer = _decoded(codec, key, kept, into)
        with self._lock:
            if answer.outcome is Outcome.MOVED:
                self._count.hits += 1
                self._count.bytes_read += into.nbytes
                return answer
            self._count.misses += 1
            self._count.corrupt += answer.outcome is Outcome.CORRUPT
            if self._kept.get(key) is kept:
                self._drop(key)
        return answer

    def _codec(self, key: BlockKey) -> Codec | None:
        try:
            return self._codecs(key.digest)
        except (KeyError, NamespaceUnknown):
            return None

    def _drop(self, key: BlockKey) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._count.bytes -= kept.content.nbytes
            self._gone.append(key)

    def _check_open(self) -> None:
        if self._closed:
            raise TierFailed(f"the {self._name} tier is closed")


class _Kept(Struct, frozen=True, kw_only=True):
    codec_id: int
    content: ByteArray
    crc32c: int  # of the content


class _Counters(Struct):
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    refused: int = 0
    evicted: int = 0
    corrupt: int = 0
    failures: int = 0


def _decoded(codec: Codec, key: BlockKey, kept: _Kept, into: ByteArray) -> Fetched:
    if kept.codec_id != codec.codec_id:
        return GONE
    if crc32c([kept.content]) != kept.crc32c:
        return CORRUPT
    try:
        codec.decode(key, kept.content, into)
    except UndecodableBlock:
        return CORRUPT
    return Fetched(Outcome.MOVED, crc32c([into]))
