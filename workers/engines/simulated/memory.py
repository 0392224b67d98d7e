"""KV memory of the simulated engine: the bytes of its named blocks, and the KV events about them.

Rules:

1. `fleet.batching.kv_blocks` decides which blocks are kept. The bytes of a block without a name are not here; its sequence has them.
2. Each name that is stored or removed becomes a KV event. Events wait for one consumer. If more names wait than twice the number of
   blocks, the events are replaced by a clear and a dump. An event may remove a name that was never reported as stored.
"""

from collections.abc import Iterable, Mapping, Sequence

from fleet.batching.kv_blocks import KvBlocks
from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore.block import BlockHash


class BlockMemory:
    """Keeps the bytes of one engine's cached blocks. Not thread-safe."""

    def __init__(self, blocks: KvBlocks[BlockHash]) -> None:
        self._blocks = blocks
        self._contents: dict[BlockHash, bytearray] = {}
        self._events: list[KvStored | KvRemoved] = []
        self._waiting = 0  # number of names in the waiting events
        self._dumps = False  # True if the next events are a clear and a dump

    def find(self, names: Sequence[BlockHash]) -> list[bytearray]:
        """Return the blocks of the longest cached prefix of a chain."""
        return [self._contents[name] for name in names[: self._blocks.leading(names)]]

    def publish(self, names: Iterable[BlockHash], contents: Mapping[BlockHash, bytearray]) -> None:
        """Store the bytes of blocks that have just got their names."""
        self._contents.update((name, contents[name]) for name in names)

    def changed(self) -> bool:
        """Drop the bytes of evicted blocks; return True if events wait for `take_events`."""
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
        """Return the changes since the last call, in order."""
        self.changed()
        events: list[KvEvent] = [event for event in self._events if event.hashes]
        if self._dumps:
            events = [KvCleared(), KvStored(tuple(self._blocks.names()))]
        self._events, self._waiting, self._dumps = [], 0, False
        return tuple(events)

    def check(self) -> None:
        """Assert that bytes exist exactly for the named blocks."""
        assert set(self._blocks.names()) <= self._contents.keys()
        if not self._blocks.changed:
            assert len(self._blocks.names()) == len(self._contents)
