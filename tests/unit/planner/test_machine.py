"""The planner's rule in a small world: growth, shrinking, steadiness and doubt."""

import pytest

from fleet.core.roles import Role
from fleet.planner.decisions import PlanGoals
from fleet.planner.machine import PlannerMachine
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.sizing.capacity import StepCapacity
from tests.unit.planner.engines import engine
from tests.unit.planner.world import World, pool

POOLS = (pool("decode", Role.DECODE, least=1), pool("prefill", Role.PREFILL, least=1))
GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.03)


def machine(**settings: object) -> PlannerMachine:
    capacity = StepCapacity({each.name: engine() for each in POOLS})
    return PlannerMachine(PlannerRuleSettings(**settings), POOLS, GOALS, capacity)  # type: ignore[arg-type]


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
