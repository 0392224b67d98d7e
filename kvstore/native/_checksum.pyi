# Of `checksum.c`; see `kvstore.native.checksums_twin`.

import numpy as np
from numpy.typing import NDArray

def extend(crc32c: int, data: NDArray[np.uint8], /) -> int: ...
def copy(crc32c: int, source: NDArray[np.uint8], destination: NDArray[np.uint8], /) -> int: ...
