"""File mapping: the memory behind a pool, a file without a name whose pages are all allocated at the start.

Rules:

1. A request for more memory than is available fails before anything is allocated. Otherwise the system would kill a
   process, and not necessarily this one.
2. Several threads populate the pages with system calls, which report an error when memory runs out. If the pages were
   populated by plain writes, the process would be killed in this case.
3. By default, huge pages that the administrator has reserved (hugetlb) are used if enough of them are free. Otherwise
   the system is asked for transparent huge pages, and `/proc` shows whether it granted any. `HugePages` has the other
   choices.
4. The file has the kernel's file seals (F_SEAL_SHRINK and F_SEAL_GROW), so no process that maps the file can change its
   size while others use it.
5. Allocating much memory takes seconds. A caller can cancel the allocation by setting an event. The chunks in progress
   are finished first, then all memory is freed.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from threading import Event

import numpy as np

from kvstore.buffers import ByteArray
from kvstore.errors import StoreNotStarted

# Maximum number of threads that allocate pages; eight threads already use the whole bandwidth of the memory.
TAKING_THREADS = 8
CHUNK_BYTES = 64 << 20
ZEROS_BYTES = 1 << 20

MADV_POPULATE_WRITE = 23  # exists since Linux 5.14; Python has no name for this constant before 3.14
MADV_HUGEPAGE = 14

MEMINFO = Path("/proc/meminfo")
SMAPS = Path("/proc/self/smaps")
CGROUP = Path("/sys/fs/cgroup")  # in a container with control groups of version 2: the folder of this process's group

# The C library's `madvise` is called directly, because `mmap.madvise` keeps Python's interpreter lock (GIL), and other
# threads would wait.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HugePages(StrEnum):
    """The pages that a pool should use."""

    AUTO = "auto"  # reserved huge pages if enough are free, else transparent huge pages, else small pages
    NEVER = "never"
    REQUIRE = "require"  # reserved huge pages; the node does not start without them


class Pages(StrEnum):
    """The kind of pages that a pool has got."""

    RESERVED = "reserved"  # huge pages that the administrator has reserved
    TRANSPARENT = "transparent"  # transparent huge pages, at least in part
    SMALL = "small"


class FileMapping:
    """Maps a whole file into the address space of this process."""

    def __init__(self, file: int):
        """Map the whole file; the caller may close the descriptor afterwards.

        Raises:
            OSError: The file cannot be mapped.
        """
        self.bytes: ByteArray = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=np.uint8)

    def populate(self, limit_bytes: int, cancelled: Event | None = None) -> None:
        """Allocate the first `limit_bytes`, and enter them into this process's page tables.

        Raises:
            OSError: The memory is not available; EINVAL if the system does not support the call.
            StoreNotStarted: The caller has cancelled the allocation (rule 5).
        """
        end = min(limit_bytes, self.bytes.nbytes)

        def take(start: int) -> None:
            self._advise(start, min(CHUNK_BYTES, end - start), MADV_POPULATE_WRITE)

        in_chunks(end, take, cancelled)

    def ask_for_huge_pages(self) -> None:
        with contextlib.suppress(OSError):  # raised on a system without huge pages
            self._advise(0, self.bytes.nbytes, MADV_HUGEPAGE)

    @property
    def huge_bytes(self) -> int:
        """Bytes of the mapping that lie in huge pages now."""
        return _smaps(self.bytes.ctypes.data, ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"))

    def _advise(self, start: int, length: int, advice: int) -> None:
        if _libc.madvise(self.bytes.ctypes.data + start, length, advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def allocate(size: int, huge_pages: HugePages, cancelled: Event | None = None) -> tuple[int, FileMapping, Pages]:
    """Allocate a file without a name, of at least `size` bytes, in memory.

    Return the file's descriptor, this process's mapping of the file, and the kind of its pages.

    Raises:
        StoreNotStarted: The memory is not available, or not in the required pages; or `cancelled` was set (rule 5).
    """
    if huge_pages is not HugePages.NEVER:
        lack = _huge_page_shortage(size)
        if not lack:
            try:
                return _allocate(_round_up(size, huge_page_bytes()), os.MFD_HUGETLB, cancelled)
            except OSError as error:
                # A control group may limit the memory, so memory can run out although the machine has enough.
                lack = error.strerror or str(error)
        if huge_pages is HugePages.REQUIRE:
            raise StoreNotStarted(
                f"huge_pages: {size} bytes of reserved huge pages cannot be allocated: {lack}; "
                "reserve more (vm.nr_hugepages), or set it to 'auto'"
            )
    available = available_memory_bytes()
    if size > available:
        raise StoreNotStarted(f"capacity_bytes: {size} bytes are needed, and {available} bytes of memory are available")
    try:
        file, memory, pages = _allocate(size, 0, cancelled, ask=huge_pages is HugePages.AUTO)
    except OSError as error:
        raise StoreNotStarted(
            f"capacity_bytes: {size} bytes of shared memory cannot be allocated: {error.strerror}"
        ) from error
    return file, memory, pages


def huge_page_bytes() -> int:
    """Return the size of the huge pages that can be reserved; 0 if the system does not support them."""
    return _meminfo("Hugepagesize")


def available_memory_bytes() -> int:
    """Return the memory in bytes that is available on the machine, or in this process's control group if that is less."""
    limits = [_meminfo("MemAvailable") or sys.maxsize]
    with contextlib.suppress(OSError, ValueError):  # without a limit, the file is missing or contains "max"
        limits.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(limits)


