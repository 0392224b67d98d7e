"""Session pins: paused sessions keep their blocks, up to a limit of bytes and until a deadline."""

import pytest

from kvstore.clock import Nanos
from kvstore.errors import Exhausted, NamespaceUnknown
from kvstore.messages import SessionPinResult
from tests.support.kvstore.builders import BLOCK_BYTES, LEASE, MachineDriver, a_chain, a_namespace


def a_store(blocks: int = 8, held_blocks: int = 4, **limits: int) -> MachineDriver:
    return MachineDriver(blocks, max_held_bytes=held_blocks * BLOCK_BYTES, **limits)


def hold(store: MachineDriver, chain, session: str = "s", now: int = 0, span: int = LEASE) -> SessionPinResult:
    return store.machine.hold(store.digest, chain, session=session, span=Nanos(span), now=Nanos(now))


def test_pinned_blocks_survive_a_flood_of_writes():
    store = a_store()
    store.hold(a_chain(3, "mine"))
    assert hold(store, a_chain(3, "mine")) == SessionPinResult(blocks=3)

    for flood in range(5):
        store.hold(a_chain(8, f"flood{flood}"), now=1)

    assert store.look(a_chain(3, "mine"), now=1) == 3
    assert store.machine.stats().held_bytes == 3 * BLOCK_BYTES
    store.machine.check()


def test_session_pin_ends_at_its_deadline():
    store = a_store(blocks=3)
    store.hold(a_chain(3))
    hold(store, a_chain(3))
    assert store.reserve(a_chain(1, "b"), now=LEASE - 1).refused == 1

    assert len(store.reserve(a_chain(1, "b"), now=LEASE).reserved) == 1

    assert store.machine.stats().held_bytes == 0
    assert store.machine.stats().expired == 1
    store.machine.check()


def test_released_session_pin_keeps_nothing():
    store = a_store(blocks=3)
    store.hold(a_chain(3))
    hold(store, a_chain(3))

    assert store.machine.release_hold(store.digest, "s", Nanos(1)) == 3
    assert store.machine.release_hold(store.digest, "s", Nanos(1)) == 0

    assert store.hold(a_chain(3, "b"), now=1) == 3


def test_resumed_session_stays_pinned_throughout():
    store = a_store(blocks=3)
    store.hold(a_chain(3))
    hold(store, a_chain(3))

    lease = store.match(a_chain(3), now=1)
    store.machine.release_hold(store.digest, "s", Nanos(1))

    assert store.reserve(a_chain(1, "b"), now=1).refused == 1
    store.release(lease.lease_id, now=2)
    assert store.reserve(a_chain(1, "b"), now=2).refused == 0
    store.machine.check()


def test_new_session_pin_replaces_the_old_one():
    store = a_store()
    store.hold(a_chain(3, "old"))
    store.hold(a_chain(3, "new"))
    hold(store, a_chain(3, "old"))

    assert hold(store, a_chain(3, "new"), now=1) == SessionPinResult(blocks=3)

    assert store.machine.stats().held_bytes == 3 * BLOCK_BYTES
    store.hold(a_chain(5, "flood"), now=2)
    assert (store.look(a_chain(3, "old"), now=2), store.look(a_chain(3, "new"), now=2)) == (0, 3)
    store.machine.check()


def test_blocks_over_the_pin_limit_are_refused_and_counted():
    store = a_store(held_blocks=4)
    store.hold(a_chain(3, "a"))
    store.hold(a_chain(4, "b"))
    hold(store, a_chain(3, "a"), session="one")

    assert hold(store, a_chain(5, "b"), session="two") == SessionPinResult(blocks=1, refused=3)

    store.machine.release_hold(store.digest, "one", Nanos(0))
    assert hold(store, a_chain(5, "b"), session="two") == SessionPinResult(blocks=4)
    store.machine.check()


def test_block_pinned_by_several_sessions_is_charged_once():
    store = a_store(held_blocks=4)
    store.hold(a_chain(4))
    for session in ("one", "two", "three"):
        assert hold(store, a_chain(4), session=session).blocks == 4
    assert store.machine.stats().held_bytes == 4 * BLOCK_BYTES

    store.machine.release_hold(store.digest, "one", Nanos(0))
    store.machine.release_hold(store.digest, "three", Nanos(0))

    assert store.machine.stats().held_bytes == 4 * BLOCK_BYTES
    store.machine.release_hold(store.digest, "two", Nanos(0))
    assert store.machine.stats().held_bytes == 0
    store.machine.check()


def test_session_may_have_pins_in_two_namespaces():
    store = a_store()
    other = a_namespace(model="other")
    store.machine.open(other, Nanos(0))
    store.hold(a_chain(1))
    hold(store, a_chain(1))

    store.machine.release_hold(other.digest, "s", Nanos(0))

    assert store.machine.stats().held_bytes == BLOCK_BYTES


def test_condemned_block_leaves_its_session_pins():
    store = a_store(blocks=2)
    chain = a_chain(2)
    store.hold(chain)
    hold(store, chain, session="one")
    hold(store, chain, session="two")

    assert store.machine.condemn(store.digest, chain[1], store.slot(chain[1]).generation, Nanos(0))

    assert store.look(chain) == 1
    assert store.machine.stats().held_bytes == BLOCK_BYTES
    store.machine.check()
    assert store.hold(a_chain(1, "new")) == 1, "its place must be free"
    assert store.machine.release_hold(store.digest, "one", Nanos(0)) == 1
    store.machine.check()


def test_session_pin_is_not_released_as_a_lease():
    """Release a session pin by its id: clients never get this id, but could guess it."""
    store = a_store()
    store.hold(a_chain(1))
    lease_id = store.match(a_chain(1)).lease_id
    hold(store, a_chain(1))

    store.release(lease_id + 1)

    assert store.machine.stats().held_bytes == BLOCK_BYTES


def test_session_pin_keeps_the_order_of_eviction():
    store = a_store(blocks=4)
    old, young = a_chain(2, "old"), a_chain(2, "young")
    store.hold(old)
    hold(store, old)
    store.hold(young)
    store.machine.release_hold(store.digest, "s", Nanos(1))

    store.hold(a_chain(2, "new"), now=2)

    assert (store.look(old, now=2), store.look(young, now=2)) == (0, 2)


def test_pin_of_no_blocks_is_not_opened():
    store = a_store()

    assert hold(store, a_chain(3)) == SessionPinResult(blocks=0)
    assert store.machine.stats().leases == 0
    with pytest.raises(NamespaceUnknown):
        store.machine.hold(b"?" * 16, a_chain(1), session="s", span=LEASE, now=Nanos(0))


def test_session_pins_count_as_leases():
    store = a_store(max_leases=1)
    store.hold(a_chain(1))
    hold(store, a_chain(1))

    with pytest.raises(Exhausted):
        store.match(a_chain(1))
    assert hold(store, a_chain(1), now=1).blocks == 1, "it replaces the session's former pin"
