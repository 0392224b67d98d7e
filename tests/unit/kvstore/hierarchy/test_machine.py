"""Hierarchy machine: failing tiers, and the accounts of all transfers in random histories."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.clock import Nanos
from kvstore.hierarchy.transfers import TierTransfer
from kvstore.messages import BlockKey
from tests.support.kvstore.builders import BLOCK_BYTES, a_chain
from tests.support.kvstore.lower_tiers import MAX_WAIT, HierarchyDriver, movement_kinds


def test_promotion_time_is_that_of_the_first_healthy_tier():
    below = HierarchyDriver()
    (known,), (unknown,) = a_chain(1), a_chain(1, "b")
    key = BlockKey(below.store.digest, known)
    below.held[0].add(known)
    assert below.hierarchy.promotion_seconds(key, BLOCK_BYTES) is None

    below.prefetch([known])
    below.perform()
    below.tick(3)
    below.perform_all()

    assert below.hierarchy.promotion_seconds(key, BLOCK_BYTES) == pytest.approx(3)
    assert below.hierarchy.promotion_seconds(BlockKey(below.store.digest, unknown), BLOCK_BYTES) is None
    below.tick(3600)
    assert below.hierarchy.promotion_seconds(key, 2 * BLOCK_BYTES) == pytest.approx(6)
    below.prefetch([unknown])
    below.fail()
    assert below.hierarchy.promotion_seconds(key, BLOCK_BYTES) is None


def test_failing_tier_is_skipped_until_it_recovers():
    below = HierarchyDriver(tiers=("ssd",))
    below.held[0].update(a_chain(2))
    below.prefetch(a_chain(2))
    below.fail()
    assert below.hierarchy.is_idle
    assert below.prefetch(a_chain(2)) == 0
    assert not below.waiting
    below.tick(5)
    assert below.prefetch(a_chain(2)) == 2
    below.perform_all()
    assert below.store.look(a_chain(2), below.now) == 2
    assert below.hierarchy.counters(0).fenced == 1


@pytest.mark.parametrize("reads", [True, False])
def test_recovered_disk_is_retried_soon_after_a_long_hang(reads):
    below = HierarchyDriver(tiers=("ssd",))
    below.held[0] |= {*a_chain(2)}
    if reads:
        below.prefetch(a_chain(2))
        below.perform()
    else:
        below.hold(a_chain(2, "b"))
    transfer = below.waiting.popleft()
    began = below.now
    below.tick(31)
    below.hierarchy.late(transfer, began, below.now)
    below.tick(3600)
    below.hierarchy.failed(transfer, began, below.now)
    before = len(below.asked)

    below.prefetch(a_chain(2)) if reads else below.hold(a_chain(2, "c"))

    assert len(below.asked) == before + 1
    assert below.hierarchy.counters(0).failures == 1
    below.hierarchy.check()


def test_index_hit_does_not_close_the_circuit_breaker():
    below = HierarchyDriver(tiers=("ssd",), finds_in_memory=True)
    below.held[0] |= {*a_chain(2), *a_chain(2, "b"), *a_chain(2, "c")}
    below.prefetch(a_chain(2))
    below.perform()
    below.fail()
    below.tick(1)
    below.prefetch(a_chain(2, "b"))
    below.perform()
    before = movement_kinds(below)

    below.prefetch(a_chain(2, "c"))

    assert movement_kinds(below) == before, "only one trial at a time"


def test_a_disk_that_cannot_be_written_can_still_be_read():
    below = HierarchyDriver(tiers=("ssd",))
    below.held[0].update(a_chain(2))
    below.hold(a_chain(2, "b"))
    below.fail()
    assert below.prefetch(a_chain(2)) == 2


CHAINS = [a_chain(6), [*a_chain(3), *a_chain(3, "b")], a_chain(4, "c"), a_chain(2, "d")]


class AnyOrder(RuleBasedStateMachine):
    """Random histories: after every step, the numbers of slots and pins are right; at the end, all are free again."""

    def __init__(self):
        super().__init__()
        self.below = HierarchyDriver(blocks=7, queue_blocks=3)
        self.hung: list[TierTransfer] = []
        self.heard: dict[str, set[bytes]] = {"ssd": set(), "redis": set()}

    @rule(chain=st.sampled_from(CHAINS), max_wait=st.sampled_from([0, 1, MAX_WAIT]))
    def prefetch(self, chain, max_wait):
        before = self.below.store.look(chain, self.below.now)
        loading = self.below.prefetch(chain, Nanos(max_wait))
        assert 0 <= loading <= len(chain) - before

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

    @rule(chain=st.sampled_from(CHAINS), tier=st.sampled_from([0, 1]))
    def confirm(self, chain, tier):
        keys = [BlockKey(self.below.store.digest, name) for name in chain]
        if self.below.hierarchy.confirm(tier, keys, self.below.now):
            assert all(self.below.hierarchy.is_being_confirmed(tier, key) for key in keys)
        self.below.collect()

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
        transfer = self.below.waiting.popleft()
        self.below.hierarchy.late(transfer, self.below.now, self.below.now)
        self.below.collect()
        self.hung.append(transfer)

    @precondition(lambda self: self.hung)
    @rule(well=st.booleans())
    def come_back(self, well):
        transfer = self.hung.pop()
        (self.below.perform if well else self.below.fail)(transfer)

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
            assert not self.heard[change.tier].intersection(change.stored), "a change was reported twice"
            assert self.heard[change.tier].issuperset(change.removed), "the removal of an unknown block was reported"
            self.heard[change.tier].update(change.stored)
            self.heard[change.tier].difference_update(change.removed)
        for index, heard in enumerate(self.heard.values()):
            assert {key.name for key in self.below.hierarchy.held(index)} == heard

    def teardown(self):
        for transfer in self.hung:
            self.below.fail(transfer)
        for _ in range(100):
            self.below.perform_all()
            if self.below.hierarchy.is_idle:
                break
            self.below.tick(60)
        assert self.below.hierarchy.is_idle
        stats = self.below.store.machine.stats()
        assert stats.pinned == 0
        assert self.below.store.reserve(a_chain(7, "all"), self.below.now).refused == 0, "a place in the pool was lost"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
