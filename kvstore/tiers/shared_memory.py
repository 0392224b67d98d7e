"""The CPU tier: a pool of memory that several processes of a host map.

Rules:

1. The pool has no name: it is a memory file descriptor that the node hands out, so it is gone with the last process
   that maps it, however they die. Nothing ever appears in /dev/shm.
2. All pages are taken at the start (`kvstore.tiers.file_mapping`). Too little memory is an error then, not a SIGBUS later, and
   no request pays for first touches (which run thirty times slower than copies).
3. Behind the blocks lies one 64-bit stamp a page: the generation of the block that begins there, 0 for none. Readers
   and writers in other processes compare it with their slot's, and so notice that a place is not theirs any more.
   The checksum stays the proof; the stamp tells a block that has gone from one that has gone bad.
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
from kvstore.tiers import file_mapping as pages
from kvstore.tiers.file_mapping import FileMapping, HugePages

STAMP_BYTES = 8

log = logging.getLogger(__name__)


class Mapping:
    """One process's view of a pool: the blocks, then the stamps."""

    def __init__(self, memory: int | FileMapping, capacity_bytes: int):
        """Lays out the memory of a pool, or of the file descriptor behind it, which may be closed afterwards.

        Raises:
            OSError: It cannot be mapped.
            ValueError: It is smaller than a pool of that capacity.
        """
        self._memory = FileMapping(memory) if isinstance(memory, int) else memory
        whole, size = self._memory.bytes, file_bytes(capacity_bytes)
        if whole.nbytes < size:
            raise ValueError(f"a pool of {capacity_bytes} bytes needs a file of {size}")
        self.bytes: ByteArray = whole[:capacity_bytes]
        self.stamps: NDArray[np.uint64] = whole[_stamps_at(capacity_bytes) : size].view(np.uint64)

    def populate(self, limit_bytes: int) -> None:
        """Set up page tables for the first `limit_bytes`, so that copies do not fault. Optional: speed only."""
        with contextlib.suppress(OSError):  # an older kernel: pages are mapped as they are touched
            self._memory.populate(limit_bytes)

    def holds(self, slot: Slot) -> bool:
        """Whether the place still belongs to the slot's block."""
        return int(self.stamps[slot.offset // PAGE_BYTES]) == slot.generation

    def block(self, offset: int, length: int) -> ByteArray:
        """A view of a block's bytes."""
        return self.bytes[offset : offset + length]


class SharedMemoryTier:
    """A `MemoryTier` that other processes can map; see the module."""

    def __init__(
        self,
        capacity_bytes: int,
        huge_pages: HugePages = HugePages.AUTO,
        clock: Clock | None = None,
        given_up: Event | None = None,
    ):
        """Takes the memory, which lasts 0.1 to 1 s a GiB.

        Args:
            capacity_bytes: A rest that fills no page stays unused.
            huge_pages: What the pool should lie in.
            clock: Says how long it lasted; the system's by default.
            given_up: To be set, from another thread, once nobody wants it any more.

        Raises:
            StoreNotStarted: There is not enough, or not in the pages that are required; or it was given up.
        """
        clock = clock or MonotonicClock()
        self._capacity_bytes = capacity_bytes - capacity_bytes % PAGE_BYTES
        started = clock.now()
        self._file, memory, self.pages = pages.take(file_bytes(self._capacity_bytes), huge_pages, given_up)
        lasted_seconds = max(seconds(clock.now() - started), 1e-9)
        self.mapping = Mapping(memory, self._capacity_bytes)
        self._stamps = self.mapping.stamps.data  # the same; one at a time is written faster through it
        log.info(
            "memory taken",
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
        """Descriptor of the pool, for other processes to map."""
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
