"""What moves between the pool and the tiers below it, and that nothing that moves is ever lost track of."""

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.clock import MILLISECOND, SECOND, Nanos
from kvstore.hierarchy import BATCH_BYTES, FETCH_AT_LEAST, MAX_COPIES, Everything, Hierarchy, Pace, TierRule
from kvstore.messages import GONE, BlockKey, Fetched, Outcome
from kvstore.movement import Fetch, Find, Keep, Movement
from tests.kv_builders import BLOCK_BYTES, Store, a_chain, a_namespace

PATIENCE = Nanos(5 * SECOND)
CRC = 77


class Below:
    """The tiers' side: what each holds, and commands performed when the test says so."""

    def __init__(
        self,
        blocks: int = 16,
        tiers: tuple[str, ...] = ("ssd", "redis"),
        admission=None,
        max_namespaces: int = 256,
        **rule,
    ):
        self.store = Store(blocks=blocks, max_namespaces=max_namespaces)
        self.held: list[set[bytes]] = [set() for _ in tiers]
        rules = [TierRule(name=name, admission=admission or Everything(), **rule) for name in tiers]
        self.hierarchy = Hierarchy(self.store.machine, rules)
        self.waiting: deque[Movement] = deque()
        self.asked: list[Movement] = []
        self.now = Nanos(0)

    def want(self, chain, patience=PATIENCE):
        count = self.hierarchy.want(self.store.digest, chain, self.store.look(chain, self.now), patience, self.now)
        self.collect()
        return count

    def hold(self, chain):
        self.store.hold(chain, self.now)
        self.hierarchy.noted(self.store.digest, chain, self.now)
        self.collect()

    def collect(self):
        self.store.machine.commands()
        for movement in self.hierarchy.commands():
            self.waiting.append(movement)
            self.asked.append(movement)

    def perform(self, movement=None):
        """Answer one command as a healthy tier would."""
        movement = movement or self.waiting.popleft()
        held = self.held[movement.tier]
        match movement:
            case Find(load_id=load_id, keys=keys):
                count = next((i for i, key in enumerate(keys) if key.name not in held), len(keys))
                self.hierarchy.found(load_id, count, self.now)
            case Fetch(load_id=load_id, addresses=addresses):
                answers = [Fetched(Outcome.MOVED, CRC) if a.key.name in held else GONE for a in addresses]
                self.hierarchy.fetched(load_id, answers, self.now)
            case Keep(copy_id=copy_id, addresses=addresses):
                held |= {address.key.name for address in addresses}
                self.hierarchy.kept(copy_id, [True] * len(addresses), self.now)
        self.collect()

    def perform_all(self):
        while self.waiting:
            self.perform()

    def fail(self, movement=None):
        movement = movement or self.waiting.popleft()
        self.hierarchy.failed(movement, self.now, self.now)
        self.collect()

    def tick(self, seconds: float):
        self.now = Nanos(self.now + round(seconds * SECOND))
        self.hierarchy.tick(self.now)
        self.collect()


def kinds(below):
    return [(type(movement).__name__, movement.tier) for movement in below.asked]


class Nothing:
    """Admits no block."""

    def admits(self, key, size_bytes, now):
        return False


def keys_of(below, chain):
    return [BlockKey(below.store.digest, name) for name in chain]


def test_a_pool_that_is_given_up_goes_down_whatever_the_rule_says_and_watchers_hear_of_it():
    below = Below(admission=Nothing())
    chain = a_chain(4)
    below.hold(chain)
    below.perform_all()
    assert below.held == [set(), set()]

    assert below.hierarchy.hand_down(1, keys_of(below, chain), below.now) == 4
    assert all(below.hierarchy.is_going_down(1, key) for key in keys_of(below, chain))
    below.collect()
    assert all(below.hierarchy.is_going_down(1, key) for key in keys_of(below, chain))
    below.perform_all()

    assert below.held == [set(), set(chain)]
    assert not any(below.hierarchy.is_going_down(1, key) for key in keys_of(below, chain))
    assert all(below.hierarchy.has(1, key) for key in keys_of(below, chain))
    (told,) = below.hierarchy.changes()
    assert (told.tier, told.stored) == ("redis", tuple(chain))


def test_what_is_given_up_waits_in_the_queue_that_all_blocks_wait_in_and_no_longer_one():
    below = Below(admission=Nothing(), queue_blocks=3)
    chain = a_chain(8)
    below.hold(chain)
    below.hierarchy.tick(below.now)

    taken = below.hierarchy.hand_down(0, keys_of(below, chain), below.now)

    assert taken == 3
    assert below.hierarchy.counters(0).dropped == 0
    below.hierarchy.check()


