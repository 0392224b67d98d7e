"""Clients: when they send, and what happens to rejected requests."""

from collections import Counter
from itertools import pairwise

import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.recording.agentic_traces import TraceSession, TraceTurn
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import EndedRequest, RunOutcome
from fleet.sim.run import RunPlan, simulate
from fleet.sim.workload.clients import ClosedClients, OpenClients, SessionClients, start_clients
from fleet.sim.workload.drawn import DrawnWorkload
from fleet.sim.workload.traffic import requests_of, sessions_of
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan, a_pool, a_world


def with_clients(clients, plan: RunPlan | None = None) -> RunPlan:
    plan = plan or a_plan()
    return RunPlan(**{**{name: getattr(plan, name) for name in plan.__struct_fields__}, "clients": clients})


def ran(clients, traffic, plan: RunPlan | None = None) -> tuple[RunOutcome, list[EndedRequest]]:
    ended: list[EndedRequest] = []
    return simulate(with_clients(clients, plan), iter(traffic), on_end=ended.append).outcome, ended


def drawn(**fields):
    return requests_of(DrawnWorkload(prompt_tokens=300, output_tokens=40, **fields), None, block_tokens=BLOCK, seed=1)


def most_at_once(ended: list[EndedRequest]) -> int:
    """Return the highest number of concurrent requests; at the same instant, ends count before arrivals."""
    changes = sorted([(each.arrival, 1) for each in ended] + [(each.end, -1) for each in ended])
    under_way = most = 0
    for _, change in changes:
        under_way += change
        most = max(most, under_way)
    return most


