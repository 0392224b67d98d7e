"""What every smaller form of a block begins with, and how bytes are refused that are not that block.

    version   1 byte
    form      1 byte: 0 the block as it is, 1 as the codec packs it
    reserved  2 bytes, zero
    bound     3 × float32: how far decoded values may be off, see `ErrorBound`; zeros where nothing is lost
    check     8 bytes: XXH3-64, seeded with the codec's id, the block's key and all of the above; over the block's bytes
              where they come back as they were, over the packed bytes otherwise
    body

All little-endian. The check makes another block's payload, another codec's and a damaged one errors. It is no
protection from someone who means to deceive; `kvstore.codecs.sealing` is.
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
    """A decoded value x' of x is off by at most `relative` * |x| + `of_largest` * largest + `least`.

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
    """Header and body in one.

    Args:
        codec_id: Of the codec that made the body.
        key: Of the block.
        body: Pieces that follow each other.
        form: Of the body.
        bound: Of the decoded values.
        check: What the check is over; None: the body.
    """
    prefix = _PREFIX.pack(VERSION, form, 0, bound.relative, bound.of_largest, bound.least)
    hasher = xxhash.xxh3_64(seed=_seed(codec_id, key, prefix))
    for piece in body if check is None else [check.data]:
        hasher.update(piece)
    return np.frombuffer(b"".join([prefix, _CHECK.pack(hasher.intdigest()), *body]), np.uint8)


class EncodedBlock:
    """An encoded block whose header has been read. `check` has to be called before its content is believed."""

    __slots__ = ("_check", "_seed", "body", "bound", "form")

    def __init__(self, codec_id: int, key: BlockKey, encoded: ByteArray):
        """Read the header.

        Raises:
            UndecodableBlock: It is none, or of a version that is not known here.
        """
        if encoded.nbytes < HEADER_BYTES:
            raise UndecodableBlock(f"{encoded.nbytes} bytes are fewer than a header's {HEADER_BYTES}")
        prefix = encoded[: _PREFIX.size].tobytes()
        version, form, reserved, *bound = _PREFIX.unpack(prefix)
        if version != VERSION or reserved or form not in tuple(PayloadForm):
            raise UndecodableBlock(f"version {version}, form {form} is not known here")
        self.form = PayloadForm(form)
        self.bound = ErrorBound(*bound)
        self.body: ByteArray = encoded[HEADER_BYTES:]
        self._seed = _seed(codec_id, key, prefix)
        (self._check,) = _CHECK.unpack_from(encoded.data, _PREFIX.size)

    def check(self, content: ByteArray) -> None:
        """Compare with what the check was made of.

        Raises:
            UndecodableBlock: It is something else.
        """
        if xxhash.xxh3_64_intdigest(content.data, seed=self._seed) != self._check:
            raise UndecodableBlock("the check does not fit: damaged, or another block's")


def bound_of(encoded: ByteArray) -> ErrorBound:
    """How far the values of a kept block may be off, read from its header.

    Raises:
        UndecodableBlock: It has no such header.
    """
    return EncodedBlock(0, BlockKey(b"", b""), encoded).bound


def _seed(codec_id: int, key: BlockKey, prefix: bytes) -> int:
    return xxhash.xxh3_64_intdigest(bytes([codec_id]) + key.digest + key.name + prefix)
