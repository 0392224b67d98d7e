"""S3 sightings: remember which objects were found or missing lately, and search for a stored prefix with few requests."""

import threading
from collections.abc import Callable, Sequence

from kvstore.clock import Nanos
from kvstore.messages import BlockKey
from kvstore.recent_map import RecentMap

SEEN_KEYS = 1 << 16


class S3Sightings:
    """Remembers which objects were found or missing lately, and which may have to be replaced.

    Thread-safe, limited in size.
    """

    def __init__(self, known: Nanos, missing: Nanos):
        self._known = known
        self._missing = missing
        self._lock = threading.Lock()
        self._seen: RecentMap[BlockKey, tuple[bool, Nanos]] = RecentMap(SEEN_KEYS)
        self._suspects: RecentMap[BlockKey, None] = RecentMap(SEEN_KEYS)

    def note(self, key: BlockKey, now: Nanos, *, is_there: bool) -> None:
        """Record that an object exists and seems undamaged, or that it is missing. It is no longer suspect then."""
        with self._lock:
            self._suspects.forget(key)
            self._seen.note(key, (is_there, Nanos(now + (self._known if is_there else self._missing))))

    def suspect(self, key: BlockKey) -> None:
        """Record that an object is suspect: this node cannot use it, or has asked to delete it.

        A later write of the block may have to replace a suspect object.
        """
        with self._lock:
            self._seen.forget(key)
            self._suspects.note(key, None)

    def forget(self, key: BlockKey) -> None:
        """Forget what is known about the existence of an object."""
        with self._lock:
            self._seen.forget(key)

    def recall(self, key: BlockKey, now: Nanos) -> bool | None:
        """Return whether an object exists; None if this node does not know, so that the object store has to be queried.

        A suspect object counts as missing.
        """
        with self._lock:
            is_there, until = self._seen.get(key) or (False, now)
            if key in self._suspects:
                return False
            return is_there if now < until else None

    def is_there(self, key: BlockKey, now: Nanos) -> bool:
        return self.recall(key, now) is True

    def is_suspect(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._suspects


def leading(count: int, width: int, are_there: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Return how many leading items exist, assuming that no item after a missing one exists.

    Each round asks `are_there` about at most `width` indices. The first round includes the last item, so one round is
    enough if all items exist.
    """
    low, high = 0, count  # all items before `low` exist, and no item from `high` on exists
    while low < high:
        steps = min(width, high - low)
        asked = [low + (step * (high - low)) // steps - 1 for step in range(1, steps + 1)]
        for index, is_there in zip(asked, are_there(asked), strict=True):
            if not is_there:
                high = index
                break
            low = index + 1
    return low
