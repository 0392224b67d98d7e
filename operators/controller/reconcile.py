"""Reconcile: decides which actions make the cluster match a DisaggDeployment. Pure.

`operators.manifests.workloads` and `operators.manifests.shared` make the child objects.

Rules:

1. `reconcile` is level-triggered: every action follows from the desired and the observed state. Nothing is remembered between
   calls, so an operator that is killed after any write continues where it was.
2. A manifest is applied if its digest differs from the digest in the annotation of the observed object. If somebody else
   owns an object whose name a child object needs, this object stays unchanged, and the deployment is Degraded until the
   name is free. A child object that somebody has edited, or that has lost its owner, is applied again at once. At each
   resync (`operators.settings.OperatorSettings.resync_seconds`), all objects are applied again.
3. Children of workers are scaled by `operators.replica_steps`, in each call by as many steps as its rules allow. A child that should have
   no replicas is removed when its last pod has gone. This applies to the child of an old revision, of a suspended deployment, and of a
   removed role. Other objects of the deployment are removed when they are not desired any more.
4. Only one source sets the number of replicas of a role: for a Static role the specification, and for other roles the
   RoleScaler. The operator creates a RoleScaler with the number in the specification, and never changes this number
   afterwards. If somebody deletes the RoleScaler, the operator creates a new one with the present number.
5. Before the replicas of a Deployment are reduced, each pod whose deletion cost is known is annotated with this cost. The
   controllers of Kubernetes remove the pods with the lowest cost first. If groups are StatefulSets, the
   operator itself removes the groups with the fewest warm blocks. A LeaderWorkerSet always removes its last groups. How a
   pod drains is set in `operators.manifests.pods` and decided in `workers.machine`.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import OptionalKinds
from operators.api.disagg_deployment import DisaggDeploymentStatus, RoleSpec, RoleType, ScalingMode
from operators.controller.group_placer import GroupPlacer, PlacedGroup, with_unfit
from operators.controller.renderings import Renderings
from operators.manifests.names import DesiredDeployment, child_name
from operators.manifests.objects import DIGEST, Manifest, with_digest
from operators.manifests.pods import Images, is_foreign
from operators.manifests.workloads import ANYWHERE, group, grouped, role_scaler, workers
from operators.observed.state import ObservedChild, ObservedState
from operators.probes.evidence import PendingProbes
from operators.replica_steps import PairSide, ReplicaChange, ScaledRole, ScalingBounds, next_changes, targets
from operators.status.deployment import status

SIDES = {RoleType.PREFILL: PairSide.PREFILL, RoleType.DECODE: PairSide.DECODE}
CONTROLLERS = frozenset({"Deployment", "LeaderWorkerSet", "StatefulSet"})
MOST_DELETION_COST = 2**31 - 1  # the maximum value that Kubernetes accepts


class Apply(Struct, frozen=True, tag=True):
    """Server-side apply of a manifest. The manifest contains every field that the operator owns in the object."""

    manifest: Manifest


class Scale(Struct, frozen=True, tag=True):
    """Change the number of replicas of a workload, but only if it is still `was`.

    If `was` is None, the number in the cache is expected instead. With this check, a write of a former leader that
    arrives late changes nothing.
    """

    kind: str
    name: str
    replicas: int
    was: int | None = None


class SetDeletionCost(Struct, frozen=True, tag=True):
    """Annotate a pod with its deletion cost. The controller of the pod removes the pods with the lowest cost first."""

    pod: str
    cost: int


class Remove(Struct, frozen=True, tag=True):
    kind: str
    name: str


class DeletePod(Struct, frozen=True, tag=True):
    """Delete a pod, which its controller then creates again."""

    pod: str


class OpenGate(Struct, frozen=True, tag=True):
    """Remove the operator's scheduling gate from a pod, so that the scheduler places the pod."""

    pod: str


Action = Apply | Scale | SetDeletionCost | Remove | DeletePod | OpenGate


