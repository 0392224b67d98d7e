"""Engines in virtual time against times worked out by hand, and the leaderboard's own sums."""

import json
import random

import pytest

from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.hardware.latency import EngineLatency
from fleet.ids import RequestId
from fleet.router.policies.built_in import policy
from kvstore.replay import Request
from loadtests.router import leaderboard
from loadtests.router.replay.engine import Device, Engine, Job
from loadtests.router.replay.outcome import Goals, Served, outcome
from loadtests.router.replay.workloads import BLOCK_TOKENS, conversations, hot_prefix, recorded, shared_prefixes, unique
from loadtests.router.replay.world import World, goals_of, ideal_rate

EXACT = Device(
    latency=EngineLatency(prefill_base_ms=0.0, prefill_ms_per_token=0.1, step_base_ms=10.0, step_ms_per_sequence=1.0),
    kv_tokens=1000,
    max_running=2,
    chunk_tokens=200,
)
BLOCK = 10


def a_job(name: str, chain: range, output_tokens: int = 3) -> Job:
    return Job(
        id=RequestId(name), chain=tuple(chain), prompt_tokens=len(chain) * BLOCK + 5, output_tokens=output_tokens
    )


def run(engine: Engine, *arrivals: tuple[float, Job]) -> dict[str, list[float]]:
    """Milliseconds of first token and end, by job."""
    found: dict[str, list[float]] = {}
    waiting = sorted(arrivals, key=lambda each: each[0])
    while waiting or engine.due is not None:
        if waiting and (engine.due is None or waiting[0][0] * MILLISECOND < engine.due):
            at, job = waiting.pop(0)
            engine.add(job, Nanos(int(at * MILLISECOND)))
            continue
        now = engine.due
        told = engine.step()
        for job in (*told.began, *told.ended):
            found.setdefault(job.id, []).append(now / MILLISECOND)
    engine.check()
    return found


def test_a_prompt_takes_its_tokens_and_an_answer_its_steps():
    """45 tokens at 0.1 ms, then two steps of 10 + 1 ms."""
    assert run(Engine(EXACT, BLOCK), (0, a_job("a", range(4)))) == {"a": [4.5, 26.5]}


def test_a_prompt_is_computed_beside_those_who_decode_and_in_chunks():
    """The second comes in the middle of a step of 11 ms and is computed with the next one: a chunk of 199, then the rest."""
    found = run(Engine(EXACT, BLOCK), (0, a_job("a", range(4), 10)), (5, a_job("b", range(100, 130), 2)))

    first_step = 4.5 + 11
    chunked = first_step + 19.9 + 11
    assert found["b"][0] == pytest.approx(chunked + 10.6 + 11)
    assert found["b"][1] == pytest.approx(found["b"][0] + 12)


def test_what_was_computed_is_found_by_the_next_one_but_for_its_end():
    engine = Engine(EXACT, BLOCK)
    first, second = a_job("a", range(4)), a_job("b", range(4))

    run(engine, (0, first), (100, second))

    assert (first.hits, second.hits) == (0, 40)
    assert engine.computed_tokens == 45 + 5


def test_what_was_not_used_for_longest_is_forgotten_for_room_and_told():
    engine = Engine(EXACT, BLOCK)
    for number in range(4):
        run(engine, (0, a_job(str(number), range(100 * number, 100 * number + 30))))
    again, gone = a_job("again", range(300, 330)), a_job("gone", range(30))

    run(engine, (0, again))
    run(engine, (0, gone))

    assert again.hits == 300
    assert gone.hits < 300


def test_a_full_batch_keeps_others_waiting():
    found = run(Engine(EXACT, BLOCK), *((0, a_job(str(number), range(number, number + 1), 5)) for number in range(3)))

    assert found["2"][0] > max(found["0"][1], 0)


def test_a_jump_that_is_cut_short_ends_with_the_step_that_runs():
    """Ten steps are taken together until somebody comes at 30 ms, in the third of them."""
    engine = Engine(EXACT, BLOCK)
    engine.add(a_job("a", range(1), 11), Nanos(0))
    engine.step()
    assert engine.due == Nanos(int((1.5 + 110) * MILLISECOND))

    assert engine.add(a_job("b", range(50, 51)), Nanos(30 * MILLISECOND))

    assert engine.due == Nanos(int((1.5 + 33) * MILLISECOND))


def test_in_the_world_of_one_worker_requests_are_served_in_order_and_counted():
    workload = unique(50, seed=1).at(10.0)

    found = World(workload, 1, Device(), policy("fleet", {}), 0).run(goals_of(Device()))

    assert found.requests == 50
    assert (found.refused, found.hit_rate, found.imbalance, found.work_imbalance) == (0, 0.0, 1.0, 1.0)
    assert found.ttft_mean > 0


def test_a_replay_is_the_same_again():
    def once():
        workload = conversations(120, seed=3, groups=4).at(20.0)
        return World(workload, 4, Device(kv_tokens=50_000), policy("fleet", {}), 5).run(goals_of(Device()))

    assert once() == once()


