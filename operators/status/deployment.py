"""Status of a DisaggDeployment: computes conditions such as Ready, and the replicas of each role. Pure.

Rules:

1. A deployment is Ready when all of the following is true. Every role has its replicas of the present revision, and all
   of them are ready and known to all routers. No old replica is left. The routers are ready. If the operator sends
   probes, every worker that is no prefill worker has answered a probe (`operators.probes.evidence`; its rule 6 makes an
   exception for busy routers). If it is unknown whether a requirement is fulfilled, the deployment is not Ready.
2. The reason of Ready names the most informative obstacle, in this order: a taken name, a refusal of the API server, a
   problem of a pod, a missing replica, a worker that routers do not know, a router that has not reported its workers, a
   worker that does not answer. A mistake in a `podTemplate` usually appears as a refusal of the API server
   (`operators.controller.refusals`). If Kubernetes notices the mistake only when it creates or starts pods, it appears
   as a problem of a pod (`operators.observed.pod_troubles`).
3. The transition time of a condition changes only if its status changes.
4. Only probes show whether KV blocks reach the decode workers. Until the next probe is answered, the condition KVPathReady
   keeps its last value.
5. A deployment is Available while requests are served: a router is ready, it sends requests to a ready worker, and the
   last probes did not all fail. So a deployment may be Available during a rollout, or while replicas are missing. The
   results of the last probes count until another probe is answered, because no probes are sent during a rollout.
"""

from collections.abc import Iterator, Sequence

from fleet.core.roles import KvPath
from operators.api.disagg_deployment import DisaggDeploymentStatus, RoleStatus, RoleType, ServedTask
from operators.api.fields import Condition
from operators.manifests.names import DesiredDeployment, router_service
from operators.observed.pod_troubles import UNPLACED
from operators.observed.state import ApiRefusal, ObservedState
from operators.probes.evidence import (
    PendingProbes,
    ProbeEvidence,
    ProbeSubject,
    ProbeTarget,
    RunningPod,
    evidence_from_status,
    kept,
    missing_only_routers,
    unanswered,
)
from operators.replica_steps import PairSide, ScaledRole

MOST_CHARACTERS = 1024
MOST_LISTED = 4
PASSING = frozenset({"ServedProbePending", "RouterSilent"})
"""Reasons of Ready that usually last only a moment before the deployment is Ready. So a status with such a reason is
usually not written at once (`operators.status.rate_limiter`, rule 3)."""

UNANSWERED = frozenset({"ServedProbePending", "ServedProbeFailed", "Saturated", "ServedProbeNeedsKey"})
"""Reasons of the condition Available. A condition with such a reason stays as it is while no probes are sent, because only
the answer to a probe can show that requests are served."""

BUSY = "the routers are alive but accept no more requests; the probe has no priority over them, and is sent again"
NOT_TOLD = "neither a router nor a Lease says which workers are registered"
TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"
ConditionUpdate = tuple[str, str, str, str]
"""Type, status, reason and message of a condition."""


