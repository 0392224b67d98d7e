"""The planner's rule in a small simulated world: it grows and shrinks pools, keeps steady, and changes nothing on doubtful data."""

import math
from itertools import pairwise
from typing import Literal

import pytest
from msgspec import structs

from fleet.core.duration_counts import EDGES, bucket_of
from fleet.core.roles import Role
from fleet.hardware.gpus import gpus
from fleet.hardware.latency.open_loop import RequestShape
from fleet.planner.decisions import DecisionReason, PlanBudget, PlanConditionType, PlanGoals, check_limits
from fleet.planner.demand import DemandWindow
from fleet.planner.machine import PlannerMachine
from fleet.planner.messages import Observation
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.sizing.capacity import OfferedLoad, StepCapacity
from fleet.planner.sizing.solver import Candidate, solve
from tests.unit.planner.engines import engine
from tests.unit.planner.world import ANSWER, PROMPT, World, pool, seconds

POOLS = (pool("decode", Role.DECODE, least=1), pool("prefill", Role.PREFILL, least=1))
GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.03)


CAPACITY = StepCapacity({each.name: engine() for each in POOLS})
LOAD = OfferedLoad(shape=RequestShape(prompt_tokens=PROMPT, answer_tokens=ANSWER))


def machine(budget: PlanBudget | None = None) -> PlannerMachine:
    return PlannerMachine(PlannerRuleSettings(), POOLS, GOALS, CAPACITY, budget)


@pytest.mark.parametrize("rate", [0.05, 1.0, 12.0, 27.0, 120.0])
def test_constant_load_never_changes_direction(rate: float) -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1}, seed=round(rate * 100))
    world.run(2 * 3600, rate)
    assert world.direction_changes("prefill") == world.direction_changes("decode") == 0


def test_step_of_five_is_served_after_one_start_up() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(1800, 20.0)
    world.run(130, 100.0)
    assert world.pools["prefill"].ready >= 3
    assert world.pools["decode"].ready >= 4


def test_end_of_load_reaches_floor_in_cool_down_and_drain() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(1800, 120.0)
    assert world.wanted["decode"] > 4
    world.run(300 + 60 + 10, 0.0)
    assert {name: each.held for name, each in world.pools.items()} == {"prefill": 1, "decode": 1}


def test_step_never_wants_more_than_needed_while_replicas_start() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(1800, 20.0)
    world.run(120, 100.0, queued=5000, oldest_seconds=60.0)
    needed = {
        each.name: next(n for n in range(1, 50) if CAPACITY.highest_rate(each, LOAD, GOALS, n) >= 100.0)
        for each in POOLS
    }
    highest = {name: max(each[name] for each in world.history) for name in needed}
    assert all(needed[name] <= highest[name] <= needed[name] + 1 for name in needed)


@pytest.mark.parametrize("budget", [PlanBudget(), PlanBudget(gpus=9)])
def test_ratio_follows_changed_lengths_in_one_plan(budget: PlanBudget) -> None:
    world = World(machine(budget), POOLS, {"prefill": 5, "decode": 3})
    world.prompt, world.answer = 4000, 40
    world.run(1800, 70.0)
    before, plans = world.wanted, len(world.plans)
    assert before["prefill"] > 2 * before["decode"]
    world.prompt, world.answer = 400, 1500
    world.run(60, 30.0)
    assert world.wanted["decode"] > before["decode"] or world.pools["prefill"].draining
    world.run(240, 30.0)
    assert world.wanted["decode"] > world.wanted["prefill"]
    assert world.plans[plans].reason is DecisionReason.RATIO


def test_decision_names_the_error_of_the_forecast() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(300, 20.0)
    world.run(300, 40.0)
    assert 0.0 < world.decisions[-1].numbers["forecast_error"] < 1.0


def test_forecast_is_missing_until_there_is_one_and_after_a_fall() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(5, 20.0)
    first = world.decisions[-1]
    assert {"forecast", "forecast_error"}.isdisjoint(first.numbers)
    assert "requests a second, no forecast yet, of" in first.message
    world.run(600, 20.0)
    assert world.decisions[-1].numbers["forecast"] > 0.0
    assert f" expected in {world.decisions[-1].numbers['horizon_seconds']:.0f} s, of" in world.decisions[-1].message
    world.run(60, 2.0)
    assert "forecast" not in world.decisions[-1].numbers
    assert "no forecast shortly after a fall" in world.decisions[-1].message


