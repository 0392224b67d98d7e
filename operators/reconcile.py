"""What has to be done so that a cluster becomes what a DisaggDeployment says: `reconcile(wish, seen) -> Outcome`. Pure.

Rules:

1. Level-triggered: everything follows from what is wished and what is seen now. Nothing is remembered between calls, so an operator that
   is killed after any write goes on where it was.
2. An object is applied when its digest, kept in an annotation, differs from what is seen. What somebody else made under one of our names is
   left alone, and the deployment is Degraded until one of the two has another name.
3. Children of workers are scaled by `operators.scaling`, one step a call. A child that should have no replicas is removed when its last pod has gone:
   of an old revision, of a suspended deployment, of a role that is not wished for any more. So are settings that no child uses.
4. Replicas have one writer: the specification of a Static role, else the role's RoleScaler, which is made with the specification's number and from
   then on never written.
5. A deployment is Ready when every role has as many replicas of the present revision as it should, all ready and known to the router, and no
   old one is left. What stands in the way is said in the first condition that is not as it should be.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from operators.children import Deployment, Images, Manifest, revision, shared, workers
from operators.resources import (
    GROUP,
    VERSION,
    Condition,
    DisaggDeploymentStatus,
    Role,
    RoleStatus,
    RoleType,
    ScalingMode,
)
from operators.scaling import Bounds, Pool, Replicas, Side, next_changes, targets

DIGEST = f"{GROUP}/digest"
SIDES = {RoleType.PREFILL: Side.PREFILL, RoleType.DECODE: Side.DECODE}


class Child(Struct, frozen=True, kw_only=True):
    """Of one role and revision, as it is."""

    kind: str
    name: str
    role: str
    replicas: Replicas


class Seen(Struct, frozen=True, kw_only=True):
    """What a cluster has of a deployment."""

    children: tuple[Child, ...] = ()
    digests: Mapping[tuple[str, str], str] = {}
    """Of what the deployment owns, by kind and name."""

    foreign: frozenset[tuple[str, str]] = frozenset()
    """Kinds and names of what it does not own, though it would have that name."""

    scalers: Mapping[str, int] = {}
    """Replicas that RoleScalers ask for, by role."""

    conditions: tuple[Condition, ...] = ()
    """As last written: a condition keeps its instant for as long as its status is the same."""

    generation: int = 0


class Apply(Struct, frozen=True, tag=True):
    """Server-side apply of a manifest, which is all that we say of the object."""

    manifest: Manifest


class Scale(Struct, frozen=True, tag=True):
    kind: str
    name: str
    replicas: int


class Remove(Struct, frozen=True, tag=True):
    kind: str
    name: str


Action = Apply | Scale | Remove


class Outcome(Struct, frozen=True, kw_only=True):
    actions: tuple[Action, ...]
    status: DisaggDeploymentStatus


def reconcile(wish: Deployment, seen: Seen, images: Images, now: str) -> Outcome:
    """One step.

    Args:
        wish: What somebody has written.
        seen: What there is.
        images: Where the deployment names none.
        now: RFC 3339, for conditions that change.
    """
    present = revision(wish, images)
    wanted = [with_digest(each) for each in (*shared(wish, images), *_scalers(wish, seen))]
    pools = [_pool(wish, role, seen, present) for role in wish.workers]
    possible = targets(pools, _bounds(wish))
    actions: list[Action] = []
    for change in next_changes(possible, _bounds(wish)):
        child = next(
            (each for each in seen.children if (each.role, each.replicas.revision) == (change.role, change.revision)),
            None,
        )
        if child is not None:
            actions.append(Scale(child.kind, child.name, change.replicas))
            continue
        role = next(role for role in wish.workers if role.name == change.role)
        *others, made = workers(wish, role, change.revision, images)
        made["spec"]["replicas"] = change.replicas
        wanted += [with_digest(each) for each in (*others, made)]
    actions += [Apply(each) for each in wanted if _key(each) not in seen.foreign and _differs(each, seen)]
    actions += _farewells(seen, possible, wanted)
    taken = sorted(f"{kind} {name}" for kind, name in seen.foreign & {_key(each) for each in wanted})
    return Outcome(actions=tuple(actions), status=_status(wish, seen, pools, possible, taken, present, now))


def with_digest(manifest: Manifest) -> Manifest:
    """The manifest with the digest of itself as an annotation. Replicas are not part of that: they have other writers."""
    spec = {key: value for key, value in manifest.get("spec", {}).items() if key != "replicas"}
    digest = hashlib.sha256(msgspec.json.encode(manifest | {"spec": spec}, order="sorted")).hexdigest()[:16]
    return manifest | {"metadata": manifest["metadata"] | {"annotations": {DIGEST: digest}}}


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _differs(manifest: Manifest, seen: Seen) -> bool:
    digest: str = manifest["metadata"]["annotations"][DIGEST]
    return seen.digests.get(_key(manifest)) != digest


def _scalers(wish: Deployment, seen: Seen) -> list[Manifest]:
    """Those that are missing."""
    made = []
    for role in wish.workers:
        if role.scaling.mode is not ScalingMode.STATIC and role.name not in seen.scalers:
            metadata: dict[str, Any] = {"name": f"{wish.name}-{role.name}", "namespace": wish.namespace}
            spec = {"target": {"deployment": wish.name, "role": role.name}, "replicas": role.replicas}
            made.append({"apiVersion": f"{GROUP}/{VERSION}", "kind": "RoleScaler", "metadata": metadata, "spec": spec})
    return made


def _wished(wish: Deployment, role: Role, seen: Seen) -> int:
    if wish.spec.suspend:
        return 0
    if role.scaling.mode is ScalingMode.STATIC:
        return role.replicas
    asked = seen.scalers.get(role.name, role.replicas)
    return min(max(asked, role.scaling.least), role.scaling.most)


def _pool(wish: Deployment, role: Role, seen: Seen, present: str) -> Pool:
    return Pool(
        name=role.name,
        side=SIDES.get(role.type, Side.ALONE),
        target=_wished(wish, role, seen),
        gpus=role.gpus.per_replica,
        surge=role.rollout.max_surge,
        unavailable=role.rollout.max_unavailable,
        revision=present,
        replicas=tuple(each.replicas for each in seen.children if each.role == role.name),
    )


def _bounds(wish: Deployment) -> Bounds:
    balance = wish.spec.balance
    return Bounds(
        gpu_budget=balance.gpu_budget,
        least=_ratio(balance.ratio.least),
        most=_ratio(balance.ratio.most),
        max_step=balance.max_step,
    )


def _ratio(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    return int(prefill), int(decode)


def _farewells(seen: Seen, pools: Sequence[Pool], wanted: Sequence[Manifest]) -> list[Action]:
    """Of children that nobody needs any more, and of settings without a child: their operator was killed in between."""
    targets_of = {pool.name: (pool.revision, pool.target) for pool in pools}
    actions: list[Action] = []
    used = {name for kind, name in map(_key, wanted) if kind == "ConfigMap"}
    for each in seen.children:
        revision_now, target = targets_of.get(each.role, ("", 0))
        if each.role not in targets_of and each.replicas.asked:
            actions.append(Scale(each.kind, each.name, 0))
        elif not each.replicas.there and not (each.replicas.revision == revision_now and target):
            actions.append(Remove(each.kind, each.name))
            continue
        used.add(each.name)
    return actions + [Remove(kind, name) for kind, name in seen.digests if kind == "ConfigMap" and name not in used]


def _status(
    wish: Deployment,
    seen: Seen,
    pools: Sequence[Pool],
    possible: Sequence[Pool],
    taken: Sequence[str],
    present: str,
    now: str,
) -> DisaggDeploymentStatus:
    roles = tuple(_role_status(pool, present) for pool in possible)
    behind = [
        each
        for each in roles
        if not (each.updated == each.ready == each.replicas == each.desired and not each.draining)
    ]
    lowered = [
        f"{pool.name}: {able.target} of {pool.target}"
        for pool, able in zip(pools, possible, strict=True)
        if able.target < pool.target
    ]
    old = any(each.asked for pool in possible for each in pool.replicas if each.revision != present)
    reason, message = "AllRolesReady", ""
    if taken:
        reason, message = "NameTaken", f"not made by this deployment: {', '.join(taken)}"
    elif behind:
        reason = "RollingOut" if old else "RolesNotReady"
        message = "; ".join(f"{each.name}: {each.ready} of {each.desired} ready, {each.updated} new" for each in behind)
    elif wish.spec.suspend:
        reason = "Suspended"
    ready = not taken and not behind and not wish.spec.suspend
    conditions = [
        ("Ready", ready, reason, message),
        ("Progressing", bool(behind), reason if behind else "Settled", ""),
        ("Degraded", bool(taken), "NameTaken" if taken else "None", message if taken else ""),
        ("ScalingLimited", bool(lowered), "BudgetOrRatio" if lowered else "Unlimited", "; ".join(lowered)),
    ]
    sides = {side: sum(pool.target for pool in possible if pool.side is side) for side in Side}
    return DisaggDeploymentStatus(
        observed_generation=seen.generation,
        current_revision="" if old else present,
        update_revision=present,
        roles=roles,
        ratio=f"{sides[Side.PREFILL]}:{sides[Side.DECODE]}" if sides[Side.PREFILL] or sides[Side.DECODE] else "",
        gpus=sum(pool.there * pool.gpus for pool in possible),
        ready_roles=f"{len(roles) - len(behind)}/{len(roles)}",
        conditions=tuple(_condition(seen, now, *each) for each in conditions),
    )


def _role_status(pool: Pool, present: str) -> RoleStatus:
    return RoleStatus(
        name=pool.name,
        desired=pool.target,
        replicas=sum(each.pods for each in pool.replicas),
        ready=sum(each.ready for each in pool.replicas),
        updated=sum(each.pods for each in pool.replicas if each.revision == present),
        registered=sum(each.ready for each in pool.replicas),
        draining=sum(each.leaving for each in pool.replicas),
    )


def _condition(seen: Seen, now: str, kind: str, holds: bool, reason: str, message: str) -> Condition:
    status = "True" if holds else "False"
    before = next((each for each in seen.conditions if each.type == kind), None)
    since = before.last_transition_time if before is not None and before.status == status else now
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        observed_generation=seen.generation,
        last_transition_time=since,
    )
