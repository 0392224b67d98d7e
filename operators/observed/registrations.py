"""Which workers are known to their routers: the one place that says how that is told. Pure.

Rules:

1. A worker registers as a Lease (`coordination.k8s.io/v1`) in its deployment's namespace, named after its pod, with the labels
   below; `spec.holderIdentity` is the pod's name too. It renews the Lease while it serves and deletes it, or gives it up (an empty
   holder), when it has drained. The annotation WARM says how many blocks its caches hold, for whoever has to choose a pod to end.
2. Or the routers say it: whoever asks their control API passes on what each was told. Both are believed; one is enough. A worker that
   some routers know and others do not gets requests, but is not registered: see `partly_unknown`.
3. A Lease that has not been renewed for its duration counts for nothing. When it was renewed is when the operator was told of it, by its own
   clock; only of Leases that were there before the operator their own time counts, until the next renewal, and clocks may differ by SKEW_SECONDS.
4. Where neither has said anything yet, nothing is known, which is something else than that no worker is registered.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct

from operators.api.fields import GROUP
from operators.manifests.names import INSTANCE, REVISION, ROLE

REGISTRATION = f"{GROUP}/registration"
"""Label of a worker's Lease, with the value `worker`: what is watched."""

WORKER = "worker"
SELECTOR = f"{REGISTRATION}={WORKER}"
WARM = f"{GROUP}/warm-blocks"
SKEW_SECONDS = 5


class WorkerRegistration(Struct, frozen=True, kw_only=True):
    """What is known of one worker."""

    pod: str
    warm_blocks: int | None = None
    """In its caches; None: not told."""


ReportedWorkers = Mapping[str, tuple[WorkerRegistration, ...]]
"""What routers say, by their pods."""


class WorkerLease(Struct, frozen=True, kw_only=True):
    """A Lease as far as it matters here."""

    holder: str
    renewed: datetime
    duration_seconds: int
    annotations: Mapping[str, str] = {}


def labels(deployment: str, role: str, revision: str) -> dict[str, str]:
    """That a worker puts on its Lease."""
    return {REGISTRATION: WORKER, INSTANCE: deployment, ROLE: role, REVISION: revision}


def registered(
    leases: Iterable[WorkerLease], told: ReportedWorkers | None, now: datetime
) -> dict[str, WorkerRegistration] | None:
    """Workers of one deployment that any router gives requests to, by pod; None where nothing is known.

    Args:
        leases: All of its workers', whatever their age.
        told: What its routers say; None: they were not asked, or none has answered.
        now: By the operator's clock.
    """
    every = tuple(leases)
    if not every and told is None:
        return None
    found = {each.pod: each for router in (told or {}).values() for each in router}
    for lease in every:
        if lease.holder and now < ends(lease):
            found[lease.holder] = WorkerRegistration(
                pod=lease.holder, warm_blocks=_warm(lease, found.get(lease.holder))
            )
    return found


def partly_unknown(
    leases: Iterable[WorkerLease], told: ReportedWorkers | None, now: datetime
) -> dict[str, tuple[str, ...]]:
    """Workers that some routers know and others do not, with these others; whoever has a Lease is found by all. Arguments as above."""
    routers = {router: {each.pod for each in workers} for router, workers in (told or {}).items()}
    leased = {lease.holder for lease in leases if lease.holder and now < ends(lease)}
    return {
        pod: missing
        for pod in sorted(set().union(*routers.values()) - leased)
        if (missing := tuple(sorted(router for router, known in routers.items() if pod not in known)))
    }


def _warm(lease: WorkerLease, told: WorkerRegistration | None) -> int | None:
    """As the Lease says; where it does not, as the router does."""
    warm = lease.annotations.get(WARM, "")
    return int(warm) if warm.isdecimal() else None if told is None else told.warm_blocks


def ends(lease: WorkerLease) -> datetime:
    """When it counts no more, unless it is renewed."""
    return lease.renewed + timedelta(seconds=lease.duration_seconds + SKEW_SECONDS)
