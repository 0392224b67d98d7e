"""RoleScaler: the number of replicas of a role whose deployment does not set it."""

from typing import Annotated

from msgspec import Meta

from operators.api.fields import UNCHANGED, Conditions, Count, Name, Resource, rules


class RoleReference(Resource, frozen=True):
    deployment: Annotated[str, Meta(min_length=1, max_length=253)]
    role: Name


class RoleScalerSpec(Resource, frozen=True):
    target: Annotated[RoleReference, rules(UNCHANGED)]
    replicas: Count = 1


class RoleScalerStatus(Resource, frozen=True):
    observed_generation: int = 0
    replicas: int = 0
    selector: Annotated[str, Meta(max_length=1024)] = ""
    """Selector of the role's pods, for an HPA."""

    last_scale_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"}, max_length=40)] = ""
    conditions: Conditions = ()
