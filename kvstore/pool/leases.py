"""Lease table: open leases and write reservations with their deadlines.

Rules:

1. Each lease and reservation of a client has a deadline, and its id is in a heap until then. The node's own leases and
   reservations have no deadline; the node ends them itself (rule 1 of `kvstore.hierarchy.machine`).
2. The number of leases and reservations of clients together is limited. The node's own leases do not count: the parts
   of the node that need leases limit their number themselves.
3. Ids are consecutive numbers. The first one differs at each start of a node. Slot generations come from the same
   sequence.
"""

import heapq
from collections.abc import Container, Iterator

from kvstore.block import BlockHash
from kvstore.clock import Nanos
from kvstore.errors import Exhausted
from kvstore.pool.open_namespaces import OpenNamespace, StoredBlock

SLACK = 64
"""The ids of ended leases and reservations are removed from the heap (rule 1) when the heap has more entries than twice
the number of open ones plus this number."""


class BlockLease:
    """A lease on blocks. The blocks are not evicted before it ends.

    Attributes:
        is_use: True if the end of the lease counts as a use of the blocks for the eviction policy.
    """

    __slots__ = ("blocks", "hold", "is_use")

    def __init__(self, blocks: list[StoredBlock], *, is_use: bool, hold: tuple[bytes, str] | None = None):
        self.blocks = blocks
        self.is_use = is_use
        self.hold = hold  # key of the session pin (`kvstore.pool.session_pins`); None if this lease is no session pin


class PendingWrite:
    """Records one write reservation: the requested chain, and its blocks that the owner will write, by index in the chain."""

    __slots__ = ("blocks", "names", "opened", "owner")

    def __init__(self, owner: str, opened: OpenNamespace, names: tuple[BlockHash, ...], blocks: dict[int, StoredBlock]):
        self.owner = owner
        self.opened = opened
        self.names = names
        self.blocks = blocks


class LeaseTable:
    """Records the open leases and reservations by id."""

    def __init__(self, epoch: int, limit: int):
        self._last_id = epoch << 32
        self._limit = limit
        self._open: dict[int, BlockLease | PendingWrite] = {}
        self._unending: set[int] = set()
        self.deadlines = _Deadlines()
        self.reservations = 0  # number of open write reservations; the other entries of `_open` are leases

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def require_room(self) -> None:
        """Raise Exhausted if clients already have the maximum number of leases and reservations."""
        if len(self._open) - len(self._unending) >= self._limit:
            raise Exhausted(f"{self._limit} leases and reservations are open (max_leases)")

    def grant(self, entry: BlockLease | PendingWrite, until: Nanos | None) -> int:
        """Open a lease or a reservation and return its id.

        If `until` is None, the entry stays open until `end` is called.
        """
        granted = self.next_id()
        self._open[granted] = entry
        self.reservations += isinstance(entry, PendingWrite)
        if until is None:
            self._unending.add(granted)
        else:
            self.deadlines.add(until, granted)
        return granted

    def lease(self, granted: int) -> BlockLease | None:
        """Return the open lease with this id; None if there is none."""
        found = self._open.get(granted)
        return found if isinstance(found, BlockLease) else None

    def is_unending(self, granted: int) -> bool:
        """Return whether the id belongs to a lease or reservation of the node itself, which clients must not end."""
        return granted in self._unending

    def writing(self, granted: int) -> PendingWrite | None:
        """Return the open reservation with this id; None if there is none."""
        found = self._open.get(granted)
        return found if isinstance(found, PendingWrite) else None

    def end(self, granted: int) -> None:
        """Remove a lease or reservation.

        If its deadline has not come yet, its entry stays in the heap for a while without effect.
        """
        self.reservations -= isinstance(self._open.pop(granted), PendingWrite)
        self._unending.discard(granted)

    def due(self, now: Nanos) -> Iterator[BlockLease | PendingWrite]:
        """Close all leases and reservations whose deadline has passed, and yield them."""
        for granted in self.deadlines.due(now):
            if (entry := self._open.get(granted)) is not None:
                self.end(granted)
                yield entry
        if self.deadlines.is_cluttered(len(self._open)):
            self.deadlines.keep(self._open.keys())

    def check(self) -> None:
        """Assert that ids, deadlines and counts keep the rules of this module; for tests."""
        assert self._unending <= self._open.keys()
        assert all(granted in self.deadlines or granted in self._unending for granted in self._open), (
            "a lease has no deadline"
        )
        assert len(self._open) - len(self._unending) <= self._limit
        assert self.reservations == sum(isinstance(entry, PendingWrite) for entry in self)

    def __iter__(self) -> Iterator[BlockLease | PendingWrite]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)


class _Deadlines:
    """Holds the ids of leases and reservations in a heap, and returns each id when its deadline has come.

    The id of a lease that ends early stays in the heap until its deadline or until `keep` removes it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Nanos, int]] = []

    def add(self, deadline: Nanos, ends: int) -> None:
        heapq.heappush(self._heap, (deadline, ends))

    def due(self, now: Nanos) -> Iterator[int]:
        """Yield the ids whose deadline has come, earliest first, including ids that ended early."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    def is_cluttered(self, open_ids: int) -> bool:
        """Return True if the heap has so many ids of ended leases that `keep` has to remove them (`SLACK`)."""
        return len(self._heap) > 2 * open_ids + SLACK

    def keep(self, open_ids: Container[int]) -> None:
        """Remove all ids from the heap that are not in `open_ids`: their leases or reservations have ended early."""
        self._heap = [entry for entry in self._heap if entry[1] in open_ids]
        heapq.heapify(self._heap)

    def __contains__(self, ends: int) -> bool:
        return any(entry[1] == ends for entry in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
