"""Trace replay, compared with independent cache models and with the best possible hit rates."""

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policies import POLICIES, policy
from kvstore.eviction.trace_replay import TraceRequest, distinct_blocks, ideal, optimal, replay
from kvstore.hierarchy.admission import ReuseAdmission
from tests.support.kvstore.reference_caches import ReferenceLru, ReferenceS3Fifo, ReferenceSlru, hit_tokens
from tests.support.sim.traces import agentic, conversation

BLOCK = 512


def requests_for(*chains, seconds=60):
    return [
        TraceRequest(Nanos(index * seconds * SECOND), len(chain) * BLOCK, tuple(chain))
        for index, chain in enumerate(chains)
    ]


def hits(requests, name, capacity_blocks):
    if name == "belady":
        return optimal(requests, capacity_blocks=capacity_blocks, block_tokens=BLOCK).hit_tokens
    return replay(requests, policy(name), capacity_blocks=capacity_blocks, block_tokens=BLOCK).hit_tokens


@pytest.mark.parametrize("capacity_blocks", [150, 1000])
@pytest.mark.parametrize("trace", [conversation, agentic])
def test_lru_equals_a_plain_lru(trace, capacity_blocks):
    requests = trace().requests[:400]

    assert hits(requests, "lru", capacity_blocks) == hit_tokens(requests, ReferenceLru(capacity_blocks), BLOCK)


@pytest.mark.parametrize(("name", "slow"), [("slru", ReferenceSlru), ("s3fifo", ReferenceS3Fifo)])
@pytest.mark.parametrize(("trace", "capacity_blocks"), [(conversation, 1000), (agentic, 2000)])
def test_hit_rates_are_within_1_percent_of_the_papers(name, slow, trace, capacity_blocks):
    """Compare caches that hold several prompts. Smaller ones skip pinned blocks, which the policies of the papers do not have."""
    requests = trace().requests[:500]
    expected = hit_tokens(requests, slow(capacity_blocks), BLOCK)

    assert hits(requests, name, capacity_blocks) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2])
def test_on_chat_hazard_beats_lru_and_optimal_beats_both(share):
    requests = conversation().requests
    capacity_blocks = int(distinct_blocks(requests) * share)
    found = {name: hits(requests, name, capacity_blocks) for name in (*POLICIES, "belady")}

    assert found["hazard"] > found["lru"] * (1 if share == 0.2 else 1.25)
    assert found["belady"] == max(found.values())
    assert found["belady"] <= ideal(requests, block_tokens=BLOCK).hit_tokens


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_on_agents_hazard_is_no_worse_than_lru(share):
    requests = agentic().requests
    capacity_blocks = int(distinct_blocks(requests) * share)
    found = {name: hits(requests, name, capacity_blocks) for name in (*POLICIES, "belady")}

    assert found["hazard"] > 0.999 * found["lru"]
    assert found["belady"] == max(found.values())


def test_optimal_keeps_the_blocks_used_next():
    requests = requests_for("ab", "cd", "ef", "ab", "cd")

    done = optimal(requests, capacity_blocks=2, block_tokens=BLOCK)

    assert done.hit_tokens == 2 * BLOCK
    assert done.blocks_written == 2


def test_optimal_writes_no_unused_blocks():
    assert optimal(requests_for("ab", "cd"), capacity_blocks=10, block_tokens=BLOCK).blocks_written == 0


def test_long_chain_is_held_as_far_as_it_fits():
    requests = requests_for("abcdef", "abcdef")

    done = replay(requests, policy("lru"), capacity_blocks=4, block_tokens=BLOCK)

    assert done.hit_tokens == 4 * BLOCK
    assert done.blocks_written == 4


def test_chain_does_not_evict_its_own_beginning():
    requests = requests_for("ab", "abcd", "abcd")

    done = replay(requests, policy("lru"), capacity_blocks=3, block_tokens=BLOCK)

    assert done.hit_tokens == (2 + 3) * BLOCK


def test_tokens_beyond_the_prompt_are_not_hits():
    requests = [TraceRequest(Nanos(0), 700, ("a", "b")), TraceRequest(Nanos(SECOND), 700, ("a", "b"))]

    assert ideal(requests, block_tokens=BLOCK).hit_tokens == 700
    assert replay(requests, policy("lru"), capacity_blocks=9, block_tokens=BLOCK).hit_tokens == 700


def test_reuse_admission_skips_blocks_used_once():
    scan = requests_for(*[range(index * 8, index * 8 + 8) for index in range(50)])

    done = replay(scan, policy("lru"), capacity_blocks=100, block_tokens=BLOCK, admission=ReuseAdmission())

    assert done.blocks_written == 0
