"""Tier statistics: the counters of a tier, and the blocks that it has lost."""

import threading
from collections.abc import Iterable, Sequence

from kvstore.buffers import ByteArray
from kvstore.messages import BlockKey, BlockOutcome, FetchResult, TierStatus

GONE_KEYS = 1 << 18
"""Maximum number of lost blocks that wait to be reported. If there are more, the oldest ones are never reported, so
routers keep believing that the tier has these blocks."""


class TierStatistics:
    """Counts what one tier does, and remembers the blocks that it has lost until `gone` returns them. Thread-safe."""

    def __init__(self, name: str):
        self.name = name
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._gone: dict[BlockKey, None] = {}

    def count(self, **more: int) -> None:
        """Add each number to the counter of this name; the names are those of fields of `TierStatus`."""
        with self._lock:
            for name, number in more.items():
                self._counts[name] = self._counts.get(name, 0) + number

    def count_fetched(self, answers: Sequence[FetchResult], into: Sequence[ByteArray]) -> None:
        """Count the blocks of one call of `BackingTier.get` by their results."""
        hits = [
            buffer.nbytes for answer, buffer in zip(answers, into, strict=True) if answer.outcome is BlockOutcome.MOVED
        ]
        self.count(hits=len(hits), misses=len(answers) - len(hits), bytes_read=sum(hits))

    def mark_gone(self, keys: Iterable[BlockKey]) -> None:
        """Record that the tier no longer has these blocks; `gone` then returns them."""
        with self._lock:
            self._gone.update(dict.fromkeys(keys))
            while len(self._gone) > GONE_KEYS:
                del self._gone[next(iter(self._gone))]

    def mark_present(self, keys: Iterable[BlockKey]) -> None:
        """Record that the tier has these blocks now, so that `gone` does not report them."""
        with self._lock:
            for key in keys:
                self._gone.pop(key, None)

    def gone(self) -> list[BlockKey]:
        """Return the blocks that were lost since the last call and have not been written again, for `BackingTier.gone`."""
        with self._lock:
            gone, self._gone = self._gone, {}
        return list(gone)

    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(name=self.name, **self._counts)
