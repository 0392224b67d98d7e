"""Requests in an order: those that wait by priority and arrival, the deadlines by instant."""

from bisect import bisect_left, insort

from fleet.ids import ModelName, RequestId


class Ranked:
    """Request ids by rank, lowest first; equal ranks in order of `seq`.

    A sorted list, because a request may leave from anywhere (cancelled, expired) and must leave nothing behind; moving
    a thousand pointers takes less than a microsecond.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, RequestId]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, rank: int, seq: int, request_id: RequestId) -> None:
        insort(self._entries, (rank, seq, request_id))

    def discard(self, rank: int, seq: int, request_id: RequestId) -> bool:
        """Take out an entry with exactly these values; false when there is none."""
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
    def lowest(self) -> int | None:
        """Rank of the first."""
        return self._entries[0][0] if self._entries else None

    def ids(self) -> list[RequestId]:
        return [request_id for _, _, request_id in self._entries]


class WaitingRoom:
    """Queues by model: a model whose workers are busy holds nobody up who wants another."""

    def __init__(self) -> None:
        self._queues: dict[ModelName, Ranked] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def first(self, model: ModelName) -> RequestId | None:
        """Who is next; None when nobody waits for this model."""
        queue = self._queues.get(model)
        return None if queue is None else queue.first

    def add(self, model: ModelName, rank: int, seq: int, request_id: RequestId) -> None:
        self._queues.setdefault(model, Ranked()).add(rank, seq, request_id)
        self._size += 1

    def discard(self, model: ModelName, rank: int, seq: int, request_id: RequestId) -> None:
        queue = self._queues.get(model)
        if queue is None or not queue.discard(rank, seq, request_id):
            return
        self._size -= 1
        if not queue:
            del self._queues[model]

    def ids(self) -> list[RequestId]:
        return [request_id for queue in self._queues.values() for request_id in queue.ids()]

    def check(self) -> None:
        assert self._size == len(self.ids())
        assert all(self._queues.values())
