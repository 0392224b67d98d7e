"""When a status is written: not at each of the many small changes that one change is made of. Pure.

Rules:

1. What is new is written at once, if the last write is SHORT ago at least: that somebody wishes something else, that it is done, what is
   wrong. So a change has one write when it begins, and one when it has settled.
2. What passes while a change is under way waits until the last write is LONG ago: numbers that count along, of pods that come up one by one,
   and what follows from them. The more deployments have something to tell that passes, the longer it waits, so that all of them together write
   MOST_PER_SECOND times at most: where a hundred change at once, or the machine is slow, each has its two writes all the same.
3. What is so for a moment, until somebody has answered, waits until it has been so for LONG.
4. Nothing is written that says what is there already.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from fleet.core.clock import SECOND, Nanos

Key = TypeVar("Key", bound=Hashable)

SHORT = Nanos(1 * SECOND)
LONG = Nanos(10 * SECOND)
MOST_PER_SECOND = 2
"""Writes of what only passes, of all deployments."""

MOST = 4096
"""Writes that are remembered before those are forgotten that do not matter any more."""


class StatusRateLimiter(Generic[Key]):
    def __init__(self) -> None:
        self._written: dict[Key, Nanos] = {}
        self._brief: dict[Key, Nanos] = {}  # since when
        self._passing: set[Key] = set()  # have something to tell that is not new

    def due(self, key: Key, now: Nanos, *, urgent: bool, brief: bool = False) -> Nanos:
        """When the status that differs may be written; `urgent` by rule 1, `brief` by rule 3."""
        if brief:
            return Nanos(self._brief.setdefault(key, now) + LONG)
        self._brief.pop(key, None)
        if urgent:
            self._passing.discard(key)
        else:
            self._passing.add(key)
        last = self._written.get(key)
        if last is None:
            return now
        return Nanos(max(now, last + (SHORT if urgent else max(LONG, len(self._passing) * SECOND // MOST_PER_SECOND))))

    def wrote(self, key: Key, now: Nanos) -> None:
        self._passing.discard(key)
        self._brief.pop(key, None)
        self._written[key] = now
        if len(self._written) > MOST:  # of many that are no more, perhaps
            self._written = {key: at for key, at in self._written.items() if now < at + LONG}

    def rests(self, key: Key) -> None:
        """There is nothing to tell, or nobody any more to tell it of."""
        self._passing.discard(key)
        self._brief.pop(key, None)
