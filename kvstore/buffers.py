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


def pieces(block: Block) -> list[ByteArray]:
    """The pieces of a block, as bytes, without copying.

    Raises:
        ValueError: A piece is not contiguous in memory, so it has no bytes in order.
    """
    if isinstance(block, list | tuple):
        return [_as_bytes(part) for part in block]
    return [_as_bytes(cast("Piece", block))]


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


def scatter_summing(source: ByteArray, parts: list[ByteArray]) -> int:
    """Copy a whole block into its pieces; the CRC-32C of what arrived there."""
    checksum = start = 0
    for part in parts:
        end = start + part.nbytes
        checksum = checksums.copy(checksum, source[start:end], part)
        start = end
    return checksum


def gather(parts: list[ByteArray], destination: ByteArray) -> None:
    """Copy the pieces into a whole block."""
    start = 0
    for part in parts:
        end = start + part.nbytes
        np.copyto(destination[start:end], part)
        start = end


def gather_summing(parts: list[ByteArray], destination: ByteArray) -> int:
    """Copy the pieces into a whole block; the CRC-32C of what arrived there."""
    checksum = start = 0
    for part in parts:
        end = start + part.nbytes
        checksum = checksums.copy(checksum, part, destination[start:end])
        start = end
    return checksum


def _as_bytes(part: Piece) -> ByteArray:
    if isinstance(part, np.ndarray):
        if not part.flags.c_contiguous:
            raise ValueError(f"a piece of shape {part.shape} and strides {part.strides} is not contiguous")
        return cast("ByteArray", part.reshape(-1).view(np.uint8))
    return np.frombuffer(memoryview(part), dtype=np.uint8)
