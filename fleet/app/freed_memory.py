"""Freed memory of this process: what makes the C library give it back to the system.

glibc keeps what is freed for later use, in one heap for each thread that ever was, and learns from large pieces that are freed to
take the next ones from a heap as well. A router that takes a few large requests would keep their memory until it ends. Where the
C library is another one, nothing is done.
"""

import ctypes
from functools import cache
from typing import Any

LARGE_BYTES = 1 << 20
"""Pieces from here on are mapped, and unmapped when they are freed. Ordinary requests have none: theirs are up to 64 KiB."""

TOP_BYTES = 4 << 20
"""Bytes that may lie free at the end of the main heap, so that it does not shrink and grow with each request."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def map_large_allocations() -> None:
    """Have the memory of large pieces given back as soon as they are freed, from now on."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, TOP_BYTES)


def trim_heaps() -> None:
    """Give freed memory of all heaps back; takes a millisecond or two, and the interpreter's lock is free meanwhile."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """Return the C library; None: it is not glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
