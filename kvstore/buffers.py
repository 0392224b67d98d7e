"""Buffers: views and copies of blocks, which lie in one buffer or in several pieces, such as one piece per layer.

The pieces of a block, put together in their order, are the whole block. Copies release Python's interpreter lock, so
other threads run meanwhile. Checksums are CRC-32C. A checksum is computed as fast as memory can be read, so it adds
little to the cost of a copy.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.native import checksums, checksums_twin

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Piece: TypeAlias = "ReadableBuffer | NDArray[Any]"
"""An object whose bytes are contiguous and can be accessed by Python's buffer protocol."""

Block: TypeAlias = "Piece | Sequence[Piece]"
"""The bytes of a block: one piece, or a list or tuple of pieces that form the block in this order."""

MutableBlock: TypeAlias = "WriteableBuffer | NDArray[Any] | Sequence[WriteableBuffer | NDArray[Any]]"

ByteArray: TypeAlias = checksums_twin.ByteArray
"""Bytes of one contiguous piece, as a one-dimensional array that shares the memory of the piece."""

_BYTE = np.dtype(np.uint8)

IOV_MAX = 1024
"""Maximum number of buffers that Linux accepts in one vectored system call, such as `sendmsg` or `preadv` (limits.h)."""


def pieces(block: Block) -> list[ByteArray]:
    """Return the pieces of a block as bytes without copying; raise ValueError if a piece is not contiguous."""
    if isinstance(block, list | tuple):
        return [_as_bytes(part) for part in block]
    return [_as_bytes(cast("Piece", block))]


def in_pieces(blocks: Sequence[Block], block_bytes: int) -> list[ByteArray]:
    """Return the pieces of several blocks, one block after the other; each block must have `block_bytes` bytes."""
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
    """Return the total number of bytes in all pieces."""
    return sum(part.nbytes for part in parts)


def crc32c(parts: list[ByteArray]) -> int:
    """Return the CRC-32C of the concatenated pieces."""
    checksum = 0
    for part in parts:
        checksum = checksums.extend(checksum, part)
    return checksum


def scatter(source: ByteArray, parts: list[ByteArray]) -> None:
    """Copy a block from one contiguous buffer into the pieces of the block, in their order."""
    start = 0
    for part in parts:
        end = start + part.nbytes
        np.copyto(part, source[start:end])
        start = end


def gather(parts: list[ByteArray], destination: ByteArray) -> None:
    """Copy all pieces of a block into one contiguous buffer."""
    start = 0
    for part in parts:
        end = start + part.nbytes
        np.copyto(destination[start:end], part)
        start = end


def _as_bytes(part: Piece) -> ByteArray:
    if isinstance(part, np.ndarray):
        if not part.flags.c_contiguous:
            raise ValueError(f"a piece of shape {part.shape} and strides {part.strides} is not contiguous")
        if part.ndim == 1 and part.dtype is _BYTE:  # the usual case: a one-dimensional array of bytes
            return cast("ByteArray", part)
        return cast("ByteArray", part.reshape(-1).view(np.uint8))
    return np.frombuffer(memoryview(part), dtype=np.uint8)


class BufferRun:
    """Tells which bytes of a list of buffers the next read or write has to transfer.

    A system call may transfer only a part of the bytes. The caller passes the number of transferred bytes to `advance`;
    `front` then returns the rest.
    """

    def __init__(self, buffers: Iterable[memoryview]):
        """Start without transferred bytes. The buffers must be contiguous and consist of single bytes."""
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._next = 0  # index of the first buffer whose bytes have not all been transferred
        self._start = 0  # number of bytes of the buffer `_next` that have been transferred
        self.left = sum(len(buffer) for buffer in self._buffers)

    def front(self, limit_bytes: int) -> list[memoryview]:
        """Return views of the bytes to transfer next: at most `limit_bytes` in total, and at most `IOV_MAX` views."""
        # The usual case: all remaining bytes are within the limit, and no buffer has been transferred in part.
        if not self._start and self.left <= limit_bytes:
            return self._buffers[self._next : self._next + IOV_MAX]
        taken: list[memoryview] = []
        start = self._start
        for buffer in self._buffers[self._next : self._next + IOV_MAX]:
            view = buffer[start : start + limit_bytes]
            taken.append(view)
            limit_bytes -= len(view)
            if not limit_bytes:
                break
            start = 0
        return taken

    def advance(self, count: int) -> None:
        """Record that the next `count` bytes have been transferred."""
        assert 0 <= count <= self.left, (count, self.left)
        self.left -= count
        if not self.left:
            self._next, self._start = len(self._buffers), 0
            return
        self._start += count
        while self._next < len(self._buffers) and self._start >= len(self._buffers[self._next]):
            self._start -= len(self._buffers[self._next])
            self._next += 1
