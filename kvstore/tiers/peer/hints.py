"""Peer hints: which peer was seen to hold a block, and which blocks were bad. Thread-safe, bounded."""

import threading
from collections.abc import Iterable

from kvstore.clock import SECOND, Nanos
from kvstore.messages import BlockKey
from kvstore.recent_map import RecentMap

HINTS = 1 << 16  # blocks with a known holder
SUSPECTS = 4096  # blocks that were found bad lately
SUSPECT_FOR = Nanos(60 * SECOND)  # in this time, peers can write the blocks again


class PeerHints:
    """The peer that was last seen to hold each block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: RecentMap[BlockKey, str] = RecentMap(HINTS)

    def note(self, keys: Iterable[BlockKey], holder: str) -> None:
        with self._lock:
            for key in keys:
                self._holders.note(key, holder)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._holders.forget(key)

    def recall(self, key: BlockKey) -> str | None:
        with self._lock:
            return self._holders.get(key)


class SuspectBlocks:
    """Blocks that were found bad lately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: RecentMap[BlockKey, Nanos] = RecentMap(SUSPECTS)

    def note(self, keys: Iterable[BlockKey], now: Nanos) -> None:
        with self._lock:
            for key in keys:
                self._until.note(key, Nanos(now + SUSPECT_FOR))

    def has(self, key: BlockKey, now: Nanos) -> bool:
        until = self._until.get(key)
        return until is not None and now < until
