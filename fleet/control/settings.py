"""What the registry is told."""

from typing import Annotated

from msgspec import Meta, Struct


class ControlSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the membership."""

    lease_ms: Annotated[int, Meta(ge=300)] = 9000
    """How long a worker is a member after it last registered; it registers three times within that, as leases in
    etcd and Kubernetes are renewed. A worker that crashes is noticed sooner, by its stream."""

    tick_ms: Annotated[int, Meta(ge=10)] = 250
    """How often ended leases are looked for."""