def test_a_tier_is_fenced_once_what_was_written_to_it_has_failed_and_nothing_is_under_way():
    below = Below(admission=Nothing())
    chain = a_chain(2)
    below.hold(chain)
    below.hierarchy.hand_down(0, keys_of(below, chain), below.now)
    below.collect()
    assert not below.hierarchy.is_fenced(0)

    below.fail()

    assert below.hierarchy.is_fenced(0)
    assert not below.hierarchy.is_fenced(1)


def test_wanted_blocks_come_up_and_are_readable():
    below = Below()
    chain = a_chain(4)
    below.held[0].update(chain)
    assert below.want(chain) == 4
    below.perform_all()
    assert below.store.look(chain) == 4
    assert below.store.slot(chain[3]).crc32c == CRC
    assert below.hierarchy.counters(0).loaded == 4


def test_only_what_the_pool_does_not_hold_is_fetched():
    below = Below()
    chain = a_chain(4)
    below.hold(chain[:2])
    below.perform_all()
    below.held[0].update(chain)
    below.asked.clear()
    assert below.want(chain) == 2
    below.perform_all()
    (fetch,) = [movement for movement in below.asked if isinstance(movement, Fetch)]
    assert [address.key.name for address in fetch.addresses] == chain[2:]


def test_the_next_tier_is_asked_for_what_the_first_does_not_hold():
    below = Below()
    chain = a_chain(4)
    below.held[0].update(chain[:2])
    below.held[1].update(chain)
    below.want(chain)
    below.perform_all()
    assert below.store.look(chain) == 4
    assert [below.hierarchy.counters(tier).loaded for tier in (0, 1)] == [2, 2]


def test_a_load_ends_at_the_first_hole():
    below = Below()
    chain = a_chain(4)
    below.held[0].update({chain[0], chain[2], chain[3]})
    below.want(chain)
    below.perform_all()
    assert below.store.look(chain) == 1
    assert below.hierarchy.is_idle


def test_who_asks_for_blocks_on_their_way_joins_the_load():
    below = Below()
    chain = a_chain(4)
    below.held[0].update(chain)
    assert below.want(chain) == 4
    assert below.want(chain[:3]) == 3
    assert below.want([*chain[:2], *a_chain(2, "b")]) == 2
    assert len(below.waiting) == 1


def test_who_joins_a_load_with_more_patience_lengthens_it():
    batch = BATCH_BYTES // BLOCK_BYTES
    chain = a_chain(batch + 4)
    for second, arrived in ((Nanos(0), batch), (PATIENCE, batch + 4)):
        below = Below(blocks=2 * batch)
        below.held[0].update(chain)
        below.want(chain, patience=Nanos(10 * MILLISECOND))
        below.want(chain, patience=second)
        below.perform()
        below.now = Nanos(20 * MILLISECOND)
        below.perform_all()
        assert below.store.look(chain, below.now) == arrived


def test_asking_without_patience_starts_nothing():
    below = Below()
    below.held[0].update(a_chain(2))
    assert below.want(a_chain(2), patience=Nanos(0)) == 0
    assert not below.waiting


def test_nothing_more_is_begun_after_the_deadline_but_what_is_under_way_arrives():
    batch = BATCH_BYTES // BLOCK_BYTES
    below = Below(blocks=2 * batch)
    chain = a_chain(batch + 4)
    below.held[0].update(chain)
    below.want(chain, patience=Nanos(10 * MILLISECOND))
    below.perform()
    below.now = Nanos(20 * MILLISECOND)
    below.perform_all()
    assert below.store.look(chain, below.now) == batch
    assert below.hierarchy.is_idle


def test_a_load_that_would_take_longer_than_computing_is_not_begun():
    below = Below(tiers=("ssd",))
    for index, took in enumerate((1.0, 1.0)):  # two blocks a second
        chain = a_chain(2, f"m{index}")
        below.held[0].update(chain)
        below.want(chain)
        below.perform()
        below.now = Nanos(below.now + round(took * SECOND))
        below.perform_all()
    chain = a_chain(4, "slow")
    below.held[0].update(chain)
    below.want(chain, patience=Nanos(SECOND))
    below.perform_all()
    assert below.store.look(chain, below.now) == 0
    assert below.hierarchy.counters(0).too_slow == 1
    below.want(chain, patience=Nanos(3 * SECOND))
    below.perform_all()
    assert below.store.look(chain, below.now) == 4


