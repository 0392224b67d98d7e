"""Freed memory: makes the C library return freed memory to the operating system.

glibc keeps freed memory in one heap per thread. Once it has freed some large allocations, it takes later large ones from
these heaps as well. So a router would keep the memory of a few large requests until it ends. Only glibc is changed.
"""

import ctypes
from functools import cache
from typing import Any

LARGE_BYTES = 1 << 20
"""Pieces of this size are mapped, and unmapped when freed. Ordinary requests have pieces of up to 64 KiB."""

TOP_BYTES = 4 << 20
"""Free bytes that may stay at the end of the main heap, so that it does not change with each request."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def map_large_allocations() -> None:
    """Let large pieces be returned to the system as soon as they are freed."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, TOP_BYTES)


def trim_heaps() -> None:
    """Return the freed memory of all heaps; it takes 1 to 2 ms without the interpreter's lock."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """Return the C library; None if it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