def status(
    desired: DesiredDeployment,
    observed: ObservedState,
    pools: Sequence[ScaledRole],
    possible: Sequence[ScaledRole],
    taken: Sequence[str],
    present: str,
    routers: int,
    at_rest: bool,
    now: str,
) -> tuple[DisaggDeploymentStatus, PendingProbes | None]:
    """Return two values: the status to write, and the pods to probe with the evidence so far (None: no probes are sent now).

    Args:
        desired: The desired deployment.
        observed: The observed state.
        pools: The roles of workers, with the requested numbers of replicas as targets.
        possible: The same roles, with the targets that the GPU budget and the ratio allow.
        taken: Descriptions of objects that belong to somebody else and have names which the deployment needs.
        present: The revision that the specification gives.
        routers: The desired number of router replicas.
        at_rest: True if no change of replicas is under way, and `next_changes` has returned no further step.
        now: The present time as RFC 3339.
    """
    workers = [_role(pool, observed, present) for pool in possible]
    router = _router(desired, observed, routers)
    roles = (*workers, router)
    behind = [each for each in roles if not _whole(each)]
    old = any(each.asked for pool in possible for each in pool.replicas if each.revision != present)
    unregistered = [each for each in workers if each.registered < each.desired]
    hindrance = next(_hindrances(desired, observed, taken, behind, unregistered, old), None)
    wanted = None if hindrance or desired.spec.suspend else _wanted(desired, observed, possible, present)
    ready: ConditionUpdate = ("Ready", FALSE, *hindrance) if hindrance else _served(desired, observed, wanted)
    progressing = bool(behind or unregistered)
    said: list[ConditionUpdate] = [
        ready,
        _available(desired, observed, wanted),
        ("Progressing", TRUE if progressing else FALSE, ready[2] if progressing and hindrance else "Settled", ""),
        _degraded(observed, taken),
        _scheduled(observed),
        _registered(observed, unregistered),
        _kv_path(desired, observed, wanted),
        _limited(pools, possible, [pool.name for pool in possible if at_rest and _stuck(pool)]),
        _rebalancing(possible, present, at_rest),
    ]
    sides = {side: sum(pool.target for pool in possible if pool.side is side) for side in PairSide}
    answered = wanted is not None and not unanswered(wanted.subject, wanted.evidence)
    found = DisaggDeploymentStatus(
        observed_generation=observed.generation,
        current_revision="" if old else present,
        update_revision=present,
        roles=roles,
        ratio=f"{sides[PairSide.PREFILL]}:{sides[PairSide.DECODE]}"
        if sides[PairSide.PREFILL] or sides[PairSide.DECODE]
        else "",
        gpus=sum(pool.there * pool.gpus for pool in possible),
        ready_roles=f"{len(roles) - len({each.name for each in (*behind, *unregistered)})}/{len(roles)}",
        proved=wanted.subject.digest if wanted is not None and answered else observed.proved,
        conditions=tuple(condition(observed.conditions, observed.generation, now, each) for each in said),
    )
    return found, wanted


def unreadable_conditions(
    before: Sequence[Condition], generation: int, problem: str, now: str
) -> tuple[Condition, ...]:
    """Return the conditions of a deployment whose specification this version of the operator cannot read.

    The pods of the deployment keep running, so its condition Available stays as it was.
    """
    said: ConditionUpdate = ("Ready", FALSE, "SpecificationRefused", problem)
    new = [condition(before, generation, now, each) for each in (said, ("Degraded", TRUE, *said[2:]))]
    return (*new, *(each for each in before if each.type == "Available"))


def with_obstacle(before: Sequence[Condition], generation: int, problem: str, now: str) -> tuple[Condition, ...]:
    """Return the conditions of a deployment that stays unchanged because the operator has no control secret for it."""
    said: ConditionUpdate = ("Ready", FALSE, "ControlSecretUnusable", problem)
    new = [condition(before, generation, now, each) for each in (said, ("Degraded", TRUE, *said[2:]))]
    return (*new, *(each for each in before if each.type not in {"Ready", "Degraded"}))


def condition(before: Sequence[Condition], generation: int, now: str, said: ConditionUpdate) -> Condition:
    kind, holds, reason, message = said
    was = next((each for each in before if each.type == kind), None)
    return Condition(
        type=kind,
        status=holds,
        reason=reason,
        message=message[:MOST_CHARACTERS],
        observed_generation=generation,
        last_transition_time=was.last_transition_time if was is not None and was.status == holds else now,
    )


def _role(pool: ScaledRole, observed: ObservedState, present: str) -> RoleStatus:
    children = [each for each in observed.children if each.role == pool.name]
    return RoleStatus(
        name=pool.name,
        desired=pool.target,
        replicas=sum(each.replicas.pods for each in children),
        ready=sum(each.ready_pods for each in children),
        updated=sum(each.replicas.pods for each in children if each.replicas.revision == present),
        registered=sum(each.registered for each in children),
        draining=sum(each.replicas.leaving for each in children),
    )


def _router(desired: DesiredDeployment, observed: ObservedState, replicas: int) -> RoleStatus:
    there = observed.router
    if there is None:
        return RoleStatus(name=desired.router.name, desired=replicas, draining=0 if replicas else 1)
    return RoleStatus(
        name=desired.router.name,
        desired=replicas,
        replicas=there.replicas,
        ready=there.ready,
        updated=there.updated,
        registered=there.ready,
        # Router pods that the Deployment no longer counts are about to end. They count as draining here, so that no probes
        # are sent until these pods have ended.
        draining=max(0, len(there.pods) - there.replicas),
    )


def _whole(role: RoleStatus) -> bool:
    return role.updated == role.ready == role.replicas == role.desired and not role.draining


