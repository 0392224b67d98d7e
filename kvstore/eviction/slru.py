"""Segmented LRU: what was used once goes before what was used again.

Rules:

1. A block begins on probation. Used again while it is there (`SAME_USE` later or more), it is protected.
2. The protected ones are at most `PROTECTED` of all; beyond that, the longest unused of them is on probation again, as if
   just used.
3. The longest unused on probation goes first, and only when nobody is on probation, the longest unused protected one.
"""

from collections import OrderedDict
from typing import Generic

from kvstore.clock import Nanos
from kvstore.eviction.policy import SAME_USE, K

PROTECTED = 0.8
"""Share of the blocks that may be protected, as in Karedla, Love and Wherry, "Caching strategies to improve disk system
performance" (IEEE Computer, 1994), who found shares from 0.6 to 0.8 alike."""


class SlruEviction(Generic[K]):
    """Good against scans; on chat traffic it loses to LRU, whose whole length a second turn needs."""

    def __init__(self) -> None:
        self._probation: OrderedDict[K, Nanos] = OrderedDict()  # since when
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
