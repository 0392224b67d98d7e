"""Memory tier: a backing tier in the memory of one process, the simplest implementation of the port."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvstore.buffers import ByteArray, crc32c
from kvstore.clock import Clock, Nanos
from kvstore.codecs.verification import decoded, encoded
from kvstore.errors import NamespaceUnknown, UndecodableBlock
from kvstore.messages import CORRUPT, GONE, BlockKey, BlockOutcome, FetchResult, TierStatus
from kvstore.ports import Codec
from kvstore.tiers.statistics import TierStatistics
from kvstore.tiers.tier_gate import TierGate


class MemoryBackingTier:
    """A `BackingTier` for tests and as an example. It evicts the least recently used block first."""

    def __init__(
        self, capacity_bytes: int, *, codecs: Callable[[bytes], Codec], clock: Clock, name: str = "memory"
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._codecs = codecs
        self._lock = threading.Lock()
        self._kept: OrderedDict[BlockKey, _StoredContent] = OrderedDict()
        self._bytes = 0  # sum of the kept contents
        self._statistics = TierStatistics(name)
        self._gate = TierGate(self._statistics, clock)

    @property
    def name(self) -> str:
        return self._statistics.name

    @property
    def finds_in_memory(self) -> bool:
        return True

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:  # noqa: ARG002 - it takes no time
        self._gate.require_open()
        with self._lock:
            for count, key in enumerate(keys):
                if key not in self._kept or self._codec(key) is None:
                    return count
        return len(keys)

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        return [self.find([key], deadline) == 1 for key in keys]

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        self._gate.require_open()
        return [self._put(*each, deadline) for each in zip(keys, blocks, checksums, strict=True)]

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        self._gate.require_open()
        answers = [self._get(key, buffer, deadline) for key, buffer in zip(keys, into, strict=True)]
        self._statistics.count_fetched(answers, into)
        return answers

    def discard(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def gone(self) -> list[BlockKey]:
        return self._statistics.gone()

    def held(self) -> list[BlockKey]:
        with self._lock:
            return list(self._kept)

    def status(self) -> TierStatus:
        with self._lock:
            blocks, occupied = len(self._kept), self._bytes
        return replace(self._statistics.status(), blocks=blocks, bytes=occupied, capacity_bytes=self._capacity_bytes)

    def close(self) -> None:
        self._gate.close()

    def damage(self, key: BlockKey) -> None:
        """Flip one bit of a stored block, for tests."""
        with self._lock:
            self._kept[key].content[0] ^= 1

    def _put(self, key: BlockKey, block: ByteArray, checksum: int, deadline: Nanos) -> bool:
        codec = self._codec(key)
        with self._lock:
            if self._gate.is_late(deadline):
                return False
            if key in self._kept:
                return True
            if codec is None:
                self._statistics.count(refused=1)
                return False
        found = encoded(codec, key, block, checksum)
        if found is None:
            self._statistics.count(corrupt=1)
            return False
        content = np.array(found[0])
        kept = _StoredContent(codec_id=codec.codec_id, content=content, crc32c=found[1])
        with self._lock:
            if content.nbytes > self._capacity_bytes:
                self._statistics.count(refused=1)
                return False
            self._drop(key)
            while self._bytes + content.nbytes > self._capacity_bytes:
                self._drop(next(iter(self._kept)))
                self._statistics.count(evicted=1)
            self._kept[key] = kept
            self._bytes += content.nbytes
            self._statistics.count(bytes_written=content.nbytes)
            self._statistics.mark_present([key])
        return True

    def _get(self, key: BlockKey, into: ByteArray, deadline: Nanos) -> FetchResult:
        codec = self._codec(key)
        with self._lock:
            kept = None if self._gate.is_late(deadline) else self._kept.get(key)
            if kept is None or codec is None:
                return GONE
            self._kept.move_to_end(key)
        answer = _decoded(codec, key, kept, into)
        with self._lock:
            self._statistics.count(corrupt=answer.outcome is BlockOutcome.CORRUPT)
            if answer.outcome is not BlockOutcome.MOVED and self._kept.get(key) is kept:
                self._drop(key)
        return answer

    def _codec(self, key: BlockKey) -> Codec | None:
        try:
            return self._codecs(key.digest)
        except NamespaceUnknown:
            return None

    def _drop(self, key: BlockKey) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._bytes -= kept.content.nbytes
            self._statistics.mark_gone([key])


class _StoredContent(Struct, frozen=True, kw_only=True):
    codec_id: int
    content: ByteArray
    crc32c: int  # of the content


def _decoded(codec: Codec, key: BlockKey, kept: _StoredContent, into: ByteArray) -> FetchResult:
    if kept.codec_id != codec.codec_id:
        return GONE
    if crc32c([kept.content]) != kept.crc32c:
        return CORRUPT
    try:
        return FetchResult(BlockOutcome.MOVED, decoded(codec, key, kept.content, into))
    except UndecodableBlock:
        return CORRUPT
