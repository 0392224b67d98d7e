"""The bytes of a block as callers hold them: in one buffer, or in pieces (one a layer, say), gathered and scattered here.

Pieces follow each other in the block. Copies let other threads run meanwhile; checksums are CRC-32C, which runs at memory
speed, and costs next to nothing where bytes are copied anyway.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.native import checksums

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Piece: TypeAlias = "ReadableBuffer | NDArray[Any]"
"""Whatever has the buffer protocol and is contiguous."""

Block: TypeAlias = "Piece | Sequence[Piece]"
"""One piece, or a list or tuple of them."""

MutableBlock: TypeAlias = "WriteableBuffer | NDArray[Any] | Sequence[WriteableBuffer | NDArray[Any]]"

ByteArray: TypeAlias = NDArray[np.uint8]
"""One contiguous piece as bytes; shares memory with what it was made of."""

_BYTE = np.dtype(np.uint8)


def pieces(block: Block) -> list[ByteArray]:
    """The pieces of a block, as bytes, without copying.

    Raises:
        ValueError: A piece is not contiguous in memory, so it has no bytes in order.
    """
    if isinstance(block, list | tuple):
        return [_as_bytes(part) for part in block]
    return [_as_bytes(cast("Piece", block))]


def in_pieces(blocks: Sequence[Block], block_bytes: int) -> list[ByteArray]:
    """The pieces of several blocks, one after the other, each of which has to have that size.

    Raises:
        ValueError: As `pieces`.
        AssertionError: A block has another size.
    """
    parts: list[ByteArray] = []
    for block in blocks:
        if isinstance(block, np.ndarray) and block.dtype is _BYTE and block.nbytes == block_bytes:
            if not block.flags.c_contiguous:
                raise ValueError(f"a block of shape {block.shape} and strides {block.strides} is not contiguous")
            parts.append(block)
            continue
        of = pieces(block)
        assert size_of(of) == block_bytes, (size_of(of), block_bytes)
        parts += of
    return parts


def size_of(parts: list[ByteArray]) -> int:
    """Bytes."""
    return sum(part.nbytes for part in parts)


def crc32c(parts: list[ByteArray]) -> int:
    """CRC-32C over the pieces in order."""
    checksum = 0
    for part in parts:
        checksum = checksums.extend(checksum, part)
    return checksum


def scatter(source: ByteArray, parts: list[ByteArray]) -> None:
    """Copy a whole block into its pieces."""
    start = 0
    for part in parts:
        end = start + part.nbytes
        np.copyto(part, source[start:end])
        start = end


def gather(parts: list[ByteArray], destination: ByteArray) -> None:
    """Copy the pieces into a whole block."""
    start = 0
    for part in parts:
        end = start + part.nbytes
        np.copyto(destination[start:end], part)
        start = end


def _as_bytes(part: Piece) -> ByteArray:
    if isinstance(part, np.ndarray):
        if not part.flags.c_contiguous:
            raise ValueError(f"a piece of shape {part.shape} and strides {part.strides} is not contiguous")
        if part.ndim == 1 and part.dtype is _BYTE:  # as most are
            return cast("ByteArray", part)
        return cast("ByteArray", part.reshape(-1).view(np.uint8))
    return np.frombuffer(memoryview(part), dtype=np.uint8)
