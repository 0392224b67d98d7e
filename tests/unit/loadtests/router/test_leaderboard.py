"""Leaderboard: its random requests, its engines with linear step times, and its figures."""

import json
import random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.hardware.latency.linear import EngineLatency
from fleet.router.placement.policies.built_in import BUILT_IN, policy
from fleet.sim.results.outcomes import EndedRequest
from kvstore.eviction.trace_replay import TraceRequest
from loadtests.router import leaderboard
from loadtests.router.simulated.cluster import AnswerGoals, SimulatedDevice, ideal_rate, outcome, run
from loadtests.router.simulated.traffic import (
    BLOCK_TOKENS,
    conversations,
    hot_prefix,
    recorded,
    shared_prefixes,
    unique,
)

BLOCK = 10


def test_single_worker_serves_requests_in_order():
    workload = unique(50, seed=1).at(10.0)

    found = run(workload, 1, SimulatedDevice(), policy("fleet", {}), 0)

    assert found.requests == 50
    assert (found.refused, found.hit_rate, found.imbalance) == (0, 0.0, 1.0)
    assert found.ttft_mean > 0


def test_run_is_reproducible():
    def once():
        workload = conversations(120, seed=3, groups=4).at(20.0)
        return run(workload, 4, SimulatedDevice(kv_tokens=50_000), policy("fleet", {}), 5)

    assert once() == once()


def test_default_policy_keeps_shared_prefixes_together():
    """Repeat the short part of the comparison in ADR 0014: four engines with little KV memory."""
    device = SimulatedDevice(kv_tokens=100_000)
    workload = conversations(900, seed=11, groups=64)
    workload = workload.at(0.9 * ideal_rate(workload, 4, device))

    found = {
        name: run(workload, 4, device, policy(name, parameters), 0)
        for name, parameters in {
            "fleet": {},
            "dynamo": {},
            "llm_d": {},
            "least_loaded": {},
        }.items()
    }
    selfish = run(workload, 4, device, policy("fleet", {"others_weight": 0.0, "stall_weight": 0.0}), 0)

    ours = found["fleet"]
    assert ours.hit_rate > selfish.hit_rate + 0.02
    assert ours.hit_rate > found["dynamo"].hit_rate + 0.1
    assert ours.hit_rate >= found["llm_d"].hit_rate - 0.03
    assert ours.ttft_mean <= 1.1 * min(each.ttft_mean for each in found.values())
    assert ours.imbalance < 1.3


def test_load_one_is_rate_of_common_cache_without_imbalance():
    """Compute the rate for two prompts of two blocks and five tokens each, whose first block is the same."""
    requests = [TraceRequest(Nanos(at * SECOND), 25, chain, 1) for at, chain in ((0, (1, 2)), (1, (1, 3)))]
    workload = recorded("two", requests, BLOCK)
    device = SimulatedDevice(
        latency=EngineLatency(prefill_ms_per_token=1.0, step_base_ms=10.0, step_ms_per_sequence=0.0), max_running=2
    )

    assert ideal_rate(workload, 1, device) == pytest.approx(2 / ((25 + 15 + 2 * 10) / 1000))


def test_workloads_have_stated_prefixes():
    def shared(workload) -> float:
        seen: set[int] = set()
        hits = blocks = 0
        for session in workload.sessions:
            for request in (turn.request for turn in session.turns):
                assert len(request.chain) == request.prompt_tokens // BLOCK_TOKENS
                hits += sum(key in seen for key in request.chain)
                blocks += len(request.chain)
                seen.update(request.chain)
        return hits / blocks

    assert shared(unique(100, 1)) == 0
    assert shared(hot_prefix(400, 1)) == pytest.approx(0.5 * 64 / (0.5 * 72 + 0.5 * 32), abs=0.05)
    assert shared(shared_prefixes(400, 1, groups=4, skew=0.0, opening=32, own=8)) == pytest.approx(0.8, abs=0.02)
    assert shared(conversations(600, 1, groups=4)) > 0.8


def test_goodput_counts_over_time_of_arrivals():
    def answered(number: int, ttft: float, hits: int = 0, refused: str = "") -> EndedRequest:
        at = Nanos(number * SECOND)
        return EndedRequest(
            request_id=str(number),
            arrival=at,
            prompt_tokens=100,
            output_tokens=11,
            cached_tokens=hits,
            first_token=Nanos(at + int(ttft * SECOND)),
            end=Nanos(at + int((ttft + 1.0) * SECOND)),
            refused=refused,
        )

    goals = AnswerGoals(ttft_seconds=1.0, ttft_seconds_per_token=0.01, tpot_seconds=0.1)
    ended = [answered(0, 1.9), answered(1, 2.1, hits=50), answered(1, 0.1, refused="queue_full")]

    found = outcome(ended, goals, imbalance=2.0, busy=0.5)

    assert found.attainment == pytest.approx(1 / 3)
    assert found.goodput == pytest.approx(1.0)
    assert (found.requests, found.refused, found.hit_rate) == (3, 1, 0.25)
    assert (found.ttft_mean, found.tpot_mean, found.seconds) == pytest.approx((2.0, 0.1, 4.1))


def test_command_pairs_seeds_names_best_and_writes_rows(tmp_path, capsys):
    report = tmp_path / "rows.json"
    arguments = ["--policies", "fleet,round_robin", "--workloads", "few-prefixes", "--workers", "2", "--loads", "0.5"]

    assert leaderboard.main([*arguments, "--seeds", "2", "--requests", "20", "--json", str(report)]) == 0

    said = capsys.readouterr().out
    assert said.count("best") == 1
    assert "fleet beside round_robin" in said
    ((ours, theirs),) = json.loads(report.read_text())
    assert (ours["policy"], theirs["policy"]) == ("fleet", "round_robin")
    assert [each["requests"] for each in ours["outcomes"]] == [40, 40]


def test_all_policies_serve_same_requests(tmp_path):
    report = tmp_path / "rows.json"
    arguments = ["--workloads", "few-prefixes", "--workers", "2", "--loads", "0.5", "--seeds", "1", "--requests", "20"]

    assert leaderboard.main([*arguments, "--json", str(report)]) == 0

    (rows,) = json.loads(report.read_text())
    found = {row["policy"]: row["outcomes"] for row in rows}
    assert found.keys() == BUILT_IN.policies.keys() - {"composed"}
    assert found.keys() >= {"round_robin", "random", "p2c", "least_loaded", "consistent_hash", "sticky"}
    assert found.keys() >= {"dynamo", "mooncake", "llm_d"}
    assert all([each["requests"] for each in outcomes] == [40] for outcomes in found.values())


@pytest.mark.parametrize(
    "arguments", [["--policies", "luck"], ["--workloads", "luck"], ["--trace", "x"], ["--workers", "x"]]
)
def test_command_names_unknown_policy_or_workload(arguments, capsys):
    assert leaderboard.main(arguments) == 2
    assert "loadtests.router.leaderboard:" in capsys.readouterr().err


def test_halves_of_trace_share_no_session():
    requests = [TraceRequest(Nanos(at * SECOND), 25, (at, at + 100), 1) for at in range(10)]
    random.Random(0).shuffle(requests)
    trace = recorded("t", sorted(requests, key=lambda each: each.arrival), BLOCK)

    assert [each.begins for each in trace.half(0).sessions] + [each.begins for each in trace.half(1).sessions] == [
        each.begins for each in trace.sessions
    ]
