"""The block machine against a naive model, over random histories of readers, writers, time and bad bytes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.machine import BlockMachine
from kvstore.messages import Claim
from kvstore.settings import PAGE_BYTES
from tests.kv_builders import LEASE, a_chain, a_namespace

PAGES = 12
NAMESPACES = (
    a_namespace(model="one", block_bytes=PAGE_BYTES),
    a_namespace(model="two", block_bytes=2 * PAGE_BYTES + 1),
    a_namespace(model="three", block_bytes=PAGE_BYTES - 1),
)
CHAINS = (a_chain(6, "x"), a_chain(3, "x") + a_chain(3, "y"), a_chain(5, "z"))

spaces = st.sampled_from(NAMESPACES)
chains = st.builds(lambda chain, length: chain[:length], st.sampled_from(CHAINS), st.integers(1, 6))
owners = st.sampled_from(("p", "q"))


class MachineAgainstModel(RuleBasedStateMachine):
    """The model knows who holds, reads and writes what; of evictions it hears, and only checks that they were allowed.

    `tier` is what a tier would know from the commands: which generation owns a place. `watched` is what a watcher would
    believe after a dump and all changes.
    """

    leases = Bundle("leases")
    reservations = Bundle("reservations")

    def __init__(self):
        super().__init__()
        self.machine = BlockMachine(PAGES * PAGE_BYTES, LruEviction(), epoch=3)
        for namespace in NAMESPACES:
            self.machine.open(namespace, Nanos(0))
        self.now = 0
        self.held = {}  # (digest, name) -> (generation, crc)
        self.pinned = {}  # lease id -> (deadline, [(digest, name, generation)])
        self.writing = {}  # reservation id -> (deadline, owner, digest, {index: (name, generation)})
        self.tier = {}  # offset -> generation
        self.watched = {(changes.digest, name) for changes in self.machine.held() for name in changes.stored}
        self.generations = set()

    @rule(target=reservations, namespace=spaces, chain=chains, owner=owners, lease=st.integers(1, LEASE))
    def reserve(self, namespace, chain, owner, lease):
        digest = namespace.digest
        self.end_what_is_due()
        busy = {(d, name) for _, _, d, blocks in self.writing.values() for name, _ in blocks.values()}
        free = [i for i, name in enumerate(chain) if (digest, name) not in self.held and (digest, name) not in busy]
        protected = {(digest, name) for name in chain}

        reservation = self.machine.reserve(digest, chain, owner=owner, lease=Nanos(lease), now=Nanos(self.now))

        indices = [reserved.index for reserved in reservation.reserved]
        assert indices == free[: len(indices)], "the start of a chain comes first"
        assert reservation.refused == len(free) - len(indices)
        self.perform(protected)
        blocks = {
            reserved.index: (chain[reserved.index], reserved.slot.generation) for reserved in reservation.reserved
        }
        new = {generation for _, generation in blocks.values()}
        assert not new & self.generations, "a generation came twice"
        self.generations |= new
        if blocks:
            self.writing[reservation.reservation_id] = (self.now + lease, owner, digest, blocks)
        return reservation.reservation_id

    @rule(reservation=consumes(reservations), owner=owners, skipped=st.sets(st.integers(0, 5)), crc=st.integers(0, 99))
    def publish(self, reservation, owner, skipped, crc):
        self.end_what_is_due()
        known = self.writing.get(reservation)
        checksums = {index: crc + index for index in range(8) if index not in skipped}

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

    @rule(target=leases, namespace=spaces, chain=chains, lease=st.integers(0, LEASE))
    def match(self, namespace, chain, lease):
        digest = namespace.digest
        self.end_what_is_due()
        prefix = []
        for name in chain:
            if (digest, name) not in self.held:
                break
            prefix.append(name)

        leased = self.machine.match(digest, chain, owner="r", lease=Nanos(lease), now=Nanos(self.now))

        assert [(slot.generation, slot.crc32c) for slot in leased.slots] == [self.held[digest, name] for name in prefix]
        for slot in leased.slots:
            assert self.tier[slot.offset] == slot.generation
        if lease and prefix:
            pins = [(digest, name, self.held[digest, name][0]) for name in prefix]
            self.pinned[leased.lease_id] = (self.now + lease, pins)
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

    @rule(namespace=spaces, chain=chains, stale=st.booleans())
    def condemn(self, namespace, chain, stale):
        self.end_what_is_due()
        key = (namespace.digest, chain[-1])
        generation = self.held[key][0] if key in self.held else 1
        dropped = self.machine.condemn(*key, generation + stale, Nanos(self.now))
        assert dropped == (key in self.held and not stale)
        if dropped:
            del self.held[key]
        self.perform()

    @rule(span=st.integers(1, 2 * LEASE))
    def wait(self, span):
        self.now += span
        self.end_what_is_due()
        self.machine.expire(Nanos(self.now))
        self.perform()

    def end_what_is_due(self):
        self.pinned = {lease: pin for lease, pin in self.pinned.items() if pin[0] > self.now}
        self.writing = {reservation: writing for reservation, writing in self.writing.items() if writing[0] > self.now}

    def perform(self, protected=frozenset()):
        """What the server would do after each call; learns of evictions."""
        for command in self.machine.commands():
            address = command.address
            key = (address.key.digest, address.key.name)
            if isinstance(command, Claim):
                assert address.offset not in self.tier, "given away twice"
                self.tier[address.offset] = address.generation
                continue
            assert self.tier.pop(address.offset) == address.generation
            assert address.generation not in {pin[2] for _, pins in self.pinned.values() for pin in pins}
            if self.held.get(key, (0, 0))[0] == address.generation:
                assert key not in protected, "a chain pushed out its own beginning"
                del self.held[key]
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
        assert stats.pinned == len({pin[2] for _, pins in self.pinned.values() for pin in pins})

    def teardown(self):
        """Whatever happened: when time has passed, all space can be had again."""
        self.now += LEASE
        self.end_what_is_due()
        self.machine.expire(Nanos(self.now))
        self.perform()
        namespace = NAMESPACES[0]
        reservation = self.machine.reserve(
            namespace.digest, a_chain(PAGES, "new"), owner="p", lease=LEASE, now=Nanos(self.now)
        )
        assert len(reservation.reserved) == PAGES, "space has leaked"


TestMachineAgainstModel = MachineAgainstModel.TestCase
TestMachineAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
