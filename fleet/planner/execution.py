"""Execution of a plan: decides which numbers are written, whether the plan is settled, and what is rolled back.

Pure. Connectors call `to_write` when they write a plan. `fleet.planner.server` calls the other functions while it
carries out a plan.

Rules:

1. A plan is settled when its pools have the requested replicas, all of these serve, and no replica drains any more.
2. Replicas that do not serve at the deadline are rolled back: the requested number falls to the number that serves, but
   not below the number before the plan. The number before the plan does not include replicas that an earlier plan has
   requested and that do not serve (`PoolObservation.fallback`). So no replica waits for room for ever, and the planner
   continues with the replicas that exist. A number that the orchestrator's bounds forbid is rolled back at once, also
   if the plan shrinks the pool.
3. A plan rolls back only numbers that it has written, and no number that somebody else has written later.
4. A rollback never interrupts the drain of a replica; the drain has a time limit of its own.
"""

from enum import StrEnum

from msgspec import structs

from fleet.planner.messages import Observation, Plan, PlanId, PoolGapReason, PoolObservation
from fleet.planner.ports import PlanConflict, PlanRefused


class PlanOutcome(StrEnum):
    """Ways in which the execution of a plan can end."""

    SETTLED = "settled"
    ROLLED_BACK = "rolled_back"
    """Numbers that were not reached at the deadline, or that the orchestrator's bounds forbid, were rolled back (rule 2)."""

    UNSETTLED = "unsettled"
    """The plan is unfinished at the deadline, but nothing can be rolled back: replicas still drain, the missing
    replicas were requested before the plan, or another plan has written the numbers."""


def pools_of(plan: Plan, seen: Observation) -> tuple[PoolObservation, ...]:
    """Return the observations of those pools that a plan contains."""
    return tuple(each for each in seen.pools if each.name in plan.replicas)


def settled(plan: Plan, seen: Observation) -> bool:
    pools = pools_of(plan, seen)
    return len(pools) == len(plan.replicas) and all(
        each.settled and each.wanted == plan.replicas[each.name] for each in pools
    )


def forbidden(plan: Plan, seen: Observation) -> Plan | None:
    """Return the part of the plan that the orchestrator's bounds forbid, or None if they allow the whole plan."""
    limited = {each.name for each in pools_of(plan, seen) if each.why is PoolGapReason.LIMITED}
    replicas = {name: count for name, count in plan.replicas.items() if name in limited}
    return structs.replace(plan, replicas=replicas) if replicas else None


def rollback(plan: Plan, before: Observation, seen: Observation) -> Plan | None:
    """Return a new plan that rolls back the unfinished part of `plan`, or None if there is nothing to roll back.

    `before` is the observation from which the plan was made, and `seen` is the present observation.
    """
    replicas = {}
    for each in pools_of(plan, seen):
        was = before.pool(each.name)
        if each.plan != plan.id or was is None:
            continue
        kept = max(each.ready, was.fallback) if each.pending else min(each.ready, was.wanted)
        if (each.pending and kept < each.wanted) or (each.why is PoolGapReason.LIMITED and kept > each.wanted):
            replicas[each.name] = kept
    return Plan(id=rollback_id(plan.id), replicas=replicas, within=plan.within) if replicas else None


def rollback_id(plan: PlanId) -> PlanId:
    """Return the id of the plan that rolls a plan back."""
    return PlanId(f"{plan}-taken-back")


def to_write(plan: Plan, seen: Observation, there: Observation) -> list[PoolObservation]:
    """Return the pools in `there` for which the plan's number is not written yet; shrinking pools come first.

    `seen` is the observation from which the plan was made, and `there` is the present one.

    Raises:
        PlanRefused: A pool of the plan does not exist, or is pinned.
        PlanConflict: Somebody has written the number of one of these pools after `seen`, or a new leader has adopted the
            plan of the number.
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
        if was is None or (was.version, was.plan) != (now.version, now.plan):
            raise PlanConflict(name)
        left.append(now)
    return sorted(left, key=lambda each: (plan.replicas[each.name] > each.wanted, each.name))