def test_errors_of_latencies_are_missing_without_a_comparison() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    measured = (0,) * bucket_of(0.08) + (100,) + (0,) * (len(EDGES) - bucket_of(0.08))
    world.run(60, 10.0, ttft=measured)
    assert "ttft_error" not in world.decisions[-1].numbers
    world.run(3600, 10.0, ttft=measured)
    assert 0.0 < world.decisions[-1].numbers["ttft_error"] < 0.1


def test_missed_goal_adds_one_replica_that_stays() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    slow = (0,) * bucket_of(0.05) + (100,) + (0,) * (len(EDGES) - bucket_of(0.05))
    world.run(1200, 24.0)
    assert world.wanted["decode"] == 1
    world.run(200, 24.0, tpot=slow)
    assert world.wanted["decode"] == 2
    world.run(3600, 24.0)
    assert world.wanted["decode"] == 2
    assert world.direction_changes("decode") == 0


def test_nothing_shrinks_while_too_many_requests_are_late() -> None:
    prompt, late = ((0,) * bucket_of(value) + (100,) + (0,) * (len(EDGES) - bucket_of(value)) for value in (0.01, 0.05))
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(1800, 120.0, tpot=prompt)
    before = world.wanted["decode"]
    world.run(900, 24.0, tpot=late)
    assert world.wanted["decode"] >= before > 4
    world.run(600, 24.0, tpot=prompt)
    assert world.wanted["decode"] < before


@pytest.mark.parametrize(
    ("late", "refused", "load", "grows"),
    [(0, 0, 1.05, False), (4, 0, 1.05, True), (0, 4, 1.05, True), (None, 0, 1.05, True), (0, 0, 1.25, True)],
    ids=["hardly_any_late", "many_late", "many_refused", "unmeasured", "far_too_few"],
)
def test_growth_waits_while_hardly_any_request_is_late(
    late: int | None, refused: int, load: float, grows: bool
) -> None:
    measured: dict[str, object] = {}
    if late is not None:
        for name, prompt, missed in (("ttft", 0.12, 2.0), ("tpot", 0.02, 0.1)):
            found = [0] * (len(EDGES) + 1)
            found[bucket_of(prompt)], found[bucket_of(missed)] = 100 - late, late
            measured[name] = tuple(found)
    world = World(machine(), POOLS, {"prefill": 8, "decode": 4})
    most = CAPACITY.highest_rate(POOLS[0], LOAD, GOALS, 4)
    world.run(1800, 0.9 * most, **measured)
    assert world.wanted["decode"] == 4
    world.run(600, load * most, refused=refused, **measured)
    assert (world.wanted["decode"] > 4) == grows


def test_second_growth_after_a_step_does_not_wait() -> None:
    """Let the load step, and turn out a little higher than the first growth was for: the pool grows again at once."""
    found = [0] * (len(EDGES) + 1)
    found[bucket_of(0.02)] = 100
    kept = {"ttft": tuple(found), "tpot": tuple(found)}
    pools = [structs.replace(each, start_seconds=4.0) for each in POOLS]
    world = World(PlannerMachine(PlannerRuleSettings(), pools, GOALS, CAPACITY), pools, {"prefill": 8, "decode": 4})
    most = CAPACITY.highest_rate(pools[0], LOAD, GOALS, 6)
    world.run(1800, 0.5 * most, **kept)
    world.run(20, 0.95 * most, **kept)
    stepped = world.wanted["decode"]
    world.run(35, 1.0 * most, **kept)
    assert world.wanted["decode"] > stepped > 4


def test_cool_down_names_the_growth_after_which_it_waits() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(600, 1.0)
    world.pools["decode"].want(6, world.now)
    world.run(200, 1.0)
    last = world.decisions[-1]
    assert last.reason is DecisionReason.COOLING_DOWN
    assert " s after a growth; " in last.message


def test_large_pool_loses_at_most_half_in_one_step() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(1800, 400.0)
    assert world.wanted["decode"] > 12
    world.run(3600, 10.0)
    steps = [(one["decode"], other["decode"]) for one, other in pairwise(world.history)]
    assert world.wanted["decode"] <= 2
    assert all(after >= before / 2 for before, after in steps)


