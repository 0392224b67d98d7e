"""The blocks in a node's pool: who writes, who reads, what goes. Pure; the server performs its commands.

Rules:

1. A block is reserved by one writer, becomes readable when published (its checksum is known by then), is pinned while
   matched under a lease, and goes by eviction or because its bytes were found bad. `kvstore.pool.lifecycle` says what may follow what.
2. Every reservation and every lease has an owner and a deadline. What is not published or released by then is
   reclaimed, so a process that died holds nothing for longer. Only the owner of a reservation can publish it; a lease
   may be released by anyone who knows its id, since the process that reads is often not the one that matched. Only what
   the node itself reserves or pins may have no deadline: its own threads move bytes there, and say when they are through.
3. A publication ends its reservation: places that it does not name are free again.
4. A place gets a new generation each time it is given to a block. Generations and ids begin at a number that differs
   between two starts of a node, so those of an earlier start never fit.
5. Only published blocks without a pin can be evicted. A block that is condemned while pinned is no longer found, but
   its place is not reused until the last pin is gone.
6. Chains are handed over from their start. What a match or a publication names is used in reverse order, tail first,
   so that a policy which evicts the oldest takes the tail of a chain before what the tail depends on. Holes are
   possible nevertheless; a match stops at the first.
7. Namespaces keep apart what may not be mixed. One set of weights (model, revision, LoRA) in two layouts at a time is
   a configuration error that would only show as a cache that never hits, so the second is refused.
8. The policy learns of a use when it is over. A block that it chooses while it is pinned is withdrawn, and admitted
   again with its last pin; so pinning a chain costs nothing there, unless space is short.
9. A tenant beyond its quota makes room among its own blocks, or is refused (`kvstore.pool.quotas`). A session that waits may
   hold its blocks, as far as holds may (`kvstore.pool.session_pins`).
"""

from collections.abc import Iterable, Mapping, Sequence

from kvstore.block import HASH_BYTES, BlockHash
from kvstore.clock import Nanos
from kvstore.hierarchy.transfers import PinnedBlocks
from kvstore.messages import (
    NO_LEASE,
    NO_RESERVATION,
    NODE,
    Address,
    BlockChanges,
    BlockKey,
    LeasedSlots,
    LeaseId,
    ReservationId,
    SessionPinResult,
    Slot,
    Slots,
    Stats,
    TierCommand,
    WriteReservation,
)
from kvstore.namespace import KvNamespace
from kvstore.pool.allocator import PoolAllocator
from kvstore.pool.leases import BlockLease, LeaseTable, PendingWrite
from kvstore.pool.lifecycle import READABLE, BlockState, BlockTransition, advance
from kvstore.pool.open_namespaces import OpenNamespace, StoredBlock
from kvstore.pool.quotas import TenantQuotas
from kvstore.pool.session_pins import SessionPins
from kvstore.ports import Eviction

