# Of `checksum.c`; see `kvstore.native.checksums_twin`.

import numpy as np
from numpy.typing import NDArray

def extend(crc32c: int, data: NDArray[np.uint8], /) -> int: ...
def copy(crc32c: int, source: NDArray[np.uint8], destination: NDArray[np.uint8], /) -> int: ...
def get_blocks(
    pool: NDArray[np.uint8],
    stamps: NDArray[np.uint64],
    page_bytes: int,
    slots: bytes,
    block_bytes: int,
    parts: list[NDArray[np.uint8]],
    /,
) -> bytes: ...
def put_blocks(
    pool: NDArray[np.uint8],
    stamps: NDArray[np.uint64],
    page_bytes: int,
    slots: bytes,
    block_bytes: int,
    parts: list[NDArray[np.uint8]],
    /,
) -> tuple[bytes, list[int]]: ...
def sums(count: int, block_bytes: int, parts: list[NDArray[np.uint8]], /) -> list[int]: ...
