"""Replay of session pauses: which blocks are kept for paused sessions, and what it costs to resume the sessions."""

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.session_pauses import LEAST_SEEN, BlockCosts, GapTimes, PausePolicy, replay_pauses
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.traces import agentic, conversation

PACE = BlockCosts(memory=SECOND // 1000, below=SECOND // 100, compute=SECOND)


def replayed(requests, policy, memory=100, below=1000, held=80, longest=120):
    return replay_pauses(
        requests,
        policy,
        PACE,
        memory_blocks=memory,
        below_blocks=below,
        held_blocks=held,
        longest_hold=Nanos(longest * SECOND),
    )


def turns(session, gap, count=100, blocks=10, start=0):
    """Return the requests of a session that resumes every `gap` seconds with the same chain."""
    chain = tuple(range(session * 1000, session * 1000 + blocks))
    return [
        TraceRequest(Nanos((start + turn * gap) * SECOND), blocks * 512, chain, 0, session) for turn in range(count)
    ]


def scan(seconds, blocks=20):
    """Return requests without a session, each with new blocks."""
    return [
        TraceRequest(
            Nanos(second * SECOND + 1), blocks * 512, tuple(range(10**6 + second * 100, 10**6 + second * 100 + blocks))
        )
        for second in range(seconds)
    ]


def together(*streams):
    return sorted((request for stream in streams for request in stream), key=lambda request: request.arrival)


def test_costs_add_up_over_the_tiers():
    report = replayed(turns(1, 10), PausePolicy.NOTHING)

    assert (report.resumes, report.memory_blocks, report.below_blocks, report.computed_blocks) == (99, 990, 0, 0)
    assert report.mean_seconds == pytest.approx(0.01)
    assert report.recompute_mean_seconds == pytest.approx(10)


def test_pinned_session_stays_in_a_full_memory():
    traffic = together(turns(1, 30), scan(3000))

    without, held = (replayed(traffic, policy) for policy in (PausePolicy.NOTHING, PausePolicy.HOLD))

    assert without.memory_blocks == 0
    assert held.memory_blocks >= 10 * (99 - LEAST_SEEN - 2)
    assert held.mean_seconds < without.mean_seconds / 2


def test_long_pause_is_prefetched_before_its_end():
    traffic = together(turns(1, 300), scan(30_000, blocks=2))

    held, adapted = (replayed(traffic, policy, longest=100) for policy in (PausePolicy.HOLD, PausePolicy.ADAPT))

    assert adapted.prefetched_blocks > 0
    assert adapted.memory_blocks > held.memory_blocks
    assert adapted.most_held_blocks <= 10


def test_pins_within_their_limit_keep_the_start_of_a_chain():
    report = replayed(together(turns(1, 20), turns(2, 20, start=1), scan(2000)), PausePolicy.HOLD, held=15)

    assert report.most_held_blocks == 15
    assert report.holds > 0


def test_pause_pin_ends_at_its_deadline():
    gone_for_long = [*turns(1, 10, count=60), *turns(1, 10, count=1, start=5000)]

    report = replayed(together(gone_for_long, scan(6000)), PausePolicy.HOLD)

    assert report.overdue == 2  # including the last pin, after which the session does not resume
    assert report.below_blocks + report.computed_blocks >= 10


def test_quantiles_need_enough_pauses():
    gaps = GapTimes()
    for seconds in range(LEAST_SEEN - 1):
        gaps.seen(None, Nanos((seconds + 1) * SECOND))
    assert gaps.quantile(None, 0.5) is None

    gaps.seen(None, Nanos(LEAST_SEEN * SECOND))

    shorter, longer = gaps.quantile(None, 0.5)
    assert shorter <= LEAST_SEEN / 2 * SECOND <= longer < 1.26 * shorter
    assert gaps.quantile(Nanos(SECOND), 0.5) is None


def test_pins_speed_up_agents_beside_chats():
    hour = conversation().requests[-1].arrival
    agents = [request for request in agentic().requests if request.arrival <= hour]
    chat = [
        TraceRequest(each.arrival, each.prompt_tokens, tuple(-1 - name for name in each.chain))
        for each in conversation().requests
    ]

    reports = [
        replayed(together(agents, chat), policy, memory=4000, below=40_000, held=3200)
        for policy in (PausePolicy.NOTHING, PausePolicy.HOLD)
    ]

    assert reports[1].mean_seconds < reports[0].mean_seconds < reports[0].recompute_mean_seconds / 2
