"""Virtual time.

Rules:

1. Time moves only from one event to the next; an event is a call without arguments, due at an instant.
2. Events of one instant happen in an order that the seed draws: what depends on such an order shows between seeds.
3. The same calls with the same seed happen in the same order, always.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from fleet.core.clock import Nanos

ScheduledEvent = list[Any]
"""Something that will happen, unless it is cancelled: when, luck, number, action. A list, since lists are made and compared
without a call of Python; Any, since each of the four is something else."""

_ACTION = 3


def cancel(event: ScheduledEvent) -> None:
    """It will not happen."""
    event[_ACTION] = None


class Kernel:
    """The heap of events; a `fleet.core.clock.Clock` too."""

    def __init__(self, seed: int, begin: int = 0):
        self._heap: list[ScheduledEvent] = []
        self._tie = Random(seed).random
        self._scheduled = 0
        self.instant = Nanos(begin)
        """The present, for those who ask often; theirs to read."""

    def now(self) -> Nanos:
        return self.instant

    def at(self, when: int, action: Callable[[], None]) -> ScheduledEvent:
        """Have something happen; what was due before now happens now."""
        if when < self.instant:  # noqa: PLR1730 - max() takes longer than all the rest
            when = self.instant
        self._scheduled += 1
        event = [when, self._tie(), self._scheduled, action]
        heappush(self._heap, event)
        return event

    def after(self, delay: int, action: Callable[[], None]) -> ScheduledEvent:
        assert delay >= 0, delay
        self._scheduled += 1
        event = [self.instant + delay, self._tie(), self._scheduled, action]
        heappush(self._heap, event)
        return event

    def skip(self, to: Nanos) -> None:
        """Let time pass in which nothing happens."""
        assert self.instant <= to, (self.instant, to)
        assert not self._heap or self._heap[0][0] >= to, self._heap[0]
        self.instant = to

    def run(self, until: Nanos | None = None) -> int:
        """Let events happen until there are none, or the next one is later than `until`; returns how many happened."""
        heap, happened, pop = self._heap, 0, heappop
        while heap and (until is None or heap[0][0] <= until):
            self.instant, _, _, action = pop(heap)
            if action is not None:
                action()
                happened += 1
        return happened
