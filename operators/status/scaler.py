"""Scaler status: computes the statuses of RoleScalers, and of ServingPlans if no planner is installed. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from operators.api.disagg_deployment import DisaggDeploymentStatus, ScalingMode
from operators.api.fields import Condition
from operators.api.role_scaler import RoleScalerStatus
from operators.api.serving_plan import ServingPlanStatus
from operators.manifests.names import DesiredDeployment, pod_selector
from operators.status.deployment import FALSE, TRUE, UNKNOWN, ConditionUpdate, condition

NO_PLANNER = "no planner is installed (value planner.enabled of the chart), so this plan has no effect; replicas stay as requested"


def scaler_status(
    before: Mapping[str, Any],
    conditions: Sequence[Condition],
    generation: int,
    asked: int,
    role: str,
    desired: DesiredDeployment | None,
    status: DisaggDeploymentStatus | None,
    now: str,
) -> RoleScalerStatus:
    """Return the status of a RoleScaler. HPAs and `kubectl scale` read the replicas and the selector in this status.

    Args:
        before: The status that was written last.
        conditions: The conditions that were written last.
        generation: Generation of the specification.
        asked: The number of replicas that the RoleScaler requests.
        role: The role's name.
        desired: The desired deployment, or None if it does not exist or cannot be read.
        status: The status of the deployment, or None if it has none.
        now: The present time as RFC 3339.
    """
    target = next((each for each in desired.spec.roles if each.name == role), None) if desired is not None else None
    there = next((each for each in status.roles if each.name == role), None) if status is not None else None
    said: list[ConditionUpdate] = []
    if desired is None or target is None:
        text = f"no role {role} in a DisaggDeployment of that name"
        said.append(("Bound", FALSE, "NoTarget", text))
    elif target.scaling.mode is ScalingMode.STATIC:
        said.append(
            ("Bound", FALSE, "StaticRole", "the role's scaling.mode is Static: the deployment says its replicas")
        )
    else:
        said.append(("Bound", TRUE, "Bound", ""))
        least, most = target.scaling.least, target.scaling.most
        if not least <= asked <= most:
            said.append(
                ("WithinBounds", FALSE, "OutOfBounds", f"{asked} are asked for; scaling allows {least} to {most}")
            )
        elif there is not None and there.desired < asked and not desired.spec.suspend:
            said.append(("WithinBounds", FALSE, "BudgetOrRatio", f"{there.desired} of {asked}: balance allows no more"))
        else:
            said.append(("WithinBounds", TRUE, "WithinBounds", ""))
    scaled = generation != before.get("observedGeneration") and generation > 1
    return RoleScalerStatus(
        observed_generation=generation,
        replicas=there.replicas if there is not None else 0,
        selector=pod_selector(desired, role) if desired is not None else "",
        last_scale_time=now if scaled else str(before.get("lastScaleTime", "")),
        conditions=tuple(condition(conditions, generation, now, each) for each in said),
    )


def plan_status(conditions: Sequence[Condition], generation: int, found: bool, now: str) -> ServingPlanStatus:
    """Return the status that a ServingPlan has while no planner is installed.

    Conditions that a removed planner has written become Unknown.
    """
    target: ConditionUpdate = (
        ("TargetFound", TRUE, "Found", "") if found else ("TargetFound", FALSE, "NoTarget", "no such DisaggDeployment")
    )
    own: tuple[ConditionUpdate, ...] = (target, ("Settled", FALSE, "NoPlanner", NO_PLANNER))
    others = [each.type for each in conditions if each.type not in {kind for kind, *_ in own}]
    said = (*own, *((kind, UNKNOWN, "NoPlanner", "") for kind in others))
    return ServingPlanStatus(
        observed_generation=generation,
        planner="none",
        conditions=tuple(condition(conditions, generation, now, each) for each in said),
    )
