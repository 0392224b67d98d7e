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
    OFF = "Off"
    """No plans are made."""

    SHADOW = "Shadow"
    """Plans are made, rehearsed, shown, and compared with later measurements, but not applied."""

    ACTIVE = "Active"
    """Plans are applied to the RoleScalers of roles in scaling mode Planner."""


class PlanMinimum(StrEnum):
    DOLLARS = "Dollars"
    """The replicas cost as little money as possible."""

    ENERGY = "Energy"
    """The replicas draw as little power as possible."""


class RoleBounds(Resource, frozen=True):
    """Bounds, price and start time of the replicas of one role."""

    role: Name
    """Name of the role."""

    least: Count = 1
    """Minimum number of replicas. With 0, the role has no replica while there are no requests; `scaling.least` of
    the role must also be 0."""

    most: Count = 64
    """Maximum number of replicas. If `scaling.most` of the role is lower, that limit applies."""

    gpu: Annotated[str, Meta(max_length=63)] = ""
    """The GPU type, by its name in `fleet hardware list`. Empty: the GPU type that `gpus.product` of the role names."""

    cents_per_hour: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Price of one GPU in cents per hour. For a role without GPUs it is the price of one replica. 0: the list price of
    the GPU type, and no cost for a replica without a GPU."""

    watts: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Power in watts of one GPU under load, for `minimise: Energy`. For a role without GPUs it is the power of one replica.
    0: the estimate for the GPU type."""

    start_seconds: Seconds = 120
    """Expected time from the request for a replica until the replica serves. The planner uses this value until it has
    observed a start."""


_BOUNDS = rules(("self.least <= self.most", "least is more than most"))


class PlannedBudget(Resource, frozen=True):
    """Limits that hold at every instant. Replicas that start or drain count too."""

    gpus: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Maximum number of GPUs of all worker roles together. 0: only `balance.gpuBudget` of the deployment limits this number."""

    cents_per_hour: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Maximum price of all replicas together, in cents per hour; 0: no limit."""


class ServingPlanSpec(Resource, frozen=True):
    """The planner's task for one deployment: its mode, goals, budget, and bounds of roles."""

    deployment: Annotated[str, Meta(min_length=1, max_length=253), rules(UNCHANGED)]
    """Name of the planned DisaggDeployment, in the plan's namespace. If several plans name one deployment, only the plan
    whose name sorts first is obeyed."""

    mode: PlanMode = PlanMode.SHADOW
    """Mode of the planner: it makes no plans, only shows its plans, or applies them."""

    objective: ServingObjective = ServingObjective()
    """Latency goals, and the percentage of requests that must keep them."""

    budget: PlannedBudget = PlannedBudget()
    interval_seconds: Seconds = 5
    """Time between two decisions of the planner."""

    cool_down_seconds: Seconds = 300
    """A role shrinks only if the load has needed fewer replicas for this whole time, and if the role has not grown within
    it."""

    minimise: PlanMinimum = PlanMinimum.DOLLARS
    """Cost that the planner keeps low. The rule `load` (`requestsPerReplica`) does not use it."""

    requests_per_replica: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Target number of running and waiting requests on one replica. With a value above 0, the planner sizes roles by the
    rule `load`, which needs no step model of the engines. 0: the planner sizes all roles by the rule `fleet`, which uses
    the step models of their engines."""

    roles: Annotated[
        tuple[Annotated[RoleBounds, _BOUNDS], ...],
        Meta(max_length=16, extra_json_schema=keyed_by("role")),
    ] = ()
    """Bounds, prices and start times of the replicas of roles. A role that is not named has at least one replica, and at most
    `scaling.most`."""


class Recommendation(Resource, frozen=True):
    """Replicas that the planner recommends for one role."""

    role: Name
    """Name of the role."""

    replicas: int = 0
    """Number of replicas that the planner decided on last."""

    reason: Annotated[str, Meta(max_length=1024)] = ""
    """Reason of the recommendation, as in `fleet plan`."""


class MadePlan(Resource, frozen=True):
    """One plan, and its state or outcome."""

    id: Annotated[str, Meta(max_length=128)]
    """Identity of the plan, for `fleet explain --plan`."""

    state: Annotated[str, Meta(max_length=32)] = ""
    """State of the plan, or how it ended."""

    changes: Annotated[str, Meta(max_length=1024)] = ""
    """Roles with their numbers of replicas before and after the plan."""

    reason: Annotated[str, Meta(max_length=32)] = ""
    """Reason of the plan, as one word for programs."""

    detail: Annotated[str, Meta(max_length=1024)] = ""
    """Reason of the plan's outcome, as a text for people."""


class ServingPlanStatus(Resource, frozen=True):
    """Results of the planner for one ServingPlan: recommendations, the last plans, and measured latencies."""

    observed_generation: int = 0
    """The `metadata.generation` of the specification that the status is about."""

    planner: Annotated[str, Meta(max_length=253)] = ""
    """Name of the planner's pod that leads and so carries out the plan; `none` if no planner is installed."""

    recommendations: Annotated[tuple[Recommendation, ...], Meta(max_length=16)] = ()
    """The replicas of each role by the planner's last decision."""

    plans: Annotated[tuple[MadePlan, ...], Meta(max_length=5)] = ()
    """The last plans for the deployment, at most five, the newest first."""

    ttft_ms: int = 0
    """Time to first token in milliseconds at the percentile of the objective, as measured last. 0: no request was served
    in the measured time."""

    tpot_ms: int = 0
    """Mean time per output token of a request, after the first token, in milliseconds at the percentile of the objective, as
    measured last. 0: no request was served in the measured time."""

    conditions: Conditions = ()
    """The conditions `TargetFound` and `Settled`, and conditions that name what hinders the planner."""
