"""Deadlines of leases and reservations by id."""

import heapq
from collections.abc import Container, Iterator

from kvstore.clock import Nanos

SLACK = 64  # number of ended entries that are not worth a sweep


class Deadlines:
    """Heap of ids by deadline. An id that ends early stays in the heap until its deadline, or until it is swept out."""

    def __init__(self) -> None:
        self._heap: list[tuple[Nanos, int]] = []

    def add(self, deadline: Nanos, ends: int) -> None:
        heapq.heappush(self._heap, (deadline, ends))

    def due(self, now: Nanos) -> Iterator[int]:
        """Yield the ids whose deadline has come, earliest first, including ids that ended early."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    def is_cluttered(self, open_ids: int) -> bool:
        """Return whether most entries have ended early, given the number of open ids."""
        return len(self._heap) > 2 * open_ids + SLACK

    def keep(self, open_ids: Container[int]) -> None:
        """Forget the ids that are not open any more."""
        self._heap = [entry for entry in self._heap if entry[1] in open_ids]
        heapq.heapify(self._heap)

    def __contains__(self, ends: int) -> bool:
        return any(entry[1] == ends for entry in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
