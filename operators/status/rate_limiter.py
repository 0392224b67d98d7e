"""Status rate limiter: decides when a changed status is written, because one change consists of many small ones. Pure.

Rules:

1. News is written at once if the last write is at least SHORT ago: a new specification, its completion, a problem. So a
   change is written once when it begins, and once when it is complete.
2. Progress during a change waits until the last write is LONG ago: counts of pods that start one by one, and what
   follows from them. The more deployments have progress to write, the longer each waits, so that together they cause at
   most MOST_PER_SECOND writes. So even if a hundred deployments change at once, or the machine is slow, each has its
   two writes.
3. A state that usually lasts a moment, until something answers or an API server has read its roles again, is written once
   it has lasted for LONG.
4. An unchanged status is not written.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from fleet.core.clock import SECOND, Nanos

Key = TypeVar("Key", bound=Hashable)

SHORT = Nanos(1 * SECOND)
LONG = Nanos(10 * SECOND)
MOST_PER_SECOND = 2
"""The most writes of mere progress in a second, over all deployments."""

MOST = 4096
"""Writes that are remembered; above this number, those that do not matter any more are forgotten."""


class StatusRateLimiter(Generic[Key]):
    def __init__(self) -> None:
        self._written: dict[Key, Nanos] = {}
        self._brief: dict[Key, Nanos] = {}  # instant at which a state began that usually lasts only a moment
        self._passing: set[Key] = set()  # keys whose progress must still be written

    def due(self, key: Key, now: Nanos, *, urgent: bool, brief: bool = False) -> Nanos:
        """Return when a changed status may be written; `urgent`: rule 1; `brief`: rule 3."""
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
        if len(self._written) > MOST:  # then forget, because many of the objects may no longer exist
            self._written = {key: at for key, at in self._written.items() if now < at + LONG}

    def rests(self, key: Key) -> None:
        """Note that nothing is to be written: the status is unchanged, or the object has gone."""
        self._passing.discard(key)
        self._brief.pop(key, None)
