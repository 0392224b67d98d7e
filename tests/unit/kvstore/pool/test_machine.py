import pytest

from kvstore.clock import Nanos
from kvstore.errors import Exhausted, InvalidArgument, NamespaceInUse, NamespaceUnknown
from kvstore.eviction.lru import LruEviction
from kvstore.messages import NO_LEASE, NO_RESERVATION, Claim, Discard, Slot, Slots
from kvstore.pool.lifecycle import NEXT, READABLE, BlockState, BlockTransition, IllegalBlockTransition, advance
from kvstore.pool.open_namespaces import NAMESPACE_IDLE
from tests.support.kvstore.builders import BLOCK_BYTES, LEASE, MachineDriver, a_chain, a_namespace


def test_a_block_is_readable_only_once_it_is_published():
    store = MachineDriver()
    chain = a_chain(3)
    reservation = store.reserve(chain)
    assert store.look(chain) == 0

    published = store.machine.publish(reservation.reservation_id, {0: 1, 1: 2, 2: 3}, owner="w", now=Nanos(0))

    assert published == 3
    assert [slot.crc32c for slot in store.match(chain).slots] == [1, 2, 3]
    store.machine.check()


def test_publication_frees_blocks_that_it_does_not_name():
    store = MachineDriver()
    chain = a_chain(3)
    reservation = store.reserve(chain)

    store.machine.publish(reservation.reservation_id, {0: 1, 2: 3}, owner="w", now=Nanos(0))

    assert store.look(chain) == 1
    assert [reserved.index for reserved in store.reserve(chain).reserved] == [1]
    store.machine.check()


def test_only_the_owner_of_a_reservation_can_publish_it():
    store = MachineDriver()
    reservation = store.reserve(a_chain(1))

    assert store.machine.publish(reservation.reservation_id, {0: 1}, owner="thief", now=Nanos(0)) == 0
    assert store.machine.publish(reservation.reservation_id, {0: 1}, owner="w", now=Nanos(0)) == 1


def test_only_one_of_two_writers_gets_the_slot():
    store = MachineDriver()
    chain = a_chain(2)
    first = store.reserve(chain, owner="one")

    second = store.reserve(chain, owner="two")

    assert len(first.reserved) == 2
    assert second.reserved == ()
    assert second.reservation_id == NO_RESERVATION
    assert second.refused == 0


def test_an_abandoned_reservation_is_reclaimed_at_its_deadline():
    store = MachineDriver(blocks=2)
    lost = store.reserve(a_chain(2, "dead"))
    assert store.reserve(a_chain(2, "live"), now=LEASE - 1).refused == 2

    reservation = store.reserve(a_chain(2, "live"), now=LEASE)

    assert len(reservation.reserved) == 2
    assert store.machine.publish(lost.reservation_id, {0: 1}, owner="w", now=Nanos(LEASE)) == 0
    assert store.machine.stats().expired == 1
    store.machine.check()


def test_a_matched_block_is_not_evicted_before_its_lease_ends():
    store = MachineDriver(blocks=2)
    chain = a_chain(2)
    store.hold(chain)
    store.match(chain)

    assert store.reserve(a_chain(1, "b"), now=LEASE - 1).refused == 1
    assert len(store.reserve(a_chain(1, "b"), now=LEASE).reserved) == 1
    store.machine.check()


def test_a_released_block_can_be_evicted_at_once():
    store = MachineDriver(blocks=2)
    chain = a_chain(2)
    store.hold(chain)
    lease = store.match(chain).lease_id
    store.release(lease)
    store.release(lease)  # a second release does nothing

    assert store.hold(a_chain(2, "b")) == 2
    assert store.look(chain) == 0
    assert store.machine.stats().evicted == 2


def test_a_block_stays_pinned_until_the_last_of_its_leases_ends():
    store = MachineDriver(blocks=2)
    chain = a_chain(2)
    store.hold(chain)
    first, second = store.match(chain), store.match(chain)

    store.release(first.lease_id)
    assert store.reserve(a_chain(1, "b")).refused == 1
    store.release(second.lease_id)
    assert store.reserve(a_chain(1, "b")).refused == 0


def test_match_without_lease_pins_and_counts_nothing():
    store = MachineDriver()
    chain = a_chain(2)
    store.hold(chain)

    leased = store.match(chain, lease=0)

    assert (leased.lease_id, len(leased.slots)) == (NO_LEASE, 2)
    stats = store.machine.stats()
    assert (stats.pinned, stats.hits, stats.misses) == (0, 0, 0)


