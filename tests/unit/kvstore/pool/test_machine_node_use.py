"""Pool machine: reservations and pins of the node itself, for promotions and demotions in threads that may hang."""

import pytest

from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.messages import NODE, BlockKey
from kvstore.pool.quotas import TenantQuotas
from tests.support.kvstore.builders import BLOCK_BYTES, MachineDriver, a_chain

EVER = Nanos(10**18)


def keys(store: MachineDriver, chain) -> list[BlockKey]:
    return [BlockKey(store.digest, name) for name in chain]


def reserve(store: MachineDriver, chain, now: int = 0):
    return store.machine.reserve(store.digest, chain, owner=NODE, lease=None, now=Nanos(now))


def test_place_reserved_by_the_node_is_never_reused():
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


def test_only_the_node_publishes_its_reservations():
    store = MachineDriver()
    reservation = reserve(store, a_chain(1))

    assert store.machine.publish(reservation.reservation_id, {0: 7}, owner="w", now=Nanos(0)) == 0
    assert store.look(a_chain(1)) == 0


def test_pin_returns_addresses_of_any_readable_blocks():
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


def test_pin_of_the_node_does_not_count_as_a_use():
    store = MachineDriver(blocks=4)
    old, young = a_chain(2, "old"), a_chain(2, "young")
    store.hold(old)
    store.hold(young)
    store.machine.unpin(store.machine.pin(keys(store, old), Nanos(1)).pin_id, Nanos(2))

    store.hold(a_chain(2, "new"), now=3)

    assert (store.look(old, now=3), store.look(young, now=3)) == (0, 2)


def test_block_chosen_while_pinned_can_be_evicted_later():
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


def test_pins_of_the_node_do_not_use_up_client_leases():
    store = MachineDriver(max_leases=1)
    reserve(store, a_chain(1, "up"))
    store.machine.pin([], Nanos(0))

    store.hold(a_chain(1))
    assert store.match(a_chain(1)).lease_id
    store.machine.check()


def test_readable_and_reserved_blocks_are_present():
    store = MachineDriver()
    store.hold(a_chain(1, "a"))
    store.reserve(a_chain(1, "b"))
    (held,), (coming,), (absent,) = (keys(store, a_chain(1, of)) for of in "abc")

    assert [store.machine.is_present(key) for key in (held, coming, absent)] == [True, True, False]
    assert not store.machine.is_present(BlockKey(b"?" * 16, held.name)), "an unknown namespace has no blocks"


def test_tenant_pays_for_its_promoted_blocks():
    store = MachineDriver(quotas=TenantQuotas(lambda _: LruEviction(), default_bytes=BLOCK_BYTES))

    reservation = store.machine.reserve(
        store.digest, a_chain(2), owner=NODE, lease=None, now=Nanos(0), tenant=b"1" * 32
    )

    assert (len(reservation.reserved), reservation.refused) == (1, 1)
    assert [row.bytes for row in store.machine.stats().tenants] == [BLOCK_BYTES]


def test_clients_cannot_release_pins_of_the_node():
    store = MachineDriver(blocks=1)
    store.machine.publish(store.reserve(a_chain(1)).reservation_id, {0: 1}, owner="w", now=Nanos(0))
    pinned = store.machine.pin(keys(store, a_chain(1)), Nanos(0))

    store.machine.release([pinned.pin_id], Nanos(0))

    assert store.reserve(a_chain(1, "b")).refused == 1, "a thread still reads this place"
    store.machine.unpin(pinned.pin_id, Nanos(0))
    assert len(store.reserve(a_chain(1, "b")).reserved) == 1
    store.machine.check()
