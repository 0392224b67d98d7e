"""Demotions to the backing tiers, and checks of which blocks the tiers still have."""

import pytest

from kvstore.hierarchy.demotions import MAX_DEMOTIONS
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.tier_states import AdmitEverything, TierRule
from tests.support.kvstore.builders import BLOCK_BYTES, a_chain, a_namespace
from tests.support.kvstore.lower_tiers import AdmitNothing, HierarchyDriver, keys_of, movement_kinds


def test_demote_now_ignores_admission_and_tells_watchers():
    below = HierarchyDriver(admission=AdmitNothing())
    chain = a_chain(4)
    below.hold(chain)
    below.perform_all()
    assert below.held == [set(), set()]

    assert below.hierarchy.demote_now(1, keys_of(below, chain), below.now) == 4
    assert all(below.hierarchy.is_demoting(1, key) for key in keys_of(below, chain))
    below.collect()
    assert all(below.hierarchy.is_demoting(1, key) for key in keys_of(below, chain))
    below.perform_all()

    assert below.held == [set(), set(chain)]
    assert not any(below.hierarchy.is_demoting(1, key) for key in keys_of(below, chain))
    assert all(below.hierarchy.has(1, key) for key in keys_of(below, chain))
    (told,) = below.hierarchy.changes()
    assert (told.tier, told.stored) == ("redis", tuple(chain))


def test_demote_now_uses_the_bounded_queue():
    below = HierarchyDriver(admission=AdmitNothing(), queue_blocks=3)
    chain = a_chain(8)
    below.hold(chain)
    below.hierarchy.tick(below.now)

    taken = below.hierarchy.demote_now(0, keys_of(below, chain), below.now)

    assert taken == 3
    assert below.hierarchy.counters(0).dropped == 0
    below.hierarchy.check()


def test_written_blocks_are_demoted_to_each_tier_once():
    below = HierarchyDriver()
    below.hold(a_chain(3))
    below.perform_all()
    below.hold(a_chain(3))
    below.perform_all()
    assert below.held == [set(a_chain(3))] * 2
    assert movement_kinds(below) == [("Demote", 0), ("Demote", 1)]


def test_demotion_carries_the_published_checksums():
    below = HierarchyDriver(tiers=("ssd",))
    below.hold(a_chain(3))
    (keep,) = below.waiting
    assert keep.checksums == (7, 7, 7)


def test_blocks_stay_pinned_until_their_demotion_ends():
    below = HierarchyDriver(blocks=2, tiers=("ssd",))
    below.hold(a_chain(2))
    assert below.store.reserve(a_chain(2, "b")).refused == 2
    below.perform_all()
    assert below.store.reserve(a_chain(2, "b")).refused == 0


def test_batches_fit_a_small_pool():
    below = HierarchyDriver(blocks=8, tiers=("ssd",))
    below.hierarchy = Hierarchy(below.store.machine, [TierRule(name="ssd", admission=AdmitEverything())], BLOCK_BYTES)
    below.hold(a_chain(6))
    assert [len(keep.addresses) for keep in below.waiting] == [1] * MAX_DEMOTIONS
    assert below.store.reserve(a_chain(6, "b")).refused == 0
    below.perform_all()
    assert below.held[0] == set(a_chain(6)[:MAX_DEMOTIONS]), "the other blocks were evicted before their turn"


def test_demotion_does_not_count_as_a_use():
    below = HierarchyDriver(blocks=3, tiers=("ssd",))
    below.hold(a_chain(1, "old"))
    keep = below.waiting.popleft()
    below.store.hold(a_chain(1, "new"))
    below.perform(keep)
    below.store.hold(a_chain(2, "b"))
    assert below.store.look(a_chain(1, "old")) == 0
    assert below.store.look(a_chain(1, "new")) == 1


def test_full_demotion_queue_drops_and_counts_blocks():
    below = HierarchyDriver(blocks=16, tiers=("ssd",), queue_blocks=3)
    for index in range(MAX_DEMOTIONS):
        below.hold(a_chain(1, f"first{index}"))
    below.hold(a_chain(5))
    assert below.hierarchy.counters(0).dropped == 2
    below.perform_all()
    assert below.hierarchy.counters(0).kept == MAX_DEMOTIONS + 3