@pytest.mark.parametrize("held_below", [0, 6])
def test_a_load_of_a_namespace_that_was_forgotten_meanwhile_is_over(held_below):
    below = Below(max_namespaces=1)
    below.held[0] |= set(a_chain(held_below))
    below.want(a_chain(6))
    below.store.machine.open(a_namespace(model="another"), below.now)  # the first has no blocks, and goes

    below.perform_all()

    assert below.hierarchy.is_idle
    below.hierarchy.check()


def test_blocks_that_wait_to_go_down_and_whose_namespace_is_forgotten_are_let_go():
    below = Below(max_namespaces=1)
    below.hold(a_chain(1))
    below.fail()
    below.fail()
    below.hold(a_chain(6, "b"))
    for name in (*a_chain(1), *a_chain(6, "b")):
        assert below.store.machine.condemn(below.store.digest, name, below.store.slot(name).generation, below.now)
    below.store.machine.open(a_namespace(model="another"), below.now)
    below.hierarchy.noted(below.store.digest, a_chain(1), below.now)

    below.tick(2)

    assert below.hierarchy.is_idle


def test_blocks_that_went_before_their_turn_to_go_down_leave_no_pin_behind():
    below = Below()
    below.hold(a_chain(1))
    below.fail()
    below.fail()
    below.hold(a_chain(6, "b"))
    for name in a_chain(6, "b"):
        assert below.store.machine.condemn(below.store.digest, name, below.store.slot(name).generation, below.now)

    below.tick(2)

    assert below.hierarchy.is_idle
    assert below.store.machine.stats().leases == 0


def test_a_slow_tier_is_tried_again_after_a_while():
    pace = Pace()
    pace.measured(100, 10 * SECOND, Nanos(0))
    assert pace.seconds(100, Nanos(SECOND)) == pytest.approx(10)
    assert pace.seconds(100, Nanos(60 * SECOND)) == 0


def test_how_long_a_block_takes_from_below_is_that_of_the_first_healthy_tier_known_to_have_it():
    below = Below()
    (known,), (unknown,) = a_chain(1), a_chain(1, "b")
    key = BlockKey(below.store.digest, known)
    below.held[0].add(known)
    assert below.hierarchy.seconds_from_below(key, BLOCK_BYTES) is None

    below.want([known])
    below.perform()
    below.tick(3)
    below.perform_all()

    assert below.hierarchy.seconds_from_below(key, BLOCK_BYTES) == pytest.approx(3)
    assert below.hierarchy.seconds_from_below(BlockKey(below.store.digest, unknown), BLOCK_BYTES) is None
    below.tick(3600)
    assert below.hierarchy.seconds_from_below(key, 2 * BLOCK_BYTES) == pytest.approx(6)
    below.want([unknown])
    below.fail()
    assert below.hierarchy.seconds_from_below(key, BLOCK_BYTES) is None


def test_a_corrupt_block_ends_what_its_tier_gives_and_the_next_is_asked():
    below = Below()
    chain = a_chain(3)
    below.held[0].update(chain)
    below.held[1].update(chain)
    below.want(chain)
    below.perform()
    fetch = below.waiting.popleft()
    answers = [Fetched(Outcome.MOVED, CRC), Fetched(Outcome.CORRUPT), Fetched(Outcome.MOVED, CRC)]
    below.hierarchy.fetched(fetch.load_id, answers, below.now)
    below.collect()
    assert below.store.look(chain) == 1
    below.perform_all()
    assert below.store.look(chain) == 3
    assert below.hierarchy.counters(1).loaded == 2


def test_written_blocks_go_down_to_every_tier_once():
    below = Below()
    below.hold(a_chain(3))
    below.perform_all()
    below.hold(a_chain(3))
    below.perform_all()
    assert below.held == [set(a_chain(3))] * 2
    assert kinds(below) == [("Keep", 0), ("Keep", 1)]


def test_blocks_go_down_with_the_checksums_that_they_were_published_with():
    below = Below(tiers=("ssd",))
    below.hold(a_chain(3))
    (keep,) = below.waiting
    assert keep.checksums == (7, 7, 7)


def test_what_a_tier_let_go_is_offered_again():
    below = Below(tiers=("ssd",))
    below.hold(a_chain(2))
    below.perform_all()
    below.hierarchy.gone(0, [BlockKey(below.store.digest, a_chain(2)[1])])
    below.hold(a_chain(2))
    (again,) = below.waiting
    assert [address.key.name for address in again.addresses] == a_chain(2)[1:]