def _hindrances(
    desired: DesiredDeployment,
    observed: ObservedState,
    taken: Sequence[str],
    behind: Sequence[RoleStatus],
    unregistered: Sequence[RoleStatus],
    old: bool,
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the deployment is not Ready, the most informative first."""
    if taken:
        yield "NameTaken", f"not made by this deployment: {', '.join(taken)}"
    if observed.refusals:
        yield observed.refusals[0].reason, _refused(observed.refusals)
    if behind and observed.troubles:
        yield observed.troubles[0].reason.name, _troubled(observed)
    if behind:
        what = "; ".join(
            f"{each.name}: {each.ready} of {each.desired} ready, {each.updated} new"
            + (f", {each.draining} draining" if each.draining else "")
            for each in behind
        )
        yield ("RollingOut" if old else "Suspending" if desired.spec.suspend else "RolesNotReady"), what
    if unregistered and not observed.registrations_known:
        yield "RegistrationUnknown", NOT_TOLD
    if unregistered:
        yield "NotRegistered", _unregistered(unregistered, observed)
    if observed.silent_routers:
        yield "RouterSilent", _silent(observed)


def _wanted(
    desired: DesiredDeployment, observed: ObservedState, pools: Sequence[ScaledRole], present: str
) -> PendingProbes | None:
    """Return the pods to probe and the evidence so far. Return None if the operator sends no probes, or if no routers exist yet."""
    if observed.evidence is None or observed.router is None:
        return None
    serving = {each.role: each.serving for each in observed.children if each.replicas.revision == present}
    prefills = tuple(each for pool in pools if pool.side is PairSide.PREFILL for each in serving.get(pool.name, ()))
    pair = bool(prefills) and KvPath.DIRECT in desired.spec.kv_transfer.paths
    subject = ProbeSubject(
        service=router_service(desired),
        model=desired.spec.model.name,
        tls=observed.router.tls,
        wants_vector=desired.spec.task is not ServedTask.GENERATE,
        routers=observed.router.pods,
        addresses=observed.router.addresses,
        prefills=prefills,
        targets=tuple(
            ProbeTarget(pool.name, worker, pair and pool.side is PairSide.DECODE)
            for pool in pools
            if pool.side is not PairSide.PREFILL
            for worker in serving.get(pool.name, ())
        ),
    )
    evidence = kept(subject, observed.evidence)
    if unanswered(subject, evidence) and (observed.proved == subject.digest or evidence == ProbeEvidence()):
        evidence = (
            evidence_from_status(subject, observed.proved, _former_condition(observed, "KVPathReady")[1]) or evidence
        )
    return PendingProbes(subject, evidence)


def _served(desired: DesiredDeployment, observed: ObservedState, wanted: PendingProbes | None) -> ConditionUpdate:
    """Return the condition Ready of a deployment that fulfils all requirements, except perhaps answers to probes."""
    if desired.spec.suspend:
        return "Ready", FALSE, "Suspended", ""
    if wanted is None:
        return "Ready", TRUE, "AllRolesReady", "no request was sent to show it: the operator's probe.enabled is off"
    subject, evidence = wanted.subject, wanted.evidence
    missing = unanswered(subject, evidence)
    if not missing:
        return "Ready", TRUE, "AllRolesReady", ""
    failure, was = evidence.reported, _former_condition(observed, "Ready")
    what = f"{len(subject.targets) - len(missing)} of {len(subject.targets)} workers have answered a request"
    # A new leader has no failed probes yet, and reports a failure only after two. Until then, the reason Saturated that the
    # former leader has written stays.
    saturated = failure.busy if failure is not None else was[2] == "Saturated"
    if saturated:
        words = was[3] if failure is None else f"{what}; {evidence.failed}: {failure}; {BUSY}"
        return "Ready", TRUE if missing_only_routers(subject, evidence) else UNKNOWN, "Saturated", words
    if failure is None:
        return "Ready", FALSE, "ServedProbePending", what
    if failure.wants_key:
        remedy = (
            "set the operator's probe.insecure on a network that nobody else is on"
            if failure.key_withheld
            else f"give the operator one for {desired.namespace}/{desired.name}: probe.keys"
        )
        return "Ready", UNKNOWN, "ServedProbeNeedsKey", f"{failure}; {remedy}"
    return "Ready", FALSE, "ServedProbeFailed", f"{evidence.failed}: {failure}"


def _available(desired: DesiredDeployment, observed: ObservedState, wanted: PendingProbes | None) -> ConditionUpdate:
    """Return the condition Available: whether requests are served (rule 5)."""
    suspended = "Suspended" if desired.spec.suspend else ""
    if observed.router is None or not observed.router.pods:
        return "Available", FALSE, suspended or "NoRouterReady", "no router is ready"
    answering = [role.name for role in desired.workers if role.type is not RoleType.PREFILL]
    if not any(each.replicas.ready for each in observed.children if each.role in answering):
        text = f"no worker of {' and '.join(answering)} is ready and known to a router"
        return "Available", FALSE, suspended or "NoWorkerReady", text
    was = _former_condition(observed, "Available")
    if wanted is None:
        return was if was[2] in UNANSWERED and observed.evidence is not None else ("Available", TRUE, "Serving", "")
    subject, evidence = wanted.subject, wanted.evidence
    missing = unanswered(subject, evidence)
    if len(missing) < len(subject.targets) or not missing or missing_only_routers(subject, evidence):
        return "Available", TRUE, "Serving", ""
    failure = evidence.reported
    if failure is None:
        kept_reason = was[1] == TRUE or was[2] in UNANSWERED
        return (
            was if kept_reason else ("Available", FALSE, "ServedProbePending", "no worker has answered a request yet")
        )
    unknown = "Saturated" if failure.busy else "ServedProbeNeedsKey" if failure.wants_key else ""
    text = f"{evidence.failed}: {failure}"
    return ("Available", UNKNOWN, unknown, text) if unknown else ("Available", FALSE, "ServedProbeFailed", text)


def _degraded(observed: ObservedState, taken: Sequence[str]) -> ConditionUpdate:
    if taken:
        return "Degraded", TRUE, "NameTaken", f"not made by this deployment: {', '.join(taken)}"
    if observed.refusals:
        return "Degraded", TRUE, observed.refusals[0].reason, _refused(observed.refusals)
    if any(each.reason not in UNPLACED for each in observed.troubles):
        return (
            "Degraded",
            TRUE,
            next(each for each in observed.troubles if each.reason not in UNPLACED).reason.name,
            _troubled(observed),
        )
    return "Degraded", FALSE, "None", ""


def _scheduled(observed: ObservedState) -> ConditionUpdate:
    unplaced = [each for each in observed.troubles if each.reason in UNPLACED]
    if unplaced:
        return "Scheduled", FALSE, unplaced[0].reason.name, "; ".join(map(str, unplaced[:MOST_LISTED]))
    return "Scheduled", TRUE, "AllPodsPlaced", ""


def _registered(observed: ObservedState, unregistered: Sequence[RoleStatus]) -> ConditionUpdate:
    if not unregistered:
        if observed.silent_routers:
            return "RolesRegistered", UNKNOWN, "NotTold", _silent(observed)
        return "RolesRegistered", TRUE, "AllWorkersRegistered", ""
    if not observed.registrations_known:
        return "RolesRegistered", UNKNOWN, "NotTold", NOT_TOLD
    return "RolesRegistered", FALSE, "NotRegistered", _unregistered(unregistered, observed)


def _kv_path(desired: DesiredDeployment, observed: ObservedState, wanted: PendingProbes | None) -> ConditionUpdate:
    """Return the condition KVPathReady: whether each decode worker took over blocks that a prefill worker computed."""
    if not any(role.type is RoleType.PREFILL for role in desired.workers):
        return "KVPathReady", TRUE, "NotNeeded", "no role hands blocks over"
    if KvPath.DIRECT not in desired.spec.kv_transfer.paths:
        text = "no path brings blocks from a prefill worker to a decode worker; add direct to kvTransfer.paths"
        return "KVPathReady", FALSE, "NoPath", text
    subject, evidence = (wanted.subject, wanted.evidence) if wanted is not None else (None, ProbeEvidence())
    pairs = [target for target in subject.targets if target.pair] if subject is not None else []
    if not pairs or any(target not in evidence.answered for target in pairs):
        was = _former_condition(observed, "KVPathReady")
        if observed.evidence is not None and was[2] in {"HandedOver", "NotHandedOver", "NotObserved"}:
            return was
        return (
            "KVPathReady",
            UNKNOWN,
            "NotObserved",
            "no probe was answered yet; routers count what arrives, as fleet_kv_bytes_total",
        )
    if unhanded := [target.worker for target in pairs if target in evidence.unhanded]:
        text = f"{_named(unhanded)}: computed the prompt of a probe instead of taking over a prefill worker's blocks"
        return "KVPathReady", FALSE, "NotHandedOver", text
    if unclear := [target.worker for target in pairs if target in evidence.unclear]:
        return (
            "KVPathReady",
            UNKNOWN,
            "NotObserved",
            f"{_named(unclear)}: the prompt of a probe does not fill one block",
        )
    return "KVPathReady", TRUE, "HandedOver", "each worker that answers took over blocks of a prefill worker"


def _rebalancing(pools: Sequence[ScaledRole], present: str, at_rest: bool) -> ConditionUpdate:
    """Return the condition Rebalancing: whether the number of prefill or decode replicas changes.

    A rollout does not count, because it changes neither of these two numbers.
    """
    pairs = [pool for pool in pools if pool.side is not PairSide.ALONE]
    asked = {
        side: sum(pool.asked for pool in pairs if pool.side is side) for side in (PairSide.PREFILL, PairSide.DECODE)
    }
    moving = {
        pool.name: pool for pool in pairs if (pool.asked if _settled(pool, present) else pool.counted) != pool.target
    }
    leaving = {pool.name: pool for pool in pairs if _leaving(pool, present)}
    if at_rest or not all(asked.values()) or not (moving or leaving):
        return "Rebalancing", FALSE, "Settled", ""
    ratio = f"prefill to decode: {asked[PairSide.PREFILL]}:{asked[PairSide.DECODE]}"
    meant = [sum(pool.target for pool in pairs if pool.side is side) for side in asked]
    text = f"{ratio}, to be {meant[0]}:{meant[1]}"
    if any(pool.asked > pool.target for pool in moving.values()):
        return "Rebalancing", TRUE, "Shrinking", text
    if leaving:
        return "Rebalancing", TRUE, "Draining", text
    return "Rebalancing", TRUE, "Growing", text


def _settled(pool: ScaledRole, present: str) -> bool:
    """Return whether all requested replicas of the role have the present revision."""
    return not any(each.asked for each in pool.replicas if each.revision != present)


def _leaving(pool: ScaledRole, present: str) -> int:
    """Return the number of a role's draining replicas of the present revision.

    Draining replicas of old revisions belong to a rollout, and are not counted.
    """
    return sum(each.leaving for each in pool.replicas if each.revision == present)


def _limited(pools: Sequence[ScaledRole], possible: Sequence[ScaledRole], stuck: Sequence[str]) -> ConditionUpdate:
    if stuck:
        text = f"{', '.join(stuck)}: no step is left within gpuBudget, ratio, maxSurge and maxUnavailable; allow more of one"
        return "ScalingLimited", TRUE, "NoRoom", text
    lowered = [
        f"{pool.name}: {able.target} of {pool.target}"
        for pool, able in zip(pools, possible, strict=True)
        if able.target < pool.target
    ]
    if lowered:
        return "ScalingLimited", TRUE, "BudgetOrRatio", "; ".join(lowered)
    return "ScalingLimited", FALSE, "Unlimited", ""


def _stuck(pool: ScaledRole) -> bool:
    """Return whether the requested replicas of a role differ from its target in number or revision.

    The caller uses the result only if no further step is possible.
    """
    return pool.asked != pool.target or any(each.asked for each in pool.replicas if each.revision != pool.revision)


def _refused(refusals: Sequence[ApiRefusal]) -> str:
    return "; ".join(f"{each.kind} {each.name}: {each.message}" for each in refusals[:MOST_LISTED])


def _troubled(observed: ObservedState) -> str:
    more = len(observed.troubles) - MOST_LISTED
    return "; ".join(map(str, observed.troubles[:MOST_LISTED])) + (f"; and {more} more" if more > 0 else "")


def _unregistered(roles: Sequence[RoleStatus], observed: ObservedState) -> str:
    short = [f"{each.name}: {each.registered} of {each.desired} known to all routers" for each in roles]
    partly_known = [f"{pod} is not known to {', '.join(routers)}" for pod, routers in observed.partly_known.items()]
    return "; ".join((*short, *partly_known[:MOST_LISTED]))


def _silent(observed: ObservedState) -> str:
    return f"{', '.join(observed.silent_routers[:MOST_LISTED])}: has not said which workers it knows"


def _named(workers: Sequence[RunningPod]) -> str:
    return ", ".join(each.pod for each in workers[:MOST_LISTED])


def _former_condition(observed: ObservedState, kind: str) -> ConditionUpdate:
    """Return a condition as it was last written. If it was never written, return a condition with empty texts."""
    was = next((each for each in observed.conditions if each.type == kind), None)
    return (kind, was.status, was.reason, was.message) if was is not None else (kind, "", "", "")