def test_a_match_ends_at_the_first_hole():
    store = MachineDriver()
    chain = a_chain(4)
    store.hold(chain)
    assert store.machine.condemn(store.digest, chain[2], store.slot(chain[2]).generation, Nanos(0))

    assert store.look(chain) == 2
    store.machine.check()


def test_end_of_a_chain_is_evicted_first():
    store = MachineDriver(blocks=6)
    chain = a_chain(6)
    store.hold(chain)

    store.hold(a_chain(2, "b"))

    assert store.look(chain) == 4


def test_a_chain_that_was_read_still_loses_its_end_first():
    store = MachineDriver(blocks=6)
    chain = a_chain(6)
    store.hold(chain)
    store.release(store.match(chain).lease_id)
    store.match(chain, lease=1)  # this lease ends by its deadline

    store.machine.expire(Nanos(1))
    store.hold(a_chain(2, "b"), now=1)

    assert store.look(chain, now=1) == 4


def test_a_chain_written_in_parts_loses_its_end_first():
    store = MachineDriver(blocks=6)
    chain = a_chain(6)
    for end in (2, 4, 6):
        store.hold(chain[:end])

    store.hold(a_chain(3, "b"))

    assert store.look(chain) == 3


def test_writing_the_end_of_a_chain_keeps_its_beginning():
    store = MachineDriver(blocks=4)
    chain = a_chain(6)
    store.hold(chain[:3])
    store.hold(a_chain(1, "b"))

    reservation = store.reserve(chain)

    assert [reserved.index for reserved in reservation.reserved] == [3]
    assert reservation.refused == 2
    assert store.look(chain) == 3


def test_a_chain_that_was_matched_outlives_one_that_was_not():
    store = MachineDriver(blocks=4)
    old, young = a_chain(2, "old"), a_chain(2, "young")
    store.hold(old)
    store.hold(young)
    store.release(store.match(old).lease_id)

    store.hold(a_chain(2, "b"))

    assert (store.look(old), store.look(young)) == (2, 0)


def test_reused_place_has_a_new_slot_generation():
    store = MachineDriver(blocks=1)
    store.hold(a_chain(1, "a"))
    before = store.slot(a_chain(1, "a")[0])

    store.hold(a_chain(1, "b"))

    after = store.slot(a_chain(1, "b")[0])
    assert after.offset == before.offset
    assert after.generation > before.generation
    assert store.machine.readable(store.digest, before) is None
    assert store.machine.readable(store.digest, after) is not None


def test_ids_of_two_starts_never_match():
    one, other = MachineDriver(), MachineDriver()
    other.machine = type(other.machine)(8 * BLOCK_BYTES, LruEviction(), epoch=2)
    other.machine.open(other.namespace, Nanos(0))
    for store in (one, other):
        store.hold(a_chain(1))
    lease = one.match(a_chain(1)).lease_id
    other.match(a_chain(1))

    other.release(lease)

    assert other.machine.stats().pinned == 1
    assert other.machine.readable(other.digest, one.slot(a_chain(1)[0])) is None


def test_commands_follow_every_change_of_ownership():
    store = MachineDriver(blocks=1)
    store.hold(a_chain(1, "a"))
    assert [type(command) for command in store.machine.commands()] == [Claim]

    store.hold(a_chain(1, "b"))

    discard, claim = store.machine.commands()
    assert isinstance(discard, Discard)
    assert isinstance(claim, Claim)
    assert discard.address.generation < claim.address.generation
    assert store.machine.commands() == []


def test_place_of_a_condemned_block_waits_for_its_readers():
    store = MachineDriver(blocks=1)
    name = a_chain(1)[0]
    store.hold([name])
    lease = store.match([name]).lease_id
    generation = store.slot(name).generation

    assert store.machine.condemn(store.digest, name, generation, Nanos(0))
    assert store.look([name]) == 0
    assert store.reserve([name]).refused == 1, "its place is still in use"
    store.machine.check()
    store.release(lease)
    assert store.hold([name]) == 1
    assert not store.machine.condemn(store.digest, name, generation, Nanos(0)), "the block has another generation"
    store.machine.check()
    assert store.machine.stats().corrupt == 1


def test_changes_list_stored_and_removed_blocks():
    store = MachineDriver(blocks=2)
    chain = a_chain(2)
    store.hold(chain)
    (change,) = store.machine.changes()
    assert (change.digest, set(change.stored), change.removed) == (store.digest, set(chain), ())

    store.hold(a_chain(1, "b"))

    (change,) = store.machine.changes()
    assert (change.stored, change.removed) == (tuple(a_chain(1, "b")), (chain[1],))
    assert store.machine.changes() == []


