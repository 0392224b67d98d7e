"""Segmented LRU eviction: blocks that were used once go before blocks that were used again.

Rules:

1. A block starts on probation. A use there, `SAME_USE` later or more, makes it protected.
2. At most the share `PROTECTED` of all blocks is protected. Beyond that, the longest unused protected block is on
   probation again, as if just used.
3. The longest unused block on probation goes first. The longest unused protected block goes only when no block is on
   probation.
"""

from collections import OrderedDict
from typing import Generic

from kvstore.clock import Nanos
from kvstore.eviction.policy import SAME_USE, K

PROTECTED = 0.8
"""Largest share of protected blocks. Karedla, Love and Wherry, "Caching strategies to improve disk system performance"
(IEEE Computer, 1994), found shares from 0.6 to 0.8 equally good.
"""


class SlruEviction(Generic[K]):
    """Segmented LRU: good against scans.

    On chat traffic it loses to LRU, because a second turn needs the whole length of the queue.
    """

    def __init__(self) -> None:
        self._probation: OrderedDict[K, Nanos] = OrderedDict()  # start of the probation
        self._protected: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:  # noqa: ARG002 - blocks count, not bytes
        if key in self._protected:
            self._protected.move_to_end(key)
        elif (since := self._probation.get(key)) is None:
            self._probation[key] = now
        elif now - since <= SAME_USE:
            self._probation.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            while len(self._protected) > PROTECTED * len(self):
                demoted, _ = self._protected.popitem(last=False)
                self._probation[demoted] = now

    def withdraw(self, key: K) -> None:
        if key in self._probation:
            del self._probation[key]
        else:
            del self._protected[key]

    def choose(self) -> K | None:
        return next(iter(self._probation), None) if self._probation else next(iter(self._protected), None)

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: K) -> bool:
        return key in self._probation or key in self._protected
