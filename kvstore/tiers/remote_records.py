"""Remote records: the value that a remote tier stores for a block. It consists of a head and the block's bytes.

Rules:

1. A value is a head of 64 bytes, then the payload: the block as the namespace's codec encodes it. Integers are big-endian.
   The head, with the number of bytes of each field: magic "FKVR" (4), format version (1), codec id (1), zeros (2),
   namespace digest (16), block hash (16), block length (8), payload length (8), CRC-32C of the payload (4), CRC-32C of
   the head up to here (4).
2. A value is not trusted, because other programs may write to the server. A block is returned only if the head names
   the requested block, its lengths fit the value and the block, both checksums are right, and the codec has decoded
   the payload.
3. A value that is damaged, is truncated, belongs to another block or has no Fleet head is corrupt. It is removed if
   a second reading agrees (`kvstore.tiers.second_reading`). If an undamaged value has another codec or block length,
   it counts as a miss, and the next put replaces it. A value of a newer format is a miss too, but stays, because
   newer nodes can read it.
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

FIELDS = struct.Struct(">4sBB2x16s16sQQI")  # fields of the head (rule 1) without the head's checksum
HEAD_BYTES = FIELDS.size + 4
assert HEAD_BYTES == 64

SLACK_BYTES = 1 << 16
"""Maximum number of bytes by which a payload may be longer than its block, because codecs add heads, scales and seals.
Longer payloads are rejected."""

log = logging.getLogger(__name__)


class RecordSource(Protocol):
    """Port of a value that is being received from the server."""

    @property
    def left(self) -> int:
        """Number of bytes that have not been read yet."""
        ...

    def fill(self, into: memoryview) -> None:
        """Read the next `len(into)` bytes. The caller never asks for more bytes than are left.

        Raises:
            OSError: The bytes did not arrive, or not in time.
        """
        ...


class FramedRecord(Struct, frozen=True):
    """A value to write to the server: the head (rule 1), then the payload."""

    head: bytes
    payload: ByteArray

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.payload.nbytes


class RemoteKeyState(Enum):
    """The state of a block's key on a server, judged by the head of the value."""

    HELD = auto()  # the key has a value from which this node can read the block
    FREE = auto()  # the key has no value, or a value that may be replaced
    NEWER = auto()  # the key has a value of a newer format, which stays (rule 3)


class RemoteRecordHead(Struct, frozen=True, kw_only=True):
    codec_id: int
    block_bytes: int
    payload_bytes: int
    crc32c: int  # CRC-32C of the payload


class NewerFormat(UndecodableBlock):
    """The value was written by a later version of this software."""


def pack(key: BlockKey, codec_id: int, block_bytes: int, payload: ByteArray, checksum: int | None = None) -> bytes:
    """Return the head of a value; `checksum` is the payload's CRC-32C, and is computed if it is not given."""
    crc = crc32c([payload]) if checksum is None else checksum
    fields = FIELDS.pack(MAGIC, FORMAT_VERSION, codec_id, key.digest, key.name, block_bytes, payload.nbytes, crc)
    return fields + struct.pack(">I", google_crc32c.value(fields))


def parse(head: bytes, key: BlockKey) -> RemoteRecordHead:
    """Return the parsed head of the value that lies under a block's key.

    Raises:
        NewerFormat: The head has a version that this program does not know.
        UndecodableBlock: The bytes are not the head of this block's value.
    """
    if len(head) < HEAD_BYTES or head[:4] != MAGIC:
        raise UndecodableBlock("the value has no Fleet head")
    if head[4] > FORMAT_VERSION:
        raise NewerFormat(f"format version {head[4]}; this is version {FORMAT_VERSION}")
    fields = head[: FIELDS.size]
    if google_crc32c.value(fields) != int.from_bytes(head[FIELDS.size : HEAD_BYTES], "big"):
        raise UndecodableBlock("the head is damaged")
    _, _, codec_id, digest, name, block_bytes, payload_bytes, checksum = FIELDS.unpack(fields)
    if digest != key.digest or name != key.name:
        raise UndecodableBlock("the value belongs to another block")
    return RemoteRecordHead(codec_id=codec_id, block_bytes=block_bytes, payload_bytes=payload_bytes, crc32c=checksum)


def _parse_checked(key: BlockKey, first: bytes, length: int) -> RemoteRecordHead:
    """Return the parsed head of a value that has `length` bytes.

    Raises:
        NewerFormat: The head has a version that this program does not know.
        UndecodableBlock: The bytes are not the head of this block's value, or the lengths in the head are wrong.
    """
    head = parse(first, key)
    if length != HEAD_BYTES + head.payload_bytes or head.payload_bytes > head.block_bytes + SLACK_BYTES:
        raise UndecodableBlock(f"{length} bytes for a payload of {head.payload_bytes}")
    return head


