"""S3-FIFO: three queues that nothing is reordered in.

After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023). Rules:

1. A block begins at the end of the small queue, or of the main one if the ghost remembers it. Uses are counted, up to
   `MOST_USES`; they move nothing.
2. While the small queue has its share or more, its first goes. If it was used twice or more it moves to the end of the main
   queue instead, and its count begins again.
3. Else the first of the main queue goes. If it was used, it moves to the end instead, with one use less.
4. The ghost remembers the names of what left the small queue for good, as many as the main queue is long, the last ones.

A block that is in use when its turn comes leaves the queue and is admitted again later (rule 8 of `kvstore.machine`): to
the main queue, by rule 1, since the ghost remembers it.
"""

from collections import OrderedDict
from typing import Generic

from kvstore.clock import Nanos
from kvstore.eviction.policy import K

SMALL = 0.1
"""Share of the small queue; the paper's, which found it to matter little."""

MOST_USES = 3


class S3FifoEviction(Generic[K]):
    """Cheap, and good where much is used once; on chat traffic the small queue ends before the second turn begins."""

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()  # uses since it came
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghost: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:  # noqa: ARG002 - neither matters
        for queue in (self._small, self._main):
            if (uses := queue.get(key)) is not None:
                queue[key] = min(uses + 1, MOST_USES)
                return
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def withdraw(self, key: K) -> None:
        if self._main.pop(key, None) is not None:
            return
        del self._small[key]
        self._ghost[key] = None
        while len(self._ghost) > max(1, len(self._main)):
            self._ghost.popitem(last=False)

    def choose(self) -> K | None:
        while self:
            if self._small and (not self._main or len(self._small) >= SMALL * len(self)):
                key, uses = next(iter(self._small.items()))
                if uses <= 1:
                    return key
                del self._small[key]
                self._main[key] = 0
            else:
                key, uses = next(iter(self._main.items()))
                if not uses:
                    return key
                self._main[key] = uses - 1
                self._main.move_to_end(key)
        return None

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: K) -> bool:
        return key in self._small or key in self._main
