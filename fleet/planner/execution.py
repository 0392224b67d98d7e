"""How a plan is going, and what is left of it at its deadline. Pure.

Rules:

1. A plan is settled when its pools have what is wanted, all of it serving, and nothing drains any more.
2. What is still pending at the deadline is taken back: the intent goes down to what serves, and not below what it was before.
   So replicas that find no room wait for ever nowhere, and whoever plans goes on with what there is. What bounds forbid is taken back at
   once, a pool that may not shrink too.
3. Only one's own intent is taken back. Whoever has written since knows better.
4. A drain is never broken off: it ends by its own deadline.
"""

from enum import StrEnum

from msgspec import structs

from fleet.planner.messages import Observation, Plan, PlanId, PoolGapReason, PoolObservation
from fleet.planner.ports import PlanConflict, PlanRefused


class PlanOutcome(StrEnum):
    """How it went."""

    SETTLED = "settled"
    ROLLED_BACK = "rolled_back"
    """In part: what served by then stays."""

    UNSETTLED = "unsettled"
    """At the deadline, with nothing to be taken back: what drains, what did not serve before either, or what is another's by now."""


def pools_of(plan: Plan, seen: Observation) -> tuple[PoolObservation, ...]:
    """Those that the plan is about."""
    return tuple(each for each in seen.pools if each.name in plan.replicas)


def settled(plan: Plan, seen: Observation) -> bool:
    pools = pools_of(plan, seen)
    return len(pools) == len(plan.replicas) and all(
        each.settled and each.wanted == plan.replicas[each.name] for each in pools
    )


def forbidden(plan: Plan, seen: Observation) -> Plan | None:
    """The plan without the pools that may be so; None when none may not."""
    limited = {each.name for each in pools_of(plan, seen) if each.why is PoolGapReason.LIMITED}
    replicas = {name: count for name, count in plan.replicas.items() if name in limited}
    return structs.replace(plan, replicas=replicas) if replicas else None


def rollback(plan: Plan, before: Observation, seen: Observation) -> Plan | None:
    """The plan that takes back what has not come of another one; None when there is nothing to be taken back.

    Args:
        plan: Of which no more is waited for.
        before: What it was made by.
        seen: What there is now.
    """
    replicas = {}
    for each in pools_of(plan, seen):
        was = before.pool(each.name)
        if each.plan != plan.id or was is None:
            continue
        kept = max(each.ready, was.wanted) if each.pending else min(each.ready, was.wanted)
        if (each.pending and kept < each.wanted) or (each.why is PoolGapReason.LIMITED and kept > each.wanted):
            replicas[each.name] = kept
    return Plan(id=PlanId(f"{plan.id}-taken-back"), replicas=replicas, within=plan.within) if replicas else None


def to_write(plan: Plan, seen: Observation, there: Observation) -> list[PoolObservation]:
    """The pools, as they are there, whose numbers are still to be written; those that shrink come first.

    Args:
        plan: What is wanted.
        seen: What the plan was made by.
        there: What there is at the moment of writing.

    Raises:
        Refused: There is no such pool, or it is pinned.
        Stale: Somebody has written since.
    """
    left = []
    for name, replicas in plan.replicas.items():
        now, was = there.pool(name), seen.pool(name)
        if now is None:
            raise PlanRefused(name, f"there is no such pool; there are {', '.join(each.name for each in there.pools)}")
        if (now.plan, now.wanted) == (plan.id, replicas):
            continue
        if now.pinned:
            raise PlanRefused(name, now.pinned)
        if was is None or was.version != now.version:
            raise PlanConflict(name)
        left.append(now)
    return sorted(left, key=lambda each: (plan.replicas[each.name] > each.wanted, each.name))
