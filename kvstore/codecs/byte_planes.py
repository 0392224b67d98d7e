"""Byte-plane codec: separates the bytes of values by significance and compresses each plane. It is lossless.

Plane i has byte i of every value. In neighbouring floating-point values, the high bytes (sign and exponent) are
similar; the low bytes are noise that no compressor can shrink. The planes of high bytes therefore shrink, and the
planes of low bytes are stored as they are.

Format of the body: the length of each plane as 4 little-endian bytes, then the planes, least significant first. A plane
is uncompressed if its length is the number of values in the block.
"""

import struct
from typing import Protocol

import numpy as np

from kvstore.buffers import ByteArray
from kvstore.codecs.encoded_block import EXACT, EncodedBlock, PayloadForm, pack
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey
from kvstore.namespace import KvNamespace
from kvstore.native import kernels


class Compressor(Protocol):
    """Port of a compressor of bytes. It gets one byte plane at a time: byte i of every value of a block. Thread-safe."""

    @property
    def codec_id(self) -> int:
        """The id of the byte-plane codec that uses this compressor."""
        ...

    def compress(self, plane: ByteArray) -> bytes: ...

    def decompress(self, packed: ByteArray, length: int) -> ByteArray:
        """Decompress `packed` to exactly `length` bytes, and never allocate more than `length` bytes for the result.

        Raises:
            UndecodableBlock: The input does not decompress to that length.
        """
        ...


class SplitCodec:
    """Codec that compresses the byte planes of a block (plane i has byte i of every value) with a given compressor."""

    def __init__(self, namespace: KvNamespace, compressor: Compressor):
        self.codec_id = compressor.codec_id
        self._compressor = compressor
        self._block_bytes = namespace.block_bytes
        # bytes per value; 1 if the size of a value is not known
        self._width = namespace.element_bytes or 1
        self._plane_bytes = self._block_bytes // self._width
        self._lengths = struct.Struct(f"<{self._width}I")

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        assert block.nbytes == self._block_bytes, (block.nbytes, self._block_bytes)
        planes: list[memoryview | bytes] = []
        by_place = np.empty((self._width, self._plane_bytes), np.uint8)
        kernels.split(block, by_place)
        for plane in by_place:
            packed = self._compressor.compress(plane)
            planes.append(packed if len(packed) < plane.nbytes else plane.data)
        lengths = self._lengths.pack(*map(len, planes))
        return pack(self.codec_id, key, [lengths, *planes], form=PayloadForm.PACKED, bound=EXACT, check=block)

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        assert into.nbytes == self._block_bytes, (into.nbytes, self._block_bytes)
        payload = EncodedBlock(self.codec_id, key, encoded)
        if payload.form is not PayloadForm.PACKED or payload.body.nbytes < self._lengths.size:
            raise UndecodableBlock("the block has no byte planes")
        lengths = self._lengths.unpack_from(payload.body.data)
        if payload.body.nbytes != self._lengths.size + sum(lengths):
            raise UndecodableBlock(f"planes of {lengths} bytes in {payload.body.nbytes}")
        planes = []
        start = self._lengths.size
        for length in lengths:
            planes.append(self._plane(payload.body[start : start + length]))
            start += length
        kernels.join(planes, into)
        payload.check(into)

    def _plane(self, kept: ByteArray) -> ByteArray:
        if kept.nbytes > self._plane_bytes:
            raise UndecodableBlock(f"a plane of {kept.nbytes} bytes, not {self._plane_bytes}")
        return kept if kept.nbytes == self._plane_bytes else self._compressor.decompress(kept, self._plane_bytes)