@pytest.mark.parametrize("left", [0, 1])
def test_what_a_shared_tier_has_lost_by_itself_is_noticed_when_it_is_missed_and_offered_again(left):
    below = Below(blocks=3, tiers=("redis",))
    below.hierarchy = Hierarchy(below.store.machine, [TierRule(name="redis", admission=Everything())], BLOCK_BYTES)
    below.hold(a_chain(3))
    below.perform_all()
    below.hold(a_chain(3, "b"))  # pushes the first chain out of the pool
    below.perform_all()
    below.hierarchy.changes()
    below.held[0] = set(a_chain(left))  # restarted, or short of memory

    below.want(a_chain(3))
    below.perform_all()

    assert [change.removed for change in below.hierarchy.changes()] == [tuple(a_chain(3)[left:])]
    below.hold(a_chain(3))
    below.perform_all()
    assert below.held[0] >= set(a_chain(3))


def test_blocks_that_go_down_stay_until_they_are_there():
    below = Below(blocks=2, tiers=("ssd",))
    below.hold(a_chain(2))
    assert below.store.reserve(a_chain(2, "b")).refused == 2
    below.perform_all()
    assert below.store.reserve(a_chain(2, "b")).refused == 0


def test_no_more_moves_at_a_time_than_a_small_pool_can_spare():
    below = Below(blocks=8, tiers=("ssd",))
    below.hierarchy = Hierarchy(below.store.machine, [TierRule(name="ssd", admission=Everything())], BLOCK_BYTES)
    below.hold(a_chain(6))
    assert [len(keep.addresses) for keep in below.waiting] == [1] * MAX_COPIES
    assert below.store.reserve(a_chain(6, "b")).refused == 0
    below.perform_all()
    assert below.held[0] == set(a_chain(6)[:MAX_COPIES]), "the rest made room before its turn came"


def test_going_down_does_not_count_as_use():
    below = Below(blocks=3, tiers=("ssd",))
    below.hold(a_chain(1, "old"))
    keep = below.waiting.popleft()
    below.store.hold(a_chain(1, "new"))
    below.perform(keep)
    below.store.hold(a_chain(2, "b"))
    assert below.store.look(a_chain(1, "old")) == 0
    assert below.store.look(a_chain(1, "new")) == 1


def test_the_queue_down_is_bounded_and_what_does_not_fit_is_counted():
    below = Below(blocks=16, tiers=("ssd",), queue_blocks=3)
    for index in range(MAX_COPIES):
        below.hold(a_chain(1, f"first{index}"))
    below.hold(a_chain(5))
    assert below.hierarchy.counters(0).dropped == 2
    below.perform_all()
    assert below.hierarchy.counters(0).kept == MAX_COPIES + 3


def test_a_failing_tier_is_left_alone_and_found_again():
    below = Below(tiers=("ssd",))
    below.held[0].update(a_chain(2))
    below.want(a_chain(2))
    below.fail()
    assert below.hierarchy.is_idle
    assert below.want(a_chain(2)) == 0
    assert not below.waiting
    below.tick(5)
    assert below.want(a_chain(2)) == 2
    below.perform_all()
    assert below.store.look(a_chain(2), below.now) == 2
    assert below.hierarchy.counters(0).fenced == 1


def test_a_tier_that_comes_with_nothing_when_the_time_is_over_has_failed():
    below = Below(tiers=("ssd",))
    below.held[0] |= {*a_chain(2), *a_chain(2, "b")}
    below.want(a_chain(2))
    below.perform()
    below.held[0].clear()
    below.tick(5)
    below.perform()
    before = kinds(below)

    below.want(a_chain(2, "b"))

    assert below.hierarchy.counters(0).failures == 1
    assert kinds(below) == before


def test_a_tier_that_has_kept_nothing_when_the_time_is_over_has_failed():
    below = Below(tiers=("ssd",))
    below.hold(a_chain(2))
    keep = below.waiting.popleft()
    below.tick(31)
    below.hierarchy.kept(keep.copy_id, [False] * 2, below.now)
    before = kinds(below)

    below.hold(a_chain(2, "b"))

    assert below.hierarchy.counters(0).failures == 1
    assert kinds(below) == before