def test_measured_latency_corrects_the_capacity() -> None:
    """Check property P5: an engine that is slower than its profile gets more replicas, even before a goal is missed."""
    exact, slow = (World(machine(), POOLS, {"prefill": 2, "decode": 4}) for _ in range(2))
    exact.run(3600, 80.0)
    predicted = CAPACITY.latency(POOLS[0], LOAD, 0.95, 4, 80.0).tpot
    counts = tuple(100 * (index == bucket_of(1.9 * predicted)) for index in range(len(EDGES) + 1))
    slow.run(7200, 80.0, tpot=counts)
    assert 1.9 * predicted < GOALS.tpot_seconds
    assert slow.wanted["decode"] > exact.wanted["decode"]


def test_pool_without_room_is_rolled_back_and_replaced() -> None:
    pools = (*POOLS, pool("decode-b200", Role.DECODE, gpu="b200", dollars_per_hour=9.0))
    capacity = StepCapacity({each.name: engine(each.gpu) for each in pools})
    world = World(PlannerMachine(PlannerRuleSettings(), pools, GOALS, capacity), pools, {"prefill": 1, "decode": 1})
    world.run(600, 20.0)
    world.pools["decode"].stuck = True
    world.run(600, 100.0)
    assert world.pools["decode"].wanted == 1
    assert world.pools["decode-b200"].ready >= 1
    served = world.pools["decode-b200"].ready * CAPACITY.highest_rate(POOLS[0], LOAD, GOALS, 1)
    assert served + CAPACITY.highest_rate(POOLS[0], LOAD, GOALS, 1) > 60.0


def test_others_are_planned_around_a_pinned_pool() -> None:
    pools = (*POOLS, pool("decode-b200", Role.DECODE, gpu="b200", dollars_per_hour=9.0))
    capacity = StepCapacity({each.name: engine(each.gpu) for each in pools})
    world = World(PlannerMachine(PlannerRuleSettings(), pools, GOALS, capacity), pools, {"prefill": 1, "decode": 1})
    world.pools["decode"].pinned = "kubectl scale has written the number"
    world.run(600, 100.0)
    assert world.wanted["decode"] == 1
    assert world.wanted["decode-b200"] >= 1
    pinned = [each for each in world.decisions[-1].conditions if each.type is PlanConditionType.PINNED]
    assert [each.field for each in pinned] == ["pools.decode"]


def test_pin_below_the_need_is_named_with_what_it_allows() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.pools["decode"].pinned = "pinned: fleet-scale has set it to 1"
    world.run(600, 100.0)
    exhausted, pinned = world.decisions[-1].conditions
    assert (exhausted.type, exhausted.field) == (PlanConditionType.BUDGET_EXHAUSTED, "pools.decode")
    assert "and the pinned numbers (decode at 1) allow for " in exhausted.message
    assert pinned.type is PlanConditionType.PINNED


def test_budget_below_the_need_is_named_with_what_it_allows() -> None:
    world = World(machine(PlanBudget(gpus=4)), POOLS, {"prefill": 1, "decode": 1})
    world.run(900, 300.0)
    assert sum(world.wanted.values()) == 4
    (condition,) = world.decisions[-1].conditions
    assert (condition.type, condition.field) == (PlanConditionType.BUDGET_EXHAUSTED, "budget.gpus")
    assert "300" in condition.message or "30" in condition.message
    assert world.direction_changes("decode") == 0


def test_unreachable_goal_is_named_and_growth_goes_on() -> None:
    goals = PlanGoals(ttft_seconds=0.001, tpot_seconds=0.03)
    world = World(PlannerMachine(PlannerRuleSettings(), POOLS, goals, CAPACITY), POOLS, {"prefill": 1, "decode": 1})
    world.run(900, 60.0)
    assert world.wanted["prefill"] >= 2
    assert PlanConditionType.GOAL_OUT_OF_REACH in {each.type for each in world.decisions[-1].conditions}
    assert world.direction_changes("prefill") == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stale": ("router-7:50052: silent for 30 s",)}, "router-7:50052"),
        ({"stale": ("unix:/run/control.sock: has not reported yet",)}, "unix:/run/control.sock"),
        ({"oldest_seconds": math.nan}, "demand.oldest_seconds"),
        ({"answer_tokens": -5}, "demand.answer_tokens"),
        ({"prompt_squares": math.inf}, "demand.prompt_squares"),
        ({"prompt_tokens": 10**400}, "demand.prompt_tokens"),
        ({"ttft": (1, -1)}, "demand.ttft"),
    ],
)
def test_doubtful_demand_holds_and_names_its_field(fields: dict[str, object], field: str) -> None:
    world = World(machine(), POOLS, {"prefill": 2, "decode": 2})
    world.run(300, 30.0)
    decision = world.tick(100_000, **fields)
    assert decision.replicas == {"prefill": 2, "decode": 2}
    assert decision.reason is DecisionReason.NO_SIGNAL
    assert decision.conditions[0].field == field
    world.run(60, 30.0)
    assert world.decisions[-1].reason is not DecisionReason.NO_SIGNAL


