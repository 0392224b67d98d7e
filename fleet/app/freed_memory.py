"""Freed memory: makes the C library return freed memory to the operating system.

glibc keeps freed memory in one heap per thread. After some large allocations were freed, glibc takes later large allocations
from these heaps as well, and does not return them. So a router would keep the memory of a few large requests until it ends.
With another C library, the functions of this module do nothing.
"""

import ctypes
from functools import cache
from typing import Any

LARGE_BYTES = 1 << 20
"""Allocations of at least this size get memory pages of their own, which return to the system when they are freed.

An ordinary request allocates at most 64 KiB at a time, so its allocations stay in the heaps.
"""

TOP_BYTES = 4 << 20
"""Number of free bytes that may stay at the end of the main heap. With them, the heap is not resized for each request."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h


def map_large_allocations() -> None:
    """Configure malloc so that large allocations return to the system as soon as they are freed."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, TOP_BYTES)


def trim_heaps() -> None:
    """Return the freed memory of all heaps to the system.

    This takes 1 to 2 ms, in which other Python threads can run.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """Return the C library; None if it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