@pytest.mark.parametrize("reads", [True, False])
def test_a_disk_that_has_hung_is_tried_again_soon_after_however_long_it_hung(reads):
    below = Below(tiers=("ssd",))
    below.held[0] |= {*a_chain(2)}
    if reads:
        below.want(a_chain(2))
        below.perform()
    else:
        below.hold(a_chain(2, "b"))
    movement = below.waiting.popleft()
    began = below.now
    below.tick(31)
    below.hierarchy.late(movement, began, below.now)
    below.tick(3600)
    below.hierarchy.failed(movement, began, below.now)
    before = len(below.asked)

    below.want(a_chain(2)) if reads else below.hold(a_chain(2, "c"))

    assert len(below.asked) == before + 1
    assert below.hierarchy.counters(0).failures == 1
    below.hierarchy.check()


def test_that_a_disk_finds_a_block_in_memory_does_not_say_that_it_can_be_read():
    below = Below(tiers=("ssd",), finds_in_memory=True)
    below.held[0] |= {*a_chain(2), *a_chain(2, "b"), *a_chain(2, "c")}
    below.want(a_chain(2))
    below.perform()
    below.fail()
    below.tick(1)
    below.want(a_chain(2, "b"))
    below.perform()
    before = kinds(below)

    below.want(a_chain(2, "c"))

    assert kinds(below) == before, "one attempt at a time"


def test_a_disk_that_cannot_be_written_can_still_be_read():
    below = Below(tiers=("ssd",))
    below.held[0].update(a_chain(2))
    below.hold(a_chain(2, "b"))
    below.fail()
    assert below.want(a_chain(2)) == 2


def test_blocks_that_wait_for_a_fenced_tier_go_down_when_it_is_well():
    below = Below(tiers=("ssd",))
    below.hold(a_chain(1))
    below.fail()
    below.hold(a_chain(1, "b"))
    assert not below.waiting
    below.tick(5)
    below.perform_all()
    assert below.held[0] == set(a_chain(1, "b"))


def test_a_late_fetch_keeps_its_places_until_its_thread_is_back():
    below = Below(blocks=2, tiers=("ssd",))
    below.held[0].update(a_chain(2))
    below.want(a_chain(2))
    below.perform()
    fetch = below.waiting.popleft()
    below.now = Nanos(60 * SECOND)
    below.hierarchy.late(fetch, Nanos(0), below.now)
    assert below.want(a_chain(2), patience=Nanos(0)) == 0, "nobody waits for it"
    assert below.store.reserve(a_chain(2, "b"), below.now).refused == 2, "the thread may still write there"
    below.perform(fetch)
    assert below.store.reserve(a_chain(2, "b"), below.now).refused == 0
    assert below.store.look(a_chain(2), below.now) == 0, "what came late is not trusted"


def test_a_fetch_gets_some_time_even_when_little_patience_is_left():
    below = Below(tiers=("ssd",))
    below.held[0].update(a_chain(1))
    below.want(a_chain(1), patience=Nanos(1))
    below.perform()
    (fetch,) = below.waiting
    assert fetch.deadline == FETCH_AT_LEAST


def test_watchers_hear_in_which_tier_a_block_is():
    below = Below(tiers=("ssd",))
    below.hold(a_chain(2))
    below.perform_all()
    below.hierarchy.gone(0, [BlockKey(below.store.digest, a_chain(2)[1])])
    stored, removed = below.hierarchy.changes()
    assert (stored.tier, set(stored.stored), stored.removed) == ("ssd", set(a_chain(2)), ())
    assert (removed.tier, removed.stored, removed.removed) == ("ssd", (), (a_chain(2)[1],))


def test_what_a_tier_promised_and_did_not_deliver_is_told_and_offered_again():
    below = Below(tiers=("redis",))
    chain = a_chain(3)
    below.hold(chain)
    below.perform_all()
    for name in chain:
        assert below.store.machine.condemn(below.store.digest, name, below.store.slot(name).generation, below.now)
    below.hierarchy.changes()
    below.want(chain)
    below.perform()
    fetch = below.waiting.popleft()
    moved = Fetched(Outcome.MOVED, CRC)

    below.hierarchy.fetched(fetch.load_id, [moved, GONE, moved], below.now)
    below.collect()

    assert [(each.stored, each.removed) for each in below.hierarchy.changes()] == [((), (chain[1],))]
    assert {key.name for key in below.hierarchy.held(0)} == {chain[0], chain[2]}
    below.hold(chain)
    (again,) = [movement for movement in below.waiting if isinstance(movement, Keep)]
    assert [address.key.name for address in again.addresses] == [chain[1]]


