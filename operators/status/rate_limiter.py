"""Status rate limiter: decides when a changed status is written, because statuses change often in small steps. Pure.

Rules:

1. A change is urgent if it shows more than the progress of a start or rollout: for example a new specification, the end
   of a rollout, or a problem. The caller decides this. An urgent change is written as soon as the last write is at
   least SHORT ago. So a rollout causes one urgent write at its start and one at its end.
2. All other changes are progress, such as the counts of pods that start one by one. Progress is written only when the
   last write is at least LONG ago. The more deployments have progress to write, the longer each of them waits, so that
   together they cause at most MOST_PER_SECOND writes per second. So urgent changes are written in time, even if a
   hundred deployments change at once.
3. A state that usually lasts only a moment is written only after it has lasted for LONG. Examples are the wait for the
   answer to a probe, and an API server that has not read its Roles yet.
4. An unchanged status is not written.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from fleet.core.clock import SECOND, Nanos

Key = TypeVar("Key", bound=Hashable)

SHORT = Nanos(1 * SECOND)
LONG = Nanos(10 * SECOND)
MOST_PER_SECOND = 2
"""Maximum number of status writes per second that show nothing but progress (rule 2), all deployments together."""

MOST = 4096
"""If more writes than this number are remembered, all writes that are older than LONG are forgotten."""


class StatusRateLimiter(Generic[Key]):
    def __init__(self) -> None:
        self._written: dict[Key, Nanos] = {}
        self._brief: dict[Key, Nanos] = {}  # by key, the instant at which its present short-lived state began (rule 3)
        self._passing: set[Key] = set()  # the keys that have progress which is not written yet (rule 2)

    def due(self, key: Key, now: Nanos, *, urgent: bool, brief: bool = False) -> Nanos:
        """Return the instant from which a changed status may be written.

        `urgent` is true for an urgent change (rule 1), and `brief` for a state that usually lasts only a moment (rule
        3).
        """
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
        if len(self._written) > MOST:  # many of the remembered objects may no longer exist
            self._written = {key: at for key, at in self._written.items() if now < at + LONG}

    def rests(self, key: Key) -> None:
        """Record that nothing is to be written for a key, because its status is unchanged or its object was deleted."""
        self._passing.discard(key)
        self._brief.pop(key, None)
