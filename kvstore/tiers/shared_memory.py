"""The CPU tier: a pool of memory that several processes of a host map.

Rules:

1. The pool has no name: it is a memory file descriptor that the node hands out, so it is gone with the last process
   that maps it, however they die. Nothing ever appears in /dev/shm.
2. All pages are taken at the start, by several threads. Too little memory is an error then, not a SIGBUS later, and
   no request pays for first touches (which run thirty times slower than copies).
3. Behind the blocks lies one 64-bit stamp a page: the generation of the block that begins there, 0 for none. Readers
   and writers in other processes compare it with their slot's, and so notice that a place is not theirs any more.
   The checksum stays the proof; the stamp tells a block that has gone from one that has gone bad.
"""

import contextlib
import fcntl
import mmap
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import Block, ByteArray, MutableBlock, gather, pieces, scatter, size_of
from kvstore.errors import StoreNotStarted
from kvstore.messages import Address, Slot
from kvstore.settings import PAGE_BYTES

STAMP_BYTES = 8
PREFAULT_THREADS = 4
PREFAULT_CHUNK_BYTES = 64 << 20
ZEROS_BYTES = 1 << 20

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # as a container sees its own; version 2


class Mapping:
    """One process's view of a pool: the blocks, then the stamps."""

    def __init__(self, file: int, capacity_bytes: int):
        """Maps the pool behind a file descriptor, which may be closed afterwards.

        Raises:
            OSError: It cannot be mapped.
            ValueError: It is smaller than a pool of that capacity.
        """
        size = file_bytes(capacity_bytes)
        if os.fstat(file).st_size < size:
            raise ValueError(f"a pool of {capacity_bytes} bytes needs a file of {size}")
        self._memory = mmap.mmap(file, size)
        whole: ByteArray = np.frombuffer(self._memory, dtype=np.uint8)
        self.bytes: ByteArray = whole[:capacity_bytes]
        self.stamps: NDArray[np.uint64] = whole[_stamps_at(capacity_bytes) :].view(np.uint64)

    def populate(self, limit_bytes: int) -> None:
        """Set up page tables for the first `limit_bytes`, so that copies do not fault. Optional: speed only."""
        advice = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux 5.14; Python has no name for it before 3.14
        for start in range(0, min(limit_bytes, len(self._memory)), PREFAULT_CHUNK_BYTES):
            length = min(PREFAULT_CHUNK_BYTES, len(self._memory) - start)
            with contextlib.suppress(OSError):  # an older kernel: pages are mapped as they are touched
                self._memory.madvise(advice, start, length)

    def holds(self, slot: Slot) -> bool:
        """Whether the place still belongs to the slot's block."""
        return int(self.stamps[slot.offset // PAGE_BYTES]) == slot.generation

    def block(self, offset: int, length: int) -> ByteArray:
        """A view of a block's bytes."""
        return self.bytes[offset : offset + length]


class SharedMemoryTier:
    """A `Tier` whose bytes other processes can map; see the module."""

    def __init__(self, capacity_bytes: int):
        """Takes the memory, which lasts 0.1 to 0.5 s a GiB.

        Raises:
            StoreNotStarted: There is not enough.
        """
        self._capacity_bytes = capacity_bytes - capacity_bytes % PAGE_BYTES
        self._file = _anonymous_file(file_bytes(self._capacity_bytes))
        self.mapping = Mapping(self._file, self._capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def fileno(self) -> int:
        """Descriptor of the pool, for other processes to map."""
        return self._file

    def claim(self, address: Address) -> None:
        self.mapping.stamps[address.offset // PAGE_BYTES] = address.generation

    def discard(self, address: Address) -> None:
        page = address.offset // PAGE_BYTES
        if self.mapping.stamps[page] == address.generation:
            self.mapping.stamps[page] = 0

    def write(self, address: Address, block: Block) -> bool:
        parts = pieces(block)
        assert size_of(parts) == address.length, (size_of(parts), address.length)
        if not self._holds(address):
            return False
        gather(parts, self.view(address))
        return self._holds(address)

    def read(self, address: Address, into: MutableBlock) -> bool:
        parts = pieces(into)
        assert size_of(parts) == address.length, (size_of(parts), address.length)
        if not self._holds(address):
            return False
        scatter(self.view(address), parts)
        return self._holds(address)

    def view(self, address: Address) -> ByteArray:
        """The bytes themselves, without copying; they may change under the caller."""
        return self.mapping.block(address.offset, address.length)

    def close(self) -> None:
        """Gives the descriptor up; the memory goes with the last view of it."""
        os.close(self._file)

    def _holds(self, address: Address) -> bool:
        return int(self.mapping.stamps[address.offset // PAGE_BYTES]) == address.generation


def file_bytes(capacity_bytes: int) -> int:
    """Size of the file behind a pool: blocks, then stamps."""
    return _stamps_at(capacity_bytes) + capacity_bytes // PAGE_BYTES * STAMP_BYTES


def _stamps_at(capacity_bytes: int) -> int:
    return capacity_bytes + -capacity_bytes % PAGE_BYTES


def _anonymous_file(size: int) -> int:
    """A file that has no name, `size` bytes long, all of them really there.

    Refused before anything is taken when the machine does not have that much: taking it nevertheless would have the
    system kill a process, and not necessarily this one. A memory file where the system has them, sealed so that no
    process can cut it short under the others; a temporary file that is already unlinked elsewhere.
    """
    available = available_memory_bytes()
    if size > available:
        raise StoreNotStarted(f"capacity_bytes: {size} bytes are needed, and {available} bytes of memory are available")
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("kvstore-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile(prefix="kvstore-pool-") as temporary:
            file = os.dup(temporary.fileno())
    try:
        os.ftruncate(file, size)
        _take_pages(file, size)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(file)
        raise StoreNotStarted(
            f"capacity_bytes: {size} bytes of shared memory cannot be had: {error.strerror}"
        ) from error
    return file


def available_memory_bytes() -> int:
    """What can be taken without pushing anyone out: the machine's, or less where this process's control group is limited."""
    limits = []
    with contextlib.suppress(OSError):  # not Linux
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # no limit: the file says "max", or is not there
        limits.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(limits, default=sys.maxsize)


def _take_pages(file: int, size: int) -> None:
    zeros = bytes(ZEROS_BYTES)

    def take(start: int) -> None:
        end = min(start + PREFAULT_CHUNK_BYTES, size)
        while start < end:
            start += os.pwrite(file, zeros[: end - start], start)

    with ThreadPoolExecutor(PREFAULT_THREADS, thread_name_prefix="kvstore-prefault") as threads:
        for _ in threads.map(take, range(0, size, PREFAULT_CHUNK_BYTES)):
            pass
