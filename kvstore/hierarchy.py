"""What moves between a node's pool and the tiers below it: what is wanted comes up, what is worth keeping goes down. Pure.

Rules:

1. The pool's machine is the only one that leases and evicts. Blocks that come up get places reserved in it, blocks that
   go down are pinned in it, both without a deadline: a thread may hang in the middle of a copy for as long as a disk
   does, and until it says that it is through, its bytes belong to it.
2. A load follows one chain from the first block that the pool does not have. Tiers are asked in order, the fastest
   first, a batch at a time; a batch is readable as soon as it is there. A load ends at the first block that no tier has
   (nobody could use what lies behind a hole), when the pool has no room, or when its deadline is over. Then nothing more is
   begun; what is under way still arrives.
3. Blocks that are already on their way are not fetched twice: who asks for them joins the load and may lengthen it.
4. A load is begun only where it is predicted to be over before the patience of the one who asks is, which is the time
   that computing the blocks again would take.
5. Nobody ever waits for blocks to go down. The queue of a tier is bounded; what does not fit is dropped and counted.
6. A tier that fails is fenced by a breaker: its blocks are misses, until one attempt after a pause finds it well.
7. What a tier was given is not offered to it again, until it says that it has let it go. A tier that cannot say so (a
   server that restarts, or is short of memory) is taken to have lost what it does not find, and what it does not deliver.
8. Watchers are told whatever becomes known to be in a tier, and whatever ceases to be. Those that come later are told the
   same by `held`, where the tier itself does not know, as far as it is remembered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from kvstore.block import ChainHash
from kvstore.breaker import Breaker
from kvstore.clock import SECOND, Nanos
from kvstore.errors import NamespaceUnknown
from kvstore.messages import NODE, Address, BlockChanges, BlockKey, Fetched, Outcome, Reservation, ReservationId, Slot
from kvstore.movement import CopyId, Fetch, Find, Keep, LoadId, Movement, Pinned, TierCounters
from kvstore.recent import Recent

BATCH_BYTES = 8 << 20
"""That move at a time: enough for a disk's full speed, little enough for the first blocks of a load to be there soon."""

MAX_LOADS = 64
MAX_LOAD_BLOCKS = 4096  # one load; a longer chain goes on with the next request
MAX_RISEN = 1 << 16  # blocks that came up, and that nobody asked for since; of more the oldest count as in the pool
MAX_COPIES = 2  # batches that go down to one tier at a time
FETCH_AT_LEAST = Nanos(1 * SECOND)  # that a batch gets once it is begun, however little patience is left
KEEP_WITHIN = Nanos(30 * SECOND)
PACE_LASTS = Nanos(30 * SECOND)
"""A tier's measured speed counts for this long; then it is tried again, however slow it was."""


class Pool(Protocol):
    """What is needed of `kvstore.machine.BlockMachine`."""

    def block_bytes(self, digest: bytes) -> int:
        """Of each block of that namespace.

        Raises:
            NamespaceUnknown: It is not open, or has been forgotten.
        """
        ...

    def is_present(self, key: BlockKey) -> bool:
        """Whether the block is readable, or being written."""
        ...

    def reserve(
        self,
        digest: bytes,
        names: Sequence[ChainHash],
        *,
        owner: str,
        lease: Nanos | None,
        now: Nanos,
        tenant: bytes = b"",
    ) -> Reservation:
        """Places for those blocks that nobody holds or writes.

        Raises:
            NamespaceUnknown: It has been forgotten; nothing was reserved.
        """
        ...

    def publish(
        self, reservation_id: ReservationId, checksums: Mapping[int, int], *, owner: str, now: Nanos
    ) -> int: ...

    def writable(self, digest: bytes, slot: Slot) -> Address | None: ...

    def pin(self, keys: Sequence[BlockKey], now: Nanos) -> Pinned:
        """Keep those of the blocks that are readable where they are; their order of eviction stays what it is."""
        ...

    def unpin(self, pin_id: int, now: Nanos) -> None: ...


class Admission(Protocol):
    """Which blocks a tier should have."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:
        """Note that a block was written or used; says whether it is worth keeping in the tier."""
        ...


class Everything:
    """Writes through: each block goes down as soon as it is there."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:  # noqa: ARG002 - as it says
        return True


