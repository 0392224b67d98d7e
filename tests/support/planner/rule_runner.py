"""Rule runner for tests in virtual time: asks a planner rule in the event loop, because threads do not run in virtual time."""

from fleet.core.clock import Nanos
from fleet.planner.decisions import PlanDecision, ScalingRule
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import Observation


async def decide_in_place(rule: ScalingRule, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
    """Ask a rule for a decision in the event loop."""
    return rule.decide(now, demand, seen)
