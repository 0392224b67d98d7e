"""Work queue: the keys that wait for the controller, each at most once. Pure.

Rules:

1. One worker has a key at a time. A request for a key in progress takes effect afterwards.
2. A failed key returns after a pause that doubles each time, up to LONGEST; one success resets the pause. Requests
   meanwhile do not shorten it, so that a broken deployment whose pods come and go does not run all the time.
3. The queue holds at most `most` keys. A further key is not kept but sets `overflown`, and the caller enqueues all keys
   when there is room again. So nothing is lost, and memory is bounded.
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
        """True if a key was not kept; the caller resets it when it enqueues all keys."""

        self._most = most
        self._due: dict[Key, Nanos] = {}
        # a heap by due instant; entries that `_due` no longer has are skipped
        self._order: list[tuple[Nanos, int, Key]] = []
        self._in_progress: dict[Key, Nanos | None] = {}  # keys in progress, with the instant of a further request
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, Nanos] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._due) + len(self._in_progress)

    def add(self, key: Key, now: Nanos, after: Nanos = IMMEDIATELY) -> None:
        """Enqueue a key, due after that time at the latest."""
        at = max(Nanos(now + after), self._not_before.get(key, now))
        if key in self._in_progress:
            asked = self._in_progress[key]
            self._in_progress[key] = at if asked is None else min(asked, at)
        elif key in self._due or len(self) < self._most:
            self._put(key, min(at, self._due.get(key, at)))
        else:
            self.overflown = True

    def hasten(self, key: Key, now: Nanos) -> None:
        """Enqueue a key now, despite earlier failures, because its specification has changed."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self.add(key, now)

    def take(self, now: Nanos) -> Key | None:
        """Take the key that has been due longest; it is in progress from now on."""
        while self._order and self._order[0][0] <= now:
            at, _, key = heapq.heappop(self._order)
            if self._due.get(key) == at:
                del self._due[key]
                self._in_progress[key] = None
                return key
        return None

    def due(self, now: Nanos) -> int:
        """Return the number of keys that are in progress or due."""
        return len(self._in_progress) + sum(at <= now for at in self._due.values())

    def next(self) -> Nanos | None:
        """Return when the next key is due."""
        while self._order and self._due.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def done(self, key: Key) -> None:
        """Note that a key was reconciled."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        if (again := self._in_progress.pop(key)) is not None:
            self._put(key, again)

    def failed(self, key: Key, now: Nanos, pause: Nanos | None = None) -> None:
        """Note that a key has to be reconciled again, after `pause` at the earliest if it is given."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        doubled = Nanos(min(LONGEST, SHORTEST << min(failures - 1, MOST_DOUBLINGS)))
        at = Nanos(now + max(doubled, pause or 0))
        self._not_before[key] = at
        del self._in_progress[key]
        self._put(key, at)

    def forget(self, key: Key) -> None:
        """Forget a key that has gone; if it is in progress, that ends as a success."""
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
