"""LRU eviction: evicts the least recently used block first, and the end of a chain before its beginning."""

from collections import OrderedDict
from typing import Generic

from kvstore.clock import Nanos
from kvstore.eviction.policy import K


class LruEviction(Generic[K]):
    """Evicts the least recently used block. This is the default policy.

    On chat traffic it has a higher hit rate than the other policies that do not learn (S3-FIFO, SLRU, LFU).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:  # noqa: ARG002 - LRU needs neither size nor time
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
