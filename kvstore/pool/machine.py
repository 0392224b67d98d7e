"""Pool machine: decides which blocks a node's pool holds, who may read or write them, and which blocks leave the pool.

The machine does no I/O; the server performs its commands. Rules:

1. A writer reserves a block and publishes it with its checksum. A published block is readable. A match under a lease
   pins it. A block leaves the pool by eviction, or because its bytes were found wrong. `kvstore.pool.lifecycle` has the
   table of transitions.
2. Each reservation and each lease has a deadline. The machine ends a reservation that was not published by then, and a
   lease that was not released by then, so a dead process occupies no block for longer. A reservation has an owner, who
   alone can publish it. Any process that knows the id of a lease may release it, because the reader is often another
   process than the one that matched. Only the node's own reservations and pins may be without a deadline: its threads
   report when they have finished copying.
3. A publication ends its reservation. If the publication has no checksum for a reserved block, the place of this block
   becomes free.
4. A place gets a new slot generation each time it is given to a block. Generations and ids start at a number that
   differs between two starts of a node, so a generation or id from before a restart never matches a new one.
5. Only published blocks without a pin can be evicted. A block that is condemned while pinned is no longer found, but
   its place is not reused before the last pin is gone.
6. Chains are passed from their first block on. The uses of the blocks of a match or publication are recorded in reverse
   order. A policy that evicts the least recently used block therefore takes the end of a chain first. Blocks in the
   middle of a chain can still be missing; a match stops at the first missing block.
7. Blocks of different namespaces are never mixed. Two namespaces with the same weights (model, revision, LoRA) are a
   configuration error, which would have no other sign than a cache without hits. The machine therefore refuses the
   second namespace until the first one has been unused for a minute (`kvstore.pool.open_namespaces`).
8. The eviction policy learns of a use when the use ends. If the policy chooses a pinned block, the block is withdrawn
   from the policy. It is admitted again when the next use of it ends, or its last pin. Pinning a chain therefore costs
   the policy nothing unless space is short.
9. If new blocks of a tenant exceed its quota, other blocks of the tenant are evicted, or the new blocks are refused
   (`kvstore.pool.quotas`). A paused session may keep its blocks pinned within a limit (`kvstore.pool.session_pins`).
"""

from collections.abc import Iterable, Mapping, Sequence