class Reconciled(Struct, frozen=True, kw_only=True):
    actions: tuple[Action, ...]
    status: DisaggDeploymentStatus
    wanted: PendingProbes | None = None
    """The pods to probe and the evidence so far; None if the deployment is not probed now."""

    placed: tuple[PlacedGroup, ...] = ()
    """New worker groups with the domains that were chosen for them."""

    needs_room: bool = False
    """True if a group could not be created because `ObservedState.room` was not read. The caller reads it and
    reconciles again."""

    unfit: bool = False
    """True if a group fits into no domain now."""


def reconcile(
    desired: DesiredDeployment, observed: ObservedState, images: Images, now: str, renderings: Renderings | None = None
) -> Reconciled:
    """Return the next actions towards the desired state, and the status.

    Args:
        desired: The desired deployment.
        observed: The observed state.
        images: Default images of routers and workers.
        now: The present time as RFC 3339. A condition whose status changes gets this time as its transition time.
        renderings: Manifests and revisions that earlier calls have made from the specifications, with the same
            `images`. If it is None, all manifests and revisions are made again, which takes a large part of the time of
            a call.
    """
    renderings = renderings or Renderings(images)
    worker_revision = renderings.revision(desired)
    routers = _target_replicas(desired, desired.router, observed)
    wanted = list(renderings.shared(desired, observed.served, routers))
    pools = [_pool(desired, role, observed, worker_revision) for role in desired.workers]
    possible = targets(pools, _bounds(desired))
    actions: list[Action] = []
    changes = next_changes(possible, _bounds(desired))
    placer = GroupPlacer(desired, observed, images)
    for change in changes:
        role = next((role for role in desired.workers if role.name == change.role), None)
        assert role is not None, "pools are made of roles"
        made, moved = _changed(desired, role, change, observed, images, placer)
        wanted += [with_digest(each) for each in made]
        actions += moved
    if observed.afresh or observed.drifted or observed.orphans:
        wanted += [
            each
            for each in map(with_digest, _present_children(desired, observed, worker_revision, images))
            if each not in wanted and (observed.afresh or _key(each) in _faulty(observed))
        ]
    applied = wanted + [with_digest(each) for each in _scalers(desired, observed)]
    actions += [Apply(each) for each in applied if _key(each) not in observed.foreign and _differs(each, observed)]
    actions += _pruned(desired, observed, possible, wanted)
    taken = sorted(f"{kind} {name}" for kind, name in map(_key, applied) if (kind, name) in observed.foreign)
    at_rest = not changes and not any(each.changing for pool in possible for each in pool.replicas)
    observed = with_unfit(observed, placer)
    said, wanted_of_probes = status(desired, observed, pools, possible, taken, worker_revision, routers, at_rest, now)
    return Reconciled(
        actions=tuple(actions),
        status=said,
        wanted=wanted_of_probes,
        placed=tuple(placer.placed),
        needs_room=placer.needs_room,
        unfit=bool(placer.unfit),
    )


def _present_children(
    desired: DesiredDeployment, observed: ObservedState, worker_revision: str, images: Images
) -> Iterator[Manifest]:
    """Yield the manifests of the existing children with the revision `worker_revision`, and of their ConfigMaps.

    The manifests keep the number of replicas that each child requests now.
    """
    for role in desired.workers:
        for each in observed.children:
            if (each.role, each.replicas.revision) != (role.name, worker_revision) or not each.kind:
                continue
            *others, made = workers(desired, role, worker_revision, images, _served(each, observed))
            if each.kind == kinds.STATEFUL_SET.name:
                groups = (
                    group(desired, role, worker_revision, _index(name), images, each.placements.get(name, ANYWHERE))
                    for name in each.members
                )
                yield from (*others, made, *groups)
                continue
            made["spec"]["replicas"] = each.replicas.asked
            yield from (*others, made)