KNOWN_KEY = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Of the look-up table where nobody chooses names to make them collide, and the same history has to give the same order: in
replays and tests."""

PINNED, CONDEMNED, GONE = BlockState.PINNED, BlockState.CONDEMNED, BlockState.GONE
"""Looked up once, as in `kvstore.pool.allocator`."""


class BlockMachine:
    """See the module. Methods that take `now` first reclaim what has ended by then.

    After every call, `commands()` has to be performed on the pool's memory before anyone learns of the call's result.
    """

    def __init__(
        self,
        capacity_bytes: int,
        eviction: Eviction,
        *,
        epoch: int,
        max_leases: int = 65_536,
        max_namespaces: int = 256,
        max_held_bytes: int = 0,
        quotas: TenantQuotas | None = None,
        table_key: tuple[int, int] = KNOWN_KEY,
    ):
        """Starts empty.

        Args:
            capacity_bytes: Size of the pool; a rest that fills no page stays unused.
            eviction: Has admitted nothing yet.
            epoch: 1 to 2³¹-1, different at every start of the node (rule 4).
            max_leases: Leases, holds and reservations of clients at a time.
            max_namespaces: Open at a time.
            max_held_bytes: That all holds together may keep.
            quotas: Of tenants; none by default.
            table_key: Of `kvstore.native.tables`; a secret where clients choose names.
        """
        assert 0 < epoch < 1 << 31, epoch
        self._allocator = PoolAllocator(capacity_bytes, eviction, max_namespaces, table_key)
        self._namespaces = self._allocator.namespaces
        self._quotas = quotas
        self._pins = SessionPins(max_held_bytes)
        self._leases = LeaseTable(epoch, max_leases)
        self._pinned = self._hits = self._misses = self._written = self._corrupt = self._expired = 0
        self._refused = self._bytes_matched = self._bytes_written = 0

    # Namespaces

    def open(self, namespace: KvNamespace, now: Nanos) -> None:
        """Make a namespace known; see `Namespaces.open`."""
        self.expire(now)
        self._namespaces.open(namespace, now)

    def namespace(self, digest: bytes) -> KvNamespace:
        """The namespace with that digest.

        Raises:
            NamespaceUnknown: It was never opened.
        """
        return self._namespaces.get(digest).namespace

    def block_bytes(self, digest: bytes) -> int:
        """Of each block of that namespace. Raises as `namespace` does."""
        return self.namespace(digest).block_bytes

    # Reading

    def match(
        self, digest: bytes, names: Sequence[BlockHash] | bytes, *, lease: Nanos, now: Nanos, tenant: bytes = b""
    ) -> LeasedSlots:
        """Slots of the longest readable prefix, pinned for `lease` nanoseconds; 0 looks only.

        Args:
            digest: Of the namespace.
            names: The chain from its start; as bytes, its names follow each other.
            lease: See above.
            now: The present.
            tenant: Who is counted.

        Raises:
            NamespaceUnknown: It was never opened; nothing was pinned.
            Exhausted: Too many leases; nothing was pinned.
        """
        self.expire(now)
        opened = self._namespaces.use(digest, now)
        joined = names if isinstance(names, bytes) else b"".join(names)
        slots = Slots(opened.readable.slots(joined))
        if lease == 0:
            return LeasedSlots(lease_id=NO_LEASE, slots=slots)
        found = opened.readable.blocks(joined[: len(slots) * HASH_BYTES])
        if found:
            self._leases.require_room()
        self._count_match(opened, len(found), len(joined) // HASH_BYTES - len(found), tenant)
        if not found:
            return LeasedSlots(lease_id=NO_LEASE, slots=slots)
        return LeasedSlots(lease_id=self._lease(BlockLease(found, is_use=True), Nanos(now + lease)), slots=slots)

    def release(self, lease_ids: Iterable[LeaseId], now: Nanos) -> None:
        """End leases early; those that have ended already are ignored, and so is what the node pins for itself."""
        self.expire(now)
        for lease_id in lease_ids:
            if self._leases.is_unending(lease_id):
                continue  # ids can be guessed, and its own threads are copying there
            if (lease := self._leases.lease(lease_id)) is not None and lease.hold is None:
                self._leases.end(lease_id)
                self._end(lease, now)

    def readable(self, digest: bytes, slot: Slot) -> Address | None:
        """Where to read; None when the slot is another block's by now, or not of this namespace."""
        block = self._allocator.at(digest, slot)
        return block.address if block is not None and block.state in READABLE else None

    # Holding

    def hold(
        self, digest: bytes, names: Sequence[BlockHash], *, session: str, span: Nanos, now: Nanos
    ) -> SessionPinResult:
        """Keep the longest readable prefix from eviction for a session that waits, as far as holds may.

        Takes the place of the session's former hold in that namespace, if there is one.

        Raises:
            NamespaceUnknown: It was never opened; nothing is held.
            Exhausted: Too many leases; the former hold is over, and nothing is held.
        """
        assert span > 0, span
        self.release_hold(digest, session, now)
        opened = self._namespaces.use(digest, now)
        found = opened.readable.blocks(b"".join(names))
        fitting = self._pins.fitting(found)
        refused = len(found) - fitting
        del found[fitting:]
        if found:
            self._leases.require_room()
            key = (digest, session)
            lease_id = self._lease(BlockLease(found, is_use=False, hold=key), Nanos(now + span))
            self._pins.begin(key, found, lease_id)
        return SessionPinResult(blocks=len(found), refused=refused)

    def release_hold(self, digest: bytes, session: str, now: Nanos) -> int:
        """End a session's hold early; returns of how many blocks, 0 when it has ended."""
        self.expire(now)
        lease_id = self._pins.lease_of((digest, session))
        if lease_id is None:
            return 0
        lease = self._leases.lease(lease_id)
        assert lease is not None
        self._leases.end(lease_id)
        self._end(lease, now)
        return len(lease.blocks)

    # Writing

    def reserve(
        self,
        digest: bytes,
        names: Sequence[BlockHash],
        *,
        owner: str,
        lease: Nanos | None,
        now: Nanos,
        tenant: bytes = b"",
    ) -> WriteReservation:
        """Places for those blocks of a chain that nobody holds or writes, as far as there is space (rule 6).

        Args:
            digest: Of the namespace.
            names: The chain from its start.
            owner: Who writes.
            lease: For how long at most; None, for the node only: until it publishes.
            now: The present.
            tenant: Whose quota the new blocks count against.

        Raises:
            NamespaceUnknown: It was never opened; nothing was reserved.
            Exhausted: Too many reservations; nothing was reserved.
        """
        assert lease is None or lease > 0, lease
        self.expire(now)
        opened = self._namespaces.use(digest, now)
        if lease is None:
            assert owner == NODE, owner
        else:
            self._leases.require_room()
        account = self._quotas.account(tenant) if self._quotas is not None else None
        held = [block for block in map(opened.readable.get, names) if block is not None]
        self._pin(held)  # while the rest of the chain looks for space, it must not push out its own beginning
        blocks, reserved, refused = self._allocator.place_missing(opened, names, account, self._leases.next_id)
        self._unpin(held, now, is_use=False)
        self._refused += refused
        if not blocks:
            return WriteReservation(reservation_id=NO_RESERVATION, reserved=(), refused=refused)
        until = Nanos(now + lease) if lease is not None else None
        reservation_id = ReservationId(self._leases.grant(PendingWrite(owner, opened, tuple(names), blocks), until))
        return WriteReservation(reservation_id=reservation_id, reserved=tuple(reserved), refused=refused)

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
        writing = self._leases.writing(reservation_id)
        if writing is None or writing.owner != owner:
            return 0
        self._leases.end(reservation_id)
        opened = writing.opened
        written = [(block, checksums[index]) for index, block in writing.blocks.items() if index in checksums]
        self._allocator.publish(opened, written)
        published = len(written)
        if published < len(writing.blocks):
            for index, block in writing.blocks.items():
                if index not in checksums:
                    self._allocator.abandon(opened, block)
        find, admit = opened.readable.get, self._allocator.admit
        for name in reversed(writing.names):  # the new blocks, and the use of those they continue (rule 6)
            there = find(name)
            if there is not None and not there.pins:
                admit(there, now)
        self._written += published
        self._bytes_written += published * opened.namespace.block_bytes
        return published

    def writable(self, digest: bytes, slot: Slot) -> Address | None:
        """Where to write; None when the reservation has ended, or is not of this namespace."""
        block = self._allocator.at(digest, slot)
        return block.address if block is not None and block.state is BlockState.RESERVED else None

    # For the node itself

    def pin(self, keys: Sequence[BlockKey], now: Nanos) -> PinnedBlocks:
        """Keep those of the blocks that are readable where they are until `unpin`; that is no use of them."""
        self.expire(now)
        found = [block for key in keys if (block := self._namespaces.find(key)) is not None]
        pin_id = self._lease(BlockLease(found, is_use=False), None)
        return PinnedBlocks(
            pin_id, tuple([each.address for each in found]), tuple([each.unpacked.crc32c for each in found])
        )

    def unpin(self, pin_id: int, now: Nanos) -> None:
        """What was pinned may go again."""
        self.expire(now)
        lease = self._leases.lease(pin_id)
        assert lease is not None, f"{pin_id} is not pinned"
        self._leases.end(pin_id)
        self._end(lease, now)

    def is_present(self, key: BlockKey) -> bool:
        """Whether a block is readable, or being written."""
        return self._namespaces.find(key) is not None or self._namespaces.written(key) is not None

    # Upkeep

    def condemn(self, digest: bytes, name: BlockHash, generation: int, now: Nanos) -> bool:
        """Drop a block whose bytes are bad; False when it is not that block's generation any more."""
        self.expire(now)
        opened = self._namespaces.get(digest)
        block = opened.readable.get(name)
        if block is None or block.generation != generation:
            return False
        if block in self._pins:
            self._let_go(block, now)
        block.state = advance(block.state, BlockTransition.CONDEMN)
        self._allocator.forget(opened, block)
        if not block.pins:
            self._allocator.free(block)
        self._corrupt += 1
        return True

    def find(self, digest: bytes, name: BlockHash) -> Slot | None:
        """The slot of a readable block.

        Raises:
            NamespaceUnknown: It was never opened.
        """
        block = self._namespaces.get(digest).readable.get(name)
        return block.unpacked if block is not None else None

    def expire(self, now: Nanos) -> None:
        """Reclaim what leases and reservations that ended by `now` were holding."""
        for ended in self._leases.due(now):
            self._end(ended, now)
            self._expired += 1

    def commands(self) -> list[TierCommand]:
        """What has to be done to the pool's memory, in order; each is handed out once."""
        return self._allocator.commands()

    def changes(self) -> list[BlockChanges]:
        """What watchers have to learn; each change is handed out once."""
        return self._allocator.changes()

    def held(self) -> list[BlockChanges]:
        """All readable blocks, one item a namespace: the dump that a watcher begins with."""
        return [
            BlockChanges(digest=opened.digest, stored=tuple(opened.readable.names())) for opened in self._namespaces
        ]

    def stats(self) -> Stats:
        return Stats(
            blocks=sum(len(opened.readable) for opened in self._namespaces),
            bytes=self._allocator.used_bytes,
            capacity_bytes=self._allocator.capacity_bytes,
            hits=self._hits,
            misses=self._misses,
            written=self._written,
            evicted=self._allocator.evicted_blocks,
            corrupt=self._corrupt,
            expired=self._expired,
            pinned=self._pinned,
            bytes_matched=self._bytes_matched,
            bytes_written=self._bytes_written,
            refused=self._refused,
            leases=len(self._leases) - self._leases.reservations,
            reservations=self._leases.reservations,
            held_bytes=self._pins.bytes,
            tenants=tuple(account.stats for account in self._quotas) if self._quotas is not None else (),
        )

    def check(self) -> None:
        """Asserts the rules, over everything there is. Slow: for tests, and for idle moments."""
        self._leases.check()
        pins: dict[int, int] = {}
        reserved: set[int] = set()
        held: set[StoredBlock] = set()
        for what in self._leases:
            if isinstance(what, PendingWrite):
                reserved |= {block.generation for block in what.blocks.values()}
                continue
            for block in what.blocks:
                pins[block.generation] = pins.get(block.generation, 0) + 1
            held |= set(what.blocks) if what.hold is not None else set()
        for block in self._allocator:
            assert block.pins == pins.get(block.generation, 0), "a pin without a lease, or the other way round"
            assert (block.pins > 0) == (block.state in (BlockState.PINNED, BlockState.CONDEMNED))
            assert (block.generation in reserved) == (block.state is BlockState.RESERVED)
        assert sum(block.pins > 0 for block in self._allocator) == self._pinned
        self._pins.check(held)
        self._allocator.check(self._quotas or ())

    # Leases and reservations

    def _lease(self, lease: BlockLease, until: Nanos | None) -> LeaseId:
        self._pin(lease.blocks)
        return LeaseId(self._leases.grant(lease, until))

    def _end(self, what: BlockLease | PendingWrite, now: Nanos) -> None:
        """What was granted is over."""
        if isinstance(what, PendingWrite):
            for block in what.blocks.values():
                self._allocator.abandon(what.opened, block)
            return
        if what.hold is not None:
            self._pins.end(what.hold, what.blocks)
        self._unpin(what.blocks, now, is_use=what.is_use)

    def _pin(self, blocks: Iterable[StoredBlock]) -> None:
        pinned = advance(
            BlockState.HELD, BlockTransition.PIN
        )  # looked up once: what is readable and has no pin is held
        fresh = 0
        for block in blocks:
            if not block.pins:
                block.state = pinned
                fresh += 1
            block.pins += 1
        self._pinned += fresh

    def _unpin(self, blocks: Sequence[StoredBlock], now: Nanos, *, is_use: bool) -> None:
        """Tail first (rule 6)."""
        unpinned = advance(PINNED, BlockTransition.UNPIN)  # looked up once, as in `_pin`
        for block in reversed(blocks):
            block.pins -= 1
            if not block.pins:
                self._pinned -= 1
                block.state = unpinned if block.state is PINNED else advance(block.state, BlockTransition.UNPIN)
            if block.state is GONE:
                self._allocator.free(block)
            elif block.state is CONDEMNED:
                continue
            elif is_use:
                self._allocator.admit(block, now)
            elif not block.pins:
                self._allocator.readmit(block, now)

    def _let_go(self, block: StoredBlock, now: Nanos) -> None:
        """Nobody wants to hold bad bytes."""
        for lease_id in self._pins.leases():
            lease = self._leases.lease(lease_id)
            assert lease is not None
            while block in lease.blocks:
                lease.blocks.remove(block)
                self._pins.let_go(block)
                self._unpin([block], now, is_use=False)

    def _count_match(self, opened: OpenNamespace, hits: int, misses: int, tenant: bytes) -> None:
        self._hits += hits
        self._misses += misses
        self._bytes_matched += hits * opened.namespace.block_bytes
        if self._quotas is not None and (account := self._quotas.account(tenant)) is not None:
            account.hits += hits
            account.misses += misses
