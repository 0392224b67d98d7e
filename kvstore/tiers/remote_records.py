"""The value that a remote tier keeps for a block: its bytes, behind a head that says whose they are.

Rules:

1. A value is a head of 64 bytes, then the payload, which is what the namespace's codec made of the block. The head:
   magic "FKVR", format version (1), codec id (1), 2 zero bytes, namespace digest (16), block name (16), length of the
   block (8), length of the payload (8), CRC-32C of the payload (4), CRC-32C of the head so far (4). Integers are big-endian.
2. Whoever can write to the store can plant anything there. A block is returned only when the head is that of the block
   asked for, the lengths agree, both checksums are right and the codec has decoded the payload.
3. A value that is none of ours any more (garbage, cut short, under another block's key) is corrupt, and removed once a
   second reading agrees (`kvstore.tiers.second_reading`).
   A sound one of another codec or block length is a miss; the next put replaces it.
   One of a newer format is a miss and stays, for those who can read it.
"""

import hashlib
import logging
import struct
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import google_crc32c
import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray, crc32c
from kvstore.codecs.plain import PlainCodec
from kvstore.codecs.verification import decoded, encoded
from kvstore.errors import NamespaceUnknown, UndecodableBlock
from kvstore.messages import CORRUPT, GONE, BlockKey, BlockOutcome, FetchResult
from kvstore.ports import Codec
from kvstore.tiers.second_reading import Read
from kvstore.tiers.statistics import TierStatistics

MAGIC = b"FKVR"
FORMAT_VERSION = 1

FIELDS = struct.Struct(">4sBB2x16s16sQQI")  # the head but for its checksum
HEAD_BYTES = FIELDS.size + 4
assert HEAD_BYTES == 64

SLACK_BYTES = 1 << 16
"""By which a payload may exceed its block: heads, scales and seals of codecs. What claims more is not received."""

log = logging.getLogger(__name__)


class RecordSource(Protocol):
    """A value on its way from the store."""

    @property
    def left(self) -> int:
        """Bytes of it that have not been taken yet."""
        ...

    def fill(self, into: memoryview) -> None:
        """Take the next bytes, as many as fit; there must be that many left.

        Raises:
            OSError: They do not come, or not in time.
        """
        ...


class FramedRecord(Struct, frozen=True):
    """What to write: the head, then the payload."""

    head: bytes
    payload: ByteArray

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.payload.nbytes


class RemoteKeyState(Enum):
    """What lies under a block's key, as far as its head tells."""

    HELD = auto()  # the block
    FREE = auto()  # nothing, or what may be replaced
    NEWER = auto()  # rule 3: it stays


class RemoteRecordHead(Struct, frozen=True, kw_only=True):
    codec_id: int
    block_bytes: int
    payload_bytes: int
    crc32c: int  # of the payload


class NewerFormat(UndecodableBlock):
    """Written by a later version of this software."""


def pack(key: BlockKey, codec_id: int, block_bytes: int, payload: ByteArray, checksum: int | None = None) -> bytes:
    """The head of a value; its checksum is that of the payload where none is given."""
    crc = crc32c([payload]) if checksum is None else checksum
    fields = FIELDS.pack(MAGIC, FORMAT_VERSION, codec_id, key.digest, key.name, block_bytes, payload.nbytes, crc)
    return fields + struct.pack(">I", google_crc32c.value(fields))


def parse(head: bytes, key: BlockKey) -> RemoteRecordHead:
    """The head of the value that lies under a block's key.

    Raises:
        NewerFormat: It is of a version that is not known here.
        UndecodableBlock: It is not this block's.
    """
    if len(head) < HEAD_BYTES or head[:4] != MAGIC:
        raise UndecodableBlock("no value of ours")
    if head[4] > FORMAT_VERSION:
        raise NewerFormat(f"format version {head[4]}; this is version {FORMAT_VERSION}")
    fields = head[: FIELDS.size]
    if google_crc32c.value(fields) != int.from_bytes(head[FIELDS.size : HEAD_BYTES], "big"):
        raise UndecodableBlock("a damaged head")
    _, _, codec_id, digest, name, block_bytes, payload_bytes, checksum = FIELDS.unpack(fields)
    if digest != key.digest or name != key.name:
        raise UndecodableBlock("another block's value")
    return RemoteRecordHead(codec_id=codec_id, block_bytes=block_bytes, payload_bytes=payload_bytes, crc32c=checksum)


def _fitting(key: BlockKey, first: bytes, length: int) -> RemoteRecordHead:
    """The head of a value of that length.

    Raises:
        NewerFormat: See `parse`.
        UndecodableBlock: It is not this block's, or of another length.
    """
    head = parse(first, key)
    if length != HEAD_BYTES + head.payload_bytes or head.payload_bytes > head.block_bytes + SLACK_BYTES:
        raise UndecodableBlock(f"{length} bytes for a payload of {head.payload_bytes}")
    return head


