"""Capacity of pools: percentiles, bursts, shared routers, and corrections."""

import math
import random

import pytest

from fleet.core.roles import Role
from fleet.hardware.latency.linear import EngineLatency
from fleet.hardware.latency.open_loop import RequestShape
from fleet.planner.decisions import PlanConditionType, PlanGoals
from fleet.planner.sizing.capacity import LatencyCorrection, OfferedLoad, StepCapacity, linear_engine
from fleet.planner.sizing.corrected import CorrectedCapacity
from tests.unit.planner.engines import engine
from tests.unit.planner.world import pool

SHAPE = RequestShape(prompt_tokens=2000, answer_tokens=200)
LOAD = OfferedLoad(shape=SHAPE)
POOLS = {role: pool(role, role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)}
CAPACITY = StepCapacity({each.name: engine() for each in POOLS.values()})
GOALS = PlanGoals(ttft_seconds=0.2, tpot_seconds=0.012)


@pytest.mark.parametrize("role", list(POOLS))
def test_replicas_that_share_a_router_serve_more_each(role: Role) -> None:
    each = [CAPACITY.highest_rate(POOLS[role], LOAD, GOALS, count) / count for count in (1, 2, 5, 20)]
    assert each == sorted(each)
    assert each[-1] > 1.05 * each[0]


@pytest.mark.parametrize("role", list(POOLS))
def test_highest_rate_keeps_the_goals_and_more_misses_them(role: Role) -> None:
    rate = CAPACITY.highest_rate(POOLS[role], LOAD, GOALS, 4)
    kept = CAPACITY.latency(POOLS[role], LOAD, GOALS.percentile, 4, 0.98 * rate)
    missed = CAPACITY.latency(POOLS[role], LOAD, GOALS.percentile, 4, 1.05 * rate)
    assert kept.ttft <= GOALS.ttft_seconds
    assert kept.tpot <= GOALS.tpot_seconds
    assert missed.ttft > GOALS.ttft_seconds or missed.tpot > GOALS.tpot_seconds


@pytest.mark.parametrize("role", list(POOLS))
def test_bursts_and_spread_lengths_lower_the_rate(role: Role) -> None:
    steady = CAPACITY.highest_rate(POOLS[role], LOAD, GOALS, 4)
    bursty = CAPACITY.highest_rate(POOLS[role], OfferedLoad(shape=SHAPE, dispersion=8.0), GOALS, 4)
    assert bursty < 0.97 * steady
    if role is Role.PREFILL:
        spread = CAPACITY.highest_rate(POOLS[role], OfferedLoad(shape=SHAPE, prompt_spread=1.0), GOALS, 4)
        assert spread < steady


def test_higher_percentile_lowers_the_rate() -> None:
    rates = [
        CAPACITY.highest_rate(
            POOLS[Role.PREFILL], LOAD, PlanGoals(ttft_seconds=0.2, tpot_seconds=1, percentile=share), 2
        )
        for share in (0.5, 0.9, 0.99)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1] > 0


