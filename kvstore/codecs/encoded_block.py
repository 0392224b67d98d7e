"""Encoded block: the header of every compressed or quantised block, with a hash that detects damage (the check).

    version   1 byte
    form      1 byte: 0 if the body is the block's bytes unchanged, 1 if it has the codec's format
    reserved  2 bytes, zero
    bound     3 × float32: the largest error of decoded values (`ErrorBound`); zeros if they are exact
    check     8 bytes: XXH3-64, seeded with the codec's id, the block's key and all fields above. It covers the block's
              bytes for a lossless codec, and the body for other codecs
    body

All fields are little-endian. The check detects damaged bytes, and bytes of another block or codec. It does not detect
deliberate changes; the encryption of `kvstore.codecs.sealing` does.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import xxhash
from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey

VERSION = 1
_PREFIX = struct.Struct("<BBHfff")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECK.size


class PayloadForm(IntEnum):
    VERBATIM = 0
    PACKED = 1


class ErrorBound(Struct, frozen=True):
    """Largest possible error of a decoded value x: `relative` * |x| + `of_largest` * largest + `least`.

    `largest` is the largest magnitude among the values that share a scale with x.
    """

    relative: float = 0.0
    of_largest: float = 0.0
    least: float = 0.0


EXACT = ErrorBound()


def pack(
    codec_id: int,
    key: BlockKey,
    body: Sequence[memoryview | bytes],
    *,
    form: PayloadForm,
    bound: ErrorBound,
    check: ByteArray | None = None,
) -> ByteArray:
    """Return an encoded block.

    The check in its header, which detects damage, is the hash of the bytes `check`, or of the body if `check` is None.
    """
    prefix = _PREFIX.pack(VERSION, form, 0, bound.relative, bound.of_largest, bound.least)
    hasher = xxhash.xxh3_64(seed=_seed(codec_id, key, prefix))
    for piece in body if check is None else [check.data]:
        hasher.update(piece)
    return np.frombuffer(b"".join([prefix, _CHECK.pack(hasher.intdigest()), *body]), np.uint8)


class EncodedBlock:
    """Encoded block with a parsed header. The caller must call the method `check` before it uses the content."""

    __slots__ = ("_check", "_seed", "body", "bound", "form")

    def __init__(self, codec_id: int, key: BlockKey, encoded: ByteArray):
        """Parse the header. The check is not verified yet.

        Raises:
            UndecodableBlock: The bytes are too few for a header, or its version or form is unknown.
        """
        if encoded.nbytes < HEADER_BYTES:
            raise UndecodableBlock(f"{encoded.nbytes} bytes are fewer than a header's {HEADER_BYTES}")
        prefix = encoded[: _PREFIX.size].tobytes()
        version, form, reserved, *bound = _PREFIX.unpack(prefix)
        if version != VERSION or reserved or form not in tuple(PayloadForm):
            raise UndecodableBlock(f"unknown version {version} or form {form}")
        self.form = PayloadForm(form)
        self.bound = ErrorBound(*bound)
        self.body: ByteArray = encoded[HEADER_BYTES:]
        self._seed = _seed(codec_id, key, prefix)
        (self._check,) = _CHECK.unpack_from(encoded.data, _PREFIX.size)

    def check(self, content: ByteArray) -> None:
        """Verify `content`, the bytes that the header's check covers.

        Raises:
            UndecodableBlock: The content does not match the check.
        """
        if xxhash.xxh3_64_intdigest(content.data, seed=self._seed) != self._check:
            raise UndecodableBlock("the check does not match: damaged, or another block's bytes")


def bound_of(encoded: ByteArray) -> ErrorBound:
    """Read the error bound of an encoded block from its header.

    Raises:
        UndecodableBlock: The block does not begin with a header of a known version.
    """
    return EncodedBlock(0, BlockKey(b"", b""), encoded).bound


def _seed(codec_id: int, key: BlockKey, prefix: bytes) -> int:
    return xxhash.xxh3_64_intdigest(bytes([codec_id]) + key.digest + key.name + prefix)
