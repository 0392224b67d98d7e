"""Least recently used first. Since the blocks of a chain are admitted tail first, the tail also goes first."""

from collections import OrderedDict

from kvstore.clock import Nanos
from kvstore.messages import BlockKey


class LruEviction:
    """The default: on chat traffic the alternatives that need no learning (S3-FIFO, SLRU, LFU) lose to it."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def admit(self, key: BlockKey, size_bytes: int, now: Nanos) -> None:  # noqa: ARG002 - LRU needs neither
        self._order[key] = None
        self._order.move_to_end(key)

    def withdraw(self, key: BlockKey) -> None:
        del self._order[key]

    def choose(self) -> BlockKey | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._order
