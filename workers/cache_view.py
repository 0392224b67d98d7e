"""What the engine's prefix cache holds, as the worker has heard it, for routers that connect later."""

from collections.abc import Iterable
from itertools import islice
from typing import assert_never

from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored
from kvstore.block import BlockHash

CHUNK = 4096
"""Hashes a message of a dump: 64 KiB, so that steps are not stuck behind a large one."""


class CacheView:
    """The hashes, in the order in which they were stored: a block after the block before it."""

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
        """Everything, as changes to a view of which nothing is known; one item a message."""
        names = iter(self._held)
        chunks: list[tuple[KvEvent, ...]] = [(KvCleared(),)]
        while chunk := tuple(islice(names, CHUNK)):
            chunks.append((KvStored(chunk),))
        return chunks

    def names(self) -> list[BlockHash]:
        """In the order in which they were stored."""
        return list(map(BlockHash, self._held))

    def __len__(self) -> int:
        return len(self._held)
