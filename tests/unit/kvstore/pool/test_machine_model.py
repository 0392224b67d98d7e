"""Pool machine compared with a simple model, in random histories of readers, writers, tenants, sessions, transfers, time
and corrupt blocks.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.messages import NODE, BlockKey, Claim, SessionPinResult
from kvstore.pool.extents import PAGE_BYTES, occupied_bytes
from kvstore.pool.machine import BlockMachine
from kvstore.pool.quotas import TenantQuotas
from tests.support.kvstore.builders import LEASE, a_chain, a_namespace

PAGES = 12
NAMESPACES = (
    a_namespace(model="one", block_bytes=PAGE_BYTES),
    a_namespace(model="two", block_bytes=2 * PAGE_BYTES + 1),
    a_namespace(model="three", block_bytes=PAGE_BYTES - 1),
)
CHAINS = (a_chain(6, "x"), a_chain(3, "x") + a_chain(3, "y"), a_chain(5, "z"))
QUOTAS = {b"": PAGES * PAGE_BYTES, b"t" * 32: 5 * PAGE_BYTES, b"u" * 32: 4 * PAGE_BYTES}
HELD_BYTES = 3 * PAGE_BYTES
NEVER = 1 << 62

spaces = st.sampled_from(NAMESPACES)
chains = st.builds(lambda chain, length: chain[:length], st.sampled_from(CHAINS), st.integers(1, 6))
owners = st.sampled_from(("p", "q", NODE))
tenants = st.sampled_from(tuple(QUOTAS))
sessions = st.sampled_from(("s", "t"))


class MachineAgainstModel(RuleBasedStateMachine):
    """The model knows which blocks are stored, read and written; it takes over evictions, and checks that they were allowed.

    `tier` is what the pool's memory knows from the commands: by offset the slot generation, the bytes and the tenant.
    `watched` is what a watcher would know after a cache dump and all changes.
    """

    leases = Bundle("leases")
    reservations = Bundle("reservations")
    pins = Bundle("pins")

    def __init__(self):
        super().__init__()
        quotas = TenantQuotas(lambda _: LruEviction(), by_tenant={t: b for t, b in QUOTAS.items() if t})
        self.machine = BlockMachine(
            PAGES * PAGE_BYTES, LruEviction(), epoch=3, max_held_bytes=HELD_BYTES, quotas=quotas
        )
        for namespace in NAMESPACES:
            self.machine.open(namespace, Nanos(0))
        self.now = 0
        self.held = {}  # (digest, name) -> (generation, crc)
        self.pinned = {}  # lease or pin id -> (deadline, [generation])
        self.holds = {}  # (digest, session) -> (deadline, {generation: bytes})
        self.writing = {}  # reservation id -> (deadline, owner, digest, {index: (name, generation)})
        self.tier = {}  # offset -> (generation, bytes, tenant)
        self.watched = {(changes.digest, name) for changes in self.machine.held() for name in changes.stored}
        self.generations = set()
        self.evicted = 0

    @rule(
        target=reservations, namespace=spaces, chain=chains, owner=owners, lease=st.integers(1, LEASE), tenant=tenants
    )
    def reserve(self, namespace, chain, owner, lease, tenant):
        digest = namespace.digest
        self.end_what_is_due()
        busy = {(d, name) for _, _, d, blocks in self.writing.values() for name, _ in blocks.values()}
        free = [i for i, name in enumerate(chain) if (digest, name) not in self.held and (digest, name) not in busy]
        protected = {(digest, name) for name in chain}
        term = None if owner == NODE else Nanos(lease)

        reservation = self.machine.reserve(digest, chain, owner=owner, lease=term, now=Nanos(self.now), tenant=tenant)

        indices = [reserved.index for reserved in reservation.reserved]
        assert indices == free[: len(indices)], "the start of a chain must come first"
        assert reservation.refused == len(free) - len(indices)
        self.perform(protected, tenant, occupied_bytes(namespace.block_bytes))
        if reservation.refused:
            self.assert_that_nothing_may_go(protected, tenant, occupied_bytes(namespace.block_bytes))
        blocks = {
            reserved.index: (chain[reserved.index], reserved.slot.generation) for reserved in reservation.reserved
        }
        new = {generation for _, generation in blocks.values()}
        assert not new & self.generations, "a slot generation was used twice"
        self.generations |= new
        if blocks:
            deadline = NEVER if term is None else self.now + lease
            self.writing[reservation.reservation_id] = (deadline, owner, digest, blocks)
        return reservation.reservation_id

    @rule(reservation=consumes(reservations), owner=owners, skipped=st.sets(st.integers(0, 5)), crc=st.integers(0, 99))
    def publish(self, reservation, owner, skipped, crc):
        self.end_what_is_due()
        known = self.writing.get(reservation)
        checksums = {index: crc + index for index in range(8) if index not in skipped}
        if known is not None and known[1] == NODE:
            owner = NODE  # the node always publishes its own reservations

        published = self.machine.publish(reservation, checksums, owner=owner, now=Nanos(self.now))

        expected = 0
        if known is not None and known[1] == owner:
            del self.writing[reservation]
            for index, (name, generation) in known[3].items():
                if index in checksums:
                    self.held[known[2], name] = (generation, checksums[index])
                    expected += 1
        assert published == expected
        self.perform()

    @rule(namespace=spaces, chain=chains, tenant=tenants)
    def store(self, namespace, chain, tenant):
        """Reserve and publish in one step, so that the pool has blocks in most histories."""
        reservation = self.reserve(namespace=namespace, chain=chain, owner="p", lease=LEASE, tenant=tenant)
        self.publish(reservation=reservation, owner="p", skipped=set(), crc=1)

    @rule(target=leases, namespace=spaces, chain=chains, lease=st.integers(0, LEASE), tenant=tenants)
    def match(self, namespace, chain, lease, tenant):
        digest = namespace.digest
        self.end_what_is_due()
        prefix = self.prefix(digest, chain)

        leased = self.machine.match(digest, chain, lease=Nanos(lease), now=Nanos(self.now), tenant=tenant)

        assert [(slot.generation, slot.crc32c) for slot in leased.slots] == [self.held[digest, name] for name in prefix]
        for slot in leased.slots:
            assert self.tier[slot.offset][0] == slot.generation
        if lease and prefix:
            self.pinned[leased.lease_id] = (self.now + lease, [self.held[digest, name][0] for name in prefix])
        else:
            assert leased.lease_id == 0
        self.perform()
        return leased.lease_id

    @rule(lease=consumes(leases))
    def release(self, lease):
        self.end_what_is_due()
        self.pinned.pop(lease, None)
        self.machine.release([lease], Nanos(self.now))
        self.perform()

    @rule(target=pins, namespace=spaces, chain=chains)
    def pin(self, namespace, chain):
        self.end_what_is_due()
        there = [name for name in chain if (namespace.digest, name) in self.held]

        pinned = self.machine.pin([BlockKey(namespace.digest, name) for name in chain], Nanos(self.now))

        assert [address.key.name for address in pinned.addresses] == there
        for address in pinned.addresses:
            assert self.tier[address.offset][0] == address.generation
        self.pinned[pinned.pin_id] = (NEVER, [address.generation for address in pinned.addresses])
        self.perform()
        return pinned.pin_id

    @rule(pin=consumes(pins))
    def unpin(self, pin):
        self.end_what_is_due()
        del self.pinned[pin]
        self.machine.unpin(pin, Nanos(self.now))
        self.perform()

    @rule(namespace=spaces, chain=chains, session=sessions, span=st.integers(1, LEASE))
    def hold(self, namespace, chain, session, span):
        digest = namespace.digest
        self.end_what_is_due()
        self.holds.pop((digest, session), None)
        prefix = self.prefix(digest, chain)
        kept, size_bytes = {}, occupied_bytes(namespace.block_bytes)
        for name in prefix:
            generation = self.held[digest, name][0]
            if sum({**self.kept(), **kept, generation: size_bytes}.values()) > HELD_BYTES:
                break
            kept[generation] = size_bytes

        held = self.machine.hold(digest, chain, session=session, span=Nanos(span), now=Nanos(self.now))

        assert held == SessionPinResult(blocks=len(kept), refused=len(prefix) - len(kept))
        if kept:
            self.holds[digest, session] = (self.now + span, kept)
        self.perform()

    @rule(namespace=spaces, session=sessions)
    def release_hold(self, namespace, session):
        self.end_what_is_due()
        _, kept = self.holds.pop((namespace.digest, session), (0, {}))

        assert self.machine.release_hold(namespace.digest, session, Nanos(self.now)) == len(kept)

        self.perform()

    @rule(namespace=spaces, chain=chains, index=st.sampled_from((0, -1)), stale=st.booleans())
    def condemn(self, namespace, chain, index, stale):
        self.end_what_is_due()
        key = (namespace.digest, chain[index])
        generation = self.held[key][0] if key in self.held else 1
        dropped = self.machine.condemn(*key, generation + stale, Nanos(self.now))
        assert dropped == (key in self.held and not stale)
        if dropped:
            del self.held[key]
            for _, kept in self.holds.values():
                kept.pop(generation, None)
        self.perform()

    @rule(span=st.integers(1, 2 * LEASE))
    def wait(self, span):
        self.now += span
        self.end_what_is_due()
        self.machine.expire(Nanos(self.now))
        self.perform()

    def prefix(self, digest, chain):
        return [name for i, name in enumerate(chain) if all((digest, before) in self.held for before in chain[: i + 1])]

    def kept(self):
        """Return by slot generation the bytes of the blocks that session pins keep."""
        return {generation: size for _, kept in self.holds.values() for generation, size in kept.items()}

    def in_use(self):
        """Return the slot generations whose blocks must not be evicted."""
        return {generation for _, pins in self.pinned.values() for generation in pins} | self.kept().keys()

    def used(self, tenant):
        return sum(size for _, size, whose in self.tier.values() if whose == tenant)

    def largest_hole(self):
        ends = sorted((offset, offset + size) for offset, (_, size, _) in self.tier.items())
        starts = [0, *(end for _, end in ends)]
        return max(
            after - before for before, after in zip(starts, [*(o for o, _ in ends), PAGES * PAGE_BYTES], strict=True)
        )

    def end_what_is_due(self):
        self.pinned = {lease: pin for lease, pin in self.pinned.items() if pin[0] > self.now}
        self.holds = {session: hold for session, hold in self.holds.items() if hold[0] > self.now}
        self.writing = {reservation: writing for reservation, writing in self.writing.items() if writing[0] > self.now}

    def assert_that_nothing_may_go(self, protected, tenant, size_bytes):
        """Check that a refusal was right: no block that could be evicted would have made room."""
        whose = {generation: owner for generation, _, owner in self.tier.values()}
        may_go = {
            generation
            for key, (generation, _) in self.held.items()
            if key not in protected and generation not in self.in_use()
        }
        over = self.used(tenant) + size_bytes > QUOTAS[tenant]
        if over and tenant:
            assert not any(whose[generation] == tenant for generation in may_go) or size_bytes > QUOTAS[tenant]
        else:
            assert not may_go
            assert self.largest_hole() < size_bytes

    def perform(self, protected=frozenset(), tenant=b"", wanted_bytes=0):
        """Perform the machine's commands, as the server does after each call, and note evictions in the model."""
        for command in self.machine.commands():
            address = command.address
            key = (address.key.digest, address.key.name)
            if isinstance(command, Claim):
                assert address.offset not in self.tier, "a place was given away twice"
                self.tier[address.offset] = (address.generation, occupied_bytes(address.length), tenant)
                assert self.used(tenant) <= QUOTAS[tenant]
                continue
            if self.held.get(key, (0, 0))[0] == address.generation:
                assert key not in protected, "a chain evicted its own beginning"
                full = self.largest_hole() < wanted_bytes
                own = self.tier[address.offset][2] == tenant
                over = bool(tenant) and self.used(tenant) + wanted_bytes > QUOTAS[tenant]
                assert own if over else full, "the wrong tenant's block was evicted, or none had to be"
                del self.held[key]
                self.evicted += 1
            assert self.tier.pop(address.offset)[0] == address.generation
            assert address.generation not in self.in_use()
        for changes in self.machine.changes():
            assert set(changes.stored).isdisjoint(changes.removed)
            self.watched |= {(changes.digest, name) for name in changes.stored}
            self.watched -= {(changes.digest, name) for name in changes.removed}

    @invariant()
    def agrees(self):
        self.machine.check()
        assert self.watched == self.held.keys()
        assert {(c.digest, name) for c in self.machine.held() for name in c.stored} == self.held.keys()
        stats = self.machine.stats()
        assert stats.blocks == len(self.held)
        assert stats.evicted == self.evicted
        assert stats.pinned == len(self.in_use())
        assert stats.bytes == sum(size for _, size, _ in self.tier.values())
        assert stats.held_bytes == sum(self.kept().values())
        assert stats.reservations == len(self.writing)

    def teardown(self):
        """Finish all transfers of the node and let all leases end; then check that all space is available again."""
        for reservation, (deadline, owner, _, _) in self.writing.items():
            if deadline == NEVER:
                self.machine.publish(reservation, {}, owner=owner, now=Nanos(self.now))
        for pin, (deadline, _) in self.pinned.items():
            if deadline == NEVER:
                self.machine.unpin(pin, Nanos(self.now))
        self.machine.commands()
        self.machine.expire(Nanos(self.now + LEASE))
        self.machine.check()
        namespace = NAMESPACES[0]
        reservation = self.machine.reserve(
            namespace.digest, a_chain(PAGES, "new"), owner="p", lease=LEASE, now=Nanos(self.now + LEASE)
        )
        assert len(reservation.reserved) == PAGES, "space was lost"


TestMachineAgainstModel = MachineAgainstModel.TestCase
TestMachineAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