@pytest.mark.parametrize(("began", "ended", "now", "field"), [
    (10, 5, 20, "demand.ended"),
    (10, 90, 20, "demand.ended"),
    (-5, 15, 20, "demand.began"),
    (10, 15, -1, "now"),
])  # fmt: skip
def test_clock_that_jumps_holds_and_names_its_field(began: int, ended: int, now: int, field: str) -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(100, 10.0)
    rule, start = world.rule, world.now
    demand = DemandWindow(began=seconds(start + began), ended=seconds(start + ended), arrivals=9000)
    decision = rule.decide(seconds(start + now), demand, world.observation)
    assert decision.reason is DecisionReason.NO_SIGNAL
    assert field in {each.field for each in decision.conditions}
    assert decision.replicas == {"prefill": 1, "decode": 1}


def test_model_that_no_router_serves_holds_ready_replicas() -> None:
    world = World(machine(), POOLS, {"prefill": 2, "decode": 3})
    world.run(600, 0.0, unserved="no router serves tinny; they serve tiny")
    assert world.wanted == {"prefill": 2, "decode": 3}
    assert [(each.type, each.field, each.message) for each in world.decisions[-1].conditions] == [
        (
            PlanConditionType.NO_DEMAND_SIGNAL,
            "model",
            "model: no router serves tinny; they serve tiny, although replicas are ready: decode 3, prefill 2",
        )
    ]


def test_pool_that_is_not_reported_is_named_and_nothing_changes() -> None:
    world = World(machine(), POOLS, {"prefill": 1, "decode": 1})
    world.run(100, 10.0)
    only = Observation(tuple(each for each in world.observation.pools if each.name == "decode"))
    decision = world.rule.decide(seconds(world.now + 5), world.window(world.now, 900), only)
    assert decision.replicas == {"decode": 1}
    assert decision.conditions[0].field == "pools.prefill"


def test_first_request_wakes_pools_that_were_at_zero() -> None:
    pools = tuple(pool(each.name, each.role, least=0) for each in POOLS)
    world = World(PlannerMachine(PlannerRuleSettings(), pools, GOALS, CAPACITY), pools, {"prefill": 0, "decode": 0})
    world.run(900, 0.0)
    assert world.wanted == {"prefill": 0, "decode": 0}
    world.tick(1, queued=1, unserved="no router serves tiny; they have no workers")
    assert world.wanted == {"prefill": 1, "decode": 1}


def test_cheaper_mix_starts_before_the_old_one_ends() -> None:
    pools = (*POOLS, pool("decode-b200", Role.DECODE, gpu="b200", dollars_per_hour=2.0))
    capacity = StepCapacity({each.name: engine(each.gpu) for each in pools})
    world = World(PlannerMachine(PlannerRuleSettings(), pools, GOALS, capacity), pools, {"prefill": 4, "decode": 5})
    world.run(3600, 100.0)
    assert world.wanted["decode"] == 1
    assert world.wanted["decode-b200"] >= 1
    ready = [sum(each[name] for name in ("decode", "decode-b200")) for each in world.history]
    assert min(ready) >= 2
    assert DecisionReason.CHEAPER_MIX in {each.reason for each in world.decisions}
    assert world.direction_changes("decode") == world.direction_changes("decode-b200") == 0


