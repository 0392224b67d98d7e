"""The cluster in virtual time, with the router's own machine."""

import pytest

from fleet.clock import SECOND, Nanos
from fleet.ids import WorkerId
from fleet.roles import Role
from fleet.router.settings import RouterSettings
from fleet.sim.engine import EngineLimits
from fleet.sim.results import Ended, Slo
from fleet.sim.run import Plan, Run, simulate
from fleet.sim.workloads import Drawn, requests_of
from fleet.sim.world import Fault, PoolProfile
from kvstore.replay import Request

BLOCK = 16


class StraightLine:
    """About a small model: 2 ms a step, 20 µs a prompt token, 0.1 ms a sequence."""

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        return 0.002 + 2e-5 * prefill_tokens + 1e-4 * decodes + 1e-8 * decode_context


def a_pool(role: Role = Role.BOTH, workers: int = 2, **limits: int) -> PoolProfile:
    given = {"kv_blocks": 400, "block_tokens": BLOCK, "max_running": 16, "step_tokens": 512, **limits}
    return PoolProfile(
        name=role.value,
        role=role,
        workers=workers,
        times=StraightLine(),
        limits=EngineLimits(**given),
        gpus=1,
        dollars_per_hour=2.0,
        busy_watts=700.0,
        idle_watts=70.0,
        kv_bytes_per_token=1000.0,
        bandwidth=1e9,
        link_latency=Nanos(10_000),
        start_time=Nanos(2 * SECOND),
    )


def a_plan(*pools: PoolProfile, seed: int = 1, faults: tuple[Fault, ...] = (), **router: object) -> Plan:
    return Plan(
        pools=pools or (a_pool(),),
        router=RouterSettings(**router),
        slo=Slo(ttft_ms=200.0, tpot_ms=20.0),
        block_tokens=BLOCK,
        message_delay=Nanos(200_000),
        seed=seed,
        faults=faults,
    )


def a_run(plan: Plan, ended: list[Ended] | None = None, **drawn: object) -> Run:
    workload = Drawn(**{"requests": 200, "rate": 20.0, "prompt_tokens": 300, "output_tokens": 40, **drawn})
    requests = requests_of(workload, None, block_tokens=BLOCK, seed=plan.seed)
    return simulate(plan, requests, told=None if ended is None else ended.append)


def test_every_request_ends_with_all_its_tokens():
    ended: list[Ended] = []
    outcome = a_run(a_plan(), ended).outcome
    assert outcome.requests == len(ended) == 200
    assert not outcome.refused
    assert all(20 <= each.output_tokens <= 60 for each in ended)
    assert outcome.disaggregated == 0


def test_the_same_seed_gives_the_same_digest_and_another_seed_another():
    digests = [a_run(a_plan(seed=seed)).outcome.digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_prefill_pool_takes_long_prompts_and_their_blocks_move():
    plan = a_plan(a_pool(Role.PREFILL, 1), a_pool(Role.DECODE, 1), remote_prefill_min_tokens=250)
    ended: list[Ended] = []
    outcome = a_run(plan, ended).outcome
    assert not outcome.refused
    assert 50 < outcome.disaggregated < 200
    assert outcome.moved_gb > 0
    assert all(20 <= each.output_tokens <= 60 for each in ended)


def test_a_shared_prefix_is_computed_once_a_worker_at_most():
    run = a_run(a_plan(), prefixes=2, prefix_tokens=128, spread=0.0)
    # At most four computations of 128 tokens, and whole requests of siblings that came before the first was done.
    assert run.outcome.hit_rate > 0.9 * 128 / 300


def test_nobody_loses_a_token_when_a_worker_dies():
    ended: list[Ended] = []
    fault = Fault(at=Nanos(3 * SECOND), worker=WorkerId("both-0"), down=Nanos(SECOND))
    plan = a_plan(faults=(fault,))
    outcome = a_run(plan, ended).outcome
    undisturbed: list[Ended] = []
    a_run(a_plan(), undisturbed)
    assert not outcome.refused
    tokens = {each.request_id: each.output_tokens for each in undisturbed}
    assert {each.request_id: each.output_tokens for each in ended} == tokens
    assert outcome.ttft_ms["p99"] > a_run(a_plan()).outcome.ttft_ms["p99"]


def test_a_dead_prefill_worker_leaves_its_requests_to_others():
    fault = Fault(at=Nanos(3 * SECOND), worker=WorkerId("prefill-0"), down=Nanos(SECOND))
    plan = a_plan(a_pool(Role.PREFILL, 1), a_pool(Role.DECODE, 2), faults=(fault,), remote_prefill_min_tokens=100)
    outcome = a_run(plan).outcome
    assert not outcome.refused
    assert 0 < outcome.disaggregated < 200


def test_what_fits_no_worker_is_refused_and_counted():
    outcome = a_run(a_plan(a_pool(kv_blocks=16)), requests=20, prompt_tokens=400, spread=0.5).outcome
    assert outcome.refused == {"too_large": sum(outcome.refused.values())}
    assert 5 < outcome.refused["too_large"] < 20


def test_an_overloaded_cluster_refuses_and_its_queue_is_bounded():
    outcome = a_run(a_plan(a_pool(workers=1), max_queued=5), requests=300, rate=500.0).outcome
    assert outcome.refused["queue_full"] > 100
    assert outcome.attainment < 0.7


def test_gpu_hours_count_the_time_that_workers_are_there():
    fault = Fault(at=Nanos(2 * SECOND), worker=WorkerId("both-0"), down=Nanos(3 * SECOND))
    undisturbed, disturbed = a_run(a_plan()).outcome, a_run(a_plan(faults=(fault,))).outcome
    assert undisturbed.gpu_hours == pytest.approx(2 * undisturbed.simulated_seconds / 3600, rel=0.01)
    assert disturbed.gpu_hours == pytest.approx((2 * disturbed.simulated_seconds - 3) / 3600, rel=0.01)


def test_sessions_and_recorded_lengths_reach_the_router():
    chain = tuple(range(1, 9))
    requests = [
        Request(Nanos(0), 128, chain, 4, 7),
        Request(Nanos(SECOND), 128, chain, 4, 7),
    ]
    ended: list[Ended] = []
    simulate(a_plan(), iter(requests), told=ended.append)
    assert [each.cached_tokens for each in ended] == [0, 112]
    assert [each.output_tokens for each in ended] == [4, 4]
