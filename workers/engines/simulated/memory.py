"""KV memory of the simulated engine: real bytes in a bounded pool, shared by reference, kept as a prefix cache.

Rules:

1. A block is free, held (by a count of sequences and leases), or idle: nobody holds it, but it has a name and can be
   found again. free + held + idle = all, always.
2. `allocate` takes a free block, else the idle block that was released first, which loses its name. A sequence
   releases its last block first, so that the tail of a chain is evicted before its head.
3. Every name that comes or goes is an event. Events wait for one consumer. If they would outgrow the pool, they are
   replaced by a clear and a dump.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

import numpy as np

from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore.block import BlockHash

BlockIndex = NewType("BlockIndex", int)


class BlockMemory:
    """The pool of blocks. It is not thread-safe."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._bytes = np.empty(num_blocks * block_bytes, dtype=np.uint8).data
        self._free = [BlockIndex(index) for index in reversed(range(num_blocks))]
        self._idle: OrderedDict[BlockIndex, None] = OrderedDict()  # the first one was released first
        self._holders: Counter[BlockIndex] = Counter()
        self._by_name: dict[BlockHash, BlockIndex] = {}
        self.names: dict[BlockIndex, BlockHash] = {}
        self._changes: list[tuple[bool, BlockHash]] = []  # (stored, name)
        self._folded = False  # true if the next events are a clear and a dump
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    @property
    def held(self) -> int:
        """The number of held blocks."""
        return len(self._holders)

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    def view(self, block: BlockIndex) -> memoryview:
        """Return the block's bytes, to read and to write."""
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def find(self, names: Sequence[BlockHash]) -> list[BlockIndex]:
        """Return the longest cached prefix of a chain, without holding it."""
        found = []
        for name in names:
            if (block := self._by_name.get(name)) is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[BlockIndex]) -> int:
        """Return how many of these blocks `hold` would make unavailable."""
        return sum(block in self._idle for block in blocks)

    def hold(self, blocks: Iterable[BlockIndex]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            assert block in self._holders or block in self._idle, block
            self._idle.pop(block, None)
            self._holders[block] += 1

    def allocate(self) -> BlockIndex:
        """Return a block with undefined bytes and one holder. There must be one available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def release(self, blocks: Sequence[BlockIndex]) -> None:
        """Remove a holder from each block, the last block first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, block
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self.names:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: BlockIndex, name: BlockHash) -> None:
        """Name a block whose bytes are complete, so that it can be found, unless another block has that name."""
        assert block in self._holders, block
        if name in self._by_name:
            return
        assert block not in self.names, block
        self._by_name[name] = block
        self.names[block] = name
        self._note(stored=True, name=name)

    @property
    def changed(self) -> bool:
        """True if there are events to take."""
        return bool(self._changes) or self._folded

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the changes since the last call, in order."""
        events: list[KvEvent] = []
        if self._folded:
            events = [KvCleared(), KvStored(tuple(self._by_name))]
            self._folded = False
        run: list[BlockHash] = []
        for position, (stored, name) in enumerate(self._changes):
            run.append(name)
            last = position + 1 == len(self._changes)
            if last or self._changes[position + 1][0] is not stored:
                events.append(KvStored(tuple(run)) if stored else KvRemoved(tuple(run)))
                run = []
        self._changes.clear()
        return tuple(events)

    def check(self) -> None:
        """Assert rule 1, and that names and blocks agree."""
        assert len(self._free) + len(self._idle) + len(self._holders) == self.num_blocks
        assert len({*self._free, *self._idle, *self._holders}) == self.num_blocks
        assert {name: block for block, name in self.names.items()} == self._by_name
        assert all(block in self.names for block in self._idle)
        assert not any(block in self.names for block in self._free)
        assert all(holders > 0 for holders in self._holders.values())

    def _forget(self, block: BlockIndex) -> None:
        name = self.names.pop(block)
        del self._by_name[name]
        self._note(stored=False, name=name)

    def _note(self, *, stored: bool, name: BlockHash) -> None:
        if self._folded:
            return  # the dump will contain it
        self._changes.append((stored, name))
        if len(self._changes) > 2 * self.num_blocks:
            self._changes.clear()
            self._folded = True
