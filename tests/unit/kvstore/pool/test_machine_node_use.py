"""Pool machine, used by the node itself: promotions and demotions in threads that may hang."""

import pytest

from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.hierarchy.machine import HierarchyPool
from kvstore.messages import NODE, BlockKey
from kvstore.pool.quotas import TenantQuotas
from tests.support.kvstore.builders import BLOCK_BYTES, MachineDriver, a_chain

EVER = Nanos(10**18)


def keys(store: MachineDriver, chain) -> list[BlockKey]:
    return [BlockKey(store.digest, name) for name in chain]


def reserve(store: MachineDriver, chain, now: int = 0):
    return store.machine.reserve(store.digest, chain, owner=NODE, lease=None, now=Nanos(now))


def test_the_machine_is_the_pool_that_the_hierarchy_asks_for():
    pool: HierarchyPool = MachineDriver().machine  # mypy checks this assignment

    assert pool.block_bytes(MachineDriver().digest) == BLOCK_BYTES


def test_a_place_that_a_thread_may_still_write_to_is_never_given_away():
    store = MachineDriver(blocks=2)
    reservation = reserve(store, a_chain(2))

    store.machine.expire(EVER)

    assert store.reserve(a_chain(1, "b"), now=EVER).refused == 1
    assert store.machine.publish(reservation.reservation_id, {0: 7}, owner=NODE, now=EVER) == 1
    assert store.look(a_chain(2), now=EVER) == 1
    assert len(store.reserve(a_chain(1, "b"), now=EVER).reserved) == 1, "places of unpublished blocks are free"
    store.machine.check()


def test_only_the_node_may_reserve_without_a_deadline():
    store = MachineDriver()

    with pytest.raises(AssertionError):
        store.machine.reserve(store.digest, a_chain(1), owner="w", lease=None, now=Nanos(0))


def test_what_the_node_reserves_is_published_by_nobody_else():
    store = MachineDriver()
    reservation = reserve(store, a_chain(1))

    assert store.machine.publish(reservation.reservation_id, {0: 7}, owner="w", now=Nanos(0)) == 0
    assert store.look(a_chain(1)) == 0


def test_pins_are_taken_anywhere_in_a_chain_and_say_where_the_bytes_are():
    store = MachineDriver(blocks=4)
    chain = a_chain(4)
    store.hold(chain)

    pinned = store.machine.pin(keys(store, [chain[3], b"absent" * 2 + b"....", chain[1]]), Nanos(0))

    assert [address.key.name for address in pinned.addresses] == [chain[3], chain[1]]
    assert [(a.offset, a.generation) for a in pinned.addresses] == [
        (store.slot(name).offset, store.slot(name).generation) for name in (chain[3], chain[1])
    ]
    assert store.hold(a_chain(4, "flood"), now=EVER) == 2
    assert store.machine.readable(store.digest, store.slot(chain[3])) == pinned.addresses[0]
    store.machine.unpin(pinned.pin_id, EVER)
    assert store.machine.stats().pinned == 0
    store.machine.check()


def test_copying_a_block_is_no_use_of_it():
    store = MachineDriver(blocks=4)
    old, young = a_chain(2, "old"), a_chain(2, "young")
    store.hold(old)
    store.hold(young)
    store.machine.unpin(store.machine.pin(keys(store, old), Nanos(1)).pin_id, Nanos(2))

    store.hold(a_chain(2, "new"), now=3)

    assert (store.look(old, now=3), store.look(young, now=3)) == (0, 2)


def test_a_block_that_was_chosen_while_it_was_pinned_may_go_afterwards():
    store = MachineDriver(blocks=2)
    store.hold(a_chain(2))
    pinned = store.machine.pin(keys(store, a_chain(2)), Nanos(0))
    assert store.reserve(a_chain(1, "b")).refused == 1

    store.machine.unpin(pinned.pin_id, Nanos(1))

    store.machine.check()
    assert len(store.reserve(a_chain(2, "b"), now=1).reserved) == 2


def test_unpinning_twice_is_a_bug():
    store = MachineDriver()
    pinned = store.machine.pin([], Nanos(0))
    store.machine.unpin(pinned.pin_id, Nanos(0))

    with pytest.raises(AssertionError, match="is not pinned"):
        store.machine.unpin(pinned.pin_id, Nanos(0))


def test_what_the_node_grants_itself_takes_no_lease_from_clients():
    store = MachineDriver(max_leases=1)
    reserve(store, a_chain(1, "up"))
    store.machine.pin([], Nanos(0))

    store.hold(a_chain(1))
    assert store.match(a_chain(1)).lease_id
    store.machine.check()


def test_present_is_what_is_readable_or_being_written():
    store = MachineDriver()
    store.hold(a_chain(1, "a"))
    store.reserve(a_chain(1, "b"))
    (held,), (coming,), (absent,) = (keys(store, a_chain(1, of)) for of in "abc")

    assert [store.machine.is_present(key) for key in (held, coming, absent)] == [True, True, False]
    assert not store.machine.is_present(BlockKey(b"?" * 16, held.name)), "an unknown namespace has no blocks"


def test_a_tenant_pays_for_what_comes_up_for_it():
    store = MachineDriver(quotas=TenantQuotas(lambda _: LruEviction(), default_bytes=BLOCK_BYTES))

    reservation = store.machine.reserve(
        store.digest, a_chain(2), owner=NODE, lease=None, now=Nanos(0), tenant=b"1" * 32
    )

    assert (len(reservation.reserved), reservation.refused) == (1, 1)
    assert [row.bytes for row in store.machine.stats().tenants] == [BLOCK_BYTES]


def test_what_the_node_pins_is_released_by_no_client_that_guesses_its_id():
    store = MachineDriver(blocks=1)
    store.machine.publish(store.reserve(a_chain(1)).reservation_id, {0: 1}, owner="w", now=Nanos(0))
    pinned = store.machine.pin(keys(store, a_chain(1)), Nanos(0))

    store.machine.release([pinned.pin_id], Nanos(0))

    assert store.reserve(a_chain(1, "b")).refused == 1, "a thread still reads this place"
    store.machine.unpin(pinned.pin_id, Nanos(0))
    assert len(store.reserve(a_chain(1, "b")).reserved) == 1
    store.machine.check()