@pytest.mark.parametrize(
    ("pools", "budget", "said"),
    [
        ((pool("prefill", Role.PREFILL),), PlanBudget(), "pools: there must be pools for prefill and for decode"),
        ((pool("a", Role.BOTH), pool("a", Role.BOTH)), PlanBudget(), "pools: a is named twice"),
        ((pool("a", Role.BOTH, least=3, most=2),), PlanBudget(), "pools.a.least: 3 is above most, which is 2"),
        ((pool("a", Role.BOTH, least=3, gpus=4),), PlanBudget(gpus=8), "budget.gpus: 8 is below what the floors"),
        (
            (pool("a", Role.BOTH),),
            PlanBudget(least_ratio=2, most_ratio=1),
            "budget.least_ratio: 2.* is above most_ratio",
        ),
        (
            (pool("p", Role.PREFILL, most=3), pool("d", Role.DECODE, most=3)),
            PlanBudget(least_ratio=0.9, most_ratio=0.91),
            "budget.least_ratio: no numbers .* 0 to 3 replicas, decode 0 to 3, .* at least 0.9 and at most 0.91$",
        ),
        (
            (pool("p", Role.PREFILL, least=3), pool("d", Role.DECODE, most=2)),
            PlanBudget(most_ratio=1.0),
            "budget.most_ratio: no numbers .* prefill has 3 to 50 replicas, decode 0 to 2, .* at most 1$",
        ),
        (
            (pool("p", Role.PREFILL, most=3), pool("d", Role.DECODE, least=2), pool("b", Role.BOTH)),
            PlanBudget(least_ratio=2.0),
            "budget.least_ratio: no numbers",
        ),
    ],
)
def test_contradictory_limits_are_refused_by_field(pools: object, budget: PlanBudget, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PlannerMachine(PlannerRuleSettings(), pools, GOALS, CAPACITY, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "ratio"),
    [(3, (0.66, 0.67)), (3, (1.0, 1.0)), (3, (3.0, None)), (3, (None, 0.34)), (3, (0.0, 0.5)), (10, (0.9, 0.91))],
)
def test_ratio_that_some_numbers_keep_is_accepted(most: int, ratio: tuple[float | None, float | None]) -> None:
    pools = (pool("p", Role.PREFILL, most=most), pool("d", Role.DECODE, most=most))
    check_limits(pools, PlanBudget(least_ratio=ratio[0], most_ratio=ratio[1]))


def test_restarted_planner_shrinks_nothing_for_a_cool_down() -> None:
    world = World(machine(), POOLS, {"prefill": 4, "decode": 4})
    world.run(PlannerRuleSettings().cool_down_seconds - 10, 0.0)
    assert world.wanted == {"prefill": 4, "decode": 4}
    assert world.decisions[-1].message.startswith("nothing shrinks for another 15 s after the start of the planner; ")

    world.run(60, 0.0)
    assert world.wanted["decode"] < 4


@pytest.mark.parametrize(
    ("start", "ended", "shrinks"), [(100.0, False, True), (600.0, False, False), (600.0, True, True)]
)
def test_slow_start_of_replicas_delays_a_shrink(start: float, ended: bool, shrinks: bool) -> None:
    """A replica that is removed too early is missed for as long as its successor needs to start."""
    pools = (
        pool("decode", Role.DECODE, least=1, start_seconds=start),
        pool("prefill", Role.PREFILL, least=1, start_seconds=start),
    )
    planner = PlannerMachine(PlannerRuleSettings(), pools, GOALS, CAPACITY)
    world = World(planner, pools, {"prefill": 4, "decode": 4})
    world.run(700, 0.0 if ended else 5.0)
    assert (world.wanted["decode"] < 4) == shrinks
    world.run(200, 0.0 if ended else 5.0)
    assert world.wanted["decode"] < 4


@pytest.mark.parametrize(("minimise", "grown"), [("dollars", "cheap"), ("energy", "frugal")])
def test_setting_decides_whether_money_or_energy_is_saved(minimise: Literal["dollars", "energy"], grown: str) -> None:
    pools = (
        pool("cheap", Role.BOTH, gpu="h100", dollars_per_hour=1.0, watts=900.0),
        pool("frugal", Role.BOTH, gpu="h100", dollars_per_hour=2.0, watts=300.0),
    )
    capacity = StepCapacity({each.name: engine() for each in pools})
    planner = PlannerMachine(PlannerRuleSettings(minimise=minimise), pools, GOALS, capacity)
    world = World(planner, pools, {"cheap": 0, "frugal": 0})
    world.run(900, 10.0)
    used = {name for name, replicas in world.wanted.items() if replicas}
    assert used == {grown}
    numbers = world.decisions[-1].numbers
    assert numbers["watts"] == world.wanted[grown] * {"cheap": 900.0, "frugal": 300.0}[grown]


