"""Solver for the sizes of pools, compared with a search through all sizes."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import highspy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.core.roles import Role
from fleet.planner.decisions import PlanBudget, PlannedPool
from fleet.planner.sizing import solver
from fleet.planner.sizing.solver import Candidate, Rates, SolverTimeout, served, solve, within_budget
from tests.unit.planner.world import pool

RATES = {"prefill-a": 5.0, "prefill-b": 12.0, "decode-a": 3.0, "decode-b": 7.0, "both": 2.0}
POOLS = [
    pool("prefill-a", Role.PREFILL, gpus=1, dollars_per_hour=2.0, start_seconds=0.0),
    pool("prefill-b", Role.PREFILL, gpus=2, dollars_per_hour=3.0, start_seconds=0.0),
    pool("decode-a", Role.DECODE, gpus=1, dollars_per_hour=2.0, start_seconds=0.0),
    pool("decode-b", Role.DECODE, gpus=2, dollars_per_hour=2.2, start_seconds=0.0),
    pool("both", Role.BOTH, gpus=1, dollars_per_hour=2.0, start_seconds=0.0),
]


def rates(pool: PlannedPool, replicas: int) -> float:
    return RATES[pool.name] * replicas


def best(
    candidates: list[Candidate], rate: float, budget: PlanBudget, rates: Rates = rates
) -> tuple[float, float] | None:
    """Try all sizes; return minus the highest served rate, and the lowest price for it; None if no size is within the budget."""
    found = None
    for replicas in product(*(range(each.least, each.most + 1) for each in candidates)):
        if within_budget(candidates, replicas, budget):
            value = (
                -served(candidates, replicas, rate, rates),
                sum(each.dollars * n for each, n in zip(candidates, replicas, strict=True)),
            )
            found = value if found is None else min(found, value)
    return found


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0, 40),
    most=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    least=st.lists(st.integers(0, 1), min_size=5, max_size=5),
    gpus=st.none() | st.integers(0, 16),
    dollars=st.none() | st.floats(0, 40),
    ratio=st.sampled_from([(None, None), (0.5, None), (None, 1.0), (0.5, 2.0)]),
)
@example(rate=0.0078125, most=[0, 0, 0, 0, 1], least=[0] * 5, gpus=None, dollars=None, ratio=(None, None))
@example(rate=4.0078125, most=[0, 0, 0, 0, 4], least=[0] * 5, gpus=None, dollars=None, ratio=(None, None))
def test_solution_is_the_best_of_all(rate, most, least, gpus, dollars, ratio) -> None:
    candidates = [
        Candidate(pool=each, least=min(low, high), most=high)
        for each, low, high in zip(POOLS, least, most, strict=True)
    ]
    budget = PlanBudget(gpus=gpus, dollars_per_hour=dollars, least_ratio=ratio[0], most_ratio=ratio[1])
    found, wanted = solve(candidates, rate, rates, budget), best(candidates, rate, budget)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert within_budget(candidates, found.replicas, budget)
        assert found.served == pytest.approx(-wanted[0], abs=1e-4)
        assert found.dollars <= wanted[1] * 1.02 + 1e-6  # the solver counts a new replica 1 % dearer


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0.5, 30),
    losses=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    gpus=st.none() | st.integers(4, 16),
    now=st.lists(st.integers(0, 10), min_size=5, max_size=5),
)
@example(rate=8.0, losses=[1.0, 1.0, 1.0, 1.0, 0.9], gpus=None, now=[0] * 5)
@example(rate=2.2, losses=[0.9] * 5, gpus=None, now=[10] * 5)
def test_solution_is_the_best_if_replicas_gain_by_sharing(rate, losses, gpus, now) -> None:
    """A lone replica of a pool may serve nothing, each further replica makes all of them better, and a pool may be above its maximum."""
    lost = dict(zip(RATES, losses, strict=True))

    def shared(pool: PlannedPool, replicas: int) -> float:
        return RATES[pool.name] * replicas * (1.0 - lost[pool.name] / replicas)

    candidates = [Candidate(pool=each, least=0, most=5, now=ours) for each, ours in zip(POOLS, now, strict=True)]
    budget = PlanBudget(gpus=gpus)
    found, wanted = solve(candidates, rate, shared, budget), best(candidates, rate, budget, shared)
    assert found is not None
    assert wanted is not None
    assert within_budget(candidates, found.replicas, budget)
    assert found.served == pytest.approx(-wanted[0], abs=1e-4)
    assert found.dollars <= wanted[1] * 1.02 + 1e-6  # the solver counts a new replica 1 % dearer


def test_pool_that_serves_hardly_anything_makes_no_mix_dearer() -> None:
    draw = random.Random(11)
    served_by, candidates = {}, []
    for number in range(12):
        role = draw.choice([Role.PREFILL, Role.DECODE, Role.BOTH])
        each = pool(f"pool-{number}", role, dollars_per_hour=draw.uniform(1, 10), start_seconds=0.0)
        served_by[each.name] = draw.uniform(0.5, 20)
        candidates.append(Candidate(pool=each, least=0, most=10_000))
    slow = pool("slow", Role.BOTH, gpus=8, dollars_per_hour=10.0, start_seconds=0.0)
    served_by[slow.name] = 0.1

    def shared(pool: PlannedPool, replicas: int) -> float:
        return served_by[pool.name] * replicas

    for rate in (20.0, 63.55, 200.0, 900.0):
        alone = solve(candidates, rate, shared, PlanBudget())
        together = solve([*candidates, Candidate(pool=slow, least=0, most=10_000)], rate, shared, PlanBudget())
        assert alone is not None
        assert together is not None
        assert together.dollars == pytest.approx(alone.dollars, rel=0.01)
        assert together.served == pytest.approx(alone.served)


def test_later_timeout_gives_the_mix_that_was_found_before(monkeypatch) -> None:
    draw = random.Random(1)
    many = [
        Candidate(pool=pool(f"both-{n}", Role.BOTH, gpus=1, dollars_per_hour=draw.uniform(1, 9)), least=0, most=40)
        for n in range(60)
    ]
    speeds = {each.pool.name: draw.uniform(1.0, 9.0) for each in many}
    asked = 0

    def shared(pool: PlannedPool, replicas: int) -> float:
        nonlocal asked
        asked += 1
        if asked > 2 * len(many):  # the first ranges are made, and the first program has ended
            monkeypatch.setattr(solver, "TIME_LIMIT_SECONDS", 0.0)
        return speeds[pool.name] * (replicas - 0.5)

    found = solve(many, 500.0, shared, PlanBudget(gpus=90))
    assert found is not None
    assert found.served > 0.0


def test_solution_without_agreement_serves_the_rate(monkeypatch) -> None:
    """Allow a single call of the solver, after which only the program with the least rates is left."""
    monkeypatch.setattr(solver, "ROUNDS", 1)

    def shared(pool: PlannedPool, replicas: int) -> float:
        return max(0.0, RATES[pool.name] * (replicas - 2))

    found = solve([Candidate(pool=each, least=0, most=60) for each in POOLS], 40.0, shared, PlanBudget())
    assert found is not None
    assert found.served == pytest.approx(40.0)


@pytest.mark.parametrize("rate", [0.0, 0.5, 17.0, 90.0])
def test_one_pool_for_each_phase_agrees_with_the_solver(rate: float) -> None:
    pair = [POOLS[0], POOLS[2]]
    alone = solve([Candidate(pool=each, least=1, most=40) for each in pair], rate, rates, PlanBudget())
    beside = [Candidate(pool=each, least=1 if each in pair else 0, most=40 if each in pair else 0) for each in POOLS]
    together = solve(beside, rate, rates, PlanBudget())
    assert alone is not None
    assert together is not None
    assert sorted(alone.replicas) == sorted(each for each in together.replicas if each)


def test_draining_replicas_hold_the_budget() -> None:
    drains = Candidate(pool=POOLS[0], least=1, most=8, now=1, held=1, draining=3)
    grows = Candidate(pool=POOLS[2], least=0, most=8, now=2, held=2)
    found = solve([drains, grows], 15.0, rates, PlanBudget(gpus=8))
    assert found is not None
    assert found.replicas[0] + found.replicas[1] + 3 <= 8
    free = solve(
        [Candidate(pool=POOLS[0], least=1, most=8), Candidate(pool=POOLS[2], least=0, most=8)],
        15.0,
        rates,
        PlanBudget(gpus=8),
    )
    assert free is not None
    assert free.served > found.served


def test_no_replica_of_the_solution_can_be_left_out() -> None:
    def pooled(pool: PlannedPool, replicas: int) -> float:
        return RATES[pool.name] * replicas * (1.0 - 0.4 / replicas**0.5)

    candidates = [Candidate(pool=each, least=0, most=200) for each in POOLS]
    found = solve(candidates, 300.0, pooled, PlanBudget())
    assert found is not None
    assert served(candidates, found.replicas, 300.0, pooled) == pytest.approx(300.0)
    for index, count in enumerate(found.replicas):
        fewer = [each - (place == index) for place, each in enumerate(found.replicas)]
        assert not count or served(candidates, fewer, 300.0, pooled) < 300.0


def test_limits_below_floors_have_no_solution() -> None:
    candidates = [Candidate(pool=POOLS[0], least=4, most=8), Candidate(pool=POOLS[2], least=1, most=8)]
    assert solve(candidates, 1.0, rates, PlanBudget(gpus=4)) is None


def test_replicas_that_shrink_hold_the_budget_until_they_drain() -> None:
    shrinks = Candidate(pool=POOLS[0], least=1, most=8, now=6, held=6)
    grows = Candidate(pool=POOLS[2], least=0, most=8, now=2, held=2)
    found = solve([shrinks, grows], 15.0, rates, PlanBudget(gpus=8))
    assert found is not None
    assert found.replicas[1] <= 2


def test_solver_without_time_says_so(monkeypatch) -> None:
    monkeypatch.setattr(solver, "TIME_LIMIT_SECONDS", 0.0)
    draw = random.Random(1)
    many = [
        Candidate(pool=pool(f"both-{n}", Role.BOTH, gpus=1, dollars_per_hour=draw.uniform(1, 9)), least=0, most=40)
        for n in range(60)
    ]
    speeds = {each.pool.name: draw.uniform(1.0, 9.0) for each in many}
    with pytest.raises(SolverTimeout, match="for 60 pools within 0 s"):
        solve(many, 500.0, lambda pool, replicas: speeds[pool.name] * replicas, PlanBudget(gpus=90))


def test_threads_get_the_solutions_of_their_own_programs() -> None:
    """The planners of a cluster decide in threads of one process. In one object of HiGHS, two programs at once would crash the process or mix their numbers."""
    candidates = [Candidate(pool=each, least=0, most=40) for each in POOLS]
    asked = [10.0 + number / 7 for number in range(120)]
    with ThreadPoolExecutor(4) as threads:
        mixes = list(threads.map(lambda rate: solve(candidates, rate, rates, PlanBudget()), asked))
    assert [mix is not None and mix.served for mix in mixes] == [pytest.approx(rate, rel=1e-5) for rate in asked]


def test_costs_of_candidates_decide_instead_of_prices() -> None:
    """Energy is such a cost. The dollars of the budget stay a limit."""
    watts = {"prefill-a": 900.0, "prefill-b": 500.0, "decode-a": 300.0, "decode-b": 2000.0, "both": 5000.0}
    frugal = [Candidate(pool=each, least=0, most=9, cost=watts[each.name]) for each in POOLS]
    cheap = [Candidate(pool=each, least=0, most=9) for each in POOLS]

    for candidates, expected in ((frugal, (0, 1, 4, 0, 0)), (cheap, (0, 0, 0, 0, 6))):
        mix = solve(candidates, 12.0, rates, PlanBudget())
        assert mix is not None
        assert mix.replicas == expected
        assert mix.dollars == pytest.approx(sum(each.dollars * n for each, n in zip(candidates, expected, strict=True)))
    limited = solve(frugal, 12.0, rates, PlanBudget(dollars_per_hour=13.0))
    assert limited is not None
    assert limited.dollars <= 13.0
    assert limited.served == pytest.approx(12.0)


def test_needless_replicas_of_the_highest_cost_are_removed(monkeypatch) -> None:
    """After a single call of the solver, the last program finds needless replicas of both pools. The cost decides which ones go."""
    monkeypatch.setattr(solver, "ROUNDS", 1)
    pools = [
        pool("frugal", Role.BOTH, gpus=1, dollars_per_hour=6.0, start_seconds=0.0),
        pool("cheap", Role.BOTH, gpus=1, dollars_per_hour=4.0, start_seconds=0.0),
    ]
    candidates = [
        Candidate(pool=each, least=least, most=60, cost=watts)
        for each, least, watts in zip(pools, (0, 1), (800.0, 900.0), strict=True)
    ]
    found = solve(candidates, 12.0, lambda _, replicas: max(0.0, 4.0 * (replicas - 3)), PlanBudget())
    assert found is not None
    assert found.replicas == (6, 1)


def test_large_mix_costs_hardly_more_than_the_best(monkeypatch) -> None:
    """With thousands of replicas, the search ends at a mix near the best one, although further programs would find a better one."""
    candidates = [Candidate(pool=each, least=0, most=20_000) for each in POOLS]
    programs = []
    monkeypatch.setattr(highspy, "Highs", lambda make=highspy.Highs: programs.append(None) or make())

    def shared(pool: PlannedPool, replicas: int) -> float:
        """Return less per replica in small pools, so that the ranges of pools have to be divided."""
        return RATES[pool.name] * (replicas - 0.3 * replicas**0.5)

    near = solve(candidates, 50_000.0, shared, PlanBudget())
    programs.clear()
    monkeypatch.setattr(solver, "NEAR", 0.0)
    best = solve(candidates, 50_000.0, shared, PlanBudget())

    assert near is not None
    assert best is not None
    assert programs
    assert near.served == pytest.approx(50_000.0)
    assert best.dollars <= near.dollars <= 1.001 * best.dollars
