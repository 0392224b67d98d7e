"""Outcomes of pools: tokens, cost, energy, and the time outside engines."""

from pathlib import Path

import pytest
from msgspec import structs

from fleet.batching.attempts import EngineLimits
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.roles import Role
from fleet.hardware.power import power_share
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.results.outcomes import Slo
from fleet.sim.run import RunPlan, simulate
from fleet.sim.workload.drawn import DrawnWorkload
from fleet.sim.workload.traffic import requests_of

BLOCK = 16


class SecondAStep:
    """Step times with which every step takes a second."""

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        return 1.0


def a_pool(role=Role.BOTH, **changes):
    pool = PoolProfile(
        name=role.value,
        role=role,
        workers=1,
        times=SecondAStep(),
        limits=EngineLimits(kv_blocks=400, block_tokens=BLOCK, max_running=16, step_tokens=512),
        gpus=2,
        dollars_per_hour=3.6,
        busy_watts=500.0,
        idle_watts=100.0,
        kv_bytes_per_token=1000.0,
        bandwidth=1e9,
        link_latency=Nanos(10_000),
        start_time=Nanos(2 * SECOND),
        gpu="h100",
    )
    return structs.replace(pool, **changes)


def a_run(*pools, requests=1, on_end=None, **router):
    plan = RunPlan(
        pools=pools,
        router=RouterSettings(**router),
        slo=Slo(),
        block_tokens=BLOCK,
        message_delay=Nanos(0),
        seed=1,
    )
    drawn = DrawnWorkload(
        requests=requests, rate=0.001, arrivals="even", prompt_tokens=100, output_tokens=5, spread=0.0
    )
    return simulate(plan, requests_of(drawn, Path(), block_tokens=BLOCK, seed=1), on_end=on_end)


def test_energy_sums_power_of_steps_and_idle_time():
    """Run one request of 100 tokens with five answer tokens: one prompt step and four decode steps; otherwise, nothing runs."""
    run = a_run(a_pool())
    [pool] = run.outcome.pools
    there = run.outcome.simulated_seconds
    at_work = power_share(100) + 4 * power_share(1)

    joules = 2 * (100.0 * there + 400.0 * at_work)

    assert pool.energy_kwh == pytest.approx(joules / 3.6e6, abs=1e-4)
    assert pool.joules_per_token == pytest.approx(joules / 105, rel=1e-3)
    assert run.outcome.joules_per_token == pytest.approx(joules / 5, rel=1e-3)


def test_pool_outcome_has_tokens_and_cost():
    run = a_run(a_pool())
    [pool] = run.outcome.pools
    there = run.outcome.simulated_seconds

    assert (pool.computed_tokens, pool.generated_tokens) == (100, 5)
    assert (pool.gpu, pool.gpus, pool.workers) == ("h100", 2, 1)
    assert pool.cost == pytest.approx(2 * there / 3600 * 3.6, abs=1e-4)
    assert pool.cost_per_million_tokens == pytest.approx(pool.cost / 105 * 1e6, rel=1e-2)


def test_pools_add_up_to_run():
    run = a_run(
        a_pool(Role.PREFILL), a_pool(Role.DECODE, dollars_per_hour=1.0), requests=20, remote_prefill_min_tokens=50
    )
    outcome = run.outcome
    prefill, decode = outcome.pools

    assert outcome.disaggregated == 20
    assert prefill.computed_tokens > decode.computed_tokens
    assert decode.generated_tokens >= 80
    assert prefill.cost + decode.cost == pytest.approx(outcome.cost, abs=1e-3)
    assert prefill.energy_kwh + decode.energy_kwh == pytest.approx(outcome.energy_kwh, abs=1e-3)
    assert prefill.gpu_hours + decode.gpu_hours == pytest.approx(outcome.gpu_hours, abs=1e-3)


def test_front_time_changes_only_what_clients_see():
    plain, seen = [], []
    a_run(a_pool(), requests=3, on_end=plain.append)
    a_run(a_pool(front=Nanos(30 * MILLISECOND), front_per_token=20_000.0), requests=3, on_end=seen.append)

    for without, beside in zip(plain, seen, strict=True):
        assert beside.ttft_ms - without.ttft_ms == pytest.approx(30 + 100 * 0.02, abs=1e-6)
        assert beside.tpot_ms == without.tpot_ms


def test_timeline_has_each_pool():
    run = a_run(a_pool(Role.PREFILL), a_pool(Role.DECODE), requests=20, remote_prefill_min_tokens=50)

    assert {pool.name for look in run.timeline for pool in look.pools} == {"prefill", "decode"}
    assert all(look.running == sum(pool.running for pool in look.pools) for look in run.timeline)