class TierRule(Struct, frozen=True, kw_only=True):
    """How the hierarchy treats one tier."""

    name: str
    admission: Admission | None  # None: nothing goes down
    queue_blocks: int = 4096  # that may wait to go down
    remember_blocks: int = 1 << 20  # that are known to be there, so that they are not offered again
    finds_in_memory: bool = False  # so that what it finds does not say whether it can be read


class Hierarchy:
    """See the module. After every call, `commands()` has to be performed, and `changes()` told."""

    def __init__(self, pool: Pool, rules: Sequence[TierRule], batch_bytes: int = BATCH_BYTES):
        """Nothing moves yet.

        Args:
            pool: Of this node.
            rules: Of the tiers below it, in the order in which they are asked.
            batch_bytes: That move at a time, and have a place in the pool meanwhile.
        """
        self._pool = pool
        self._batch_bytes = batch_bytes
        self._tiers = [_Tier(index, rule) for index, rule in enumerate(rules)]
        self._loads: dict[LoadId, _Load] = {}
        self._coming: dict[BlockKey, _Load] = {}
        self._copies: dict[CopyId, _Copy] = {}
        self._late: set[CopyId] = set()  # of them; counted as failures already
        self._hung: dict[LoadId, Reservation] = {}  # places that a thread may still write to, of loads that have ended
        self._last_id = 0
        self._commands: list[Movement] = []
        self._changes: list[BlockChanges] = []
        self._risen: dict[BlockKey, str] = {}  # where blocks of the pool were, of which nobody was told
        self.refused = 0  # loads that `MAX_LOADS` kept from beginning

    # Coming up

    def seconds_from_below(self, key: BlockKey, size_bytes: int) -> float | None:
        """How long a block takes from the first tier that is known to have it; None where there is none, or no speed."""
        for tier in self._tiers:
            if key in tier.known and tier.reading.closed:
                return tier.pace.latest(size_bytes)
        return None

    def coming(self, digest: bytes, names: Sequence[ChainHash]) -> int:
        """How many of these leading blocks, none of which is in the pool yet, are on their way or being looked for."""
        for count, name in enumerate(names):
            if BlockKey(digest, name) not in self._coming:
                return count
        return len(names)

    def want(
        self, digest: bytes, chain: Sequence[ChainHash], held: int, patience: Nanos, now: Nanos, tenant: bytes = b""
    ) -> int:
        """Somebody would use blocks of a chain beyond those in the pool.

        Args:
            digest: Of the namespace.
            chain: Names from the start.
            held: How many of them are in the pool.
            patience: How long the blocks are worth waiting for: as long as computing them again would take.
            now: The present.
            tenant: Who pays for their places.

        Returns:
            How many blocks after the held ones are on their way or being looked for.
        """
        missing = chain[held : held + MAX_LOAD_BLOCKS]
        if not missing or patience <= 0 or not self._tiers:
            return 0
        deadline = Nanos(now + patience)
        load = self._coming.get(BlockKey(digest, missing[0]))
        if load is None:
            if len(self._loads) >= MAX_LOADS:
                self.refused += 1
                return 0
            ours = [BlockKey(digest, name) for name in missing]
            ours = ours[: next((i for i, key in enumerate(ours) if key in self._coming), None)]  # the rest has a load
            block_bytes = self._pool.block_bytes(digest)
            chain = tuple(chain[: held + len(ours)])
            load = _Load(self._next_load(), digest, block_bytes, chain, held, deadline, tenant)
            self._loads[load.id] = load
            self._coming.update(dict.fromkeys(ours, load))
            self._look(load, 0, now)
        else:
            load.deadline = max(load.deadline, deadline)
        return self.coming(digest, missing)

    def found(self, load_id: LoadId, count: int, now: Nanos) -> None:
        """A tier has said how many of the blocks of a `Find` it holds."""
        load = self._loads.get(load_id)
        if load is None:
            return  # too late
        tier = self._tiers[load.tier]
        if not tier.rule.finds_in_memory:
            tier.reading.succeeded()
        self._forget_lost(load, tier, count)
        if count == 0:
            self._look(load, load.tier + 1, now)
            return
        if tier.pace.seconds(count * load.block_bytes, now) > (load.deadline - now) / SECOND:
            tier.counters.too_slow += 1
            self._look(load, load.tier + 1, now)
            return
        count = min(count, self._batch_blocks(load.block_bytes))
        names = load.chain[: load.position + count]
        try:
            reservation = self._pool.reserve(load.digest, names, owner=NODE, lease=None, now=now, tenant=load.tenant)
        except NamespaceUnknown:  # forgotten while a tier was asked, being empty: nobody wants these blocks any more
            self._end(load)
            return
        run = [place for place in reservation.reserved if place.index >= load.position]
        if not run or run[0].index != load.position:  # no room, or somebody else has just begun to write there
            self._abandon(reservation, now)
            self._look(load, load.tier, now) if run else self._end(load)
            return
        run = [place for index, place in enumerate(run) if place.index == load.position + index]
        load.reservation = reservation
        load.places = tuple(place.index for place in run)
        load.began = now
        load.until = Nanos(max(load.deadline, now + FETCH_AT_LEAST))
        addresses = tuple(self._address(load.digest, place.slot) for place in run)
        self._commands.append(Fetch(load.id, tier.index, addresses, load.until))

    def fetched(self, load_id: LoadId, answers: Sequence[Fetched], now: Nanos) -> None:
        """A `Fetch` is through: what of it came."""
        load = self._loads.get(load_id)
        if load is None:
            self._release(load_id, now)
            return
        tier = self._tiers[load.tier]
        good = next((i for i, answer in enumerate(answers) if answer.outcome is not Outcome.MOVED), len(answers))
        if good or now < load.until:
            tier.reading.succeeded()
        else:
            tier.failed(tier.reading, load.began, now)  # a call that waits behind one that hangs returns with nothing
        tier.pace.measured(good * load.block_bytes, now - load.began, now)
        tier.counters.loaded += good
        keys = [BlockKey(load.digest, load.chain[index]) for index in load.places]
        self._know(tier, [key for key, answer in zip(keys, answers, strict=True) if answer.outcome is Outcome.MOVED])
        if not tier.rule.finds_in_memory:
            self._forget(tier, [k for k, a in zip(keys, answers, strict=True) if a.outcome is not Outcome.MOVED])
        self._publish(load, answers[:good], now)
        self._risen.update(dict.fromkeys(keys[:good], tier.rule.name))
        while len(self._risen) > MAX_RISEN:
            del self._risen[next(iter(self._risen))]
        # A block that this tier promised and did not have may be in the next one.
        self._look(load, 0 if good == len(answers) else load.tier + 1, now)

    @property
    def any_risen(self) -> bool:
        """Whether `risen` may say anything."""
        return bool(self._risen)

    def risen(self, digest: bytes, names: Iterable[ChainHash]) -> dict[str, int]:
        """How many of these blocks came up from which tier, as far as nobody was told before; the others were in the pool."""
        found: dict[str, int] = {}
        for name in names:
            if (tier := self._risen.pop(BlockKey(digest, name), None)) is not None:
                found[tier] = found.get(tier, 0) + 1
        return found

    def left(self, digest: bytes, names: Iterable[ChainHash]) -> None:
        """Blocks are in the pool no more."""
        if self._risen:
            for name in names:
                self._risen.pop(BlockKey(digest, name), None)

    # Going down

    def noted(self, digest: bytes, names: Iterable[ChainHash], now: Nanos) -> None:
        """Blocks of the pool were written or used: offer them to the tiers that should have them."""
        try:
            size_bytes = self._pool.block_bytes(digest)
        except NamespaceUnknown:
            return  # its blocks went before this was heard of
        keys = [BlockKey(digest, name) for name in names]
        for tier in self._tiers:
            if tier.rule.admission is None:
                continue
            for key in keys:
                if key not in tier.known and tier.rule.admission.admits(key, size_bytes, now):
                    tier.enqueue(key, size_bytes)
            self._keep(tier, now)

    def hand_down(self, tier: int, keys: Sequence[BlockKey], now: Nanos) -> int:
        """Have a tier keep blocks whatever its rule says, because the pool is given up.

        Returns:
            How many of these leading ones there was room for in its queue; call `commands()`.

        Raises:
            NamespaceUnknown: Theirs was never opened.
        """
        which = self._tiers[tier]
        taken = keys[: self.room(tier)]
        for key in taken:
            which.enqueue(key, self._pool.block_bytes(key.digest))
        self._keep(which, now)
        return len(taken)

    def room(self, tier: int) -> int:
        """For how many more blocks there is room in its queue."""
        which = self._tiers[tier]
        return max(0, which.rule.queue_blocks - len(which.queue))

    def is_going_down(self, tier: int, key: BlockKey) -> bool:
        """Whether a block waits for a tier, or is on its way to it."""
        copies = (copy for copy in self._copies.values() if copy.tier == tier)
        return key in self._tiers[tier].queue or any(key in copy.keys for copy in copies)

    def has(self, tier: int, key: BlockKey) -> bool:
        """Whether a tier is known to have a block."""
        return key in self._tiers[tier].known

    def is_fenced(self, tier: int) -> bool:
        """Whether the last that was written to a tier has failed, and nothing is tried now."""
        which = self._tiers[tier]
        return not which.writing.closed and not which.copying

    def kept(self, copy_id: CopyId, answers: Sequence[bool], now: Nanos) -> None:
        """A `Keep` is through: what of it the tier has now."""
        copy = self._copies.pop(copy_id)
        tier = self._tiers[copy.tier]
        was_late = copy_id in self._late
        self._late.discard(copy_id)
        if any(answers) or now < copy.until:
            tier.writing.succeeded()
        elif not was_late:
            tier.failed(tier.writing, copy.began, now)
        tier.copying -= 1
        self._pool.unpin(copy.pinned.pin_id, now)
        there = [a.key for a, kept in zip(copy.pinned.addresses, answers, strict=True) if kept]
        tier.counters.kept += len(there)
        self._know(tier, there)
        self._keep(tier, now)

    # Both

    def failed(self, movement: Movement, started: Nanos, now: Nanos) -> None:
        """A command could not be performed, or not in time. Its buffers are free again.

        One that was late is no second failure: the longer a disk has hung, the longer it would then be left alone.
        """
        tier = self._tiers[movement.tier]
        if isinstance(movement, Keep):
            copy = self._copies.pop(movement.copy_id)
            if movement.copy_id not in self._late:
                tier.failed(tier.writing, started, now)
            self._late.discard(movement.copy_id)
            tier.copying -= 1
            self._pool.unpin(copy.pinned.pin_id, now)
            self._keep(tier, now)
            return
        load = self._loads.get(movement.load_id)
        if load is None:
            self._release(movement.load_id, now)
            return
        tier.failed(tier.reading, started, now)
        if isinstance(movement, Fetch):
            self._publish(load, (), now)
        self._look(load, load.tier + 1, now)

    def late(self, movement: Movement, started: Nanos, now: Nanos) -> None:
        """A command has not come back in time. Its answer or failure is still awaited: until then its bytes are in use."""
        tier = self._tiers[movement.tier]
        tier.failed(tier.writing if isinstance(movement, Keep) else tier.reading, started, now)
        if isinstance(movement, Keep):
            self._late.add(movement.copy_id)
            return
        load = self._loads[movement.load_id]
        if load.reservation is not None:
            self._hung[load.id], load.reservation = load.reservation, None
        self._end(load)

    def gone(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """A tier has let blocks go by itself."""
        which = self._tiers[tier]
        if not which.rule.finds_in_memory:
            self._forget(which, keys)
            return
        for key in keys:  # among them blocks from before the node started, which the tier alone knew
            which.forget(key)
        self._tell(which, removed=keys)

    def tick(self, now: Nanos) -> None:
        """Time has passed: a tier that was fenced may be tried again."""
        for tier in self._tiers:
            self._keep(tier, now)

    def commands(self) -> list[Movement]:
        """What has to be done, in order; each is handed out once."""
        commands, self._commands = self._commands, []
        return commands

    def changes(self) -> list[BlockChanges]:
        """What watchers have to learn; each change is handed out once."""
        changes, self._changes = self._changes, []
        return changes

    def held(self, tier: int) -> list[BlockKey]:
        """What is known to be in a tier, for watchers that have heard nothing yet."""
        return list(self._tiers[tier].known)

    def counters(self, tier: int) -> TierCounters:
        return self._tiers[tier].counters

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves, and nothing waits to."""
        return not self._loads and not self._copies and not self._hung and not any(tier.queue for tier in self._tiers)

    def check(self) -> None:
        """Asserts what always holds; for tests."""
        assert len(self._loads) <= MAX_LOADS
        for load in self._loads.values():
            for name in load.chain[load.position :]:
                assert self._coming[BlockKey(load.digest, name)] is load
        assert set(self._coming.values()) <= set(self._loads.values())
        assert self._late <= self._copies.keys()
        for tier in self._tiers:
            assert tier.copying == sum(copy.tier == tier.index for copy in self._copies.values()) <= MAX_COPIES
            assert len(tier.queue) <= tier.rule.queue_blocks
            assert len(tier.known) <= tier.rule.remember_blocks

    # Loads

    def _look(self, load: "_Load", tier_index: int, now: Nanos) -> None:
        """Ask the tiers from this one on for the next blocks of a load; end it when none is left to ask."""
        while load.position < len(load.chain) and self._pool.is_present(
            BlockKey(load.digest, load.chain[load.position])
        ):
            self._advance(load, 1)  # somebody else has brought it, or is about to
        if load.position == len(load.chain) or now >= load.deadline:
            self._end(load)
            return
        batch = self._batch_blocks(load.block_bytes)
        for tier in self._tiers[tier_index:]:
            if not tier.reading.allows(now):
                continue
            load.tier = tier.index
            keys = tuple(BlockKey(load.digest, name) for name in load.chain[load.position : load.position + batch])
            self._commands.append(Find(load.id, tier.index, keys, load.deadline))
            return
        self._end(load)

    def _forget_lost(self, load: "_Load", tier: "_Tier", count: int) -> None:
        """A tier that is shared, or elsewhere, does not tell what it lets go (rule 7).

        What lies behind the first block that it lacks may still be there: to offer that once more costs little, and to
        miss it block by block would cost a look-up each. A tier that finds in memory tells, but what it said of a block
        before may have been heard after that; and of the others it says at once whether they are there.
        """
        if count < self._batch_blocks(load.block_bytes):
            missing = load.chain[load.position + count :]
            missing = missing[:1] if tier.rule.finds_in_memory else missing
            self._forget(tier, [BlockKey(load.digest, name) for name in missing])

    def _publish(self, load: "_Load", answers: Sequence[Fetched], now: Nanos) -> None:
        """Make what came readable, and give the other places back."""
        assert load.reservation is not None
        reservation, load.reservation = load.reservation, None
        checksums = {index: answer.crc32c for index, answer in zip(load.places, answers, strict=False)}
        self._pool.publish(reservation.reservation_id, checksums, owner=NODE, now=now)
        self._advance(load, len(answers))

    def _address(self, digest: bytes, slot: Slot) -> Address:
        address = self._pool.writable(digest, slot)
        assert address is not None, "a place that was reserved a moment ago"
        return address

    def _release(self, load_id: LoadId, now: Nanos) -> None:
        """A thread is through with what it did for a load that has ended."""
        if (reservation := self._hung.pop(load_id, None)) is not None:
            self._abandon(reservation, now)

    def _abandon(self, reservation: Reservation, now: Nanos) -> None:
        if reservation.reserved:
            self._pool.publish(reservation.reservation_id, {}, owner=NODE, now=now)

    def _advance(self, load: "_Load", blocks: int) -> None:
        for name in load.chain[load.position : load.position + blocks]:
            del self._coming[BlockKey(load.digest, name)]
        load.position += blocks

    def _end(self, load: "_Load") -> None:
        self._advance(load, len(load.chain) - load.position)
        del self._loads[load.id]

    # Copies

    def _keep(self, tier: "_Tier", now: Nanos) -> None:
        """Begin to copy what waits for a tier, as far as it may."""
        while tier.queue and tier.copying < MAX_COPIES and tier.writing.allows(now):
            first, size_bytes = next(iter(tier.queue.items()))
            limit = self._batch_blocks(size_bytes)
            keys: list[BlockKey] = []
            while tier.queue and len(keys) < limit:
                key = next(iter(tier.queue))
                if key.digest != first.digest:
                    break
                del tier.queue[key]
                keys.append(key)
            pinned = self._pool.pin(keys, now)
            if not pinned.addresses:
                self._pool.unpin(pinned.pin_id, now)
                continue  # all evicted while they waited
            copy = _Copy(
                id=CopyId(self._next_id()),
                tier=tier.index,
                pinned=pinned,
                keys=frozenset(each.key for each in pinned.addresses),
                began=now,
                until=Nanos(now + KEEP_WITHIN),
            )
            self._copies[copy.id] = copy
            tier.copying += 1
            self._commands.append(Keep(copy.id, tier.index, pinned.addresses, pinned.checksums, copy.until))

    def _know(self, tier: "_Tier", keys: Sequence[BlockKey]) -> None:
        """A tier has these blocks."""
        new = [key for key in keys if key not in tier.known]
        for key in keys:
            tier.know(key)
        self._tell(tier, stored=new)

    def _forget(self, tier: "_Tier", keys: Sequence[BlockKey]) -> None:
        """A tier does not have those of these blocks that it was known to have."""
        lost = [key for key in keys if key in tier.known]
        for key in lost:
            tier.forget(key)
        self._tell(tier, removed=lost)

    def _tell(self, tier: "_Tier", *, stored: Sequence[BlockKey] = (), removed: Sequence[BlockKey] = ()) -> None:
        for digest in dict.fromkeys(key.digest for key in (*stored, *removed)):
            self._changes.append(
                BlockChanges(
                    digest=digest,
                    stored=tuple(key.name for key in stored if key.digest == digest),
                    removed=tuple(key.name for key in removed if key.digest == digest),
                    tier=tier.rule.name,
                )
            )

    def _batch_blocks(self, block_bytes: int) -> int:
        return max(1, self._batch_bytes // block_bytes)

    def _next_load(self) -> LoadId:
        return LoadId(self._next_id())

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


class _Load:
    """One chain on its way up. `position` is the first block that is not in the pool yet."""

    __slots__ = (
        "began",
        "block_bytes",
        "chain",
        "deadline",
        "digest",
        "id",
        "places",
        "position",
        "reservation",
        "tenant",
        "tier",
        "until",
    )

    def __init__(
        self,
        load_id: LoadId,
        digest: bytes,
        block_bytes: int,
        chain: tuple[ChainHash, ...],
        position: int,
        deadline: Nanos,
        tenant: bytes,
    ):
        self.id = load_id
        self.digest = digest
        self.block_bytes = block_bytes
        self.chain = chain
        self.position = position
        self.deadline = deadline
        self.tenant = tenant
        self.tier = 0  # that was asked last
        self.reservation: Reservation | None = None  # of the batch under way
        self.places: tuple[int, ...] = ()  # indexes into the chain of the batch under way
        self.began = Nanos(0)
        self.until = Nanos(0)


class _Copy(Struct, frozen=True):
    """One batch on its way down."""

    id: CopyId
    tier: int
    pinned: Pinned
    keys: frozenset[BlockKey]
    began: Nanos
    until: Nanos


class _Tier:
    """What is known of one tier."""

    def __init__(self, index: int, rule: TierRule):
        self.index = index
        self.rule = rule
        self.reading = Breaker()
        self.writing = Breaker()  # apart: a full disk can still be read
        self.pace = Pace()
        self.counters = TierCounters()
        self.queue: OrderedDict[BlockKey, int] = OrderedDict()  # to go down, with the bytes of each
        self.known: Recent[BlockKey, None] = Recent(rule.remember_blocks)  # there, as far as we know
        self.copying = 0

    def enqueue(self, key: BlockKey, size_bytes: int) -> None:
        if key in self.queue:
            return
        if len(self.queue) >= self.rule.queue_blocks:
            self.counters.dropped += 1
            return
        self.queue[key] = size_bytes

    def know(self, key: BlockKey) -> None:
        self.known.note(key, None)

    def forget(self, key: BlockKey) -> None:
        self.known.forget(key)

    def failed(self, breaker: Breaker, started: Nanos, now: Nanos) -> None:
        self.counters.failures += 1
        self.counters.fenced += breaker.closed
        breaker.failed(started, now)


class Pace:
    """How fast a tier has been of late: nanoseconds a byte over the last batches, what they waited included."""

    SHARE = 0.25  # of the newest batch in the average

    def __init__(self) -> None:
        self._nanos_a_byte = 0.0
        self._measured_at: Nanos | None = None

    def measured(self, num_bytes: int, took: int, now: Nanos) -> None:
        if not num_bytes:
            return
        newest = took / num_bytes
        old = self._nanos_a_byte if self._is_fresh(now) else newest
        self._nanos_a_byte = old + self.SHARE * (newest - old)
        self._measured_at = now

    def seconds(self, num_bytes: int, now: Nanos) -> float:
        """What that many bytes will take, as far as we know; 0 where nothing is known (any more)."""
        return num_bytes * self._nanos_a_byte / SECOND if self._is_fresh(now) else 0.0

    def latest(self, num_bytes: int) -> float | None:
        """What that many bytes took when it was last measured, in seconds, however long ago; None before that."""
        return num_bytes * self._nanos_a_byte / SECOND if self._measured_at is not None else None

    def _is_fresh(self, now: Nanos) -> bool:
        return self._measured_at is not None and now - self._measured_at < PACE_LASTS
