"""The blocks of one tier of one node: who writes, who reads, what goes. Pure; the server performs its commands.

Rules:

1. A block is reserved by one writer, becomes readable when published (its checksum is known by then), is pinned while
   matched under a lease, and goes by eviction or because its bytes were found bad. `kvstore.lifecycle` says what may follow what.
2. Every reservation and every lease has an owner and a deadline. What is not published or released by then is
   reclaimed, so a process that died holds nothing for longer. Only the owner of a reservation can publish it; a lease
   may be released by anyone who knows its id, since the process that reads is often not the one that matched.
3. A publication ends its reservation: places that it does not name are free again.
4. A place gets a new generation each time it is given to a block. Generations and ids begin at a number that differs
   between two starts of a node, so those of an earlier start never fit.
5. Only published blocks without a pin can be evicted. A block that is condemned while pinned is no longer found, but
   its place is not reused until the last pin is gone.
6. Chains are handed over from their start. What a match or a reservation names is used in reverse order, tail first,
   so that a policy which evicts the oldest takes the tail of a chain before what the tail depends on. Holes are
   possible nevertheless; a match stops at the first.
7. Namespaces keep apart what may not be mixed. One set of weights (model, revision, LoRA) in two layouts at a time is
   a configuration error that would only show as a cache that never hits, so the second is refused.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvstore.block import ChainHash
from kvstore.clock import Nanos
from kvstore.deadlines import Deadlines
from kvstore.errors import Exhausted
from kvstore.extents import Extents, pages_for
from kvstore.layout import Namespace
from kvstore.lifecycle import READABLE, State, Step, advance
from kvstore.messages import (
    NO_LEASE,
    NO_RESERVATION,
    Address,
    BlockChanges,
    BlockKey,
    Claim,
    Discard,
    Leased,
    LeaseId,
    Reservation,
    ReservationId,
    Reserved,
    Slot,
    Stats,
    TierCommand,
)
from kvstore.namespaces import Namespaces, StoredBlock
from kvstore.ports import Eviction
from kvstore.settings import PAGE_BYTES


class _Lease:
    __slots__ = ("blocks", "owner")

    def __init__(self, owner: str, blocks: tuple[StoredBlock, ...]):
        self.owner = owner
        self.blocks = blocks


class _Writing:
    """One reservation: the chain that was asked for, and the blocks to write by index into it."""

    __slots__ = ("blocks", "digest", "names", "owner")

    def __init__(self, owner: str, digest: bytes, names: tuple[ChainHash, ...], blocks: dict[int, StoredBlock]):
        self.owner = owner
        self.digest = digest
        self.names = names
        self.blocks = blocks


class BlockMachine:
    """See the module. Methods that take `now` first reclaim what has ended by then.

    After every call, `commands()` has to be performed on the tier before anyone learns of the call's result.
    """

    def __init__(
        self,
        capacity_bytes: int,
        eviction: Eviction,
        *,
        epoch: int,
        max_leases: int = 65_536,
        max_namespaces: int = 256,
    ):
        """Starts empty.

        Args:
            capacity_bytes: Size of the tier; a rest that fills no page stays unused.
            eviction: Has admitted nothing yet.
            epoch: 1 to 2³¹-1, different at every start of the node (rule 4).
            max_leases: Leases and reservations at a time.
            max_namespaces: Open at a time.
        """
        assert 0 < epoch < 1 << 31, epoch
        self._extents = Extents(capacity_bytes)
        self._eviction = eviction
        self._max_leases = max_leases
        self._last_id = epoch << 32
        self._namespaces = Namespaces(self._extents.capacity_bytes, max_namespaces)
        self._by_offset: dict[int, StoredBlock] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._writing: dict[ReservationId, _Writing] = {}
        self._deadlines = Deadlines()
        self._commands: list[TierCommand] = []
        self._changed: dict[bytes, dict[ChainHash, bool]] = {}  # namespace -> name -> stored (else removed)
        self._pinned = self._hits = self._misses = self._written = self._evicted = self._corrupt = self._expired = 0

    # Namespaces

    def open(self, namespace: Namespace, now: Nanos) -> None:
        """Make a namespace known; see `Namespaces.open`."""
        self.expire(now)
        self._namespaces.open(namespace, now)

    def namespace(self, digest: bytes) -> Namespace:
        """The namespace with that digest.

        Raises:
            NamespaceUnknown: It was never opened.
        """
        return self._namespaces.get(digest).namespace

    # Reading

    def match(self, digest: bytes, names: Sequence[ChainHash], *, owner: str, lease: Nanos, now: Nanos) -> Leased:
        """Slots of the longest readable prefix, pinned for `lease` nanoseconds; 0 looks only.

        Raises:
            NamespaceUnknown: It was never opened; nothing was pinned.
            Exhausted: Too many leases; nothing was pinned.
        """
        self.expire(now)
        opened = self._namespaces.use(digest, now)
        found: list[StoredBlock] = []
        for name in names:
            block = opened.blocks.get(name)
            if block is None or block.state not in READABLE:
                break
            found.append(block)
        slots = tuple(block.slot for block in found)
        if lease == 0:
            return Leased(lease_id=NO_LEASE, slots=slots)
        if found:
            self._require_room_for_a_lease()
        self._hits += len(found)
        self._misses += len(names) - len(found)
        if not found:
            return Leased(lease_id=NO_LEASE, slots=())
        for block in found:
            self._pin(block)
        lease_id = LeaseId(self._next_id())
        self._leases[lease_id] = _Lease(owner, tuple(found))
        self._deadlines.add(Nanos(now + lease), lease_id)
        return Leased(lease_id=lease_id, slots=slots)

    def release(self, lease_ids: Iterable[LeaseId], now: Nanos) -> None:
        """End leases early; those that have ended already are ignored."""
        self.expire(now)
        for lease_id in lease_ids:
            self._end_lease(lease_id, now)

    def readable(self, digest: bytes, slot: Slot) -> Address | None:
        """Where to read; None when the slot is another block's by now, or not of this namespace."""
        block = self._by_offset.get(slot.offset)
        if block is None or block.state not in READABLE or not _is(block, digest, slot):
            return None
        return block.address

    # Writing

    def reserve(
        self, digest: bytes, names: Sequence[ChainHash], *, owner: str, lease: Nanos, now: Nanos
    ) -> Reservation:
        """Places for those blocks of a chain that nobody holds or writes, as far as there is space (rule 6).

        Raises:
            NamespaceUnknown: It was never opened; nothing was reserved.
            Exhausted: Too many reservations; nothing was reserved.
        """
        assert lease > 0, lease
        self.expire(now)
        opened = self._namespaces.use(digest, now)
        self._require_room_for_a_lease()
        refused = 0
        held = [block for name in names if (block := opened.blocks.get(name)) is not None and block.state in READABLE]
        for block in held:  # while the rest of the chain looks for space, it must not push out its own beginning
            self._pin(block)
        blocks: dict[int, StoredBlock] = {}
        for index, name in enumerate(names):
            if name in opened.blocks:
                continue
            block = self._place(BlockKey(digest, name), opened.namespace.block_bytes) if not refused else None
            if block is None:
                refused += 1
                continue
            opened.blocks[name] = block
            blocks[index] = block
        for block in reversed(held):
            self._unpin(block, now)
        if not blocks:
            return Reservation(reservation_id=NO_RESERVATION, reserved=(), refused=refused)
        reservation_id = ReservationId(self._next_id())
        self._writing[reservation_id] = _Writing(owner, digest, tuple(names), blocks)
        self._deadlines.add(Nanos(now + lease), reservation_id)
        reserved = tuple(Reserved(index, block.slot) for index, block in blocks.items())
        return Reservation(reservation_id=reservation_id, reserved=reserved, refused=refused)

    def publish(self, reservation_id: ReservationId, checksums: Mapping[int, int], *, owner: str, now: Nanos) -> int:
        """Make written blocks readable and end their reservation (rule 3).

        Args:
            reservation_id: From `reserve`.
            checksums: CRC-32C of the blocks that were written, by index; indexes that were not reserved are ignored.
            owner: Must be the one that reserved.
            now: The present.

        Returns:
            Blocks published; 0 when the reservation has ended or is another's.
        """
        self.expire(now)
        writing = self._writing.get(reservation_id)
        if writing is None or writing.owner != owner:
            return 0
        del self._writing[reservation_id]
        changed = self._changed.setdefault(writing.digest, {})
        published = 0
        for index, block in writing.blocks.items():
            if index not in checksums:
                self._drop(block, Step.ABANDON)
                continue
            block.crc32c = checksums[index]
            block.state = advance(block.state, Step.PUBLISH)
            published += 1
            changed[block.address.key.name] = True
        opened = self._namespaces.get(writing.digest)
        for name in reversed(writing.names):  # the new blocks, and the use of those they continue (rule 6)
            block_now = opened.blocks.get(name)
            if block_now is not None and block_now.state is State.HELD:
                self._eviction.admit(block_now.address.key, block_now.address.length, now)
        self._written += published
        return published

    def writable(self, digest: bytes, slot: Slot) -> Address | None:
        """Where to write; None when the reservation has ended, or is not of this namespace."""
        block = self._by_offset.get(slot.offset)
        if block is None or block.state is not State.RESERVED or not _is(block, digest, slot):
            return None
        return block.address

    # Upkeep

    def condemn(self, digest: bytes, name: ChainHash, generation: int, now: Nanos) -> bool:
        """Drop a block whose bytes are bad; False when it is not that block's generation any more."""
        self.expire(now)
        block = self._namespaces.get(digest).blocks.get(name)
        if block is None or block.address.generation != generation or block.state not in READABLE:
            return False
        if block.state is State.PINNED:
            block.state = advance(block.state, Step.CONDEMN)
            self._forget(block)
        else:
            self._eviction.withdraw(block.address.key)
            self._drop(block, Step.CONDEMN)
        self._corrupt += 1
        return True

    def find(self, digest: bytes, name: ChainHash) -> Slot | None:
        """The slot of a readable block.

        Raises:
            NamespaceUnknown: It was never opened.
        """
        block = self._namespaces.get(digest).blocks.get(name)
        return block.slot if block is not None and block.state in READABLE else None

    def expire(self, now: Nanos) -> None:
        """Reclaim what leases and reservations that ended by `now` were holding."""
        for ended in self._deadlines.due(now):
            if self._end_lease(LeaseId(ended), now) or self._end_reservation(ReservationId(ended)):
                self._expired += 1
        if self._deadlines.is_cluttered(len(self._leases) + len(self._writing)):
            self._deadlines.keep(self._leases.keys() | self._writing.keys())

    def commands(self) -> list[TierCommand]:
        """What the tier has to do, in order; each is handed out once."""
        commands, self._commands = self._commands, []
        return commands

    def changes(self) -> list[BlockChanges]:
        """What watchers have to learn; each change is handed out once."""
        changed, self._changed = self._changed, {}
        return [
            BlockChanges(
                digest=digest,
                stored=tuple(name for name, stored in names.items() if stored),
                removed=tuple(name for name, stored in names.items() if not stored),
            )
            for digest, names in changed.items()
            if names
        ]

    def held(self) -> list[BlockChanges]:
        """All readable blocks, one item a namespace: the dump that a watcher begins with."""
        return [
            BlockChanges(
                digest=opened.namespace.digest,
                stored=tuple(name for name, block in opened.blocks.items() if block.state in READABLE),
            )
            for opened in self._namespaces
        ]

    def stats(self) -> Stats:
        readable = self._pinned + len(self._eviction) - self._condemned()
        return Stats(
            blocks=readable,
            bytes=self._extents.capacity_bytes - self._extents.free_bytes,
            capacity_bytes=self._extents.capacity_bytes,
            hits=self._hits,
            misses=self._misses,
            written=self._written,
            evicted=self._evicted,
            corrupt=self._corrupt,
            expired=self._expired,
            pinned=self._pinned,
        )

    def check(self) -> None:
        """Asserts the rules, over everything there is. Slow: for tests, and for idle moments."""
        self._extents.check()
        pins: dict[int, int] = {}
        for lease in self._leases.values():
            for block in lease.blocks:
                pins[block.address.generation] = pins.get(block.address.generation, 0) + 1
        reserved = {block.address.generation for writing in self._writing.values() for block in writing.blocks.values()}
        areas = [(offset, length) for offset, length in self._extents.free_extents()]
        admitted = pinned = 0
        for offset, block in self._by_offset.items():
            address = block.address
            assert address.offset == offset
            areas.append((offset, pages_for(address.length) * PAGE_BYTES))
            assert block.pins == pins.get(address.generation, 0), "a pin without a lease, or the other way round"
            assert (block.pins > 0) == (block.state in (State.PINNED, State.CONDEMNED))
            assert (address.generation in reserved) == (block.state is State.RESERVED)
            assert (address.key in self._eviction and self._found(address.key) is block) == (block.state is State.HELD)
            assert (self._found(address.key) is block) == (block.state is not State.CONDEMNED)
            assert block.state is not State.GONE
            admitted += block.state is State.HELD
            pinned += block.pins > 0
        assert admitted == len(self._eviction), "the policy knows blocks that are not there"
        assert pinned == self._pinned
        assert sum(len(opened.blocks) for opened in self._namespaces) + self._condemned() == len(self._by_offset)
        end = 0
        for offset, length in sorted(areas):
            assert offset == end, "space is lost, or given away twice"
            end = offset + length
        assert end == self._extents.capacity_bytes
        assert all(ends in self._deadlines for ends in (*self._leases, *self._writing)), "something would never end"
        assert len(self._leases) + len(self._writing) <= self._max_leases

    # Blocks

    def _place(self, key: BlockKey, length: int) -> StoredBlock | None:
        """A new block; makes room if it must. None when nothing more may go."""
        while (offset := self._extents.take(length)) is None:
            victim = self._eviction.choose()
            if victim is None:
                return None
            self._eviction.withdraw(victim)
            self._drop(self._namespaces.get(victim.digest).blocks[victim.name], Step.EVICT)
            self._evicted += 1
        block = StoredBlock(Address(key=key, offset=offset, length=length, generation=self._next_id()))
        self._by_offset[offset] = block
        self._commands.append(Claim(block.address))
        return block

    def _pin(self, block: StoredBlock) -> None:
        block.pins += 1
        if block.pins == 1:
            block.state = advance(block.state, Step.PIN)
            self._eviction.withdraw(block.address.key)
            self._pinned += 1

    def _unpin(self, block: StoredBlock, now: Nanos) -> None:
        block.pins -= 1
        if block.pins:
            return
        self._pinned -= 1
        if block.state is State.CONDEMNED:
            block.state = advance(block.state, Step.UNPIN)
            self._free(block)
        else:
            block.state = advance(block.state, Step.UNPIN)
            self._eviction.admit(block.address.key, block.address.length, now)

    def _drop(self, block: StoredBlock, step: Step) -> None:
        """The end of a block that nobody has pinned; the policy does not know it (any more)."""
        was_readable = block.state in READABLE
        block.state = advance(block.state, step)
        if was_readable:
            self._forget(block)
        else:
            del self._namespaces.get(block.address.key.digest).blocks[block.address.key.name]
        self._free(block)

    def _forget(self, block: StoredBlock) -> None:
        """The block is not found any more, and watchers learn it."""
        key = block.address.key
        del self._namespaces.get(key.digest).blocks[key.name]
        self._changed.setdefault(key.digest, {})[key.name] = False

    def _free(self, block: StoredBlock) -> None:
        address = block.address
        del self._by_offset[address.offset]
        self._extents.give_back(address.offset, address.length)
        self._commands.append(Discard(address))

    # Leases and reservations

    def _end_lease(self, lease_id: LeaseId, now: Nanos) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        for block in reversed(lease.blocks):
            self._unpin(block, now)
        return True

    def _end_reservation(self, reservation_id: ReservationId) -> bool:
        writing = self._writing.pop(reservation_id, None)
        if writing is None:
            return False
        for block in writing.blocks.values():
            self._drop(block, Step.ABANDON)
        return True

    def _require_room_for_a_lease(self) -> None:
        if len(self._leases) + len(self._writing) >= self._max_leases:
            raise Exhausted(f"{self._max_leases} leases and reservations are open (max_leases)")

    # The rest

    def _found(self, key: BlockKey) -> StoredBlock | None:
        return self._namespaces.get(key.digest).blocks.get(key.name) if key.digest in self._namespaces else None

    def _condemned(self) -> int:
        return len(self._by_offset) - sum(len(opened.blocks) for opened in self._namespaces)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _is(block: StoredBlock, digest: bytes, slot: Slot) -> bool:
    return block.address.generation == slot.generation and block.address.key.digest == digest
