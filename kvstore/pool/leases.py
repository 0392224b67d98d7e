"""What was granted until when: leases, and reservations. Pure.

Rules:

1. Whatever is granted has a deadline, and is in a heap until then. Only the node grants itself something without one,
   and ends it itself (rule 1 of `kvstore.hierarchy.machine`).
2. A limit holds for what clients were granted; what the node grants itself is bounded by whoever asks for it.
3. Ids go up by one, from a number that differs between two starts of a node. Generations are taken from the same row.
"""

from collections.abc import Iterator

from kvstore.block import BlockHash
from kvstore.clock import Nanos
from kvstore.errors import Exhausted
from kvstore.pool.deadlines import Deadlines
from kvstore.pool.open_namespaces import OpenNamespace, StoredBlock


class BlockLease:
    """Blocks that stay where they are. Of some, the end counts as a use for the eviction policy (`is_use`)."""

    __slots__ = ("blocks", "hold", "is_use")

    def __init__(self, blocks: list[StoredBlock], *, is_use: bool, hold: tuple[bytes, str] | None = None):
        self.blocks = blocks
        self.is_use = is_use
        self.hold = hold  # namespace and session, when a session holds them


class PendingWrite:
    """One reservation: the chain that was asked for, and the blocks to write by index into it."""

    __slots__ = ("blocks", "names", "opened", "owner")

    def __init__(self, owner: str, opened: OpenNamespace, names: tuple[BlockHash, ...], blocks: dict[int, StoredBlock]):
        self.owner = owner
        self.opened = opened
        self.names = names
        self.blocks = blocks


class LeaseTable:
    """Open leases and reservations by id."""

    def __init__(self, epoch: int, limit: int):
        self._last_id = epoch << 32
        self._limit = limit
        self._open: dict[int, BlockLease | PendingWrite] = {}
        self._unending: set[int] = set()
        self._deadlines = Deadlines()
        self.reservations = 0  # open ones

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def require_room(self) -> None:
        """Before a client is granted something.

        Raises:
            Exhausted: Too much is open.
        """
        if len(self._open) - len(self._unending) >= self._limit:
            raise Exhausted(f"{self._limit} leases and reservations are open (max_leases)")

    def grant(self, what: BlockLease | PendingWrite, until: Nanos | None) -> int:
        """Its id; None: until it is ended."""
        granted = self.next_id()
        self._open[granted] = what
        self.reservations += isinstance(what, PendingWrite)
        if until is None:
            self._unending.add(granted)
        else:
            self._deadlines.add(until, granted)
        return granted

    def lease(self, granted: int) -> BlockLease | None:
        """The open lease with that id."""
        found = self._open.get(granted)
        return found if isinstance(found, BlockLease) else None

    def is_unending(self, granted: int) -> bool:
        """Whether the node has granted it to itself, and nobody else may end it."""
        return granted in self._unending

    def writing(self, granted: int) -> PendingWrite | None:
        """The open reservation with that id."""
        found = self._open.get(granted)
        return found if isinstance(found, PendingWrite) else None

    def end(self, granted: int) -> None:
        """Over before its time; its deadline stays in the heap for a while, and means nothing."""
        self.reservations -= isinstance(self._open.pop(granted), PendingWrite)
        self._unending.discard(granted)

    def due(self, now: Nanos) -> Iterator[BlockLease | PendingWrite]:
        """What ended by itself until now; it is not open any more."""
        for granted in self._deadlines.due(now):
            if (what := self._open.get(granted)) is not None:
                self.end(granted)
                yield what
        if self._deadlines.is_cluttered(len(self._open)):
            self._deadlines.keep(self._open.keys())

    def check(self) -> None:
        """Asserts the rules, and what each kind of grant holds."""
        assert self._unending <= self._open.keys()
        assert all(granted in self._deadlines or granted in self._unending for granted in self._open), (
            "something would never end"
        )
        assert len(self._open) - len(self._unending) <= self._limit
        assert self.reservations == sum(isinstance(what, PendingWrite) for what in self)

    def __iter__(self) -> Iterator[BlockLease | PendingWrite]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)