def _huge_page_shortage(size: int) -> str:
    """Return why a file of this size cannot use reserved huge pages; an empty text if it can use them."""
    page_bytes = huge_page_bytes()
    if not page_bytes or not hasattr(os, "memfd_create"):
        return "the system has none"
    free, needed = _meminfo("HugePages_Free"), _round_up(size, page_bytes) // page_bytes
    return "" if free >= needed else f"{needed} pages are needed, and {free} are free"


def _allocate(size: int, flags: int, cancelled: Event | None, *, ask: bool = False) -> tuple[int, FileMapping, Pages]:
    file = _anonymous_file(flags)
    try:
        os.ftruncate(file, size)
        memory = FileMapping(file)
        if ask:
            memory.ask_for_huge_pages()
        try:
            memory.populate(size, cancelled)
        except OSError as error:
            if error.errno != errno.EINVAL or flags:
                raise
            _write_zeros(file, size, cancelled)  # the kernel is older than Linux 5.14, or not Linux
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, StoreNotStarted):
        os.close(file)
        raise
    if flags:
        return file, memory, Pages.RESERVED
    return file, memory, Pages.TRANSPARENT if memory.huge_bytes else Pages.SMALL


def _anonymous_file(flags: int) -> int:
    """Open a memory file, or an unlinked temporary file on a system without memory files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvstore-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    with tempfile.TemporaryFile(prefix="kvstore-pool-") as temporary:
        return os.dup(temporary.fileno())


def _write_zeros(file: int, size: int, cancelled: Event | None) -> None:
    zeros = bytes(ZEROS_BYTES)

    def write(start: int) -> None:
        end = min(start + CHUNK_BYTES, size)
        while start < end:
            start += os.pwrite(file, zeros[: end - start], start)

    in_chunks(size, write, cancelled)


def in_chunks(size: int, act: Callable[[int], None], cancelled: Event | None) -> None:
    """Call `act` with the offset of each chunk of `CHUNK_BYTES`, in several threads.

    Raise StoreNotStarted if `cancelled` is set before all chunks have begun.
    """

    def unless_cancelled(start: int) -> None:
        if cancelled is not None and cancelled.is_set():
            raise StoreNotStarted("capacity_bytes: cancelled while the memory was being allocated")
        act(start)

    with ThreadPoolExecutor(min(TAKING_THREADS, os.cpu_count() or 1), thread_name_prefix="kvstore-pages") as threads:
        for _ in threads.map(unless_cancelled, range(0, size, CHUNK_BYTES)):
            pass


def _round_up(size: int, page_bytes: int) -> int:
    return size + -size % page_bytes


def _meminfo(name: str) -> int:
    """Return a field of /proc/meminfo: a size in bytes, or a number of pages; 0 if the field is missing."""
    with contextlib.suppress(OSError):  # raised if the system is not Linux
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                _, number, *unit = line.split()
                return int(number) * (1024 if unit else 1)
    return 0


def _smaps(address: int, names: tuple[str, ...]) -> int:
    """Return the sum, in bytes, of the fields `names` in /proc/self/smaps for the mapping that begins at `address`."""
    total, inside = 0, False
    with contextlib.suppress(OSError), SMAPS.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # this line is the first of a mapping, and begins with its range of addresses
                inside = first.startswith(f"{address:x}-")
            elif inside and first[:-1] in names:
                total += int(rest.split()[0]) * 1024
    return total