class RecordFramer:
    """Converts blocks to the values that one tier stores, and values back to blocks. Thread-safe."""

    def __init__(self, codecs: Callable[[bytes], Codec], statistics: TierStatistics):
        """Start with the codecs and the counters of one tier.

        Args:
            codecs: Returns the codec for a namespace digest; raises `NamespaceUnknown` if the namespace is not open.
            statistics: The counters in which corrupt values are counted.
        """
        self._codecs = codecs
        self._statistics = statistics
        self._lock = threading.Lock()
        self._newer_seen = False

    def knows(self, key: BlockKey) -> bool:
        """Return whether the block's namespace is open on this node."""
        return self._codec(key) is not None

    def frame(self, key: BlockKey, block: ByteArray, checksum: int) -> FramedRecord | None:
        """Return the value for a block.

        Return None if the block's namespace is not open on this node, or if its bytes do not match `checksum`.
        """
        codec = self._codec(key)
        if codec is None:
            return None
        found = encoded(codec, key, block, checksum)
        if found is None:
            self.corrupt(key, "its bytes do not match its published checksum")
            return None
        payload, payload_checksum = found
        return FramedRecord(pack(key, codec.codec_id, block.nbytes, payload, payload_checksum), payload)

    def key_state(self, key: BlockKey, head: bytes, block_bytes: int | None = None) -> RemoteKeyState:
        """Return the state of a key, judged by `head`, the first bytes of the key's value (empty if there is no value).

        `block_bytes` is the length of the block; None if the caller does not know it.
        """
        codec = self._codec(key)
        try:
            found = parse(head, key)
        except NewerFormat as error:
            self._note_newer(key, error)
            return RemoteKeyState.NEWER
        except UndecodableBlock:
            return RemoteKeyState.FREE
        ours = codec is not None and found.codec_id == codec.codec_id and block_bytes in (None, found.block_bytes)
        return RemoteKeyState.HELD if ours else RemoteKeyState.FREE

    def take(self, key: BlockKey, value: RecordSource, into: ByteArray) -> FetchResult:
        """Read a value from the server, and copy its block into `into`.

        The result is CORRUPT if the value is bad. It is GONE if this node cannot use the value: the namespace is not open
        here, or the value has another codec, another block length or a newer format. If the result is not MOVED, a part
        of the value may be left unread.

        Raises:
            OSError: The value could not be read.
        """
        try:
            return self._read_block(key, value, into)
        except NewerFormat as error:
            self._note_newer(key, error)
            return GONE
        except UndecodableBlock as error:
            self.corrupt(key, str(error))
            return CORRUPT

    def proof(self, key: BlockKey, block_bytes: int, length: int, read: Read) -> bytes | None:
        """Return a proof that a value is corrupt: a digest of its length and of the bytes that show the damage.

        Return None if the value is not corrupt, or if the namespace of the block is not open on this node.

        `length` is the value's length. Errors of `read`, which fetches parts of the value, are passed on.
        """
        codec = self._codec(key)
        if codec is None:
            return None
        first = read(0, min(length, HEAD_BYTES)) if length else b""
        digest = hashlib.sha256(f"{length}:".encode() + first)
        try:
            head = _parse_checked(key, first, length)
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
        """Count and log a corrupt value."""
        self._statistics.count(corrupt=1)
        log.warning("block corrupt", extra={"tier": self._statistics.name, "block": key.name.hex(), "reason": reason})

    def _read_block(self, key: BlockKey, value: RecordSource, into: ByteArray) -> FetchResult:
        codec = self._codec(key)
        if codec is None:
            return GONE
        length = value.left
        first = bytearray(min(length, HEAD_BYTES))
        value.fill(memoryview(first))
        head = _parse_checked(key, bytes(first), length)
        if head.codec_id != codec.codec_id or head.block_bytes != into.nbytes:
            return GONE
        if head.codec_id == PlainCodec.codec_id and head.payload_bytes == into.nbytes:
            return self._receive_payload(value, head, into)
        payload = np.empty(head.payload_bytes, np.uint8)
        self._receive_payload(value, head, payload)
        return FetchResult(BlockOutcome.MOVED, decoded(codec, key, payload, into))

    def _receive_payload(self, value: RecordSource, head: RemoteRecordHead, into: ByteArray) -> FetchResult:
        value.fill(into.data)
        if crc32c([into]) != head.crc32c:
            raise UndecodableBlock("the payload is damaged")
        return FetchResult(BlockOutcome.MOVED, head.crc32c)

    def _codec(self, key: BlockKey) -> Codec | None:
        try:
            return self._codecs(key.digest)
        except NamespaceUnknown:
            return None

    def _note_newer(self, key: BlockKey, error: NewerFormat) -> None:
        with self._lock:
            first, self._newer_seen = not self._newer_seen, True
        if first:
            log.warning(
                "blocks of a newer format are misses, update this node",
                extra={"tier": self._statistics.name, "block": key.name.hex(), "reason": str(error)},
            )
