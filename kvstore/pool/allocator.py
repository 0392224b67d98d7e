"""Pool allocator: decides where in the pool blocks lie, and which blocks are evicted to make room for others.

By default, the least recently used block that is not pinned is evicted first, and the end of a chain is evicted before
its start (`kvstore.eviction.lru`). The setting `eviction` can name another policy. A tenant whose quota is full loses
its own blocks.

The allocator is a part of `kvstore.pool.machine`, whose rules also hold here. Only the machine calls the allocator. The
allocator collects the commands for the pool's memory and the changes for the watchers. It does not know why a block is
pinned, or how long a place is reserved.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.block import BlockHash
from kvstore.clock import Nanos
from kvstore.eviction.policy import EvictionPolicy
from kvstore.messages import SLOT, Address, BlockChanges, BlockKey, Claim, Discard, ReservedSlot, Slot, TierCommand
from kvstore.pool.extents import FreeExtents, occupied_bytes
from kvstore.pool.lifecycle import READABLE, BlockState, BlockTransition, advance
from kvstore.pool.open_namespaces import OpenNamespace, OpenNamespaces, StoredBlock
from kvstore.pool.quotas import TenantAccount

RESERVED, HELD = BlockState.RESERVED, BlockState.HELD
"""Members of `BlockState`. They are constants of this module because an enum look-up takes longer than the work per
block."""

EVICTED = advance(BlockState.HELD, BlockTransition.EVICT)


class PoolAllocator:
    """Decides in which places of the pool the blocks lie, and which blocks are evicted."""

    def __init__(
        self, capacity_bytes: int, eviction: EvictionPolicy[BlockKey], max_namespaces: int, table_key: tuple[int, int]
    ):
        self._extents = FreeExtents(capacity_bytes)
        self._eviction = eviction
        self._by_offset: dict[int, StoredBlock] = {}
        self._commands: list[TierCommand] = []
        # Changes for the watchers, by namespace digest and block hash. True: stored, False: removed.
        self._changed: dict[bytes, dict[BlockHash, bool]] = {}
        self.evicted_blocks = 0
        self.namespaces = OpenNamespaces(self._extents.capacity_bytes, max_namespaces, table_key)

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._extents.capacity_bytes - self._extents.free_bytes

    def at(self, digest: bytes, slot: Slot) -> StoredBlock | None:
        block = self._by_offset.get(slot.offset)
        if block is None or block.generation != slot.generation or block.key.digest != digest:
            return None
        return block

    # The methods below reserve places for blocks, make blocks readable, and remove them.

    def place_missing(
        self,
        opened: OpenNamespace,
        names: Sequence[BlockHash],
        account: TenantAccount | None,
        next_id: Callable[[], int],
    ) -> tuple[dict[int, StoredBlock], list[ReservedSlot], int]:
        """Find places for the missing blocks of a chain: those that are neither readable nor being written.

        If space is short, the blocks at the start of the chain get their places first. Return three values: the blocks
        that got a place, by their index in the chain; their slots in the form for clients; and the number of missing
        blocks for which there was no space.
        """
        blocks: dict[int, StoredBlock] = {}
        reserved: list[ReservedSlot] = []
        length, digest = opened.namespace.block_bytes, opened.digest
        refused = 0
        readable, writing, by_offset, claims = opened.readable, opened.writing, self._by_offset, self._commands
        missing: dict[BlockHash, int] = {}
        for index, name in enumerate(names):
            if name not in readable and name not in writing:
                missing.setdefault(name, index)
        free = iter(self._extents.take_several(length, len(missing)) if account is None else ())
        for name, index in missing.items():
            offset = next(free, None)
            if offset is None and not refused:
                offset = self._find_room(length, account)
            if offset is None:
                refused += 1
                continue
            key = BlockKey(digest, name)
            generation = next_id()
            block = StoredBlock(key, SLOT.pack(offset, generation, 0), length, account)
            blocks[index] = by_offset[offset] = writing[name] = block
            reserved.append(ReservedSlot(index, Slot(offset, generation)))
            claims.append(Claim(Address(key=key, offset=offset, length=length, generation=generation)))
            if account is not None:
                account.bytes += occupied_bytes(length)
        if account is not None:
            account.refused += refused
        return blocks, reserved, refused

    def publish(self, opened: OpenNamespace, written: Iterable[tuple[StoredBlock, int]]) -> None:
        """Make written blocks readable. `written` has pairs of a block and its CRC-32C.

        The caller has to add the blocks to the eviction policy later (`admit`).
        """
        # The new state is looked up once for all blocks, because each of them is RESERVED.
        published = advance(RESERVED, BlockTransition.PUBLISH)
        writing, put = opened.writing, opened.readable.put
        changed = self._changed.setdefault(opened.digest, {})
        for block, crc32c in written:
            assert block.state is RESERVED, block.state
            name = block.key.name
            block.has_bytes(crc32c)
            block.state = published
            del writing[name]
            put(name, block)
            changed[name] = True

    def abandon(self, opened: OpenNamespace, block: StoredBlock) -> None:
        """Free the place of a reserved block that was not published."""
        block.state = advance(block.state, BlockTransition.ABANDON)
        del opened.writing[block.key.name]
        self.free(block)

    def forget(self, opened: OpenNamespace, block: StoredBlock) -> None:
        """Stop finding a readable block: remove it from the look-up table and from the eviction policies.

        The removal is recorded for the watchers (`changes`). The block keeps its place until `free`.
        """
        key = block.key
        if key in self._eviction:
            self._eviction.withdraw(key)
        if block.account is not None and key in block.account.eviction:
            block.account.eviction.withdraw(key)
        opened.readable.remove(key.name)
        self._changed.setdefault(key.digest, {})[key.name] = False

    def free(self, block: StoredBlock) -> None:
        self._extents.give_back(self._vacate(block), block.length)

    # The methods below add blocks to the eviction policies.

    def admit(self, block: StoredBlock, now: Nanos) -> None:
        self._eviction.admit(block.key, block.length, now)
        if block.account is not None:
            block.account.eviction.admit(block.key, block.length, now)

    def readmit(self, block: StoredBlock, now: Nanos) -> None:
        """Admit an unpinned block again to the policies from which it was withdrawn.

        A policy loses a block if it chooses the block for eviction while the block is pinned (`_choose`).
        """
        for policy in self._policies(block):
            if block.key not in policy:
                policy.admit(block.key, block.length, now)

    # The methods below return the commands and the changes that the methods above have caused.

    def commands(self) -> list[TierCommand]:
        """Return the commands for the pool's memory, in order. Each command is returned only once."""
        commands, self._commands = self._commands, []
        return commands

    def changes(self) -> list[BlockChanges]:
        """Return the changes since the last call that watchers must receive, with only the last change of each block."""
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

    def __iter__(self) -> Iterator[StoredBlock]:
        return iter(self._by_offset.values())

    def check(self, accounts: Iterable[TenantAccount]) -> None:
        """Assert that no space is lost or used twice, and that the policies know only blocks that exist; for tests."""
        self._extents.check()
        areas = self._extents.free_extents()
        charged: dict[int, int] = {}
        admitted: dict[int, int] = {}
        for offset, block in self._by_offset.items():
            state = block.state
            assert block.address.offset == offset
            areas.append((offset, occupied_bytes(block.length)))
            assert (self.namespaces.find(block.key) is block) == (state in READABLE)
            assert (self.namespaces.written(block.key) is block) == (state is BlockState.RESERVED)
            assert state is not BlockState.GONE
            for policy in self._policies(block):
                known = state in READABLE and block.key in policy
                assert known or state is not BlockState.HELD, "a block that no policy can evict"
                admitted[id(policy)] = admitted.get(id(policy), 0) + known
            if block.account is not None:
                charged[id(block.account)] = charged.get(id(block.account), 0) + occupied_bytes(block.length)
        assert admitted.get(id(self._eviction), 0) == len(self._eviction), "the policy knows blocks that do not exist"
        for account in accounts:
            assert account.bytes == charged.pop(id(account), 0) <= account.limit_bytes
            assert admitted.get(id(account.eviction), 0) == len(account.eviction)
        assert not charged, "an account with blocks was forgotten"
        for opened in self.namespaces:
            assert not any(name in opened.readable for name in opened.writing)
            for name in opened.readable.names():
                (block,) = opened.readable.blocks(name)
                assert self._by_offset[block.address.offset] is block
                assert opened.readable.slots(name) == block.slot, "a look-up would return the wrong place"
        end = 0
        for offset, length in sorted(areas):
            assert offset == end, "space is lost or used twice"
            end = offset + length
        assert end == self._extents.capacity_bytes

    def _find_room(self, length: int, account: TenantAccount | None) -> int | None:
        """Allocate an extent, after evicting blocks if necessary, and return its offset.

        Return None if the pool or the tenant's quota has no room and no further block can be evicted.
        """
        if account is not None and not self._make_room_within(account, length):
            return None
        while (offset := self._extents.take(length)) is None:
            victim = self._choose(self._eviction)
            if victim is None:
                return None
            vacant = self._evict(victim)
            if occupied_bytes(victim.length) == occupied_bytes(length):
                return vacant  # the common case: the place of the evicted block has the right size
            self._extents.give_back(vacant, victim.length)
        return offset

    def _make_room_within(self, account: TenantAccount, length: int) -> bool:
        """Evict blocks of a tenant until one more block fits into its quota; return False if that is impossible."""
        size_bytes = occupied_bytes(length)
        if size_bytes > account.limit_bytes:
            return False  # the block is larger than the quota
        while account.bytes + size_bytes > account.limit_bytes:
            victim = self._choose(account.eviction)
            if victim is None:
                return False
            self._extents.give_back(self._evict(victim), victim.length)
            account.evicted += 1
        return True

    def _choose(self, policy: EvictionPolicy[BlockKey]) -> StoredBlock | None:
        """Return the unpinned block that a policy evicts next; None if the policy has no unpinned block."""
        while (key := policy.choose()) is not None:
            block = self.namespaces.find(key)
            assert block is not None, "the policy knows a block that does not exist"
            if not block.pins:
                return block
            # The block is pinned. `admit` or `readmit` adds it to the policy again when a use or its last pin ends.
            policy.withdraw(key)
        return None

    def _evict(self, block: StoredBlock) -> int:
        """Remove a block to make space. Return the offset of its extent, which the caller must free or use."""
        assert block.state is HELD, block.state
        block.state = EVICTED
        self.forget(self.namespaces.get(block.key.digest), block)
        self.evicted_blocks += 1
        return self._vacate(block)

    def _vacate(self, block: StoredBlock) -> int:
        """Remove a block from its place. Return the offset of its extent, which the caller must free or use."""
        address = block.address
        del self._by_offset[address.offset]
        if block.account is not None:
            block.account.bytes -= occupied_bytes(block.length)
        self._commands.append(Discard(address))
        return address.offset

    def _policies(self, block: StoredBlock) -> tuple[EvictionPolicy[BlockKey], ...]:
        """Return the eviction policies for a block: the pool's, and its tenant's if the tenant has a quota."""
        return (self._eviction,) if block.account is None else (self._eviction, block.account.eviction)
