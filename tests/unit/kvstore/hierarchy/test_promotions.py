"""Promotions: requested blocks are copied to the pool only once, and within the max wait."""

import pytest

from kvstore.clock import MILLISECOND, SECOND, Nanos
from kvstore.hierarchy.machine import BATCH_BYTES
from kvstore.hierarchy.promotions import FETCH_AT_LEAST
from kvstore.hierarchy.transfers import Fetch
from kvstore.messages import BlockOutcome, FetchResult
from tests.support.kvstore.builders import BLOCK_BYTES, a_chain, a_namespace
from tests.support.kvstore.lower_tiers import CRC, MAX_WAIT, HierarchyDriver, movement_kinds


def test_prefetched_blocks_become_readable():
    below = HierarchyDriver()
    chain = a_chain(4)
    below.held[0].update(chain)
    assert below.prefetch(chain) == 4
    below.perform_all()
    assert below.store.look(chain) == 4
    assert below.store.slot(chain[3]).crc32c == CRC
    assert below.hierarchy.counters(0).loaded == 4


def test_only_missing_blocks_are_fetched():
    below = HierarchyDriver()
    chain = a_chain(4)
    below.hold(chain[:2])
    below.perform_all()
    below.held[0].update(chain)
    below.asked.clear()
    assert below.prefetch(chain) == 2
    below.perform_all()
    (fetch,) = [transfer for transfer in below.asked if isinstance(transfer, Fetch)]
    assert [address.key.name for address in fetch.addresses] == chain[2:]


def test_next_tier_is_asked_for_blocks_missing_in_the_first():
    below = HierarchyDriver()
    chain = a_chain(4)
    below.held[0].update(chain[:2])
    below.held[1].update(chain)
    below.prefetch(chain)
    below.perform_all()
    assert below.store.look(chain) == 4
    assert [below.hierarchy.counters(tier).loaded for tier in (0, 1)] == [2, 2]


def test_promotion_ends_at_the_first_hole():
    below = HierarchyDriver()
    chain = a_chain(4)
    below.held[0].update({chain[0], chain[2], chain[3]})
    below.prefetch(chain)
    below.perform_all()
    assert below.store.look(chain) == 1
    assert below.hierarchy.is_idle


def test_second_request_joins_the_promotion():
    below = HierarchyDriver()
    chain = a_chain(4)
    below.held[0].update(chain)
    assert below.prefetch(chain) == 4
    assert below.prefetch(chain[:3]) == 3
    assert below.prefetch([*chain[:2], *a_chain(2, "b")]) == 2
    assert len(below.waiting) == 1


def test_joining_with_a_longer_max_wait_extends_the_promotion():
    batch = BATCH_BYTES // BLOCK_BYTES
    chain = a_chain(batch + 4)
    for second, arrived in ((Nanos(0), batch), (MAX_WAIT, batch + 4)):
        below = HierarchyDriver(blocks=2 * batch)
        below.held[0].update(chain)
        below.prefetch(chain, max_wait=Nanos(10 * MILLISECOND))
        below.prefetch(chain, max_wait=second)
        below.perform()
        below.now = Nanos(20 * MILLISECOND)
        below.perform_all()
        assert below.store.look(chain, below.now) == arrived


def test_prefetch_without_max_wait_starts_nothing():
    below = HierarchyDriver()
    below.held[0].update(a_chain(2))
    assert below.prefetch(a_chain(2), max_wait=Nanos(0)) == 0
    assert not below.waiting


def test_transfer_under_way_arrives_after_the_deadline():
    batch = BATCH_BYTES // BLOCK_BYTES
    below = HierarchyDriver(blocks=2 * batch)
    chain = a_chain(batch + 4)
    below.held[0].update(chain)
    below.prefetch(chain, max_wait=Nanos(10 * MILLISECOND))
    below.perform()
    below.now = Nanos(20 * MILLISECOND)
    below.perform_all()
    assert below.store.look(chain, below.now) == batch
    assert below.hierarchy.is_idle


def test_promotion_slower_than_computing_is_not_begun():
    below = HierarchyDriver(tiers=("ssd",))
    for index, took in enumerate((1.0, 1.0)):  # two blocks per second
        chain = a_chain(2, f"m{index}")
        below.held[0].update(chain)
        below.prefetch(chain)
        below.perform()
        below.now = Nanos(below.now + round(took * SECOND))
        below.perform_all()
    chain = a_chain(4, "slow")
    below.held[0].update(chain)
    below.prefetch(chain, max_wait=Nanos(SECOND))
    below.perform_all()
    assert below.store.look(chain, below.now) == 0
    assert below.hierarchy.counters(0).too_slow == 1
    below.prefetch(chain, max_wait=Nanos(3 * SECOND))
    below.perform_all()
    assert below.store.look(chain, below.now) == 4


@pytest.mark.parametrize("held_below", [0, 6])
def test_promotion_ends_when_its_namespace_is_closed(held_below):
    below = HierarchyDriver(max_namespaces=1)
    below.held[0] |= set(a_chain(held_below))
    below.prefetch(a_chain(6))
    below.store.machine.open(a_namespace(model="another"), below.now)  # the first namespace has no blocks and is closed

    below.perform_all()

    assert below.hierarchy.is_idle
    below.hierarchy.check()


def test_next_tier_is_asked_after_a_corrupt_block():
    below = HierarchyDriver()
    chain = a_chain(3)
    below.held[0].update(chain)
    below.held[1].update(chain)
    below.prefetch(chain)
    below.perform()
    fetch = below.waiting.popleft()
    answers = [
        FetchResult(BlockOutcome.MOVED, CRC),
        FetchResult(BlockOutcome.CORRUPT),
        FetchResult(BlockOutcome.MOVED, CRC),
    ]
    below.hierarchy.fetched(fetch.promotion_id, answers, below.now)
    below.collect()
    assert below.store.look(chain) == 1
    below.perform_all()
    assert below.store.look(chain) == 3
    assert below.hierarchy.counters(1).loaded == 2


def test_late_fetch_without_blocks_counts_as_failure():
    below = HierarchyDriver(tiers=("ssd",))
    below.held[0] |= {*a_chain(2), *a_chain(2, "b")}
    below.prefetch(a_chain(2))
    below.perform()
    below.held[0].clear()
    below.tick(5)
    below.perform()
    before = movement_kinds(below)

    below.prefetch(a_chain(2, "b"))

    assert below.hierarchy.counters(0).failures == 1
    assert movement_kinds(below) == before


def test_late_fetch_keeps_its_places_until_it_returns():
    below = HierarchyDriver(blocks=2, tiers=("ssd",))
    below.held[0].update(a_chain(2))
    below.prefetch(a_chain(2))
    below.perform()
    fetch = below.waiting.popleft()
    below.now = Nanos(60 * SECOND)
    below.hierarchy.late(fetch, Nanos(0), below.now)
    assert below.prefetch(a_chain(2), max_wait=Nanos(0)) == 0, "the max wait is over"
    assert below.store.reserve(a_chain(2, "b"), below.now).refused == 2, "the thread may still write to these places"
    below.perform(fetch)
    assert below.store.reserve(a_chain(2, "b"), below.now).refused == 0
    assert below.store.look(a_chain(2), below.now) == 0, "a late block is not published"


def test_fetch_gets_a_minimum_of_time():
    below = HierarchyDriver(tiers=("ssd",))
    below.held[0].update(a_chain(1))
    below.prefetch(a_chain(1), max_wait=Nanos(1))
    below.perform()
    (fetch,) = below.waiting
    assert fetch.deadline == FETCH_AT_LEAST
