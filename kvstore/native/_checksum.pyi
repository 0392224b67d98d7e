# Types of `checksum.c`; `kvstore.native.checksums_twin` documents the functions.

import numpy as np
from numpy.typing import NDArray

from kvstore.native.checksums_twin import ByteArray

def extend(crc32c: int, data: ByteArray, /) -> int: ...
def copy(crc32c: int, source: ByteArray, destination: ByteArray, /) -> int: ...
def get_blocks(
    pool: ByteArray,
    stamps: NDArray[np.uint64],
    page_bytes: int,
    slots: bytes,
    block_bytes: int,
    parts: list[ByteArray],
    /,
) -> bytes: ...
def put_blocks(
    pool: ByteArray,
    stamps: NDArray[np.uint64],
    page_bytes: int,
    slots: bytes,
    block_bytes: int,
    parts: list[ByteArray],
    /,
) -> tuple[bytes, list[int]]: ...
def sums(count: int, block_bytes: int, parts: list[ByteArray], /) -> list[int]: ...
