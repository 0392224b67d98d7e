"""The radix tree, compared with a list of all added chains."""

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.router.kv_index import prefix_index as subject
from fleet.router.kv_index.prefix_index import JOIN_ABOVE, Chain, ChainHolder, RadixTree

HOLDERS = 4

# A prompt is a path through a small tree, so many prompts begin alike; the key of a block is the path up to it.
prompts = st.lists(st.integers(0, 1), max_size=9)


def keys_of(prompt: list[int]) -> tuple[int, ...]:
    return tuple(hash((7, *prompt[: end + 1])) & 0xFFFF_FFFF_FFFF for end in range(len(prompt)))


def leading(chains: list[Chain], holder: ChainHolder, keys: tuple[int, ...]) -> int:
    held = {key for chain in chains if chain.holder is holder for key in chain.keys}
    return next((depth for depth, key in enumerate(keys) if key not in held), len(keys))


@pytest.mark.parametrize("many", [JOIN_ABOVE, 0])
@given(
    history=st.lists(st.tuples(st.integers(0, HOLDERS - 1), prompts, st.booleans(), st.integers(0, 100)), max_size=40),
    asked=prompts,
)
def test_leading_blocks_equal_a_scan_of_all_chains(many, history, asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "JOIN_ABOVE", many)
        chains = RadixTree()
        holders = [ChainHolder(1 << number) for number in range(HOLDERS)]
        there: list[Chain] = []
        for number, prompt, adds, which in history:
            if adds or not there:
                keys = keys_of(prompt)
                if (begun := chains.extendable_chain(holders[number], keys)) is not None:
                    assert begun.holder is holders[number]
                    chains.extend(begun, keys)
                else:
                    there.append(chains.add(holders[number], keys))
            else:
                chains.remove(there.pop(which % len(there)))
            chains.check(there)

            for probe in (asked, prompt):
                keys = keys_of(probe)
                named = [bit for _, mask in chains.runs(keys) for bit in (1, 2, 4, 8) if mask & bit]
                assert len(named) == len(set(named))
                found = {bit: depth for depth, mask in chains.runs(keys) for bit in (1, 2, 4, 8) if mask & bit}
                expected = {holder.bit: leading(there, holder, keys) for holder in holders}
                assert found == {bit: depth for bit, depth in expected.items() if depth}
            assert len(chains) == len({key for chain in there for key in chain.keys})
            for holder in holders:
                assert holder.blocks == len({key for chain in there if chain.holder is holder for key in chain.keys})
        for chain in there:
            chains.remove(chain)
        assert len(chains) == 0


def test_unshared_prompt_is_one_node():
    chains, holder = RadixTree(), ChainHolder(1)

    chains.add(holder, range(1000))

    assert (len(chains.nodes), holder.blocks) == (1, 1000)


def divided(chains: RadixTree, holders: list[ChainHolder], keys: tuple[int, ...]) -> list[Chain]:
    """Add a chain and all its prefixes, the longest first, for the holders in turn; return the added chains."""
    return [chains.add(holders[end % len(holders)], keys[:end]) for end in range(len(keys), 0, -1)]


def test_nodes_split_by_removed_chains_are_joined():
    chains, holders = RadixTree(), [ChainHolder(1), ChainHolder(2)]
    keys = tuple(range(1, 1001))
    whole, *beginnings = divided(chains, holders, keys)
    assert len(chains.nodes) == 1000
    random.Random(5).shuffle(beginnings)

    for beginning in beginnings:
        chains.remove(beginning)
    passing = chains.add(holders[0], keys)
    chains.remove(passing)

    chains.check([whole])
    assert len(chains.nodes) < 20
    assert chains.runs(keys) == [(1000, whole.holder.bit)]
    chains.remove(whole)
    assert (len(chains), chains.nodes, [holder.blocks for holder in holders]) == (0, {}, [0, 0])


def test_node_where_a_chain_ends_stays_split():
    chains, holder = RadixTree(), ChainHolder(1)
    keys = tuple(range(1, 101))
    there = divided(chains, [holder], keys)
    while len(there) > 50:  # removes the chains that end in the first half
        chains.remove(there.pop())

    chains.remove(chains.add(holder, keys))

    chains.check(there)
    assert sorted(node.start for node in chains.nodes.values()) == [0, *range(51, 100)]


def test_known_prefix_changes_no_upper_nodes():
    chains, holders = RadixTree(), [ChainHolder(1), ChainHolder(2)]
    keys = tuple(range(1, 101))
    whole = divided(chains, holders, keys)[0]
    last, counted = whole.last, [(node, node.count) for node in chains.nodes.values()]

    again = chains.add(whole.holder, keys)

    assert {node.start for node, count in counted if node.count != count} == {99}
    assert again.last is last
    chains.remove(again)
    assert all(node.count == count for node, count in counted)


def test_removed_chain_leaves_no_garbage_cycles():
    chains, holder = RadixTree(), ChainHolder(1)
    stays = chains.add(holder, (1, 2, 3))
    gc.collect()
    gc.disable()
    try:
        for keys in ((1, 2, 3), (1, 2, 4), (5, 6), (1,)):
            chains.remove(chains.add(holder, keys))
        assert gc.collect() == 0
    finally:
        gc.enable()
    chains.remove(stays)


def test_colliding_keys_break_nothing():
    chains, one, other = RadixTree(), ChainHolder(1), ChainHolder(2)
    first = chains.add(one, (1, 2, 3))
    second = chains.add(other, (9, 1, 2))  # here, the keys 1 and 2 are those of other blocks
    third = chains.add(one, (2, 1))
    chains.runs((1, 2, 3)), chains.runs((9, 2, 1)), chains.runs((2, 9))

    for chain in (first, second, third):
        chains.remove(chain)

    assert len(chains) == 0
    assert (one.blocks, other.blocks) == (0, 0)


collisions = st.lists(st.integers(0, 4), max_size=6)  # equal keys of different blocks at several positions


@given(
    st.lists(st.tuples(st.integers(0, HOLDERS - 1), collisions, st.booleans(), st.integers(0, 100)), max_size=40),
)
def test_removed_chains_with_colliding_keys_leave_nothing(history):
    chains = RadixTree()
    holders = [ChainHolder(1 << number) for number in range(HOLDERS)]
    there: list[Chain] = []
    for number, keys, adds, which in history:
        if adds or not there:
            if (begun := chains.extendable_chain(holders[number], keys)) is not None:
                chains.extend(begun, keys)
            else:
                there.append(chains.add(holders[number], keys))
        else:
            chains.remove(there.pop(which % len(there)))
        named = [bit for _, mask in chains.runs(keys) for bit in (1, 2, 4, 8) if mask & bit]
        assert len(named) == len(set(named))

    for chain in there:
        chains.remove(chain)

    assert (len(chains), chains.nodes) == (0, {})
    assert [holder.blocks for holder in holders] == [0] * HOLDERS