def test_queued_blocks_of_a_closed_namespace_are_dropped():
    below = HierarchyDriver(max_namespaces=1)
    below.hold(a_chain(1))
    below.fail()
    below.fail()
    below.hold(a_chain(6, "b"))
    below.lose([*a_chain(1), *a_chain(6, "b")])
    below.store.machine.open(a_namespace(model="another"), below.now)
    below.hierarchy.offer(below.store.digest, a_chain(1), below.now)

    below.tick(2)

    assert below.hierarchy.is_idle


def test_blocks_evicted_while_queued_leave_no_pin():
    below = HierarchyDriver()
    below.hold(a_chain(1))
    below.fail()
    below.fail()
    below.hold(a_chain(6, "b"))
    below.lose(a_chain(6, "b"))

    below.tick(2)

    assert below.hierarchy.is_idle
    assert below.store.machine.stats().leases == 0


def test_late_demotion_without_blocks_counts_as_failure():
    below = HierarchyDriver(tiers=("ssd",))
    below.hold(a_chain(2))
    keep = below.waiting.popleft()
    below.tick(31)
    below.hierarchy.kept(keep.demotion_id, [False] * 2, below.now)
    before = movement_kinds(below)

    below.hold(a_chain(2, "b"))

    assert below.hierarchy.counters(0).failures == 1
    assert movement_kinds(below) == before


def test_queued_blocks_are_demoted_when_the_tier_recovers():
    below = HierarchyDriver(tiers=("ssd",))
    below.hold(a_chain(1))
    below.fail()
    below.hold(a_chain(1, "b"))
    assert not below.waiting
    below.tick(5)
    below.perform_all()
    assert below.held[0] == set(a_chain(1, "b"))


def test_evicted_blocks_use_up_no_try_of_a_recovered_tier():
    below = HierarchyDriver(tiers=("ssd",))
    below.hold(a_chain(1))
    hung_seconds = 20
    transfer = below.waiting.popleft()
    below.tick(hung_seconds)
    below.hierarchy.failed(transfer, below.now - round(hung_seconds * 1e9), below.now)
    below.hold(a_chain(2, "b"))
    below.lose(a_chain(2, "b"))

    below.tick(4 * hung_seconds)  # the pause is over
    below.hold(a_chain(2, "c"))

    assert [type(each).__name__ for each in below.waiting] == ["Demote"]
    below.perform_all()
    assert below.held[0] == set(a_chain(2, "c"))


def test_confirm_forgets_lost_blocks_and_tells_watchers():
    below = HierarchyDriver(tiers=("redis",))
    chain = a_chain(4)
    below.hold(chain)
    below.perform_all()
    below.hierarchy.changes()
    below.held[0].difference_update(chain[1:3])

    assert below.hierarchy.confirm(0, keys_of(below, chain), below.now)
    below.collect()
    assert all(below.hierarchy.is_being_confirmed(0, key) for key in keys_of(below, chain))
    assert below.hierarchy.confirm(0, keys_of(below, chain[:2]), below.now)
    assert below.hierarchy.commands() == [], "a block is confirmed once at a time"
    below.perform_all()

    assert not any(below.hierarchy.is_being_confirmed(0, key) for key in keys_of(below, chain))
    assert [below.hierarchy.has(0, key) for key in keys_of(below, chain)] == [True, False, False, True]
    assert [change.removed for change in below.hierarchy.changes()] == [tuple(chain[1:3])]
    below.hierarchy.check()


@pytest.mark.parametrize("late", [False, True])
def test_unconfirmed_blocks_count_as_lost(late):
    below = HierarchyDriver(tiers=("redis",))
    chain = a_chain(2)
    below.hold(chain)
    below.perform_all()
    below.hierarchy.confirm(0, keys_of(below, chain), below.now)
    (question,) = below.hierarchy.commands()

    if late:
        below.hierarchy.late(question, below.now, below.now)
    below.hierarchy.failed(question, below.now, below.now)

    assert not any(
        below.hierarchy.has(0, key) or below.hierarchy.is_being_confirmed(0, key) for key in keys_of(below, chain)
    )
    assert not below.hierarchy.confirm(0, keys_of(below, chain), below.now)
    assert below.hierarchy.counters(0).failures == 1
    assert below.hierarchy.failed_writes(0) == 0, "the tier may still be written to"
    below.hierarchy.check()
