"""KV memory of the simulated engine: the bytes of its named blocks, and the events that routers hear of them.

Rules:

1. `fleet.batching.kv_blocks` decides which blocks are kept. A block without a name has no bytes here; its sequence has them.
2. Names that come or go are events. Events wait for one consumer. If they would outgrow the pool, they are replaced by a
   clear and a dump. A removed name may be one that was never reported as stored.
"""

from collections.abc import Iterable, Mapping, Sequence

from fleet.batching.kv_blocks import KvBlocks
from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore.block import BlockHash


class BlockMemory:
    """The bytes of one engine's cache. It is not thread-safe."""

    def __init__(self, blocks: KvBlocks[BlockHash]) -> None:
        self._blocks = blocks
        self._contents: dict[BlockHash, bytearray] = {}
        self._events: list[KvStored | KvRemoved] = []
        self._waiting = 0  # names in the events
        self._dumps = False  # true if the next events are a clear and a dump

    def find(self, names: Sequence[BlockHash]) -> list[bytearray]:
        """Return the blocks of the longest cached prefix of a chain."""
        return [self._contents[name] for name in names[: self._blocks.leading(names)]]

    def publish(self, names: Iterable[BlockHash], contents: Mapping[BlockHash, bytearray]) -> None:
        """Keep the bytes of blocks that just got their names."""
        self._contents.update((name, contents[name]) for name in names)

    def changed(self) -> bool:
        """Drop the bytes of evicted blocks; return True if there are events to take."""
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
        """Assert that exactly the named blocks have bytes."""
        assert set(self._blocks.names()) <= self._contents.keys()
        if not self._blocks.changed:
            assert len(self._blocks.names()) == len(self._contents)
