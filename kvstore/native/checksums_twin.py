"""Checksums by a library, copies by numpy: what the functions of `checksum.c` mean, and what runs where it was not built."""

import google_crc32c
import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 256 << 10  # summed up while they are in the processor's cache


def extend(crc32c: int, data: NDArray[np.uint8], /) -> int:
    """The CRC-32C of what `crc32c` is that of, 0 for nothing, followed by `data`."""
    return int(google_crc32c.extend(crc32c, data))


def copy(crc32c: int, source: NDArray[np.uint8], destination: NDArray[np.uint8], /) -> int:
    """Copy bytes, and `extend` by those that arrived, even if the source changes meanwhile.

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
