"""Ordered requests: request ids in the order of an integer, for queues and deadlines."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from fleet.core.ids import RequestId

QueuePosition = tuple[int, int, RequestId]
"""Rank, order of arrival and request id."""


class OrderedRequests:
    """Request ids by rank, the lowest first; equal ranks are in the order of `seq`.

    It is a sorted list, because a request may leave from any place and must leave nothing behind. Moving a thousand pointers
    takes less than a microsecond.
    """

    def __init__(self) -> None:
        self._entries: list[QueuePosition] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate from the lowest rank; valid until an entry is added or removed."""
        return (request_id for _, _, request_id in self._entries)

    def __reversed__(self) -> Iterator[RequestId]:
        """Iterate from the highest rank; valid until an entry is added or removed."""
        return (request_id for _, _, request_id in reversed(self._entries))

    def add(self, rank: int, seq: int, request_id: RequestId) -> None:
        insort(self._entries, (rank, seq, request_id))

    def discard(self, rank: int, seq: int, request_id: RequestId) -> bool:
        """Remove the entry with exactly these values; return False if there is none."""
        entry = (rank, seq, request_id)
        place = bisect_left(self._entries, entry)
        if place == len(self._entries) or self._entries[place] != entry:
            return False
        del self._entries[place]
        return True

    @property
    def first(self) -> RequestId | None:
        return self._entries[0][2] if self._entries else None

    @property
    def place(self) -> QueuePosition:
        """The first entry; there has to be one."""
        return self._entries[0]

    @property
    def lowest(self) -> int | None:
        """The rank of the first entry."""
        return self._entries[0][0] if self._entries else None

    def before(self, rank: int) -> int:
        """Return how many entries would go before a new one of this rank."""
        return bisect_left(self._entries, (rank + 1,))

    def copy(self) -> "OrderedRequests":
        copy = OrderedRequests()
        copy._entries = self._entries.copy()
        return copy

    def ids(self) -> list[RequestId]:
        return list(self)
