"""When a status is written: not at each of the many small changes that one change is made of. Pure.

Rules:

1. What differs from what was written last is written at once, if the last write is SHORT ago at least: a change has one write when it
   begins, and one when it has settled.
2. Numbers that only count along, of pods that come up one by one, wait until the last write is LONG ago.
3. Nothing is written that says what is there already.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from fleet.clock import SECOND, Nanos

Key = TypeVar("Key", bound=Hashable)

SHORT = Nanos(1 * SECOND)
LONG = Nanos(10 * SECOND)
MOST = 4096
"""Writes that are remembered before those are forgotten that do not matter any more."""


class Pace(Generic[Key]):
    def __init__(self) -> None:
        self._written: dict[Key, Nanos] = {}

    def due(self, key: Key, now: Nanos, *, urgent: bool) -> Nanos:
        """When the status that differs may be written; `urgent` by rule 1."""
        last = self._written.get(key)
        return now if last is None else Nanos(max(now, last + (SHORT if urgent else LONG)))

    def wrote(self, key: Key, now: Nanos) -> None:
        self._written[key] = now
        if len(self._written) > MOST:  # of many that are no more, perhaps
            self._written = {key: at for key, at in self._written.items() if now < at + LONG}
