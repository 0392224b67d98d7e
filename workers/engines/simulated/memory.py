"""KV memory of the simulated engine: the bytes of its named blocks, and the KV events about them.

Rules:

1. `fleet.batching.kv_blocks` decides which blocks are kept. This module has the bytes of named blocks only; a block
   without a name has its bytes in its sequence.
2. Each stored or removed block becomes a KV event. Events wait until the only consumer takes them. If the waiting
   events name more than twice as many blocks as fit into the memory, they are replaced by two events: one that clears
   the consumer's view of the cache, and one that lists all blocks. The consumer must accept the removal of a block that
   was never reported as stored.
"""

from collections.abc import Iterable, Mapping, Sequence

from fleet.batching.kv_blocks import KvBlocks
from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore.block import BlockHash


class BlockMemory:
    """Keeps the bytes of one engine's cached blocks. The class is not thread-safe."""

    def __init__(self, blocks: KvBlocks[BlockHash]) -> None:
        self._blocks = blocks
        self._contents: dict[BlockHash, bytearray] = {}
        self._events: list[KvStored | KvRemoved] = []
        self._waiting = 0  # number of block names in `_events`, which wait for `take_events`
        self._dumps = False  # True if the next `take_events` clears the consumer's view and lists all blocks (rule 2)

    def find(self, names: Sequence[BlockHash]) -> list[bytearray]:
        """Return the bytes of the leading blocks of a chain that are cached."""
        return [self._contents[name] for name in names[: self._blocks.leading(names)]]

    def publish(self, names: Iterable[BlockHash], contents: Mapping[BlockHash, bytearray]) -> None:
        """Store the bytes of blocks that have just got their names (rule 1)."""
        self._contents.update((name, contents[name]) for name in names)

    def changed(self) -> bool:
        """Drop the bytes of evicted blocks; return True if there are events for `take_events`."""
        if self._blocks.changed:
            stored, removed = self._blocks.changes()
            for name in removed:
                if name not in self._blocks:
                    self._contents.pop(name, None)
            self._events += (KvRemoved(tuple(removed)), KvStored(tuple(stored)))
            self._waiting += len(removed) + len(stored)
            self._dumps |= self._waiting > 2 * self._blocks.blocks
            if self._dumps:
                self._events.clear()
        return bool(self._events) or self._dumps

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order, or instead a list of all blocks (rule 2)."""
        self.changed()
        events: list[KvEvent] = [event for event in self._events if event.hashes]
        if self._dumps:
            events = [KvCleared(), KvStored(tuple(self._blocks.names()))]
        self._events, self._waiting, self._dumps = [], 0, False
        return tuple(events)

    def check(self) -> None:
        """Assert that exactly the named blocks have bytes here; bytes of evicted blocks may remain until `changed` is called."""
        assert set(self._blocks.names()) <= self._contents.keys()
        if not self._blocks.changed:
            assert len(self._blocks.names()) == len(self._contents)
