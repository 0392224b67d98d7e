"""Virtual time.

Rules:

1. Time moves only from one event to the next; an event is a call without arguments, due at an instant.
2. Events of one instant happen in an order that the seed draws: what depends on such an order shows between seeds.
3. The same calls with the same seed happen in the same order, always.
"""

import heapq
from collections.abc import Callable
from random import Random

from fleet.clock import Nanos


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]):
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Kernel:
    """The heap of events; a `fleet.clock.Clock` too."""

    def __init__(self, seed: int):
        self._heap: list[tuple[int, float, int, Event]] = []
        self._tie = Random(seed).random
        self._scheduled = 0
        self._now = Nanos(0)

    def now(self) -> Nanos:
        return self._now

    def at(self, when: Nanos, action: Callable[[], None]) -> Event:
        """Have something happen; what was due before now happens now."""
        event = Event(action)
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when, self._now), self._tie(), self._scheduled, event))
        return event

    def after(self, delay: Nanos, action: Callable[[], None]) -> Event:
        return self.at(Nanos(self._now + delay), action)

    def run(self, until: Nanos | None = None) -> int:
        """Let events happen until there are none, or the next one is later than `until`; returns how many happened."""
        heap, happened = self._heap, 0
        while heap and (until is None or heap[0][0] <= until):
            when, _, _, event = heapq.heappop(heap)
            if event.action is not None:
                self._now = Nanos(when)
                event.action()
                happened += 1
        return happened
