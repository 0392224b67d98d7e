"""What was seen in a bucket of late, and how to find out about many objects with few requests."""

import threading
from collections.abc import Callable, Sequence

from kvstore.clock import Nanos
from kvstore.messages import BlockKey
from kvstore.recent_map import RecentMap

SEEN_KEYS = 1 << 16


class S3Sightings:
    """What was seen, and which blocks' objects may have to be replaced. Thread-safe, bounded."""

    def __init__(self, known: Nanos, missing: Nanos):
        self._known = known
        self._missing = missing
        self._lock = threading.Lock()
        self._seen: RecentMap[BlockKey, tuple[bool, Nanos]] = RecentMap(SEEN_KEYS)
        self._doubtful: RecentMap[BlockKey, None] = RecentMap(SEEN_KEYS)

    def note(self, key: BlockKey, now: Nanos, *, is_there: bool) -> None:
        """An object was there, and as good as one can tell, or was not."""
        with self._lock:
            self._doubtful.forget(key)
            self._seen.note(key, (is_there, Nanos(now + (self._known if is_there else self._missing))))

    def doubt(self, key: BlockKey) -> None:
        """What lies there is not usable here, or was to be deleted."""
        with self._lock:
            self._seen.forget(key)
            self._doubtful.note(key, None)

    def forget(self, key: BlockKey) -> None:
        """Nothing is known of an object any more."""
        with self._lock:
            self._seen.forget(key)

    def recall(self, key: BlockKey, now: Nanos) -> bool | None:
        """Whether it is there; None when that has to be asked."""
        with self._lock:
            is_there, until = self._seen.get(key) or (False, now)
            if key in self._doubtful:
                return False
            return is_there if now < until else None

    def is_there(self, key: BlockKey, now: Nanos) -> bool:
        return self.recall(key, now) is True

    def is_doubtful(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._doubtful


def leading(count: int, width: int, are_there: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """How many of the first items are there, if whatever is there is there from the start on.

    Args:
        count: Of all items.
        width: Items to ask about at a time.
        are_there: Answers for indices.

    The last item is among the first asked about, so that "all" takes one round.
    """
    low, high = 0, count  # all before `low` are there, none from `high` on
    while low < high:
        steps = min(width, high - low)
        asked = [low + (step * (high - low)) // steps - 1 for step in range(1, steps + 1)]
        for index, is_there in zip(asked, are_there(asked), strict=True):
            if not is_there:
                high = index
                break
            low = index + 1
    return low