def _changed(
    desired: DesiredDeployment,
    role: RoleSpec,
    change: ReplicaChange,
    observed: ObservedState,
    images: Images,
    placer: GroupPlacer,
) -> tuple[list[Manifest], list[Action]]:
    """Return the manifests to apply, and the further actions, that bring one revision of a role to the number of replicas in `change`."""
    child = next(
        (each for each in observed.children if (each.role, each.replicas.revision) == (change.role, change.revision)),
        None,
    )
    there = child is not None and bool(child.kind)
    served = _served(child, observed)
    if child is not None and there and child.kind != "StatefulSet":
        deletion_costs = _deletion_costs(child, observed) if change.replicas < child.replicas.asked else []
        return [], [*deletion_costs, Scale(child.kind, child.name, change.replicas, child.replicas.asked)]
    if not there and not grouped(role, served):
        *others, made = workers(desired, role, change.revision, images, served)
        made["spec"]["replicas"] = change.replicas
        return [*others, made], []
    base = child_name(desired, role.name, change.revision)
    members = child.members if child is not None else ()
    if child is not None and len(members) > change.replicas:
        return [], [Remove("StatefulSet", name) for name in _in_removal_order(child)[: len(members) - change.replicas]]
    free = (index for index in range(len(members) + change.replicas) if f"{base}-{index}" not in members)
    made_groups = [
        group(desired, role, change.revision, index, images, placement)
        for index, _ in zip(free, range(change.replicas - len(members)), strict=False)
        if (placement := placer.place(role, f"{base}-{index}")) is not None
    ]
    return [*workers(desired, role, change.revision, images, served), *made_groups], []


def _served(child: ObservedChild | None, observed: ObservedState) -> OptionalKinds:
    """Return the optional kinds that may be used for one revision of a role.

    An existing child keeps its kind, even if the API server has other kinds by now.
    """
    if child is None or not child.kind:
        return observed.served
    return structs.replace(observed.served, leader_worker_sets=child.kind == kinds.LEADER_WORKER_SET.name)


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])


def _in_removal_order(child: ObservedChild) -> list[str]:
    """Return the names of a child's groups in the order in which they are removed.

    Groups that do not serve come before groups that serve. Within each of these two kinds, groups with fewer warm blocks
    come first. Among groups with equally many warm blocks, the group with the highest index comes first.
    """
    return sorted(child.members, key=lambda name: (name in child.ready_members, child.warm.get(name, 0), -_index(name)))


def _deletion_costs(child: ObservedChild, observed: ObservedState) -> list[SetDeletionCost]:
    """Return the deletion costs to annotate on the pods of a child that loses replicas.

    Leave out pods whose cost is unknown or annotated already.
    """
    return [
        SetDeletionCost(each.pod, cost)
        for each in observed.deletion_costs.get((child.role, child.replicas.revision), ())
        if each.blocks is not None and str(cost := min(each.blocks, MOST_DELETION_COST)) != each.said
    ]


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _faulty(observed: ObservedState) -> frozenset[tuple[str, str]]:
    """Return kind and name of the objects that have to be applied even if their digest is up to date.

    Somebody has edited these objects, or they have no owner.
    """
    return observed.drifted | observed.orphans


def _differs(manifest: Manifest, observed: ObservedState) -> bool:
    if observed.afresh or _key(manifest) in _faulty(observed):
        return True
    replicas = manifest.get("spec", {}).get("replicas")
    if (
        observed.router is not None
        and _key(manifest) == ("Deployment", observed.router.name)
        and observed.router.asked != replicas
    ):
        return True
    digest: str = manifest["metadata"]["annotations"][DIGEST]
    return observed.digests.get(_key(manifest)) != digest


def _scalers(desired: DesiredDeployment, observed: ObservedState) -> list[Manifest]:
    """Return the manifests of the RoleScalers that should exist and do not."""
    return [
        role_scaler(desired, role, _first_value(desired, role, observed))
        for role in _scaled(desired)
        if role.name not in observed.scalers
    ]


def _first_value(desired: DesiredDeployment, role: RoleSpec, observed: ObservedState) -> int:
    """Return the number of replicas for a new RoleScaler.

    It is the last desired number of the role (`ObservedState.sizes`). For a new role, and in a suspended deployment,
    it is the number in the specification.
    """
    return role.replicas if desired.spec.suspend else observed.sizes.get(role.name, role.replicas)


