"""Stateful properties of the planner's rule: limits hold at every instant, and every plan ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.core.roles import Role
from fleet.planner.decisions import PlanBudget, PlanConditionType, PlanGoals
from fleet.planner.execution import PlanOutcome
from fleet.planner.machine import PlannerMachine
from fleet.planner.messages import PoolGapReason
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.sizing.capacity import StepCapacity
from tests.unit.planner.engines import engine
from tests.unit.planner.world import World, pool

POOLS = (
    pool("decode", Role.DECODE, least=1, most=12, drain_seconds=90.0),
    pool("decode-b200", Role.DECODE, gpu="b200", most=6, dollars_per_hour=6.0, start_seconds=60.0),
    pool("prefill", Role.PREFILL, least=1, most=12, start_seconds=30.0),
)
NAMES = st.sampled_from([each.name for each in POOLS])
BUDGET = PlanBudget(gpus=14, dollars_per_hour=54.0, least_ratio=0.25, most_ratio=3.0)
GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.03)
ENDS = {"superseded", PlanOutcome.SETTLED, PlanOutcome.ROLLED_BACK}
"""How plans end if no pool has bounds that a person set. With such bounds, there may be nothing to roll back at a deadline."""

CAPACITY = StepCapacity(
    {each.name: engine("b200" if each.gpu == "b200" else "h100") for each in POOLS},
)


class PlannerStates(RuleBasedStateMachine):
    """A planner and its pools in random histories of load, obstacles and people who change bounds."""

    def __init__(self) -> None:
        super().__init__()
        machine = PlannerMachine(PlannerRuleSettings(cool_down_seconds=60.0), POOLS, GOALS, CAPACITY, BUDGET)
        self.world = World(machine, POOLS, {"decode": 1, "prefill": 1})
        self.rate = 0.0
        self.ends = set(ENDS)

    @rule(rate=st.sampled_from([0.0, 0.2, 5.0, 30.0, 90.0, 200.0, 1000.0]), ticks=st.integers(1, 40))
    def load(self, rate: float, ticks: int) -> None:
        self.rate = rate
        self.run(ticks)

    @rule(prompt=st.sampled_from([100, 2000, 8000]), answer=st.sampled_from([20, 200, 1500]))
    def lengths(self, prompt: int, answer: int) -> None:
        self.world.prompt, self.world.answer = prompt, answer
        self.run(6)

    @rule(name=NAMES, stuck=st.booleans())
    def room(self, name: str, stuck: bool) -> None:
        self.world.pools[name].stuck = stuck

    @rule(name=NAMES, why=st.sampled_from([None, PoolGapReason.LIMITED]))
    def bounds_elsewhere(self, name: str, why: PoolGapReason | None) -> None:
        self.world.pools[name].why = why
        if why is not None:
            self.ends.add(PlanOutcome.UNSETTLED)

    @rule(name=NAMES)
    def pin(self, name: str) -> None:
        self.world.pools[name].pinned = "a person has written the number"

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.world.pools[name].pinned = ""

    @rule(
        broken=st.sampled_from(
            [{"stale": ("router-1: silent for 30 s",)}, {"oldest_seconds": float("nan")}, {"prompt_tokens": -1}]
        )
    )
    def broken_demand(self, broken: dict[str, object]) -> None:
        before = self.world.wanted
        decision = self.world.tick(10, **broken)
        assert decision.replicas == before
        assert decision.conditions[0].type is PlanConditionType.NO_DEMAND_SIGNAL

    @rule(hours=st.integers(1, 50))
    def clock_jumps(self, hours: int) -> None:
        self.world.now += 3600.0 * hours
        for each in self.world.pools.values():
            each.advance(self.world.now)
        self.run(1)

    @precondition(lambda self: self.world.plans)
    @rule()
    def rest(self) -> None:
        """Remove all obstacles, and wait longer than a deadline and a drain; then check that every plan has ended."""
        for each in self.world.pools.values():
            each.why = None
        self.run(100)
        assert all(each.outcome is not None for each in self.world.plans[:-1])
        last = self.world.plans[-1]
        assert last.outcome is not None or self.world.now < last.deadline

    @invariant()
    def limits_hold(self) -> None:
        pools = self.world.pools
        assert sum(each.held * each.pool.gpus for each in pools.values()) <= 14
        assert sum(each.held * each.pool.dollars_per_hour for each in pools.values()) <= 54.0
        for each in pools.values():
            assert each.ready + len(each.starting) >= each.pool.least
            assert each.wanted <= each.pool.most

    @invariant()
    def plans_end_in_an_expected_way(self) -> None:
        *earlier, last = [each.outcome for each in self.world.plans] or [None]
        assert set(earlier) <= self.ends
        assert last is None or last in self.ends

    @invariant()
    def replicas_that_serve_or_start_are_the_wanted_ones(self) -> None:
        """Check the numbers of replicas: ready and starting ones are the wanted ones, and draining ones hold GPUs in addition."""
        for each in self.world.pools.values():
            assert each.ready + len(each.starting) == each.wanted
            assert each.held == each.wanted + len(each.draining)

    @invariant()
    def ratio_holds_after_a_plan(self) -> None:
        plans = self.world.plans
        if plans and plans[-1].outcome != PlanOutcome.ROLLED_BACK:
            wanted = self.world.wanted
            decode = wanted["decode"] + wanted["decode-b200"]
            assert 0.25 * decode <= wanted["prefill"] <= 3.0 * decode

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick(self.world.arrivals(5.0 * self.rate))
            self.limits_hold()
            self.ratio_holds_after_a_plan()
            self.plans_end_in_an_expected_way()
            self.replicas_that_serve_or_start_are_the_wanted_ones()


PlannerStates.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestPlannerStates = pytest.mark.timeout(600)(PlannerStates.TestCase)  # 150 examples take about 40 s
