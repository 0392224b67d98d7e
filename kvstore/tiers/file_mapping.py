"""The memory behind a pool: a file without a name, all of whose pages are taken at the start.

Rules:

1. Refused before anything is taken when the machine does not have that much: taking it nevertheless would have the system
   kill a process, and not necessarily this one.
2. Pages are taken by several threads, in calls that fail where they cannot be had. Touching them instead would end the
   process there.
3. Reserved huge pages (hugetlb) are used where enough of them are free, since they cannot be had by waiting. Otherwise
   the system is asked for transparent ones, and looked at for what it gave.
4. The file is sealed, so that no process that maps it can cut it short under the others.
5. Taking much lasts seconds. Who does not want it any more says so, and what was taken is given back after the chunks at hand.
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

TAKING_THREADS = 8  # at most: clearing pages has the memory's whole bandwidth by then
CHUNK_BYTES = 64 << 20
ZEROS_BYTES = 1 << 20

MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it before 3.14
MADV_HUGEPAGE = 14

MEMINFO = Path("/proc/meminfo")
SMAPS = Path("/proc/self/smaps")
CGROUP = Path("/sys/fs/cgroup")  # as a container sees its own; version 2

_libc = ctypes.CDLL(None, use_errno=True)  # mmap.madvise would keep all other threads waiting
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HugePages(StrEnum):
    """What a pool should lie in."""

    AUTO = "auto"  # reserved ones where enough are free, else what the system gives transparently, else small ones
    NEVER = "never"
    REQUIRE = "require"  # reserved ones; the node does not start without


class Pages(StrEnum):
    """What a pool lies in."""

    RESERVED = "reserved"  # huge ones, set aside by the administrator
    TRANSPARENT = "transparent"  # huge ones, at least in part, as the system found them
    SMALL = "small"


class FileMapping:
    """One process's view of a whole file."""

    def __init__(self, file: int):
        """Maps all of the file, which may be closed afterwards.

        Raises:
            OSError: It cannot be mapped.
        """
        self.bytes: ByteArray = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=np.uint8)

    def populate(self, limit_bytes: int, given_up: Event | None = None) -> None:
        """Have the first `limit_bytes` there, and in this process's page tables.

        Raises:
            OSError: They cannot be had; EINVAL where the system cannot be asked.
            StoreNotStarted: Nobody wants them any more (rule 5).
        """
        end = min(limit_bytes, self.bytes.nbytes)

        def take(start: int) -> None:
            self._advise(start, min(CHUNK_BYTES, end - start), MADV_POPULATE_WRITE)

        _in_chunks(end, take, given_up)

    def ask_for_huge_pages(self) -> None:
        with contextlib.suppress(OSError):  # a system without them
            self._advise(0, self.bytes.nbytes, MADV_HUGEPAGE)

    @property
    def huge_bytes(self) -> int:
        """How much of it is mapped in huge pages at the moment."""
        return _smaps(self.bytes.ctypes.data, ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"))

    def _advise(self, start: int, length: int, advice: int) -> None:
        if _libc.madvise(self.bytes.ctypes.data + start, length, advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def take(size: int, huge_pages: HugePages, given_up: Event | None = None) -> tuple[int, FileMapping, Pages]:
    """A file of at least `size` bytes, all of them really there: its descriptor, this process's view of it, and what it lies in.

    Args:
        size: Bytes.
        huge_pages: What it should lie in.
        given_up: Set once nobody wants it any more (rule 5).

    Raises:
        StoreNotStarted: That much memory cannot be had, or not in the pages that are required; or it was given up.
    """
    if huge_pages is not HugePages.NEVER:
        wanting = _lacking_huge_pages(size)
        if not wanting:
            try:
                return _taken(_rounded(size, huge_page_bytes()), os.MFD_HUGETLB, given_up)
            except OSError as error:  # a control group may have less than the machine
                wanting = error.strerror or str(error)
        if huge_pages is HugePages.REQUIRE:
            raise StoreNotStarted(
                f"huge_pages: {size} bytes of reserved huge pages cannot be had: {wanting}; "
                "reserve more (vm.nr_hugepages), or set it to 'auto'"
            )
    available = available_memory_bytes()
    if size > available:
        raise StoreNotStarted(f"capacity_bytes: {size} bytes are needed, and {available} bytes of memory are available")
    try:
        file, memory, pages = _taken(size, 0, given_up, ask=huge_pages is HugePages.AUTO)
    except OSError as error:
        raise StoreNotStarted(
            f"capacity_bytes: {size} bytes of shared memory cannot be had: {error.strerror}"
        ) from error
    return file, memory, pages


def huge_page_bytes() -> int:
    """Size of a reserved huge page; 0 where there are none."""
    return _meminfo("Hugepagesize")


def available_memory_bytes() -> int:
    """What can be taken without pushing anyone out: the machine's, or less where this process's control group is limited."""
    limits = [_meminfo("MemAvailable") or sys.maxsize]
    with contextlib.suppress(OSError, ValueError):  # no limit: the file says "max", or is not there
        limits.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(limits)


def _lacking_huge_pages(size: int) -> str:
    """Why a file of that size does not get reserved huge pages; empty when it does."""
    page_bytes = huge_page_bytes()
    if not page_bytes or not hasattr(os, "memfd_create"):
        return "the system has none"
    free, needed = _meminfo("HugePages_Free"), _rounded(size, page_bytes) // page_bytes
    return "" if free >= needed else f"{needed} pages are needed, and {free} are free"


def _taken(size: int, flags: int, given_up: Event | None, *, ask: bool = False) -> tuple[int, FileMapping, Pages]:
    file = _anonymous_file(flags)
    try:
        os.ftruncate(file, size)
        memory = FileMapping(file)
        if ask:
            memory.ask_for_huge_pages()
        try:
            memory.populate(size, given_up)
        except OSError as error:
            if error.errno != errno.EINVAL or flags:
                raise
            _write_zeros(file, size, given_up)  # an older kernel, or not Linux
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, StoreNotStarted):
        os.close(file)
        raise
    if flags:
        return file, memory, Pages.RESERVED
    return file, memory, Pages.TRANSPARENT if memory.huge_bytes else Pages.SMALL


def _anonymous_file(flags: int) -> int:
    """A memory file where the system has them; a temporary file that is already unlinked elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvstore-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    with tempfile.TemporaryFile(prefix="kvstore-pool-") as temporary:
        return os.dup(temporary.fileno())


def _write_zeros(file: int, size: int, given_up: Event | None) -> None:
    zeros = bytes(ZEROS_BYTES)

    def write(start: int) -> None:
        end = min(start + CHUNK_BYTES, size)
        while start < end:
            start += os.pwrite(file, zeros[: end - start], start)

    _in_chunks(size, write, given_up)


def _in_chunks(size: int, act: Callable[[int], None], given_up: Event | None) -> None:
    """Call with the offset of every chunk, in several threads, until it is given up."""

    def unless_given_up(start: int) -> None:
        if given_up is not None and given_up.is_set():
            raise StoreNotStarted("capacity_bytes: given up while the memory was taken")
        act(start)

    with ThreadPoolExecutor(min(TAKING_THREADS, os.cpu_count() or 1), thread_name_prefix="kvstore-pages") as threads:
        for _ in threads.map(unless_given_up, range(0, size, CHUNK_BYTES)):
            pass


def _rounded(size: int, page_bytes: int) -> int:
    return size + -size % page_bytes


def _meminfo(name: str) -> int:
    """Bytes, or a number of pages; 0 when the system does not say."""
    with contextlib.suppress(OSError):  # not Linux
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                _, number, *unit = line.split()
                return int(number) * (1024 if unit else 1)
    return 0


def _smaps(address: int, names: tuple[str, ...]) -> int:
    """Bytes that the mapping at that address has under these names together."""
    total, inside = 0, False
    with contextlib.suppress(OSError), SMAPS.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # a mapping begins: its range of addresses
                inside = first.startswith(f"{address:x}-")
            elif inside and first[:-1] in names:
                total += int(rest.split()[0]) * 1024
    return total
