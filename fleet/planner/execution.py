"""Execution of a plan: whether it is settled, and what is rolled back at its deadline.

These are pure functions, which `fleet.planner.server` calls while it carries out a plan. That module also decides the outcome.

Rules:

1. A plan is settled when its pools have the wanted replicas, all of these serve, and nothing drains any more.
2. Replicas that are still pending at the deadline are rolled back: the wanted number falls to the number that serves, but not below
   the number before the plan. So no replica waits for room for ever, and the planner continues with what there is. What bounds
   forbid is rolled back at once, including a pool that may not shrink.
3. A plan rolls back only its own numbers, not those that somebody has written since.
4. A drain is never interrupted; it ends by its own deadline.
"""

from enum import StrEnum

from msgspec import structs

from fleet.planner.messages import Observation, Plan, PlanId, PoolGapReason, PoolObservation
from fleet.planner.ports import PlanConflict, PlanRefused


class PlanOutcome(StrEnum):
    """How the execution of a plan ended."""

    SETTLED = "settled"
    ROLLED_BACK = "rolled_back"
    """Workers that served at the deadline stay. The rest of the plan was rolled back."""

    UNSETTLED = "unsettled"
    """Nothing can be rolled back at the deadline: replicas drain, did not serve before either, or belong to another plan."""


def pools_of(plan: Plan, seen: Observation) -> tuple[PoolObservation, ...]:
    """Return the observed pools of a plan."""
    return tuple(each for each in seen.pools if each.name in plan.replicas)


def settled(plan: Plan, seen: Observation) -> bool:
    pools = pools_of(plan, seen)
    return len(pools) == len(plan.replicas) and all(
        each.settled and each.wanted == plan.replicas[each.name] for each in pools
    )


def forbidden(plan: Plan, seen: Observation) -> Plan | None:
    """Return the part of the plan that bounds forbid, or None."""
    limited = {each.name for each in pools_of(plan, seen) if each.why is PoolGapReason.LIMITED}
    replicas = {name: count for name, count in plan.replicas.items() if name in limited}
    return structs.replace(plan, replicas=replicas) if replicas else None


def rollback(plan: Plan, before: Observation, seen: Observation) -> Plan | None:
    """Return the plan that rolls back the unfinished part of another plan, or None if there is nothing to roll back.

    The plan was made on the observation `before`; the present observation is `seen`.
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
    """Return the present pools (`there`) whose numbers have still to be written; pools that shrink come first.

    The plan was made on the observation `seen`.

    Raises:
        PlanRefused: There is no such pool, or it is pinned.
        PlanConflict: Somebody has written since.
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
