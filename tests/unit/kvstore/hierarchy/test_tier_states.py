"""Tier states: what the node knows about its backing tiers, and what it tells watchers."""

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.tier_states import AdmitEverything, TierRule, TierSpeed
from kvstore.hierarchy.transfers import Demote
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult
from tests.support.kvstore.builders import BLOCK_BYTES, a_chain
from tests.support.kvstore.lower_tiers import CRC, HierarchyDriver


def test_a_slow_tier_is_tried_again_after_a_while():
    pace = TierSpeed()
    pace.measured(100, 10 * SECOND, Nanos(0))
    assert pace.seconds(100, Nanos(SECOND)) == pytest.approx(10)
    assert pace.seconds(100, Nanos(60 * SECOND)) == 0


def test_block_removed_by_a_tier_is_offered_again():
    below = HierarchyDriver(tiers=("ssd",))
    below.hold(a_chain(2))
    below.perform_all()
    below.hierarchy.gone(0, [BlockKey(below.store.digest, a_chain(2)[1])])
    below.hold(a_chain(2))
    (again,) = below.waiting
    assert [address.key.name for address in again.addresses] == a_chain(2)[1:]


@pytest.mark.parametrize("left", [0, 1])
def test_block_missed_in_a_shared_tier_is_offered_again(left):
    below = HierarchyDriver(blocks=3, tiers=("redis",))
    below.hierarchy = Hierarchy(below.store.machine, [TierRule(name="redis", admission=AdmitEverything())], BLOCK_BYTES)
    below.hold(a_chain(3))
    below.perform_all()
    below.hold(a_chain(3, "b"))  # evicts the first chain from the pool
    below.perform_all()
    below.hierarchy.changes()
    below.held[0] = set(a_chain(left))  # as if the tier had restarted, or were short of memory

    below.prefetch(a_chain(3))
    below.perform_all()

    assert [change.removed for change in below.hierarchy.changes()] == [tuple(a_chain(3)[left:])]
    below.hold(a_chain(3))
    below.perform_all()
    assert below.held[0] >= set(a_chain(3))


def test_watchers_learn_the_tier_of_a_block():
    below = HierarchyDriver(tiers=("ssd",))
    below.hold(a_chain(2))
    below.perform_all()
    below.hierarchy.gone(0, [BlockKey(below.store.digest, a_chain(2)[1])])
    stored, removed = below.hierarchy.changes()
    assert (stored.tier, set(stored.stored), stored.removed) == ("ssd", set(a_chain(2)), ())
    assert (removed.tier, removed.stored, removed.removed) == ("ssd", (), (a_chain(2)[1],))


def test_undelivered_block_is_reported_and_offered_again():
    below = HierarchyDriver(tiers=("redis",))
    chain = a_chain(3)
    below.hold(chain)
    below.perform_all()
    below.lose(chain)
    below.hierarchy.changes()
    below.prefetch(chain)
    below.perform()
    fetch = below.waiting.popleft()
    moved = FetchResult(BlockOutcome.MOVED, CRC)

    below.hierarchy.fetched(fetch.promotion_id, [moved, GONE, moved], below.now)
    below.collect()

    assert [(each.stored, each.removed) for each in below.hierarchy.changes()] == [((), (chain[1],))]
    assert {key.name for key in below.hierarchy.held(0)} == {chain[0], chain[2]}
    below.hold(chain)
    (again,) = [transfer for transfer in below.waiting if isinstance(transfer, Demote)]
    assert [address.key.name for address in again.addresses] == [chain[1]]


def test_watchers_learn_of_blocks_written_by_other_nodes():
    below = HierarchyDriver(tiers=("redis",))
    below.held[0].update(a_chain(2))

    below.prefetch(a_chain(2))
    below.perform_all()

    assert [set(each.stored) for each in below.hierarchy.changes()] == [set(a_chain(2))]
    below.prefetch([*a_chain(2), *a_chain(1, "more")])
    below.perform_all()
    assert below.hierarchy.changes() == [], "a known block is not reported again"


def test_misses_of_an_indexed_tier_are_forgotten_one_by_one():
    below = HierarchyDriver(tiers=("ssd",), finds_in_memory=True)
    chain = a_chain(3)
    below.hold(chain)
    below.perform_all()
    below.lose(chain)
    below.hierarchy.changes()
    below.held[0].discard(chain[1])

    below.prefetch(chain)
    below.perform_all()

    assert [each.removed for each in below.hierarchy.changes()] == [(chain[1],)]
