"""ServingPlan: the planner's task for a deployment, and its results."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from operators.api.fields import (
    UNCHANGED,
    Conditions,
    Count,
    Name,
    Resource,
    Seconds,
    ServingObjective,
    keyed_by,
    rules,
)


class PlanMode(StrEnum):
    SHADOW = "Shadow"
    """The planner only reports what it would do."""

    ACTIVE = "Active"


class RoleBounds(Resource, frozen=True):
    role: Name
    least: Count = 0
    most: Count = 64


_BOUNDS = rules(("self.least <= self.most", "least is more than most"))


class ServingPlanSpec(Resource, frozen=True):
    deployment: Annotated[str, Meta(min_length=1, max_length=253), rules(UNCHANGED)]
    mode: PlanMode = PlanMode.SHADOW
    objective: ServingObjective = ServingObjective()
    interval_seconds: Seconds = 60
    roles: Annotated[
        tuple[Annotated[RoleBounds, _BOUNDS], ...],
        Meta(max_length=16, extra_json_schema=keyed_by("role")),
    ] = ()


class Recommendation(Resource, frozen=True):
    role: Name
    replicas: int = 0
    reason: Annotated[str, Meta(max_length=1024)] = ""


class ServingPlanStatus(Resource, frozen=True):
    observed_generation: int = 0
    recommendations: Annotated[tuple[Recommendation, ...], Meta(max_length=16)] = ()
    ttft_ms: int = 0
    tpot_ms: int = 0
    conditions: Conditions = ()