@pytest.mark.parametrize(("replicas", "known"), [({"bare": 1, "gpu": 1}, False), ({"bare": 0, "gpu": 1}, True)])
def test_decision_has_no_watts_if_a_pool_of_unknown_power_runs(replicas: dict[str, int], known: bool) -> None:
    pools = (pool("bare", Role.BOTH, gpu=""), pool("gpu", Role.BOTH, gpu="h100", watts=300.0))
    capacity = StepCapacity({each.name: engine() for each in pools})
    world = World(PlannerMachine(PlannerRuleSettings(), pools, GOALS, capacity), pools, replicas)
    world.run(5, 0.0)
    numbers = world.decisions[-1].numbers
    assert ("watts" in numbers) == known
    assert "dollars_per_hour" in numbers


def test_estimated_power_follows_from_the_gpu_type() -> None:
    """Prefill draws more than decoding; the estimate lies between the power that is drawn at rest and the board's limit."""
    prefill, decode = (pool(role, role, gpu="h100", gpus=4) for role in (Role.PREFILL, Role.DECODE))
    device = gpus()["h100"]
    assert 4 * device.idle_watts < decode.replica_watts < prefill.replica_watts < 4 * device.watts
    assert pool("own", Role.BOTH, gpu="h100", gpus=4, watts=100.0).replica_watts == 400.0
    assert pool("none", Role.BOTH, gpu="", watts=100.0).replica_watts == 100.0


def test_pool_of_unknown_power_is_refused_where_energy_counts() -> None:
    pools = (pool("both", Role.BOTH, gpu=""),)
    capacity = StepCapacity({each.name: engine() for each in pools})
    with pytest.raises(ValueError, match=r'^pools\[0\]\.watts: is needed, because the rule minimises "energy"'):
        PlannerMachine(PlannerRuleSettings(minimise="energy"), pools, GOALS, capacity)


@pytest.mark.parametrize("watts", [math.nan, math.inf, -1.0])
def test_impossible_power_of_a_pool_is_refused(watts: float) -> None:
    with pytest.raises(ValueError, match=r"^pools\.both\.watts: must be a number of at least 0"):
        check_limits([pool("both", Role.BOTH, watts=watts)], PlanBudget())


@pytest.mark.parametrize("dollars", [(2.0, 3.0), (3.0, 2.0), (90.0, 100.0)])
@pytest.mark.parametrize("rate", [3.0, 77.0])
def test_price_decides_between_pools_of_equal_power(dollars: tuple[float, float], rate: float) -> None:
    pools = [pool(f"both-{price:g}", Role.BOTH, gpu="h100", gpus=1, dollars_per_hour=price) for price in dollars]
    candidates = [Candidate(pool=each, least=0, most=60, cost=each.cost("energy")) for each in pools]
    mix = solve(candidates, rate, lambda _, replicas: 4.0 * replicas, PlanBudget())
    assert mix is not None
    assert mix.dollars == math.ceil(rate / 4.0) * min(dollars)


def test_other_phase_grows_for_requests_beyond_the_goals() -> None:
    """Let a pool at its maximum serve hardly anything within the goals: the other pool is sized for what it serves without them."""
    goals = PlanGoals(ttft_seconds=0.07, tpot_seconds=0.03)
    decode, prefill = POOLS[0], structs.replace(POOLS[1], most=2)
    pools = [decode, prefill]
    world = World(PlannerMachine(PlannerRuleSettings(), pools, goals, CAPACITY), pools, {"prefill": 1, "decode": 1})
    within_goals = CAPACITY.highest_rate(prefill, LOAD, goals, 2)
    world.run(900, 50.0)
    assert within_goals < CAPACITY.highest_rate(decode, LOAD, goals, 1) < 50.0
    assert world.wanted["prefill"] == 2
    assert CAPACITY.highest_rate(decode, LOAD, goals, world.wanted["decode"]) >= 48.0
    assert any(each.type is PlanConditionType.BUDGET_EXHAUSTED for each in world.decisions[-1].conditions)
    world.run(900, 50.0)
    assert CAPACITY.highest_rate(decode, LOAD, goals, world.wanted["decode"]) >= 48.0, "it does not shrink either"
