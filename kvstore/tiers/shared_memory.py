"""Shared memory: the pool of the CPU tier, which several processes of a host can map.

Rules:

1. The memory of the pool is a file without a name; the node gives its descriptor to other processes. The memory is
   therefore freed when the last process that maps it ends, even if it is killed, and nothing appears in /dev/shm.
2. All pages are allocated at the start (`kvstore.tiers.file_mapping`). If there is too little memory, this is an error at
   the start, and not a SIGBUS later. No request waits for page faults, which are thirty times slower than copies.
3. The file contains the blocks, then one 64-bit stamp for each page: the slot generation of the block that begins in the
   page, or 0. Readers and writers in other processes compare the stamp with their slot's generation. If the two differ,
   the place does not belong to their block any more. When a checksum is wrong, an equal stamp means that the block is
   corrupt, and another stamp that it has gone.
"""

import contextlib
import logging
import os
from threading import Event

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import Block, ByteArray, MutableBlock, gather, pieces, scatter, size_of
from kvstore.clock import Clock, seconds
from kvstore.messages import Address, Slot
from kvstore.pool.extents import PAGE_BYTES
from kvstore.system_clock import MonotonicClock
from kvstore.tiers import file_mapping
from kvstore.tiers.file_mapping import FileMapping, HugePages

STAMP_BYTES = 8

log = logging.getLogger(__name__)


class Mapping:
    """Maps the file of a pool into this process: first the bytes of the blocks, then the stamps (rule 3)."""

    def __init__(self, memory: int | FileMapping, capacity_bytes: int):
        """Use `memory`, which is a mapped file or a descriptor. The caller may close a descriptor afterwards.

        Raises:
            OSError: The file cannot be mapped.
            ValueError: The file is smaller than a pool of that capacity.
        """
        self._memory = FileMapping(memory) if isinstance(memory, int) else memory
        whole, size = self._memory.bytes, file_bytes(capacity_bytes)
        if whole.nbytes < size:
            raise ValueError(f"a pool of {capacity_bytes} bytes needs a file of {size}")
        self.bytes: ByteArray = whole[:capacity_bytes]
        self.stamps: NDArray[np.uint64] = whole[_stamps_at(capacity_bytes) : size].view(np.uint64)

    def populate(self, limit_bytes: int) -> None:
        """Enter the first `limit_bytes` into the page tables, so that copies cause no page faults. Ignore failures."""
        with contextlib.suppress(OSError):  # raised by an older kernel, which maps pages at the first access
            self._memory.populate(limit_bytes)

    def holds(self, slot: Slot) -> bool:
        """Return whether the place still belongs to the slot's block."""
        return int(self.stamps[slot.offset // PAGE_BYTES]) == slot.generation

    def block(self, offset: int, length: int) -> ByteArray:
        """Return a view of a block's bytes."""
        return self.bytes[offset : offset + length]


class SharedMemoryTier:
    """The pool: a `MemoryTier` that other processes can map."""

    def __init__(
        self,
        capacity_bytes: int,
        huge_pages: HugePages = HugePages.AUTO,
        clock: Clock | None = None,
        cancelled: Event | None = None,
    ):
        """Allocate the memory, which takes 0.1 to 1 s for each GiB.

        Args:
            capacity_bytes: Rounded down to whole pages.
            huge_pages: The kind of pages to use.
            clock: Measures for the log how long the allocation takes; the system's clock by default.
            cancelled: Another thread sets this event to cancel the allocation.

        Raises:
            StoreNotStarted: There is not enough memory, not enough of it in the pages that `huge_pages` requires, or
                `cancelled` was set.
        """
        clock = clock or MonotonicClock()
        self._capacity_bytes = capacity_bytes - capacity_bytes % PAGE_BYTES
        started = clock.now()
        self._file, memory, self.pages = file_mapping.allocate(file_bytes(self._capacity_bytes), huge_pages, cancelled)
        lasted_seconds = max(seconds(clock.now() - started), 1e-9)
        self.mapping = Mapping(memory, self._capacity_bytes)
        self._stamps = self.mapping.stamps.data  # a memoryview writes single stamps faster than numpy
        log.info(
            "pool memory allocated",
            extra={
                "bytes": memory.bytes.nbytes,
                "pages": self.pages,
                "seconds": round(lasted_seconds, 3),
                "gigabytes_per_second": round(memory.bytes.nbytes / lasted_seconds / 1e9, 2),
            },
        )

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def fileno(self) -> int:
        """Return the descriptor of the pool's file, which other processes map."""
        return self._file

    def claim(self, address: Address) -> None:
        self._stamps[address.offset // PAGE_BYTES] = address.generation

    def discard(self, address: Address) -> None:
        page = address.offset // PAGE_BYTES
        if self._stamps[page] == address.generation:
            self._stamps[page] = 0

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
        """Return the block's bytes without copying them. They change when another block gets this place."""
        return self.mapping.block(address.offset, address.length)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when no process maps it any more."""
        os.close(self._file)

    def _holds(self, address: Address) -> bool:
        return int(self.mapping.stamps[address.offset // PAGE_BYTES]) == address.generation


def file_bytes(capacity_bytes: int) -> int:
    """Return the size of a pool's file, for its blocks and stamps."""
    return _stamps_at(capacity_bytes) + capacity_bytes // PAGE_BYTES * STAMP_BYTES


def _stamps_at(capacity_bytes: int) -> int:
    return capacity_bytes + -capacity_bytes % PAGE_BYTES
