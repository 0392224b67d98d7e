"""Cache view: the engine's cached blocks, as its KV events reported them, for routers that connect after these events.

`workers.server` adds the events and sends each one to the connected routers.
"""

from collections.abc import Iterable
from itertools import islice
from typing import assert_never

from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore.block import BlockHash

CHUNK = 4096
"""Maximum number of block hashes in one message of a cache dump. Such a message has 64 KiB, so the outputs of engine
steps, which wait behind it in the stream, are hardly delayed."""


class CacheView:
    """Keeps the hashes of the cached blocks in the order in which they were stored, so earlier blocks of a chain come first."""

    def __init__(self) -> None:
        self._held: dict[bytes, None] = {}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case KvStored():
                    self._held.update(dict.fromkeys(event.hashes))
                case KvRemoved():
                    for name in event.hashes:
                        self._held.pop(name, None)
                case KvCleared():
                    self._held.clear()
                case _:
                    assert_never(event)

    def dump(self) -> list[tuple[KvEvent, ...]]:
        """Return KV events that describe the whole cache; the first one tells the router to forget all blocks of this worker.

        Each tuple becomes one message.
        """
        names = iter(self._held)
        chunks: list[tuple[KvEvent, ...]] = [(KvCleared(),)]
        while chunk := tuple(islice(names, CHUNK)):
            chunks.append((KvStored(chunk),))
        return chunks

    def names(self) -> list[BlockHash]:
        """Return the hashes in the order in which they were stored."""
        return list(map(BlockHash, self._held))

    def __len__(self) -> int:
        return len(self._held)
