"""What a deployment's status says. Pure.

Rules:

1. A deployment is Ready when every role has as many replicas of the present revision as it should, all ready and known to the router, when no
   old one is left, and when the routers are ready. Never on hearsay: what nobody has told yet is not so.
2. What stands in the way is the reason of Ready, the most telling first: a name that is taken, what the API server refuses, what scheduler and
   kubelet say, what has not come up, what is not known to the router.
3. A condition keeps its instant for as long as its status is the same.
"""

from collections.abc import Iterator, Sequence

from operators.children import Deployment
from operators.diagnosis import UNPLACED
from operators.resources import Condition, DisaggDeploymentStatus, KvPath, RoleStatus, RoleType
from operators.scaling import Pool, Side
from operators.seen import Refusal, Seen

MOST_CHARACTERS = 1024
MOST_TOLD = 4
TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"
Said = tuple[str, str, str, str]
"""Type, status, reason, message."""


def status(
    wish: Deployment,
    seen: Seen,
    pools: Sequence[Pool],
    possible: Sequence[Pool],
    taken: Sequence[str],
    present: str,
    routers: int,
    at_rest: bool,
    now: str,
) -> DisaggDeploymentStatus:
    """The status that there should be.

    Args:
        wish: What somebody has written.
        seen: What there is.
        pools: Roles of workers, with what is asked for.
        possible: The same, with what budget and ratio allow.
        taken: What has one of our names and is not ours.
        present: Revision of the specification.
        routers: Replicas of the router that there should be.
        at_rest: Nothing is under way, and no step is possible.
        now: RFC 3339.
    """
    workers = [_role(pool, seen, present) for pool in possible]
    router = _router(wish, seen, routers)
    roles = (*workers, router)
    behind = [each for each in roles if not _whole(each)]
    old = any(each.asked for pool in possible for each in pool.replicas if each.revision != present)
    unregistered = [each for each in workers if each.registered < each.desired]
    hindrance = next(_hindrances(wish, seen, taken, behind, unregistered, old), None)
    ready = hindrance is None and not wish.spec.suspend
    reason, message = hindrance or ("Suspended" if wish.spec.suspend else "AllRolesReady", "")
    progressing = bool(behind or unregistered)
    said: list[Said] = [
        ("Ready", TRUE if ready else FALSE, reason, message),
        ("Progressing", TRUE if progressing else FALSE, reason if progressing and hindrance else "Settled", ""),
        _degraded(seen, taken),
        _scheduled(seen),
        _registered(seen, unregistered),
        _kv_path(wish),
        _limited(pools, possible, [pool.name for pool in possible if at_rest and _stuck(pool)]),
    ]
    sides = {side: sum(pool.target for pool in possible if pool.side is side) for side in Side}
    return DisaggDeploymentStatus(
        observed_generation=seen.generation,
        current_revision="" if old else present,
        update_revision=present,
        roles=roles,
        ratio=f"{sides[Side.PREFILL]}:{sides[Side.DECODE]}" if sides[Side.PREFILL] or sides[Side.DECODE] else "",
        gpus=sum(pool.there * pool.gpus for pool in possible),
        ready_roles=f"{len(roles) - len({each.name for each in (*behind, *unregistered)})}/{len(roles)}",
        conditions=tuple(condition(seen.conditions, seen.generation, now, each) for each in said),
    )


def misread(seen_conditions: Sequence[Condition], generation: int, problem: str, now: str) -> tuple[Condition, ...]:
    """Conditions of an object whose specification this operator does not understand: it was written for another version."""
    said: Said = ("Ready", FALSE, "SpecificationRefused", problem)
    return tuple(condition(seen_conditions, generation, now, each) for each in (said, ("Degraded", TRUE, *said[2:])))


def condition(before: Sequence[Condition], generation: int, now: str, said: Said) -> Condition:
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


def _role(pool: Pool, seen: Seen, present: str) -> RoleStatus:
    children = [each for each in seen.children if each.role == pool.name]
    return RoleStatus(
        name=pool.name,
        desired=pool.target,
        replicas=sum(each.replicas.pods for each in children),
        ready=sum(each.ready_pods for each in children),
        updated=sum(each.replicas.pods for each in children if each.replicas.revision == present),
        registered=sum(each.registered for each in children),
        draining=sum(each.replicas.leaving for each in children),
    )


