"""Twin of `checksum.c`, made with google-crc32c and numpy: defines the results, and runs if the C code is not built."""

import struct
from typing import TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

ByteArray: TypeAlias = NDArray[np.uint8]
"""Bytes of one contiguous piece, as a one-dimensional array that shares the memory of the piece."""

# Size of a step of a copy, small enough that the bytes are still in the processor's cache for their checksum.
CHUNK_BYTES = 256 << 10

SLOT = struct.Struct("<QQI")  # offset, generation and CRC-32C of a slot, as in `kvstore.messages`
MOVED, GONE, CORRUPT = range(3)
"""Numbers of the outcomes of a block, in the order of `kvstore.messages.BlockOutcome`."""


def extend(crc32c: int, data: ByteArray, /) -> int:
    """Return the CRC-32C of earlier bytes followed by `data`.

    `crc32c` is the CRC-32C of the earlier bytes, or 0 if there are none.
    """
    return int(google_crc32c.extend(crc32c, data))


def copy(crc32c: int, source: ByteArray, destination: ByteArray, /) -> int:
    """Copy bytes, and return the CRC-32C of earlier bytes followed by the copied bytes.

    `crc32c` is the CRC-32C of the earlier bytes, or 0 if there are none. The result covers the bytes that were really
    copied, even if the source changes during the copy.

    Raises:
        ValueError: Source and destination differ in size; nothing was copied.
    """
    if source.nbytes != destination.nbytes:
        raise ValueError(f"{source.nbytes} bytes to copy into {destination.nbytes}")
    for start in range(0, source.nbytes, CHUNK_BYTES):
        chunk = destination[start : start + CHUNK_BYTES]
        np.copyto(chunk, source[start : start + CHUNK_BYTES])
        crc32c = extend(crc32c, chunk)
    return crc32c


def get_blocks(
    pool: ByteArray,
    stamps: NDArray[np.uint64],
    page_bytes: int,
    slots: bytes,
    block_bytes: int,
    parts: list[ByteArray],
    /,
) -> bytes:
    """Copy blocks out of a pool; return one byte per block with its outcome.

    If the checksum of the copied bytes is wrong, the outcome is CORRUPT if the slot still belongs to the block after
    the copy, and GONE otherwise.

    Args:
        pool: The whole pool.
        stamps: For each page, the slot generation of the block that begins in it, or 0 if no block begins there.
        page_bytes: Size of a page.
        slots: One record `kvstore.messages.SLOT` per block.
        block_bytes: Size of each block.
        parts: Contiguous destinations: the parts of the first block, then those of the second block, and so on. The
            sizes of a block's parts add up to `block_bytes`.

    Raises:
        AssertionError: The parts do not make up these blocks; nothing was copied.
    """
    outcomes = bytearray()
    records, blocks = list(SLOT.iter_unpack(slots)), _blocks(parts, block_bytes)
    assert len(records) == len(blocks), f"parts do not make {len(records)} blocks of {block_bytes} bytes"
    for (offset, generation, crc32c), block in zip(records, blocks, strict=True):
        place = _place(pool, stamps, page_bytes, offset, generation, block_bytes)
        checksum = start = 0
        for part in block if place is not None else ():
            assert place is not None
            checksum = copy(checksum, place[start : start + part.nbytes], part)
            start += part.nbytes
        if place is not None and checksum == crc32c:
            outcomes.append(MOVED)
        else:
            held = _place(pool, stamps, page_bytes, offset, generation, block_bytes) is not None
            outcomes.append(CORRUPT if place is not None and held else GONE)
    return bytes(outcomes)


def put_blocks(
    pool: ByteArray,
    stamps: NDArray[np.uint64],
    page_bytes: int,
    slots: bytes,
    block_bytes: int,
    parts: list[ByteArray],
    /,
) -> tuple[bytes, list[int]]:
    """Copy blocks into a pool; return for each block MOVED or GONE, and the CRC-32C of the copied bytes.

    Arguments and errors are those of `get_blocks`, but the parts are the sources of the copies. The checksums in the
    slots are ignored.
    """
    outcomes, checksums = bytearray(), []
    records, blocks = list(SLOT.iter_unpack(slots)), _blocks(parts, block_bytes)
    assert len(records) == len(blocks), f"parts do not make {len(records)} blocks of {block_bytes} bytes"
    for (offset, generation, _), block in zip(records, blocks, strict=True):
        place = _place(pool, stamps, page_bytes, offset, generation, block_bytes)
        checksum = start = 0
        for part in block if place is not None else ():
            assert place is not None
            checksum = copy(checksum, part, place[start : start + part.nbytes])
            start += part.nbytes
        held = _place(pool, stamps, page_bytes, offset, generation, block_bytes) is not None
        outcomes.append(MOVED if place is not None and held else GONE)
        checksums.append(checksum)
    return bytes(outcomes), checksums


def sums(count: int, block_bytes: int, parts: list[ByteArray], /) -> list[int]:
    """Return the CRC-32C of each of `count` blocks; `parts` and the errors are as in `get_blocks`."""
    blocks = _blocks(parts, block_bytes)
    assert len(blocks) == count, f"parts do not make {count} blocks of {block_bytes} bytes"
    checksums = []
    for block in blocks:
        checksum = 0
        for part in block:
            checksum = extend(checksum, part)
        checksums.append(checksum)
    return checksums


def _blocks(parts: list[ByteArray], block_bytes: int) -> list[list[ByteArray]]:
    blocks: list[list[ByteArray]] = []
    left = 0
    for part in parts:
        flat = part.reshape(-1).view(np.uint8)
        if left == 0 and flat.nbytes:
            blocks.append([])
            left = block_bytes
        left -= flat.nbytes
        assert left >= 0, f"parts do not make blocks of {block_bytes} bytes"
        if flat.nbytes:
            blocks[-1].append(flat)
    assert left == 0, f"parts do not make blocks of {block_bytes} bytes"
    return blocks


def _place(
    pool: ByteArray, stamps: NDArray[np.uint64], page_bytes: int, offset: int, generation: int, block_bytes: int
) -> ByteArray | None:
    """Return the bytes of a block in the pool; None if the place belongs to another block, or is outside the pool."""
    page = offset // page_bytes
    if page >= len(stamps) or offset + block_bytes > pool.nbytes or int(stamps[page]) != generation:
        return None
    return pool[offset : offset + block_bytes]
