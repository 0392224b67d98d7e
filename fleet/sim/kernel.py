"""Kernel: the event heap that moves virtual time.

Rules:

1. Time moves only from one event to the next, or by `Kernel.skip`. An event is a call without arguments that is due at an instant.
2. Events of one instant run in a random order that the seed determines. So a result that depends on their order differs between seeds.
3. The same calls with the same seed always give the same order of events.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from fleet.core.clock import Nanos

ScheduledEvent = list[Any]
"""An event: instant, random tie-breaker, number in the order of scheduling, and action (None: the event was cancelled).

Events are lists, because a class with its own comparison would be slower.
"""

_ACTION = 3


def cancel(event: ScheduledEvent) -> None:
    """Cancel an event: its action will not be called."""
    event[_ACTION] = None


class Kernel:
    """Runs events in the order of their instants. Implements `fleet.core.clock.Clock`."""

    def __init__(self, seed: int, begin: int = 0):
        self._heap: list[ScheduledEvent] = []
        self._tie = Random(seed).random
        self._scheduled = 0
        self.instant = Nanos(begin)
        """The present instant; only the kernel sets it. Reading it is faster than calling `now()`."""

    def now(self) -> Nanos:
        return self.instant

    def at(self, when: int, action: Callable[[], None]) -> ScheduledEvent:
        """Schedule an action at the instant `when`, or at the present instant if `when` is past."""
        if when < self.instant:  # noqa: PLR1730 - max() would be slower
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
        """Move time forward to an instant without running events. No event may be due earlier than this instant."""
        assert self.instant <= to, (self.instant, to)
        assert not self._heap or self._heap[0][0] >= to, self._heap[0]
        self.instant = to

    def run(self, until: Nanos | None = None) -> int:
        """Run events until none is left, or until the next event is later than `until`. Return the number of events that ran."""
        heap, happened, pop = self._heap, 0, heappop
        while heap and (until is None or heap[0][0] <= until):
            self.instant, _, _, action = pop(heap)
            if action is not None:
                action()
                happened += 1
        return happened
