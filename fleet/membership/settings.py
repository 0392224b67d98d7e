"""Settings of a router's registry of workers."""

from typing import Annotated

from msgspec import Meta, Struct


class MembershipSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a router's registry of workers: leases and how often they are checked."""

    lease_ms: Annotated[int, Meta(ge=300)] = 9000
    """Duration of a worker's lease after its last registration, in milliseconds.

    A worker registers three times per lease, as is usual for leases in etcd and Kubernetes. The router notices a
    crashed worker sooner, because its stream breaks.
    """

    tick_ms: Annotated[int, Meta(ge=10)] = 250
    """Time between two checks for ended leases, in milliseconds."""
