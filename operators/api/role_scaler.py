"""RoleScaler: holds the number of replicas of one role, which `kubectl scale`, an HPA, KEDA or the planner changes.

`operators.controller.reconcile` (rule 4) makes RoleScalers and obeys them; `operators.status.scaler` writes their status.
"""

from typing import Annotated

from msgspec import Meta

from operators.api.fields import UNCHANGED, Conditions, Count, Name, Resource, rules


class RoleReference(Resource, frozen=True):
    """Names a role of a DisaggDeployment."""

    deployment: Annotated[str, Meta(min_length=1, max_length=253)]
    """Name of the DisaggDeployment, which is in the namespace of the RoleScaler."""

    role: Name
    """Name of the role in the DisaggDeployment."""


class RoleScalerSpec(Resource, frozen=True):
    """The scaled role, and its requested replicas."""

    target: Annotated[RoleReference, rules(UNCHANGED)]
    """The role that is scaled. It cannot be changed."""

    replicas: Count = 1
    """Requested number of replicas of the role. The bounds in the role's `scaling` and in the deployment's `balance` limit
    this number."""


class RoleScalerStatus(Resource, frozen=True):
    """State of the scaled role, as autoscalers read it."""

    observed_generation: int = 0
    """The `metadata.generation` of the specification that the status is about."""

    replicas: int = 0
    """Existing replicas of the role, without those that are being removed."""

    selector: Annotated[str, Meta(max_length=1024)] = ""
    """Label selector of the role's pods. An HPA finds the pods by it."""

    last_scale_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"}, max_length=40)] = ""
    """The time at which somebody last changed `spec.replicas`; empty: nobody has changed it since the creation."""

    conditions: Conditions = ()
    """The condition `Bound` is True if the role exists and this object scales it. `WithinBounds` is True if the
    bounds allow the requested replicas."""
