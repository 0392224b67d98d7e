"""Settings of `fleet.v1.Selection`: how much of a router's capacity its callers may hold by leases, and for how long."""

from typing import Annotated

from msgspec import Meta, Struct


class SelectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the leases that `Select` gives."""

    max_lease_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 60_000
    """The longest lease in milliseconds; a longer request is refused. Each report renews a lease, so it needs to be no longer than the
    pause between two reports; the capacity of a caller that died is free again after that time."""

    max_wait_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 60_000
    """The longest wait of `Select` in milliseconds while all workers are busy; a longer one is refused."""

    caller_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of a model's places (batch sizes times `oversubscribe`) that all leases of one caller may hold. With `oversubscribe` 2, half of
    them are as many as all batches together: one caller can keep the workers busy, and requests of others still find a place. One lease
    is always allowed."""

    max_leases: Annotated[int, Meta(ge=1, le=1 << 20)] = 65_536
    """Leases of all callers together; further selections are rejected. Each takes about 2 KB."""
