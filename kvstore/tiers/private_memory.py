"""Private memory: a pool in the memory of one process, the simplest implementation of the port."""

import numpy as np

from kvstore.buffers import Block, ByteArray, MutableBlock, gather, pieces, scatter
from kvstore.messages import Address


class PrivateMemoryTier:
    """A `MemoryTier` for a store that is embedded in its only user, and for tests."""

    def __init__(self, capacity_bytes: int):
        self._bytes: ByteArray = np.zeros(capacity_bytes, dtype=np.uint8)
        self._claimed: dict[int, int] = {}  # offset -> generation

    @property
    def capacity_bytes(self) -> int:
        return self._bytes.nbytes

    def claim(self, address: Address) -> None:
        self._claimed[address.offset] = address.generation

    def discard(self, address: Address) -> None:
        if self._holds(address):
            del self._claimed[address.offset]

    def write(self, address: Address, block: Block) -> bool:
        if not self._holds(address):
            return False
        gather(pieces(block), self.view(address))
        return True

    def read(self, address: Address, into: MutableBlock) -> bool:
        if not self._holds(address):
            return False
        scatter(self.view(address), pieces(into))
        return True

    def view(self, address: Address) -> ByteArray:
        return self._bytes[address.offset : address.offset + address.length]

    def close(self) -> None:
        self._claimed.clear()

    def _holds(self, address: Address) -> bool:
        return self._claimed.get(address.offset) == address.generation
