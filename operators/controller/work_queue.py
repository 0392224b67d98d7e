"""What is to be looked at: keys, each once however often it is asked for. Pure.

Rules:

1. A key is in hand once at a time. What is asked for while it is in hand comes after that.
2. A key that failed comes back after a pause that doubles each time, up to LONGEST; one look that succeeds and it starts anew.
   What is asked for meanwhile does not shorten that: a broken deployment whose pods come and go is not looked at all the time.
3. There are `most` keys at a time. One more is not kept but remembered as *too many*, and whoever runs this asks for all of them when there is
   room again: nothing is lost, and memory is bounded.
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
        """Whether a key was not kept; to be set back by whoever asks for all of them."""

        self._most = most
        self._due: dict[Key, Nanos] = {}
        self._order: list[tuple[Nanos, int, Key]] = []  # what is not in `_due` for that instant any more is passed over
        self._in_hand: dict[Key, Nanos | None] = {}  # and when it is to be looked at again, if somebody asked
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, Nanos] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._due) + len(self._in_hand)

    def add(self, key: Key, now: Nanos, after: Nanos = IMMEDIATELY) -> None:
        """Have it looked at, `after` so long at the latest."""
        at = max(Nanos(now + after), self._not_before.get(key, now))
        if key in self._in_hand:
            asked = self._in_hand[key]
            self._in_hand[key] = at if asked is None else min(asked, at)
        elif key in self._due or len(self) < self._most:
            self._put(key, min(at, self._due.get(key, at)))
        else:
            self.overflown = True

    def hasten(self, key: Key, now: Nanos) -> None:
        """Have it looked at now, whatever went wrong before: somebody has changed what is wished."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self.add(key, now)

    def take(self, now: Nanos) -> Key | None:
        """The key that has been due for longest, which is in hand from now on."""
        while self._order and self._order[0][0] <= now:
            at, _, key = heapq.heappop(self._order)
            if self._due.get(key) == at:
                del self._due[key]
                self._in_hand[key] = None
                return key
        return None

    def due(self, now: Nanos) -> int:
        """Keys that are in hand, or should be."""
        return len(self._in_hand) + sum(at <= now for at in self._due.values())

    def next(self) -> Nanos | None:
        """When the next key is due."""
        while self._order and self._due.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def done(self, key: Key) -> None:
        """It was looked at."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        if (again := self._in_hand.pop(key)) is not None:
            self._put(key, again)

    def failed(self, key: Key, now: Nanos, pause: Nanos | None = None) -> None:
        """It has to be looked at again; after `pause` at the earliest, if that is given."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        doubled = Nanos(min(LONGEST, SHORTEST << min(failures - 1, MOST_DOUBLINGS)))
        at = Nanos(now + max(doubled, pause or 0))
        self._not_before[key] = at
        del self._in_hand[key]
        self._put(key, at)

    def forget(self, key: Key) -> None:
        """It is no more; what is in hand ends as if it had been looked at."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def check(self) -> None:
        assert len(self) <= self._most
        assert not self._due.keys() & self._in_hand.keys(), "a key is either due or in hand"
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
