# Types of `kernels.c`; `kvstore.native.kernels_twin` documents the functions.

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.native.checksums_twin import ByteArray

def copy(table: NDArray[np.int64], sources: Sequence[ByteArray], destinations: Sequence[ByteArray]) -> None: ...
def split(block: ByteArray, planes: ByteArray) -> None: ...
def join(planes: Sequence[ByteArray], block: ByteArray) -> None: ...
def narrow(
    values: NDArray[np.uint16], tables: NDArray[np.uint8], which: NDArray[np.uint16], codes: NDArray[np.uint8]
) -> None: ...
def widen(
    codes: NDArray[np.uint8], tables: NDArray[np.uint16], which: NDArray[np.uint16], values: NDArray[np.uint16]
) -> None: ...
def quantise(
    values: NDArray[np.uint16], fraction_bits: int, scales: NDArray[np.uint16], codes: NDArray[np.int8]
) -> None: ...
def dequantise(
    codes: NDArray[np.int8], scales: NDArray[np.uint16], fraction_bits: int, values: NDArray[np.uint16]
) -> None: ...