from kvstore.block import HASH_BYTES, BlockHash
from kvstore.clock import Nanos
from kvstore.eviction.policy import EvictionPolicy
from kvstore.messages import (
    NO_LEASE,
    NO_RESERVATION,
    NODE,
    Address,
    BlockChanges,
    BlockKey,
    LeasedSlots,
    LeaseId,
    PinnedBlocks,
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

KNOWN_KEY = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Hash key of the block table in replays and tests. It is fixed, because in replays and tests the same calls must give
the same order of blocks, and nobody tries to make hashes collide."""

PINNED, CONDEMNED, GONE = BlockState.PINNED, BlockState.CONDEMNED, BlockState.GONE
"""Members of `BlockState`. They are constants of this module because an enum look-up takes longer than the work per
block."""


class BlockMachine:
    """Decides which blocks are in one node's pool and who may use them, by the rules of this module.

    Methods that take `now` first end the leases and reservations whose deadline has passed. After each call, the caller
    has to perform `commands()` on the pool's memory before it passes on the result of the call.
    """

    def __init__(
        self,
        capacity_bytes: int,
        eviction: EvictionPolicy[BlockKey],
        *,
        epoch: int,
        max_leases: int = 65_536,
        max_namespaces: int = 256,
        max_held_bytes: int = 0,
        quotas: TenantQuotas | None = None,
        table_key: tuple[int, int] = KNOWN_KEY,
    ):
        """Start with an empty pool.

        Args:
            capacity_bytes: Size of the pool; bytes at its end that do not fill a page stay unused.
            eviction: A new eviction policy, without any block.
            epoch: A number from 1 to 2³¹-1, different at each start of the node (rule 4).
            max_leases: Maximum number of open leases, session pins and reservations of all clients together.
            max_namespaces: Maximum number of open namespaces.
            max_held_bytes: Maximum number of bytes of all blocks that session pins keep in the pool; 0: no session can
                pin blocks.
            quotas: Quotas of tenants; none by default.
            table_key: Hash key of `kvstore.native.tables`. It has to be secret if clients choose the hashes, so that
                clients cannot choose hashes that collide.
        """
        assert 0 < epoch < 1 << 31, epoch
        self._allocator = PoolAllocator(capacity_bytes, eviction, max_namespaces, table_key)
        self._namespaces = self._allocator.namespaces
        self._quotas = quotas
        self._pins = SessionPins(max_held_bytes)
        self._leases = LeaseTable(epoch, max_leases)
        self._pinned = self._hits = self._misses = self._written = self._corrupt = self._expired = 0
        self._refused = self._bytes_matched = self._bytes_written = 0

    # The methods below are for namespaces.

    def open(self, namespace: KvNamespace, now: Nanos) -> None:
        """Open a namespace; see `OpenNamespaces.open`."""
        self.expire(now)
        self._namespaces.open(namespace, now)

    def namespace(self, digest: bytes) -> KvNamespace:
        """Return the namespace with this digest; raise NamespaceUnknown if it is not open."""
        return self._namespaces.get(digest).namespace

    def block_bytes(self, digest: bytes) -> int:
        """Return the size of the namespace's blocks in bytes; raise NamespaceUnknown if the namespace is not open."""
        return self.namespace(digest).block_bytes

    # The methods below are for reading.

    def match(
        self, digest: bytes, names: Sequence[BlockHash] | bytes, *, lease: Nanos, now: Nanos, tenant: bytes = b""
    ) -> LeasedSlots:
        """Find the longest readable prefix of a chain and pin it for `lease` nanoseconds.

        With a lease of 0, nothing is pinned and no hits or misses are counted. `names` has the block hashes in order,
        in a sequence or as concatenated bytes. Hits and misses are counted for the `tenant` too. Raise NamespaceUnknown
        or Exhausted (`max_leases` is reached) without pinning anything.
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
        """End leases early. Ignore leases that have ended, session pins, and the node's own pins."""
        self.expire(now)
        for lease_id in lease_ids:
            if self._leases.is_unending(lease_id):
                # A client might guess the id of a node's own pin, and the pinned blocks may be being copied now.
                continue
            if (lease := self._leases.lease(lease_id)) is not None and lease.hold is None:
                self._leases.end(lease_id)
                self._end(lease, now)

    def readable(self, digest: bytes, slot: Slot) -> Address | None:
        """Return the address of the block in a slot; None if the place has another block or no readable block now."""
        block = self._allocator.at(digest, slot)
        return block.address if block is not None and block.state in READABLE else None

    # The methods below are for session pins.

    def hold(
        self, digest: bytes, names: Sequence[BlockHash], *, session: str, span: Nanos, now: Nanos
    ) -> SessionPinResult:
        """Pin the longest readable prefix of a chain for a paused session, as far as the limit of session pins allows.

        The pin lasts `span` nanoseconds. The session's former pin in this namespace ends first, even if this call
        fails. Raise NamespaceUnknown or Exhausted (`max_leases` is reached) without pinning.
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
        """End a session's pin early; return the number of its blocks, or 0 if the session has no pin."""
        self.expire(now)
        lease_id = self._pins.lease_of((digest, session))
        if lease_id is None:
            return 0
        lease = self._leases.lease(lease_id)
        assert lease is not None
        self._leases.end(lease_id)
        self._end(lease, now)
        return len(lease.blocks)

    # The methods below are for writing.

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
        """Reserve places for the missing blocks of a chain: those that are neither readable nor being written.

        If the space is not enough for all of them, the blocks at the end of the chain get no place.

        `lease` is the maximum duration of the reservation in nanoseconds. Only the node itself may pass None; the
        reservation then lasts until the node publishes the blocks. The blocks are charged to the quota of `tenant`.
        Raise NamespaceUnknown or Exhausted (`max_leases` is reached) without reserving anything.
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
        self._pin(held)  # keeps the chain's stored blocks from being evicted to make room for its new blocks
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

        `checksums` has the CRC-32C of the written blocks by index; indices that were not reserved are ignored. Return
        the number of published blocks: 0 if the reservation has ended or belongs to another owner.
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
        # A publication counts as a use of the whole chain, so blocks that were stored before are included (rule 6).
        for name in reversed(writing.names):
            there = find(name)
            if there is not None and not there.pins:
                admit(there, now)
        self._written += published
        self._bytes_written += published * opened.namespace.block_bytes
        return published

    def writable(self, digest: bytes, slot: Slot) -> Address | None:
        """Return the address of a reserved slot; None if the reservation has ended or belongs to another namespace."""
        block = self._allocator.at(digest, slot)
        return block.address if block is not None and block.state is BlockState.RESERVED else None

    # Only the node itself uses the methods below.

    def pin(self, keys: Sequence[BlockKey], now: Nanos) -> PinnedBlocks:
        """Pin the blocks among `keys` that are readable, until `unpin`.

        The eviction policy does not count this as a use.
        """
        self.expire(now)
        found = [block for key in keys if (block := self._namespaces.find(key)) is not None]
        pin_id = self._lease(BlockLease(found, is_use=False), None)
        return PinnedBlocks(
            pin_id, tuple([each.address for each in found]), tuple([each.unpacked.crc32c for each in found])
        )

    def unpin(self, pin_id: int, now: Nanos) -> None:
        """End a pin of the node."""
        self.expire(now)
        lease = self._leases.lease(pin_id)
        assert lease is not None, f"{pin_id} is not pinned"
        self._leases.end(pin_id)
        self._end(lease, now)

    def is_present(self, key: BlockKey) -> bool:
        """Return whether a block is readable or is being written."""
        return self._namespaces.find(key) is not None or self._namespaces.written(key) is not None

    # The methods below remove damaged blocks, end leases at their deadline, or return commands, changes and statistics.

    def condemn(self, digest: bytes, name: BlockHash, generation: int, now: Nanos) -> bool:
        """Remove a block whose bytes are wrong (rule 5).

        Return False if no block with this hash and generation is readable. Raise NamespaceUnknown if the namespace is
        not open.
        """
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
        """Return the slot of a block; None if the block is not readable.

        Raise NamespaceUnknown if the namespace is not open.
        """
        block = self._namespaces.get(digest).readable.get(name)
        return block.unpacked if block is not None else None

    def expire(self, now: Nanos) -> None:
        """End the leases and reservations whose deadline has come.

        Each block of an ended lease loses one pin, and the places of an ended reservation become free.
        """
        for ended in self._leases.due(now):
            self._end(ended, now)
            self._expired += 1

    def commands(self) -> list[TierCommand]:
        """Return the commands for the pool's memory, in order. Each command is returned only once."""
        return self._allocator.commands()

    def changes(self) -> list[BlockChanges]:
        """Return the changes since the last call that watchers must receive, with only the last change of each block."""
        return self._allocator.changes()

    def held(self) -> list[BlockChanges]:
        """Return all readable blocks, one item for each namespace, for the cache dump at the beginning of a watch."""
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
        """Assert that the whole state keeps the rules. This is slow: call it in tests and when the node is idle."""
        self._leases.check()
        pins: dict[int, int] = {}
        reserved: set[int] = set()
        held: set[StoredBlock] = set()
        for entry in self._leases:
            if isinstance(entry, PendingWrite):
                reserved |= {block.generation for block in entry.blocks.values()}
                continue
            for block in entry.blocks:
                pins[block.generation] = pins.get(block.generation, 0) + 1
            held |= set(entry.blocks) if entry.hold is not None else set()
        for block in self._allocator:
            assert block.pins == pins.get(block.generation, 0), "a pin without a lease, or the other way round"
            assert (block.pins > 0) == (block.state in (BlockState.PINNED, BlockState.CONDEMNED))
            assert (block.generation in reserved) == (block.state is BlockState.RESERVED)
        assert sum(block.pins > 0 for block in self._allocator) == self._pinned
        self._pins.check(held)
        self._allocator.check(self._quotas or ())

    # The methods below are helpers for leases and reservations.

    def _lease(self, lease: BlockLease, until: Nanos | None) -> LeaseId:
        self._pin(lease.blocks)
        return LeaseId(self._leases.grant(lease, until))

    def _end(self, entry: BlockLease | PendingWrite, now: Nanos) -> None:
        """Unpin the blocks of an ended lease, or free the places of an ended reservation."""
        if isinstance(entry, PendingWrite):
            for block in entry.blocks.values():
                self._allocator.abandon(entry.opened, block)
            return
        if entry.hold is not None:
            self._pins.end(entry.hold, entry.blocks)
        self._unpin(entry.blocks, now, is_use=entry.is_use)

    def _pin(self, blocks: Iterable[StoredBlock]) -> None:
        # The new state is looked up only once, because all these blocks without a pin have the same state, HELD.
        pinned = advance(BlockState.HELD, BlockTransition.PIN)
        fresh = 0
        for block in blocks:
            if not block.pins:
                block.state = pinned
                fresh += 1
            block.pins += 1
        self._pinned += fresh

    def _unpin(self, blocks: Sequence[StoredBlock], now: Nanos, *, is_use: bool) -> None:
        """Remove one pin from each of these blocks, beginning with the last block of the chain (rule 6).

        If `is_use` is true, the eviction policy counts a use of the blocks.
        """
        # The new state of blocks that are not condemned is looked up only once.
        unpinned = advance(PINNED, BlockTransition.UNPIN)
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
        """Remove a condemned block from all session pins."""
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
