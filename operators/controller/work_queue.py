"""Work queue: holds the keys that wait for the controller, each at most once. Pure.

Rules:

1. Only one reconcile of a key runs at a time. If a key is enqueued while its reconcile runs, the key is due again after
   that reconcile has ended.
2. A key whose reconcile failed is due again after a pause that doubles with each failure, up to LONGEST. The pause is
   longer if the API server demands it. One success resets the pause. If `add` enqueues the key during the pause, the
   pause does not become shorter. If it did, a broken deployment, whose pods start and end all the time, would be
   reconciled all the time. A changed specification ends the pause (`hasten`).
3. The queue holds at most `most` keys. If it is full, a new key is dropped and `overflown` is set, and the caller
   enqueues all keys when there is room again. So no key is lost, and the memory of the queue is bounded.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from fleet.core.clock import MILLISECOND, SECOND, Nanos

Key = TypeVar("Key", bound=Hashable)

IMMEDIATELY = Nanos(0)
SHORTEST = Nanos(20 * MILLISECOND)
LONGEST = Nanos(60 * SECOND)
MOST_DOUBLINGS = 16


class WorkQueue(Generic[Key]):
    def __init__(self, most: int) -> None:
        self.overflown = False
        """True if a key was dropped because the queue was full. The caller sets it to False when it enqueues all
        keys."""

        self._most = most
        self._due: dict[Key, Nanos] = {}
        # A heap, ordered by the instant at which a key is due. An entry is outdated, and is skipped, if `_due` has another
        # instant for its key.
        self._order: list[tuple[Nanos, int, Key]] = []
        # The keys whose reconcile runs now, each with the instant at which the key is due again. None: the key was not
        # enqueued during its reconcile.
        self._in_progress: dict[Key, Nanos | None] = {}
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, Nanos] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._due) + len(self._in_progress)

    def add(self, key: Key, now: Nanos, after: Nanos = IMMEDIATELY) -> None:
        """Enqueue a key, so that it is due when the time `after` has passed.

        If the key is queued already, the earlier of the two instants counts. A key that pauses after a failure becomes due
        only after the pause (rule 2).
        """
        at = max(Nanos(now + after), self._not_before.get(key, now))
        if key in self._in_progress:
            asked = self._in_progress[key]
            self._in_progress[key] = at if asked is None else min(asked, at)
        elif key in self._due or len(self) < self._most:
            self._put(key, min(at, self._due.get(key, at)))
        else:
            self.overflown = True

    def hasten(self, key: Key, now: Nanos) -> None:
        """Make a key due now and end its pause after failures, because the specification of its object has changed."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self.add(key, now)

    def take(self, now: Nanos) -> Key | None:
        """Return the key that has been due longest, and mark it as in progress; None if no key is due."""
        while self._order and self._order[0][0] <= now:
            at, _, key = heapq.heappop(self._order)
            if self._due.get(key) == at:
                del self._due[key]
                self._in_progress[key] = None
                return key
        return None

    def due(self, now: Nanos) -> int:
        """Return the number of keys whose reconcile runs or that are due now."""
        return len(self._in_progress) + sum(at <= now for at in self._due.values())

    def next(self) -> Nanos | None:
        """Return the instant at which the next key is due; None if no key is queued."""
        while self._order and self._due.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def done(self, key: Key) -> None:
        """Record that the reconcile of a key has ended without a failure."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        if (again := self._in_progress.pop(key)) is not None:
            self._put(key, again)

    def failed(self, key: Key, now: Nanos, pause: Nanos | None = None) -> None:
        """Record that the reconcile of a key has failed; the key is due again after a pause (rule 2).

        `pause` is the minimum pause that the API server has demanded, or None if it has demanded none.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        doubled = Nanos(min(LONGEST, SHORTEST << min(failures - 1, MOST_DOUBLINGS)))
        at = Nanos(now + max(doubled, pause or 0))
        self._not_before[key] = at
        del self._in_progress[key]
        self._put(key, at)

    def forget(self, key: Key) -> None:
        """Forget a key whose object was deleted, and the failures of the key. A running reconcile of the key goes on."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def check(self) -> None:
        assert len(self) <= self._most
        assert not self._due.keys() & self._in_progress.keys(), "a key is either due or in hand"
        assert self._due.items() <= {(key, at) for at, _, key in self._order}, "what is due is in order"

    def _put(self, key: Key, at: Nanos) -> None:
        if self._due.get(key) == at:
            return
        self._due[key] = at
        self._added += 1
        heapq.heappush(self._order, (at, self._added, key))
        if len(self._order) > 2 * len(self._due) + 64:
            self._order = [each for each in self._order if self._due.get(each[2]) == each[0]]
            heapq.heapify(self._order)