def _router(wish: Deployment, seen: Seen, desired: int) -> RoleStatus:
    there = seen.router
    if there is None:
        return RoleStatus(name=wish.router.name, desired=desired, draining=0 if desired else 1)
    return RoleStatus(
        name=wish.router.name,
        desired=desired,
        replicas=there.replicas,
        ready=there.ready,
        updated=there.updated,
        registered=there.ready,
    )


def _whole(role: RoleStatus) -> bool:
    return role.updated == role.ready == role.replicas == role.desired and not role.draining


def _hindrances(
    wish: Deployment,
    seen: Seen,
    taken: Sequence[str],
    behind: Sequence[RoleStatus],
    unregistered: Sequence[RoleStatus],
    old: bool,
) -> Iterator[tuple[str, str]]:
    """Why it is not ready, the most telling reason first."""
    if taken:
        yield "NameTaken", f"not made by this deployment: {', '.join(taken)}"
    if seen.refusals:
        yield seen.refusals[0].reason, _refused(seen.refusals)
    if behind and seen.troubles:
        yield seen.troubles[0].reason.name, _troubled(seen)
    if behind:
        what = "; ".join(f"{each.name}: {each.ready} of {each.desired} ready, {each.updated} new" for each in behind)
        yield ("RollingOut" if old else "Suspending" if wish.spec.suspend else "RolesNotReady"), what
    if unregistered and not seen.registrations_known:
        yield "RegistrationUnknown", "neither the router nor a Lease says which workers are registered"
    if unregistered:
        yield "NotRegistered", _unregistered(unregistered)


def _degraded(seen: Seen, taken: Sequence[str]) -> Said:
    if taken:
        return "Degraded", TRUE, "NameTaken", f"not made by this deployment: {', '.join(taken)}"
    if seen.refusals:
        return "Degraded", TRUE, seen.refusals[0].reason, _refused(seen.refusals)
    if any(each.reason not in UNPLACED for each in seen.troubles):
        return (
            "Degraded",
            TRUE,
            next(each for each in seen.troubles if each.reason not in UNPLACED).reason.name,
            _troubled(seen),
        )
    return "Degraded", FALSE, "None", ""


def _scheduled(seen: Seen) -> Said:
    unplaced = [each for each in seen.troubles if each.reason in UNPLACED]
    if unplaced:
        return "Scheduled", FALSE, unplaced[0].reason.name, "; ".join(map(str, unplaced[:MOST_TOLD]))
    return "Scheduled", TRUE, "AllPodsPlaced", ""


def _registered(seen: Seen, unregistered: Sequence[RoleStatus]) -> Said:
    if not unregistered:
        return "RolesRegistered", TRUE, "AllWorkersRegistered", ""
    if not seen.registrations_known:
        return "RolesRegistered", UNKNOWN, "NotTold", "neither the router nor a Lease says which workers are registered"
    return "RolesRegistered", FALSE, "NotRegistered", _unregistered(unregistered)


def _kv_path(wish: Deployment) -> Said:
    """Only whether there is one at all: that blocks went over it is known to the engines, which do not tell the API server."""
    if not any(role.type is RoleType.PREFILL for role in wish.workers):
        return "KVPathReady", TRUE, "NotNeeded", "no role hands blocks over"
    if KvPath.DIRECT not in wish.spec.kv_transfer.paths:
        text = "workers keep blocks of their own, and nothing brings those of a prefill worker to a decode worker; add direct"
        return "KVPathReady", FALSE, "NoPath", text
    return "KVPathReady", UNKNOWN, "NotObserved", "routers count what arrives, as fleet_kv_bytes_total"


def _limited(pools: Sequence[Pool], possible: Sequence[Pool], stuck: Sequence[str]) -> Said:
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


def _stuck(pool: Pool) -> bool:
    """Whether it would have to change, were there a way."""
    return pool.asked != pool.target or any(each.asked for each in pool.replicas if each.revision != pool.revision)


def _refused(refusals: Sequence[Refusal]) -> str:
    return "; ".join(f"{each.kind} {each.name}: {each.message}" for each in refusals[:MOST_TOLD])


def _troubled(seen: Seen) -> str:
    more = len(seen.troubles) - MOST_TOLD
    return "; ".join(map(str, seen.troubles[:MOST_TOLD])) + (f"; and {more} more" if more > 0 else "")


def _unregistered(roles: Sequence[RoleStatus]) -> str:
    return "; ".join(f"{each.name}: {each.registered} of {each.desired} known to the router" for each in roles)
