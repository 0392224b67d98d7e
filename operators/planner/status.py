"""Status of a ServingPlan: computes it from the demand, the last decision and the plans of the planner. Pure.

Rules:

1. The status always contains the conditions `TargetFound` and `Settled`. If the plan is carried out, and its planner
   has made a decision or reports a condition, the status also contains a condition for each type in
   `fleet.planner.decisions.PlanConditionType`. Such a condition is True if the planner reports it, and otherwise False
   or, by rule 3, Unknown.
2. `Pinned` names the roles in scaling mode Planner whose number of replicas somebody else has set. It follows the last
   observation of the deployment, even if the planner made no decision. Roles in other scaling modes are left out,
   because the specification already says that they are not planned.
3. While the planner cannot decide, the conditions about goals, budget and model drift (`ABOUT_DECISIONS`) are Unknown,
   unless the planner reports them.
4. A status is written at once if anything that `is_news` compares has changed: the conditions without the numbers in
   their messages, the recommended numbers of replicas, and the ids and states of plans. If only other parts have
   changed, such as numbers in messages and measured latencies, it is written when the last write is `status_seconds`
   ago, or earlier together with news.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from fleet.planner.decisions import PlanCondition, PlanConditionType
from fleet.planner.records import PlannerStatus, PlanRecord, PlanState
from fleet.planner.settings import PlannerMode
from operators.api.disagg_deployment import ScalingMode
from operators.api.fields import Condition
from operators.api.serving_plan import MadePlan, Recommendation, ServingPlanStatus
from operators.plan_connector import PINNED
from operators.planner.translation import PlanNotObeyed
from operators.status.deployment import FALSE, TRUE, UNKNOWN, ConditionUpdate, condition

MOST_PLANS = 5
MOST_TEXT = 1024
CLEAR = "Clear"
"""Reason of a condition whose type is in `PlanConditionType`, while the condition is False."""

UNDECIDED = frozenset(
    {PlanConditionType.NO_DEMAND_SIGNAL, PlanConditionType.CONNECTOR_FAILED, PlanConditionType.RULE_FAILED}
)
"""Types of the conditions that keep the planner from deciding."""

ABOUT_DECISIONS = frozenset(
    {PlanConditionType.GOAL_OUT_OF_REACH, PlanConditionType.BUDGET_EXHAUSTED, PlanConditionType.MODEL_DRIFT}
)
"""Types of the conditions that are known only after a decision."""

NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")
IN_WORK = frozenset({PlanState.REHEARSED, PlanState.UNDER_WAY})


def refused_status(
    refusal: PlanNotObeyed, before: Sequence[Condition], generation: int, planner: str, now: str
) -> ServingPlanStatus:
    """Return the status of a ServingPlan that cannot be carried out, or whose planner has not started yet."""
    found = TRUE if refusal.target_found else FALSE
    said: list[ConditionUpdate] = [
        ("TargetFound", found, "Found" if refusal.target_found else refusal.reason, ""),
        ("Settled", FALSE, refusal.reason, str(refusal)),
    ]
    return ServingPlanStatus(
        observed_generation=generation,
        planner=planner,
        conditions=tuple(condition(before, generation, now, each) for each in said),
    )


def obeyed_status(
    seen: PlannerStatus,
    modes: Mapping[str, ScalingMode],
    before: Sequence[Condition],
    generation: int,
    now: str,
) -> ServingPlanStatus:
    """Return the status of a ServingPlan that is carried out.

    Args:
        seen: The state of the deployment's planner.
        modes: Scaling mode of each role.
        before: The conditions in the status that was written last.
        generation: Generation of the plan's specification.
        now: The present time as RFC 3339.
    """
    planned = {name for name, mode in modes.items() if mode is ScalingMode.PLANNER}
    said: list[ConditionUpdate] = [("TargetFound", TRUE, "Found", ""), ("Settled", *_settled(seen, planned))]
    if seen.reason is not None or seen.conditions:
        pins = tuple(
            PlanCondition(
                type=PlanConditionType.PINNED,
                field=f"pools.{each.name}",
                message=f"{each.name}: {each.pinned.removeprefix(PINNED)}",
            )
            for each in seen.pools
            if each.pinned.startswith(PINNED) and each.name in planned
        )
        conditions = (*(each for each in seen.conditions if each.type is not PlanConditionType.PINNED), *pins)
        said += [_condition_update(kind, conditions) for kind in PlanConditionType]
    reason = "" if seen.reason is None else str(seen.reason)
    return ServingPlanStatus(
        observed_generation=generation,
        planner=seen.planner,
        recommendations=tuple(
            Recommendation(role=name, replicas=count, reason=reason)
            for name, count in sorted(seen.replicas.items())
            if name in planned
        ),
        plans=tuple(_made(each) for each in seen.plans[:MOST_PLANS]),
        ttft_ms=_milliseconds(seen.demand.get("ttft_seconds")),
        tpot_ms=_milliseconds(seen.demand.get("tpot_seconds")),
        conditions=tuple(condition(before, generation, now, each) for each in said),
    )


def is_news(there: ServingPlanStatus | None, said: ServingPlanStatus) -> bool:
    """Return whether the status `said` has to be written at once (rule 4).

    `there` is the status on the API server, or None if it cannot be decoded.
    """
    return there is None or _essence(there) != _essence(said)


def _essence(status: ServingPlanStatus) -> Any:
    conditions = sorted(
        (each.type, each.status, each.reason, each.observed_generation, NUMBER.sub("#", each.message))
        for each in status.conditions
    )
    sizes = sorted((each.role, each.replicas) for each in status.recommendations)
    plans = [(each.id, each.state) for each in status.plans]
    return status.observed_generation, status.planner, conditions, sizes, plans


def _settled(seen: PlannerStatus, planned: set[str]) -> tuple[str, str, str]:
    if seen.mode is PlannerMode.OFF:
        return FALSE, "Off", "spec.mode is Off, so nothing is decided"
    if seen.reason is None:
        failed = next((each for each in seen.conditions), None)
        return UNKNOWN, "NoDecision", (seen.message or "nothing was decided yet") if failed is None else failed.message
    latest = next((each for each in seen.plans if each.state in IN_WORK), None)
    if latest is not None:
        return FALSE, "PlanUnderWay", f"{latest.id}: {_sizes(latest)}"
    pools = [each for each in seen.pools if each.name in planned]
    other = [
        f"{each.name} {each.wanted} to {seen.replicas[each.name]}"
        for each in pools
        if not each.pinned and seen.replicas.get(each.name, each.wanted) != each.wanted
    ]
    if other and seen.mode is PlannerMode.SHADOW:
        return FALSE, "Shadow", f"spec.mode is Shadow, so this is not applied: {', '.join(other)}"
    if other:
        return FALSE, "NotApplied", f"not applied yet: {', '.join(other)}"
    moving = [each for each in pools if not each.settled]
    if moving:
        text = ", ".join(f"{each.name} {each.ready} of {each.wanted}" for each in moving)
        return FALSE, "ReplicasNotReady", text
    return TRUE, "Settled", ""


def _condition_update(kind: PlanConditionType, conditions: Sequence[PlanCondition]) -> ConditionUpdate:
    holding = [each for each in conditions if each.type is kind]
    obstacle = next((each for each in conditions if each.type in UNDECIDED), None)
    if not holding and obstacle is not None and kind in ABOUT_DECISIONS:
        return str(kind), UNKNOWN, str(obstacle.type), "nothing is decided meanwhile"
    if not holding:
        return str(kind), FALSE, CLEAR, ""
    return str(kind), TRUE, str(kind), "; ".join(dict.fromkeys(each.message for each in holding))


def _made(record: PlanRecord) -> MadePlan:
    return MadePlan(
        id=record.id,
        state=str(record.state),
        changes=_sizes(record)[:MOST_TEXT],
        reason=str(record.reason),
        detail=record.detail[:MOST_TEXT],
    )


def _sizes(record: PlanRecord) -> str:
    return ", ".join(f"{name} {record.before.get(name, '?')} to {count}" for name, count in record.replicas.items())


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1000)


def undated(status: ServingPlanStatus) -> ServingPlanStatus:
    """Return the status with its conditions sorted by type, for a comparison with the status on the API server."""
    return structs.replace(status, conditions=tuple(sorted(status.conditions, key=lambda each: each.type)))
