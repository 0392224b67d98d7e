"""Contract tests of all eviction policies, whichever order they prefer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policies import POLICIES, policy
from kvstore.eviction.policy import SAME_USE
from kvstore.pool.machine import BlockMachine
from tests.support.kvstore.builders import BLOCK_BYTES, LEASE, a_chain, a_namespace

every_policy = pytest.mark.parametrize("name", POLICIES)


@every_policy
def test_empty_policy_chooses_no_victim(name):
    rule = policy(name)

    assert rule.choose() is None
    assert len(rule) == 0


@every_policy
def test_victim_stays_until_it_is_withdrawn(name):
    rule = policy(name)
    rule.admit("a", 1, Nanos(0))

    assert rule.choose() == rule.choose() == "a"
    assert "a" in rule

    rule.withdraw("a")
    assert "a" not in rule
    assert rule.choose() is None


@every_policy
def test_chain_is_evicted_from_its_tail(name):
    rule = policy(name)
    chain = a_chain(6)
    for block in reversed(chain):
        rule.admit(block, 1, Nanos(0))

    gone = []
    while (victim := rule.choose()) is not None:
        rule.withdraw(victim)
        gone.append(victim)

    assert gone == chain[::-1]


@every_policy
def test_shared_prefix_outlives_the_tails(name):
    rule = policy(name)
    shared = a_chain(3, "s")
    for turn, of in enumerate("xyxy"):
        for block in reversed(shared + a_chain(4, of)):
            rule.admit(block, 1, Nanos(turn * 60 * SECOND))

    gone = []
    while (victim := rule.choose()) is not None:
        rule.withdraw(victim)
        gone.append(victim)

    assert set(gone[:8]) == {*a_chain(4, "x"), *a_chain(4, "y")}
    assert gone[8:] == shared[::-1]


@every_policy
def test_block_pinned_at_its_turn_is_offered_again(name):
    rule = policy(name)
    for block in "abc":
        rule.admit(block, 1, Nanos(0))
    pinned = rule.choose()
    rule.withdraw(pinned)

    assert rule.choose() != pinned
    rule.admit(pinned, 1, Nanos(SECOND))

    assert len(rule) == 3
    assert pinned in rule


@every_policy
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from(["admit", "evict", "withdraw"]), st.integers(0, 40)), max_size=120
    )
)
def test_policy_knows_admitted_blocks_until_withdrawn(name, steps):
    rule = policy(name)
    admitted = set()
    now = 0
    for key, step, seconds in steps:
        now += seconds * SECOND // 8
        if step == "admit":
            rule.admit(key, 1, Nanos(now))
            admitted.add(key)
        elif step == "withdraw" and key in admitted:
            rule.withdraw(key)
            admitted.remove(key)
        elif step == "evict" and admitted:
            victim = rule.choose()
            assert victim in admitted
            rule.withdraw(victim)
            admitted.remove(victim)
        assert len(rule) == len(admitted)
        assert all((each in rule) == (each in admitted) for each in range(12))
    assert (rule.choose() is None) == (not admitted)


@every_policy
@given(turns=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7), st.booleans()), max_size=40))
def test_a_pinned_block_is_never_evicted(name, turns):
    namespace = a_namespace()
    machine = BlockMachine(8 * BLOCK_BYTES, policy(name), epoch=1)
    machine.open(namespace, Nanos(0))
    pins = {}
    for now, (session, length, keeps) in enumerate(turns):
        at, chain = Nanos(now * SECOND), a_chain(length, f"s{session}")
        for lease in [lease for lease in pins if not keeps]:
            machine.release([lease], at)
            del pins[lease]
        leased = machine.match(namespace.digest, chain, lease=Nanos(100 * LEASE), now=at)
        if len(leased.slots):
            pins[leased.lease_id] = [
                (block, machine.find(namespace.digest, block)) for block in chain[: len(leased.slots)]
            ]
        reservation = machine.reserve(namespace.digest, chain, owner="w", lease=LEASE, now=at)
        machine.publish(reservation.reservation_id, {r.index: 7 for r in reservation.reserved}, owner="w", now=at)

        for pinned in pins.values():
            assert all(machine.find(namespace.digest, block) == slot for block, slot in pinned)
        machine.check()


@every_policy
def test_uses_of_one_request_do_not_reorder_its_blocks(name):
    rule = policy(name)
    for block in ("twice", *"abcdefgh"):
        rule.admit(block, 1, Nanos(0))
    rule.admit("twice", 1, SAME_USE)
    for block in "abcdefgh":
        rule.withdraw(block)
    rule.admit("once", 1, Nanos(60 * SECOND))

    assert rule.choose() == "twice"


def test_unknown_policy_is_rejected_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mru' is not one of lru, s3fifo, slru, hazard"):
        policy("mru")
