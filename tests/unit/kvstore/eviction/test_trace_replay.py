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
def test_lru_finds_exactly_what_a_plain_lru_finds(trace, capacity_blocks):
    requests = trace().requests[:400]

    assert hits(requests, "lru", capacity_blocks) == hit_tokens(requests, ReferenceLru(capacity_blocks), BLOCK)


@pytest.mark.parametrize(("name", "slow"), [("slru", ReferenceSlru), ("s3fifo", ReferenceS3Fifo)])
@pytest.mark.parametrize(("trace", "capacity_blocks"), [(conversation, 1000), (agentic, 2000)])
def test_what_is_known_from_papers_is_within_a_hundredth_of_the_paper(name, slow, trace, capacity_blocks):
    """Where several prompts fit: what is in use when its turn comes cannot be treated as the papers do, who know no uses that last."""
    requests = trace().requests[:500]
    expected = hit_tokens(requests, slow(capacity_blocks), BLOCK)

    assert hits(requests, name, capacity_blocks) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2])
def test_on_chat_hazard_finds_more_than_lru_and_the_future_most(share):
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


def test_knowing_the_future_keeps_what_is_used_next_and_leaves_out_what_is_not():
    requests = requests_for("ab", "cd", "ef", "ab", "cd")

    done = optimal(requests, capacity_blocks=2, block_tokens=BLOCK)

    assert done.hit_tokens == 2 * BLOCK
    assert done.blocks_written == 2


def test_knowing_the_future_writes_nothing_that_nobody_will_use():
    assert optimal(requests_for("ab", "cd"), capacity_blocks=10, block_tokens=BLOCK).blocks_written == 0


def test_a_chain_longer_than_the_cache_is_held_as_far_as_it_fits():
    requests = requests_for("abcdef", "abcdef")

    done = replay(requests, policy("lru"), capacity_blocks=4, block_tokens=BLOCK)

    assert done.hit_tokens == 4 * BLOCK
    assert done.blocks_written == 4


def test_a_chain_does_not_push_out_its_own_beginning():
    requests = requests_for("ab", "abcd", "abcd")

    done = replay(requests, policy("lru"), capacity_blocks=3, block_tokens=BLOCK)

    assert done.hit_tokens == (2 + 3) * BLOCK


def test_tokens_beyond_the_prompt_are_no_hits():
    requests = [TraceRequest(Nanos(0), 700, ("a", "b")), TraceRequest(Nanos(SECOND), 700, ("a", "b"))]

    assert ideal(requests, block_tokens=BLOCK).hit_tokens == 700
    assert replay(requests, policy("lru"), capacity_blocks=9, block_tokens=BLOCK).hit_tokens == 700


def test_blocks_that_are_used_once_are_not_written_where_a_second_sighting_is_asked_for():
    scan = requests_for(*[range(index * 8, index * 8 + 8) for index in range(50)])

    done = replay(scan, policy("lru"), capacity_blocks=100, block_tokens=BLOCK, admission=ReuseAdmission())

    assert done.blocks_written == 0
