"""LRU eviction: the least recently used block goes first, and the end of a chain before its beginning."""

from collections import OrderedDict
from typing import Generic

from kvstore.clock import Nanos
from kvstore.eviction.policy import K


class LruEviction(Generic[K]):
    """The default policy. On chat traffic the other policies without learning (S3-FIFO, SLRU, LFU) find fewer blocks."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:  # noqa: ARG002 - LRU needs neither
        self._order[key] = None
        self._order.move_to_end(key)

    def withdraw(self, key: K) -> None:
        del self._order[key]

    def choose(self) -> K | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: K) -> bool:
        return key in self._order