def test_short_lived_block_is_reported_as_removed():
    store = MachineDriver(blocks=1)
    store.hold(a_chain(1, "a"))
    store.hold(a_chain(1, "b"))

    (change,) = store.machine.changes()

    assert (change.stored, change.removed) == (tuple(a_chain(1, "b")), tuple(a_chain(1, "a")))


def test_namespaces_of_different_block_sizes_share_the_space():
    store = MachineDriver(blocks=8)
    big = a_namespace(model="big", block_bytes=4 * BLOCK_BYTES)
    store.machine.open(big, Nanos(0))
    store.hold(a_chain(8))

    reservation = store.machine.reserve(big.digest, a_chain(2), owner="w", lease=LEASE, now=Nanos(0))

    assert len(reservation.reserved) == 2
    assert store.look(a_chain(8)) == 0
    store.machine.check()
    store.machine.publish(reservation.reservation_id, {}, owner="w", now=Nanos(0))
    assert store.hold(a_chain(8)) == 8
    store.machine.check()


def test_a_slot_is_only_found_under_its_own_namespace():
    store = MachineDriver()
    other = a_namespace(model="other")
    store.machine.open(other, Nanos(0))
    store.hold(a_chain(1))
    slot = store.slot(a_chain(1)[0])

    assert store.machine.readable(store.digest, slot) is not None
    assert store.machine.readable(other.digest, slot) is None
    assert store.machine.match(other.digest, a_chain(1), lease=LEASE, now=Nanos(0)).slots == Slots()


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "bfloat16"), ("block_tokens", 64), ("layers", 5), ("kv_heads", 4), ("head_dim", 16), ("layout", "NHD")],
)
def test_the_same_weights_in_another_layout_are_refused_by_name(field, value):
    store = MachineDriver()

    with pytest.raises(NamespaceInUse) as refused:
        store.machine.open(a_namespace(**{field: value}), Nanos(1))

    assert refused.value.fields == [field]
    store.machine.open(a_namespace(**{field: value}), NAMESPACE_IDLE)  # the other namespace has been idle long enough


@pytest.mark.parametrize("field", ["model", "revision", "lora"])
def test_other_weights_may_have_another_layout(field):
    store = MachineDriver()

    store.machine.open(a_namespace(dtype="bfloat16", **{field: "other"}), Nanos(0))


def test_an_unknown_namespace_is_refused():
    store = MachineDriver()

    with pytest.raises(NamespaceUnknown):
        store.machine.match(b"?" * 16, a_chain(1), lease=LEASE, now=Nanos(0))


def test_a_block_larger_than_the_pool_is_refused_by_name():
    store = MachineDriver(blocks=1)

    with pytest.raises(InvalidArgument) as refused:
        store.machine.open(a_namespace(model="big", block_bytes=2 * BLOCK_BYTES), Nanos(0))

    assert refused.value.field == "namespace.block_bytes"


def test_leases_have_a_limit_that_ends_with_them():
    store = MachineDriver(max_leases=2)
    store.hold(a_chain(1))
    store.match(a_chain(1))
    store.match(a_chain(1))

    with pytest.raises(Exhausted):
        store.match(a_chain(1))
    with pytest.raises(Exhausted):
        store.reserve(a_chain(1, "b"))

    assert store.look(a_chain(1)) == 1
    assert len(store.match(a_chain(1), now=LEASE).slots) == 1
    store.machine.check()


def test_an_empty_namespace_makes_room_for_another():
    store = MachineDriver(max_namespaces=2)
    store.machine.open(a_namespace(model="second"), Nanos(1))
    store.hold(a_chain(1), now=2)

    store.machine.open(a_namespace(model="third"), Nanos(3))

    assert store.look(a_chain(1), now=4) == 1
    with pytest.raises(NamespaceUnknown):
        store.machine.namespace(a_namespace(model="second").digest)


def test_only_the_listed_transitions_are_legal():
    for state in BlockState:
        for step in BlockTransition:
            if (state, step) in NEXT:
                assert advance(state, step) is NEXT[state, step]
            else:
                with pytest.raises(IllegalBlockTransition):
                    advance(state, step)


def test_only_publication_makes_a_block_readable():
    into_readable = {key for key, state in NEXT.items() if state in READABLE and key[0] not in READABLE}

    assert into_readable == {(BlockState.RESERVED, BlockTransition.PUBLISH)}
    assert {step for (state, step) in NEXT if step is BlockTransition.EVICT and state is not BlockState.HELD} == set()


def test_an_unknown_slot_is_neither_readable_nor_writable():
    store = MachineDriver()
    nowhere = Slot(3 * BLOCK_BYTES, 1)

    assert store.machine.readable(store.digest, nowhere) is None
    assert store.machine.writable(store.digest, nowhere) is None