def test_the_default_keeps_shared_prefixes_together_under_load_at_least_as_well_as_others():
    """Of the comparison in ADR 0014, the part that takes a second: four engines with little room."""
    device = Device(kv_tokens=100_000)
    workload = conversations(900, seed=11, groups=64)
    workload = workload.at(0.9 * ideal_rate(workload, 4, device))

    found = {
        name: World(workload, 4, device, policy(name, parameters), 0).run(goals_of(device))
        for name, parameters in {
            "fleet": {},
            "dynamo": {},
            "llm_d": {},
            "least_loaded": {},
        }.items()
    }
    selfish = World(workload, 4, device, policy("fleet", {"others_weight": 0.0, "stall_weight": 0.0}), 0)

    ours = found["fleet"]
    assert ours.hit_rate > selfish.run(goals_of(device)).hit_rate + 0.02
    assert ours.hit_rate > found["dynamo"].hit_rate + 0.1
    assert ours.hit_rate >= found["llm_d"].hit_rate - 0.03
    assert ours.ttft_mean <= 1.1 * min(each.ttft_mean for each in found.values())
    assert ours.work_imbalance < 1.3


def test_a_load_of_one_is_what_one_cache_and_no_imbalance_would_keep_up_with():
    """Two prompts of two blocks that begin alike: three blocks and two ends of five tokens to compute, twice one step."""
    requests = [Request(Nanos(at * SECOND), 25, chain, 1) for at, chain in ((0, (1, 2)), (1, (1, 3)))]
    workload = recorded("two", requests, BLOCK)
    device = Device(
        latency=EngineLatency(prefill_ms_per_token=1.0, step_base_ms=10.0, step_ms_per_sequence=0.0), max_running=2
    )

    assert ideal_rate(workload, 1, device) == pytest.approx(2 / ((25 + 15 + 2 * 10) / 1000))


def test_workloads_have_what_their_names_say():
    def shared(workload) -> float:
        seen: set[int] = set()
        hits = blocks = 0
        for session in workload.sessions:
            for turn in session.turns:
                assert len(turn.chain) == turn.prompt_tokens // BLOCK_TOKENS
                hits += sum(key in seen for key in turn.chain)
                blocks += len(turn.chain)
                seen.update(turn.chain)
        return hits / blocks

    assert shared(unique(100, 1)) == 0
    assert shared(hot_prefix(400, 1)) == pytest.approx(0.5 * 64 / (0.5 * 72 + 0.5 * 32), abs=0.05)
    assert shared(shared_prefixes(400, 1, groups=4, skew=0.0, opening=32, own=8)) == pytest.approx(0.8, abs=0.02)
    assert shared(conversations(600, 1, groups=4)) > 0.8


def test_goals_and_imbalance_are_counted_over_all_workers():
    def served(worker: int, ttft: float, hits: int = 0) -> Served:
        at = Nanos(worker * SECOND)
        return Served(
            worker=worker,
            prompt_tokens=100,
            output_tokens=11,
            hit_tokens=hits,
            arrived=at,
            first=Nanos(at + int(ttft * SECOND)),
            ended=Nanos(at + int((ttft + 1.0) * SECOND)),
        )

    goals = Goals(ttft_seconds=1.0, ttft_seconds_per_token=0.01, tpot_seconds=0.1)

    found = outcome([served(0, 1.9), served(1, 2.1, hits=50)], 1, 4, goals, Nanos(4 * SECOND))

    assert found.attainment == pytest.approx(1 / 3)
    assert found.goodput == pytest.approx(1.0)
    assert (found.imbalance, found.hit_rate) == (2.0, 0.25)
    assert found.work_imbalance == pytest.approx(100 / 37.5)


def test_the_command_pairs_seeds_names_the_best_and_writes_rows(tmp_path, capsys):
    report = tmp_path / "rows.json"
    arguments = ["--policies", "fleet,round_robin", "--workloads", "few-prefixes", "--workers", "2", "--loads", "0.5"]

    assert leaderboard.main([*arguments, "--seeds", "2", "--requests", "20", "--json", str(report)]) == 0

    said = capsys.readouterr().out
    assert said.count("best") == 1
    assert "fleet beside round_robin" in said
    ((ours, theirs),) = json.loads(report.read_text())
    assert (ours["policy"], theirs["policy"]) == ("fleet", "round_robin")
    assert [each["requests"] for each in ours["outcomes"]] == [40, 40]


@pytest.mark.parametrize(
    "arguments", [["--policies", "luck"], ["--workloads", "luck"], ["--trace", "x"], ["--workers", "x"]]
)
def test_the_command_names_what_there_is_not(arguments, capsys):
    assert leaderboard.main(arguments) == 2
    assert "loadtests.router.leaderboard:" in capsys.readouterr().err


def test_halves_of_a_trace_have_nothing_in_common():
    requests = [Request(Nanos(at * SECOND), 25, (at, at + 100), 1) for at in range(10)]
    random.Random(0).shuffle(requests)
    trace = recorded("t", sorted(requests, key=lambda each: each.arrival), BLOCK)

    assert [each.start for each in trace.half(0).sessions] + [each.start for each in trace.half(1).sessions] == [
        each.start for each in trace.sessions
    ]
