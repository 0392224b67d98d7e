"""Registrations: finds out which workers the routers know, from the workers' Leases and the routers' reports.

Pure.

Rules:

1. A worker registers by a Lease (`coordination.k8s.io/v1`) in its deployment's namespace. The Lease has the name of the
   worker's pod and the label REGISTRATION, and its `spec.holderIdentity` is also the name of the pod. The worker renews
   the Lease while it serves. When it has drained, it deletes the Lease or empties the holder. The annotation WARM
   contains the number of blocks in the worker's prefix cache, so that the operator can remove the pods with the fewest
   warm blocks first.
2. Routers also report their workers, at their control ports. A worker counts as known if it has a Lease, or if a router
   reports it. A worker that only some routers know gets requests, but does not count as registered (`partly_unknown`).
3. A Lease that was not renewed for its duration does not count. The operator measures the age of a renewal by its own
   clock, from the moment at which it learned of the renewal. For a Lease that existed before the operator started, the
   renewal time that the worker has written counts until the next renewal. Because the clocks of worker and operator may
   differ, each Lease is valid for SKEW_SECONDS longer than its duration.
4. If there is neither a Lease nor a report, the registrations are unknown. If a router reports that it knows no worker,
   the registrations are known, and empty.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from msgspec import Struct

from fleet.net.kubernetes.kinds import GROUP

REGISTRATION = f"{GROUP}/registration"
"""Label of a worker's Lease, with the value `worker`. The operator watches only Leases that have this label."""

WORKER = "worker"
SELECTOR = f"{REGISTRATION}={WORKER}"
WARM = f"{GROUP}/warm-blocks"
SKEW_SECONDS = 5


class WorkerRegistration(Struct, frozen=True, kw_only=True):
    """Describes one registered worker, as its Lease or a router reports it."""

    pod: str
    warm_blocks: int | None = None
    """Number of blocks in the worker's prefix cache, or None if it is unknown."""


ReportedWorkers = Mapping[str, tuple[WorkerRegistration, ...]]
"""The workers that routers report, by the name of the router's pod."""


class WorkerLease(Struct, frozen=True, kw_only=True):
    """Holds the fields of a worker's Lease from which the worker's registration is computed."""

    holder: str
    renewed: datetime
    duration_seconds: int
    annotations: Mapping[str, str] = {}


def registered(
    leases: Iterable[WorkerLease], reports: ReportedWorkers | None, now: datetime
) -> dict[str, WorkerRegistration] | None:
    """Return the workers of a deployment that count as known (rule 2), by pod, or None if nothing is known (rule 4).

    Args:
        leases: Leases of all workers of the deployment, including expired Leases.
        reports: Workers that the deployment's routers report, or None if no router has answered.
        now: The present time by the operator's clock.
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
    """Return the workers that only some of the reporting routers know, each with the routers that do not know it.

    Workers with a valid Lease are left out, because every router finds them by the Lease.
    """
    routers = {router: {each.pod for each in workers} for router, workers in (reports or {}).items()}
    leased = {lease.holder for lease in leases if lease.holder and now < lease_end(lease)}
    return {
        pod: missing
        for pod in sorted(set().union(*routers.values()) - leased)
        if (missing := tuple(sorted(router for router, known in routers.items() if pod not in known)))
    }


def _warm(lease: WorkerLease, reports: WorkerRegistration | None) -> int | None:
    """Return the number of warm blocks in the Lease. If the Lease has none, return the number that a router reports, or None."""
    warm = lease.annotations.get(WARM, "")
    return int(warm) if warm.isdecimal() else None if reports is None else reports.warm_blocks


def lease_end(lease: WorkerLease) -> datetime:
    """Return the time at which a Lease expires if its worker does not renew it.

    SKEW_SECONDS are added, because the clocks of worker and operator may differ.
    """
    return lease.renewed + timedelta(seconds=lease.duration_seconds + SKEW_SECONDS)