class RecordFramer:
    """Frames blocks and takes them out of their frames, for one tier. Thread-safe."""

    def __init__(self, codecs: Callable[[bytes], Codec], statistics: TierStatistics):
        """Binds a tier to the codecs of its namespaces.

        Args:
            codecs: By namespace digest; `NamespaceUnknown` where nobody has opened it.
            statistics: Of the tier; corrupt values are counted here.
        """
        self._codecs = codecs
        self._statistics = statistics
        self._lock = threading.Lock()
        self._newer_seen = False

    def knows(self, key: BlockKey) -> bool:
        """Whether the namespace is open here."""
        return self._codec(key) is not None

    def frame(self, key: BlockKey, block: ByteArray, checksum: int) -> FramedRecord | None:
        """What to write for a block; None when its namespace is not open here, or it is not what its checksum says."""
        codec = self._codec(key)
        if codec is None:
            return None
        found = encoded(codec, key, block, checksum)
        if found is None:
            self.corrupt(key, "its bytes do not have the checksum that it was published with")
            return None
        payload, payload_checksum = found
        return FramedRecord(pack(key, codec.codec_id, block.nbytes, payload, payload_checksum), payload)

    def key_state(self, key: BlockKey, head: bytes, block_bytes: int | None = None) -> RemoteKeyState:
        """What the first bytes of a value say of it.

        Args:
            key: Of the block.
            head: Empty where there is no value.
            block_bytes: Length of the block, where it is known.
        """
        codec = self._codec(key)
        try:
            found = parse(head, key)
        except NewerFormat as error:
            self._newer(key, error)
            return RemoteKeyState.NEWER
        except UndecodableBlock:
            return RemoteKeyState.FREE
        ours = codec is not None and found.codec_id == codec.codec_id and block_bytes in (None, found.block_bytes)
        return RemoteKeyState.HELD if ours else RemoteKeyState.FREE

    def take(self, key: BlockKey, value: RecordSource, into: ByteArray) -> FetchResult:
        """Get the block out of a value. May leave bytes of the value untaken, unless the answer is MOVED.

        Raises:
            OSError: From the value.
        """
        try:
            return self._taken(key, value, into)
        except NewerFormat as error:
            self._newer(key, error)
            return GONE
        except UndecodableBlock as error:
            self.corrupt(key, str(error))
            return CORRUPT

    def proof(self, key: BlockKey, block_bytes: int, length: int, read: Read) -> bytes | None:
        """Return what proves that a value is corrupt: its length, and its bytes as far as they tell; None where it is not.

        Args:
            key: Of the block.
            block_bytes: The length of the block.
            length: The length of the value.
            read: Fetches parts of the value; what it raises comes out of this call.
        """
        codec = self._codec(key)
        if codec is None:
            return None
        first = read(0, min(length, HEAD_BYTES)) if length else b""
        digest = hashlib.sha256(f"{length}:".encode() + first)
        try:
            head = _fitting(key, first, length)
            if head.codec_id != codec.codec_id or head.block_bytes != block_bytes:
                return None
            payload = read(HEAD_BYTES, length) if length > HEAD_BYTES else b""
            digest.update(payload)
            encoded_block = np.frombuffer(bytearray(payload), np.uint8)
            if crc32c([encoded_block]) != head.crc32c:
                return digest.digest()
            decoded(codec, key, encoded_block, np.empty(block_bytes, np.uint8))
        except NewerFormat:
            return None
        except UndecodableBlock:
            return digest.digest()
        return None

    def corrupt(self, key: BlockKey, reason: str) -> None:
        """What lies under a block's key is nothing of ours."""
        self._statistics.count(corrupt=1)
        log.warning(
            "block is corrupt", extra={"tier": self._statistics.name, "block": key.name.hex(), "reason": reason}
        )

    def _taken(self, key: BlockKey, value: RecordSource, into: ByteArray) -> FetchResult:
        codec = self._codec(key)
        if codec is None:
            return GONE
        length = value.left
        first = bytearray(min(length, HEAD_BYTES))
        value.fill(memoryview(first))
        head = _fitting(key, bytes(first), length)
        if head.codec_id != codec.codec_id or head.block_bytes != into.nbytes:
            return GONE
        if head.codec_id == PlainCodec.codec_id and head.payload_bytes == into.nbytes:
            return self._received(value, head, into)
        payload = np.empty(head.payload_bytes, np.uint8)
        self._received(value, head, payload)
        return FetchResult(BlockOutcome.MOVED, decoded(codec, key, payload, into))

    def _received(self, value: RecordSource, head: RemoteRecordHead, into: ByteArray) -> FetchResult:
        value.fill(into.data)
        if crc32c([into]) != head.crc32c:
            raise UndecodableBlock("a damaged payload")
        return FetchResult(BlockOutcome.MOVED, head.crc32c)

    def _codec(self, key: BlockKey) -> Codec | None:
        try:
            return self._codecs(key.digest)
        except NamespaceUnknown:
            return None

    def _newer(self, key: BlockKey, error: NewerFormat) -> None:
        with self._lock:
            first, self._newer_seen = not self._newer_seen, True
        if first:
            log.warning(
                "blocks of a newer format are misses here; update this node",
                extra={"tier": self._statistics.name, "block": key.name.hex(), "reason": str(error)},
            )