def waits(rate: float, service: float, replicas: int, burst: int, seed: int) -> list[float]:
    """Simulate bursts of requests in one queue for several servers; return the seconds from arrival to end of each request."""
    chance, now, free, found = random.Random(seed), 0.0, [0.0] * replicas, []
    for _ in range(20_000 // burst):
        now += chance.expovariate(rate / burst)
        for _ in range(burst):
            first = min(range(replicas), key=free.__getitem__)
            free[first] = max(now, free[first]) + service
            found.append(free[first] - now)
    return found


def test_bursty_trace_is_kept_where_mean_sizing_misses() -> None:
    """Check property P3 with bursts of six requests: sizing by the mean gives too few replicas, sizing by the percentile enough."""
    prefill, service = POOLS[Role.PREFILL], 0.1
    latency = EngineLatency(prefill_base_ms=0.0, prefill_ms_per_token=1e3 * service / SHAPE.prompt_tokens)
    capacity = StepCapacity(
        {prefill.name: linear_engine(latency, Role.PREFILL, capacity_tokens=1e6, most_running=64, budget_tokens=2000)}
    )
    goals, rate, burst = PlanGoals(ttft_seconds=3.0 * service, tpot_seconds=1.0), 4.0 / service, 6
    load = OfferedLoad(shape=SHAPE, dispersion=float(burst))  # bursts of six requests each

    def attained(replicas: int) -> float:
        found = waits(rate, service, replicas, burst, seed=7)
        return sum(each <= goals.ttft_seconds for each in found) / len(found)

    by_mean = math.ceil(rate * service / 0.9)
    ours = next(count for count in range(1, 50) if capacity.highest_rate(prefill, load, goals, count) >= rate)
    assert attained(by_mean) < goals.percentile
    assert attained(ours) >= goals.percentile
    assert ours <= 2 * by_mean


def test_correction_predicts_a_slower_engine_within_a_fifth() -> None:
    correction = LatencyCorrection()
    for step in range(60):
        correction.observe(0.1 + 0.01 * (step % 5), 1.7 * (0.1 + 0.01 * (step % 5)))
    assert 0.12 * correction.factor(0.12) == pytest.approx(1.7 * 0.12, rel=0.2)


def test_error_of_a_prediction_without_fixed_costs_fades() -> None:
    correction, errors = LatencyCorrection(), list[float | None]()
    for _ in range(20):
        correction.observe(0.005, 0.05)
        errors.append(correction.error)
    assert errors[0] is None
    assert all(each is not None and each <= 1.0 for each in errors[1:])
    assert errors[-1] is not None
    assert errors[-1] < 0.2


def test_drift_raises_an_alarm_and_noise_none() -> None:
    correction, chance = LatencyCorrection(), random.Random(3)
    noise = [correction.observe(0.1, 0.1 * chance.lognormvariate(0, 0.1)) for _ in range(500)]
    assert not any(noise)
    assert any(correction.observe(0.1, 0.25) for _ in range(20))


@pytest.mark.parametrize(("predicted", "measured"), [(math.inf, 1.0), (0.1, math.nan), (0.0, 1.0), (0.1, -1.0)])
def test_impossible_latencies_teach_nothing(predicted: float, measured: float) -> None:
    correction = LatencyCorrection()
    assert not correction.observe(predicted, measured)
    assert correction.samples == 0


def test_goal_out_of_reach_names_the_best_and_is_relaxed() -> None:
    goals = PlanGoals(ttft_seconds=0.001, tpot_seconds=0.012)
    corrected = CorrectedCapacity(CAPACITY, goals, list(POOLS.values()))
    (condition,) = corrected.out_of_reach(LOAD)
    assert condition.type is PlanConditionType.GOAL_OUT_OF_REACH
    assert condition.field == "goals.ttft_seconds"
    assert "the best is 0.0" in condition.message
    assert corrected.highest_rate(POOLS[Role.PREFILL], LOAD, 1) > 0


def test_missed_goal_lowers_the_capacity_until_it_fades() -> None:
    corrected = CorrectedCapacity(CAPACITY, GOALS, list(POOLS.values()))
    before = corrected.highest_rate(POOLS[Role.PREFILL], LOAD, 2)
    corrected.remember(Role.PREFILL, 0.8)
    after = corrected.highest_rate(POOLS[Role.PREFILL], LOAD, 2)
    assert after == pytest.approx(0.95 * 0.8 * before)
    corrected.advance(48 * 3600.0)
    assert corrected.highest_rate(POOLS[Role.PREFILL], LOAD, 2) == pytest.approx(before, rel=0.01)
    assert corrected.highest_rate(POOLS[Role.DECODE], LOAD, 2) == CAPACITY.highest_rate(
        POOLS[Role.DECODE], LOAD, GOALS, 2
    )


def test_linear_engine_has_the_step_times_of_its_latency_model() -> None:
    latency = EngineLatency()
    both = linear_engine(latency, Role.BOTH, capacity_tokens=1e5, most_running=32, budget_tokens=8192).engine.step
    assert both.seconds(0, 0, 8, 8 * 500) == pytest.approx(latency.seconds(0, 0, 8, 4000))
    prefill = linear_engine(latency, Role.PREFILL, capacity_tokens=1e5, most_running=32, budget_tokens=8192).engine.step
    assert prefill.seconds(1000, 500_000, 0, 0) == pytest.approx(latency.seconds(1000, 500_000, 0, 0))