def a_request(number: int, tokens: int = 64, answer: int = 8, session: int = 0) -> TraceRequest:
    return TraceRequest(Nanos(0), tokens, tuple(range(1000 * number, 1000 * number + tokens // BLOCK)), answer, session)


def test_users_limit_concurrent_requests():
    outcome, ended = ran(ClosedClients(users=8), drawn(requests=200, rate=0.001))
    assert outcome.requests == 200
    assert most_at_once(ended) == 8
    assert outcome.simulated_seconds < 20, "arrivals of the workload are not waited for"


def test_user_thinks_after_an_answer():
    _, ended = ran(ClosedClients(users=1, think_seconds=3.0), drawn(requests=5))
    gaps = [after.arrival - before.end for before, after in pairwise(ended)]
    assert gaps == [3 * SECOND] * 4


def test_users_without_requests_do_not_come():
    kernel = Kernel(1)
    world, ended = a_world(kernel, a_plan())
    requests = iter([a_request(number) for number in range(4)])

    clients = start_clients(
        ClosedClients(users=1 << 20, ramp_seconds=float(1 << 20)), kernel, world, requests, ended.append
    )

    assert kernel.run() < 100
    assert len(ended) == 4
    assert clients.over


def test_ramp_spreads_arrival_of_users():
    _, ended = ran(ClosedClients(users=4, ramp_seconds=2.0), [a_request(number, answer=1000) for number in range(4)])
    assert sorted(each.arrival for each in ended) == [0, SECOND // 2, SECOND, 3 * SECOND // 2]


def test_more_users_than_requests_end():
    outcome, _ = ran(ClosedClients(users=50), drawn(requests=3))
    assert outcome.requests == 3


def test_turn_waits_for_answers_and_gap():
    session = TraceSession(
        (
            TraceTurn(a_request(1)),
            TraceTurn(a_request(2), (0,), Nanos(5 * SECOND)),  # a sub-agent
            TraceTurn(a_request(3, answer=40), (0,), Nanos(4 * SECOND)),  # another sub-agent, which is slower
            TraceTurn(a_request(4), (0, 1, 2), Nanos(SECOND)),
        )
    )
    _, ended = ran(SessionClients(users=1), [session])
    by_name = {each.chain[0] // 1000: each for each in ended}
    assert len(ended) == len(by_name) == 4
    assert by_name[2].arrival == by_name[1].end + 5 * SECOND
    assert by_name[3].arrival == by_name[1].end + 4 * SECOND
    assert by_name[4].arrival == max(by_name[2].end, by_name[3].end) + SECOND


def test_next_session_begins_when_one_ends():
    sessions = [
        TraceSession((TraceTurn(a_request(2 * number)), TraceTurn(a_request(2 * number + 1), (0,), Nanos(SECOND))))
        for number in range(6)
    ]
    _, ended = ran(SessionClients(users=2), sessions)
    begins = sorted(each.arrival for each in ended if each.chain[0] // 1000 % 2 == 0)
    assert len(ended) == 12
    assert begins[0] == begins[1] == 0
    assert begins[2] > SECOND
    assert begins[4] > 2 * SECOND


def test_timed_sessions_begin_at_their_times():
    sessions = [TraceSession((TraceTurn(a_request(number)),), Nanos(number * SECOND)) for number in range(5)]
    _, ended = ran(SessionClients(users=0), sessions)
    assert [each.arrival for each in ended] == [number * SECOND for number in range(5)]


def test_long_gap_is_cut():
    session = TraceSession((TraceTurn(a_request(1)), TraceTurn(a_request(2), (0,), Nanos(9000 * SECOND))))
    _, ended = ran(SessionClients(users=1, longest_gap_seconds=60.0), [session])
    assert ended[1].arrival - ended[0].end == 60 * SECOND


def test_conversations_hit_their_cached_history():
    workload = DrawnWorkload(requests=100, turns=10, spread=0.0, prompt_tokens=320, output_tokens=16, turn_tokens=32)
    plan = a_plan(a_pool(workers=1, kv_blocks=2000))
    sessions = sessions_of(workload, None, block_tokens=BLOCK, seed=1)
    outcome, _ = ran(SessionClients(users=4), sessions, plan)
    # Turn n + 1 finds the prompt of turn n: 320 + 48 n of its 368 + 48 n tokens.
    known = sum(320 + 48 * turn for turn in range(9))
    assert outcome.hit_rate == pytest.approx(known / sum(320 + 48 * turn for turn in range(10)), abs=0.03)


def test_rejected_request_is_retried_and_counts_once():
    plan = a_plan(a_pool(workers=1, max_running=2), max_queued=1, oversubscribe=1.0)
    burst = [a_request(number) for number in range(8)]
    impatient, _ = ran(OpenClients(), burst, plan)
    patient, ended = ran(OpenClients(retries=10, retry_seconds=0.05), burst, plan)
    assert impatient.refused["queue_full"] >= 4
    assert not patient.refused
    assert patient.requests == 8
    assert patient.retries == sum(each.retries for each in ended) > 0
    again = [each for each in ended if each.retries]
    assert all(each.arrival == 0 and each.ttft_ms >= 50 for each in again), "time counts from the first sending"


def test_client_gives_up_after_its_retries():
    plan = a_plan(a_pool(kv_blocks=16))
    outcome, _ = ran(OpenClients(retries=3), [a_request(1, tokens=400)], plan)
    assert outcome.refused == {"too_large": 1}
    assert outcome.retries == 0, "no retry helps against too_large"
    plan = a_plan(a_pool(workers=1, max_running=1), max_queued=0, oversubscribe=1.0)
    outcome, ended = ran(
        OpenClients(retries=2, retry_seconds=0.001), [a_request(n, answer=400) for n in range(2)], plan
    )
    assert outcome.refused == {"queue_full": 1}
    assert sorted(each.retries for each in ended) == [0, 2]


def test_client_gives_up_at_deadline():
    plan = a_plan(a_pool(workers=1))
    outcome, ended = ran(OpenClients(deadline_seconds=0.5), [a_request(1, answer=4000), a_request(2, answer=8)], plan)
    assert outcome.refused == {"deadline_passed": 1}
    late = next(each for each in ended if each.refused)
    assert late.end - late.arrival == pytest.approx(500 * MILLISECOND, abs=MILLISECOND)


def test_closed_client_continues_after_rejection():
    plan = a_plan(a_pool(kv_blocks=16))
    mixed = [a_request(number, tokens=400 if number % 2 else 64) for number in range(20)]
    outcome, _ = ran(ClosedClients(users=3), mixed, plan)
    assert Counter(outcome.refused) == {"too_large": 10}
    assert outcome.requests == 20


@pytest.mark.parametrize("clients", [OpenClients(), ClosedClients(users=5), SessionClients(users=5)])
def test_same_seed_gives_same_digest(clients):
    def digest() -> str:
        workload = DrawnWorkload(requests=60, prompt_tokens=300, output_tokens=40, turns=4)
        if isinstance(clients, SessionClients):
            return ran(clients, sessions_of(workload, None, block_tokens=BLOCK, seed=1))[0].digest
        return ran(clients, drawn(requests=60))[0].digest

    assert digest() == digest()


def test_closed_loop_throughput_is_users_per_turn():
    """Compare the throughput with the number of users divided by the time of a turn, as the accuracy report assumes it."""
    outcome, ended = ran(ClosedClients(users=4), drawn(requests=400, spread=0.0))
    turn = sum(each.end - each.arrival for each in ended) / len(ended) / SECOND
    assert outcome.requests / outcome.simulated_seconds == pytest.approx(4 / turn, rel=0.02)


def test_gaps_equal_token_times():
    alone, _ = ran(ClosedClients(users=1), drawn(requests=20, spread=0.0))
    assert alone.itl_ms["mean"] == pytest.approx(alone.tpot_ms["mean"], rel=1e-3)
    crowd, ended = ran(ClosedClients(users=16), drawn(requests=100, spread=0.0))
    tokens = sum(each.output_tokens - 1 for each in ended)
    spent = sum(each.tpot_ms * (each.output_tokens - 1) for each in ended)
    assert crowd.itl_ms["mean"] == pytest.approx(spent / tokens, rel=0.02)
    assert crowd.itl_ms["p99"] > 2 * crowd.itl_ms["p50"], "some wait for another one's prompt"
