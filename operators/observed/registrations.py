"""Registrations: which workers the routers of a deployment know, from workers' Leases and routers' reports. Pure.

Rules:

1. A worker registers by a Lease (`coordination.k8s.io/v1`) in its deployment's namespace, named after its pod and with
   the labels below; `spec.holderIdentity` is the pod's name too. It renews the Lease while it serves. When it has
   drained, it deletes the Lease or gives it up (an empty holder). The annotation WARM has the number of blocks in its
   caches, for whoever has to choose a pod to end.
2. Routers report their workers too, at their control ports. A Lease or a report is enough. A worker that only some
   routers know gets requests, but does not count as registered (`partly_unknown`).
3. A Lease that was not renewed for its duration does not count. Its renewal time is when the operator learned of it, on
   the operator's clock. Only for Leases that are older than the operator, the Lease's own time counts until the next
   renewal, and clocks may differ by SKEW_SECONDS.
4. While there is neither a Lease nor a report, the registrations are unknown, which differs from having no registered
   worker.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct

from fleet.net.kubernetes.kinds import GROUP

REGISTRATION = f"{GROUP}/registration"
"""Label of a worker's Lease, with the value `worker`; the operator watches it."""

WORKER = "worker"
SELECTOR = f"{REGISTRATION}={WORKER}"
WARM = f"{GROUP}/warm-blocks"
SKEW_SECONDS = 5


class WorkerRegistration(Struct, frozen=True, kw_only=True):
    """Facts about one worker, as Leases and routers report them."""

    pod: str
    warm_blocks: int | None = None
    """Blocks in its caches; None: unknown."""


ReportedWorkers = Mapping[str, tuple[WorkerRegistration, ...]]
"""The workers that routers report, by the routers' pods."""


class WorkerLease(Struct, frozen=True, kw_only=True):
    """The fields of a worker's Lease from which registrations are computed."""

    holder: str
    renewed: datetime
    duration_seconds: int
    annotations: Mapping[str, str] = {}


def registered(
    leases: Iterable[WorkerLease], reports: ReportedWorkers | None, now: datetime
) -> dict[str, WorkerRegistration] | None:
    """Return the workers of one deployment to which any router sends requests, by pod; None if nothing is known.

    Args:
        leases: Leases of all its workers, whatever their age.
        reports: Workers that its routers report; None: no router was asked, or none has answered.
        now: Time of the operator's clock.
    """
    every = tuple(leases)
    if not every and reports is None:
        return None
    found = {each.pod: each for router in (reports or {}).values() for each in router}
    for lease in every:
        if lease.holder and now < lease_end(lease):
            found[lease.holder] = WorkerRegistration(
                pod=lease.holder, warm_blocks=_warm(lease, found.get(lease.holder))
            )
    return found


def partly_unknown(
    leases: Iterable[WorkerLease], reports: ReportedWorkers | None, now: datetime
) -> dict[str, tuple[str, ...]]:
    """Return the workers that only some routers know, with the other routers.

    Every router finds a worker with a Lease.
    """
    routers = {router: {each.pod for each in workers} for router, workers in (reports or {}).items()}
    leased = {lease.holder for lease in leases if lease.holder and now < lease_end(lease)}
    return {
        pod: missing
        for pod in sorted(set().union(*routers.values()) - leased)
        if (missing := tuple(sorted(router for router, known in routers.items() if pod not in known)))
    }


def _warm(lease: WorkerLease, reports: WorkerRegistration | None) -> int | None:
    """Return the Lease's number of warm blocks, or the router's if the Lease has none."""
    warm = lease.annotations.get(WARM, "")
    return int(warm) if warm.isdecimal() else None if reports is None else reports.warm_blocks


def lease_end(lease: WorkerLease) -> datetime:
    """Return when the Lease stops counting unless it is renewed."""
    return lease.renewed + timedelta(seconds=lease.duration_seconds + SKEW_SECONDS)