def test_watchers_hear_of_blocks_that_another_node_has_written():
    below = Below(tiers=("redis",))
    below.held[0].update(a_chain(2))

    below.want(a_chain(2))
    below.perform_all()

    assert [set(each.stored) for each in below.hierarchy.changes()] == [set(a_chain(2))]
    below.want([*a_chain(2), *a_chain(1, "more")])
    below.perform_all()
    assert below.hierarchy.changes() == [], "what is known is not told again"


def test_a_tier_that_finds_in_memory_is_asked_what_it_holds_and_what_it_lacks_is_forgotten_one_by_one():
    below = Below(tiers=("ssd",), finds_in_memory=True)
    chain = a_chain(3)
    below.hold(chain)
    below.perform_all()
    for name in chain:
        assert below.store.machine.condemn(below.store.digest, name, below.store.slot(name).generation, below.now)
    below.hierarchy.changes()
    below.held[0].discard(chain[1])

    below.want(chain)
    below.perform_all()

    assert [each.removed for each in below.hierarchy.changes()] == [(chain[1],)]


CHAINS = [a_chain(6), [*a_chain(3), *a_chain(3, "b")], a_chain(4, "c"), a_chain(2, "d")]


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: places and pins add up, and all of them come back."""

    def __init__(self):
        super().__init__()
        self.below = Below(blocks=7, queue_blocks=3)
        self.hung: list[Movement] = []
        self.heard: dict[str, set[bytes]] = {"ssd": set(), "redis": set()}

    @rule(chain=st.sampled_from(CHAINS), patience=st.sampled_from([0, 1, PATIENCE]))
    def want(self, chain, patience):
        before = self.below.store.look(chain, self.below.now)
        coming = self.below.want(chain, Nanos(patience))
        assert 0 <= coming <= len(chain) - before

    @rule(chain=st.sampled_from(CHAINS))
    def hold(self, chain):
        self.below.hold(chain)

    @rule(chain=st.sampled_from(CHAINS), tier=st.sampled_from([0, 1]))
    def appear_below(self, chain, tier):
        self.below.held[tier].update(chain)

    @rule(chain=st.sampled_from(CHAINS), tier=st.sampled_from([0, 1]))
    def go_below(self, chain, tier):
        self.below.held[tier].difference_update(chain)
        self.below.hierarchy.gone(tier, [BlockKey(self.below.store.digest, name) for name in chain])

    @precondition(lambda self: self.below.waiting)
    @rule(data=st.data())
    def answer(self, data):
        place = data.draw(st.integers(0, len(self.below.waiting) - 1))
        self.below.waiting.rotate(-place)
        self.below.perform()

    @precondition(lambda self: self.below.waiting)
    @rule()
    def fail(self):
        self.below.fail()

    @precondition(lambda self: self.below.waiting)
    @rule()
    def hang(self):
        movement = self.below.waiting.popleft()
        self.below.hierarchy.late(movement, self.below.now, self.below.now)
        self.below.collect()
        self.hung.append(movement)

    @precondition(lambda self: self.hung)
    @rule(well=st.booleans())
    def come_back(self, well):
        movement = self.hung.pop()
        (self.below.perform if well else self.below.fail)(movement)

    @rule(seconds=st.sampled_from([0.001, 1, 40]))
    def wait(self, seconds):
        self.below.tick(seconds)

    @invariant()
    def all_adds_up(self):
        self.below.hierarchy.check()
        self.below.store.machine.check()

    @invariant()
    def who_watched_from_the_start_knows_what_a_newcomer_is_told(self):
        for change in self.below.hierarchy.changes():
            assert not self.heard[change.tier].intersection(change.stored), "told twice"
            assert self.heard[change.tier].issuperset(change.removed), "told of what nobody knew"
            self.heard[change.tier].update(change.stored)
            self.heard[change.tier].difference_update(change.removed)
        for index, heard in enumerate(self.heard.values()):
            assert {key.name for key in self.below.hierarchy.held(index)} == heard

    def teardown(self):
        for movement in self.hung:
            self.below.fail(movement)
        for _ in range(100):
            self.below.perform_all()
            if self.below.hierarchy.is_idle:
                break
            self.below.tick(60)
        assert self.below.hierarchy.is_idle
        stats = self.below.store.machine.stats()
        assert stats.pinned == 0
        assert self.below.store.reserve(a_chain(7, "all"), self.below.now).refused == 0, "a place was lost"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