def _scaled(desired: DesiredDeployment) -> Iterator[RoleSpec]:
    """Yield the roles whose number of replicas is in a RoleScaler."""
    return (role for role in (*desired.workers, desired.router) if role.scaling.mode is not ScalingMode.STATIC)


def _target_replicas(desired: DesiredDeployment, role: RoleSpec, observed: ObservedState) -> int:
    if desired.spec.suspend:
        return 0
    if role.scaling.mode is ScalingMode.STATIC:
        return role.replicas
    asked = observed.scalers.get(role.name, _first_value(desired, role, observed))
    return min(max(asked, role.scaling.least), role.scaling.most)


def _pool(desired: DesiredDeployment, role: RoleSpec, observed: ObservedState, worker_revision: str) -> ScaledRole:
    return ScaledRole(
        name=role.name,
        side=SIDES.get(role.type, PairSide.ALONE),
        target=_target_replicas(desired, role, observed),
        gpus=role.gpus.per_replica,
        surge=role.rollout.max_surge,
        unavailable=role.rollout.max_unavailable,
        revision=worker_revision,
        replicas=tuple(each.replicas for each in observed.children if each.role == role.name),
    )


def _bounds(desired: DesiredDeployment) -> ScalingBounds:
    balance = desired.spec.balance
    return ScalingBounds(
        gpu_budget=balance.gpu_budget,
        least=_ratio(balance.ratio.least),
        most=_ratio(balance.ratio.most),
        max_step=balance.max_step,
    )


def _ratio(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    return int(prefill), int(decode)


def _pruned(
    desired: DesiredDeployment, observed: ObservedState, pools: Sequence[ScaledRole], wanted: Sequence[Manifest]
) -> list[Action]:
    """Return actions that remove the deployment's unneeded children and all its other objects that are not desired.

    Examples are the objects of a removed role, and a ConfigMap whose child does not exist because the operator was
    killed between two writes. Also return actions that remove half-scheduled groups, and pods that run a user's own
    command and were left behind by a restart of their group (`ObservedChild.half_scheduled`,
    `ObservedChild.left_behind`).
    """
    targets_of = {pool.name: (pool.revision, pool.target) for pool in pools}
    used = {_key(each) for each in wanted}
    # The operator does not delete left-behind pods that run Fleet's own process: such processes notice the restart of
    # another rank, and restart by themselves (`workers.rank_rendezvous`).
    foreign = {role.name for role in desired.workers if is_foreign(role)}
    actions: list[Action] = []
    for each in observed.children:
        if not each.kind:
            continue
        revision_now, target = targets_of.get(each.role, ("", 0))
        names = each.members or (each.name,)
        if each.role not in targets_of and each.replicas.asked:
            actions += _emptied(each)
        elif not each.replicas.there and not (each.replicas.revision == revision_now and target):
            actions += [Remove(each.kind, name) for name in names if name]
            continue
        actions += [Remove(each.kind, name) for name in each.half_scheduled[-1:]]
        actions += [DeletePod(pod) for pod in each.left_behind if each.role in foreign]
        used.add(("ConfigMap", child_name(desired, each.role, each.replicas.revision)))
    actions += [Remove(kinds.DEPLOYMENT.name, name) for name in observed.old_routers]
    # Orphans are not removed: an orphan may be a copy of a child object that a user has made.
    used |= observed.orphans
    own = [key for key in observed.digests if key[0] not in {*CONTROLLERS, "RoleScaler"} and key not in used]
    scaled = {f"{desired.name}-{role.name}" for role in _scaled(desired)}
    own += [("RoleScaler", name) for name in sorted(observed.own_scalers - scaled)]
    return actions + [Remove(kind, name) for kind, name in own]


def _emptied(child: ObservedChild) -> list[Action]:
    if child.kind == "StatefulSet":
        return [Remove(child.kind, name) for name in child.members]
    return [Scale(child.kind, child.name, 0, child.replicas.asked)]
