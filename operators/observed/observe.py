"""Observation: computes the observed state of one deployment from the cached Kubernetes objects. Pure.

Rules:

1. A deployment owns the objects whose owner reference has its uid. An object with another owner does not belong to the
   deployment, even if its name and labels match. For example, a deployment that was deleted and created again does not
   own the objects of the deleted deployment. An object that has no owner and carries the operator's labels is an orphan; it is
   left over by `kubectl delete --cascade=orphan`. It belongs to the deployment that its labels name. An orphaned workload
   must also have the name that the operator would give it.
2. A replica is one pod, or a group of pods that start and end together. A group is ready when all of its pods are
   ready, and it is registered when its first pod is registered.
3. A group needs nodes for all of its pods. A scheduler that does not know groups may find nodes for only some of the
   pods. After one to two times PARTIAL_GROUP_SECONDS, such a group is removed, so that other groups can use these nodes. A
   group is also removed if the scheduler finds no node for any of its pods in the domain that was chosen, or outside the
   nodes that its pods must avoid.
4. A pod has ended when the API server does not have it any more. A pod that is being deleted still holds its GPUs.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar, cast
from zlib import crc32

import msgspec
from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.views import (
    CustomObject,
    KubernetesLease,
    NamedObject,
    Pod,
    WorkloadResource,
)
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleType
from operators.api.fields import Condition
from operators.manifests.names import (
    AVOIDED,
    DOMAIN,
    GATED,
    GROUP_LABEL,
    INSTANCE,
    MANAGED_BY,
    OPERATOR,
    REVISION,
    ROLE,
    ROUTER,
    SPEAKS_TLS,
    TYPE,
    GroupPlacement,
)
from operators.manifests.objects import DIGEST
from operators.observed.caches import InformerCaches
from operators.observed.drift import DriftDetector
from operators.observed.gates import GatedGroup, gated_group
from operators.observed.pod_troubles import troubles
from operators.observed.registrations import (
    ReportedWorkers,
    WorkerLease,
    WorkerRegistration,
    partly_unknown,
    registered,
)
from operators.observed.state import ObservedChild, ObservedRouter, ObservedState, PodDeletionCost
from operators.probes.evidence import ProbeEvidence, RunningPod
from operators.replica_steps import RevisionReplicas

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEADER_GROUP = "leaderworkerset.sigs.k8s.io/group-index"
PARTIAL_GROUP_SECONDS = 60
"""A group that has nodes for only a part of its pods is removed after one to two times this number of seconds, and then
created again. The time differs between groups, because two groups may each hold nodes that the other group needs. With
equal times they would be removed and created at the same moments, and could block each other for ever."""

GROUP_REJOIN_SECONDS = 60
"""Seconds within which a group has to become ready again after one of its pods has restarted. After this time, the pods that have
restarted less often than another pod of the group count as left behind (`ObservedChild.left_behind`)."""

Kept = TypeVar("Kept", bound=NamedObject)


class ForeignObjects(Struct, frozen=True):
    """Tells by the operator `in` whether an object, given as the pair (kind, name), exists and does not belong to the deployment.

    RoleScalers never count. The container cannot be iterated.
    """

    store: InformerCaches
    namespace: str
    deployment: str
    uid: str

    def __contains__(self, key: object) -> bool:
        kind, name = cast(tuple[str, str], key)
        found = self.store.any(kinds.BY_NAME[kind]).get(self.namespace, name)
        # The deployment also uses a RoleScaler that somebody else has created.
        return found is not None and not _is_owned(found, self.deployment, self.uid) and kind != kinds.ROLE_SCALER.name


def observe(
    store: InformerCaches,
    custom: CustomObject,
    spec: DisaggDeploymentSpec,
    reports: ReportedWorkers | None,
    now: datetime,
    served: OptionalKinds,
    evidence: ProbeEvidence | None = None,
    drift: DriftDetector | None = None,
) -> ObservedState:
    """Return the observed state of one deployment.

    Args:
        store: Caches of all objects.
        custom: The DisaggDeployment as it is on the API server.
        spec: The deployment's specification.
        reports: Workers that the deployment's routers report, or None if no router has reported.
        now: Time of the wall clock.
        served: The optional kinds that the API server has.
        evidence: The results of probes, or None if the operator sends no probes.
        drift: Detects children that others have changed; None: no child counts as changed.
    """
    namespace, name, uid = custom.metadata.namespace, custom.metadata.name, custom.metadata.uid
    pods = tuple(store.of(kinds.POD, Pod).of(namespace, name).values())
    leases = tuple(
        WorkerLease(
            holder=each.spec.holder_identity or "",
            renewed=each.renewed,
            duration_seconds=each.spec.lease_duration_seconds or 0,
            annotations=each.metadata.annotations,
        )
        for each in store.of(kinds.LEASE, KubernetesLease).of(namespace, name).values()
    )
    known = registered(leases, reports, now)
    routers = {pod.metadata.name for pod in routers_of(pods) if pod.ready}
    reports_of_ready = (
        None if reports is None else {router: workers for router, workers in reports.items() if router in routers}
    )
    partly_known = partly_unknown(leases, reports_of_ready, now)
    controllers = [
        (kind, each)
        for kind in kinds.WORKLOAD_KINDS
        for each in _owned(store.of(kind, WorkloadResource).of(namespace, name), name, uid)
    ]
    owned = {
        (kind.name, each.metadata.name): each
        for kind in (*kinds.WORKLOAD_KINDS, *kinds.SUPPORTING_KINDS)
        for each in _owned(store.any(kind).of(namespace, name), name, uid)
    }
    router = next((role.name for role in spec.roles if role.type is RoleType.ROUTER), ROUTER)
    domains = {role.name: role.topology.domain for role in spec.roles if role.topology.domain}
    products = [role.gpus.product for role in spec.roles if role.gpus.product]
    return ObservedState(
        children=tuple(_children(controllers, pods, known, partly_known, now)),
        digests={key: each.metadata.annotations.get(DIGEST, "") for key, each in owned.items()},
        drifted=frozenset(key for key, each in owned.items() if drift is not None and drift.drifted(each)),
        orphans=frozenset(key for key, each in owned.items() if not each.metadata.owner_uid),
        foreign=ForeignObjects(store, namespace, name, uid),
        scalers={role: each.spec.get("replicas", 1) for role, each in scalers_of(store, namespace, name).items()},
        sizes=_sizes(custom),
        own_scalers=frozenset(
            each.metadata.name for each in _owned(store.any(kinds.ROLE_SCALER).of(namespace, name), name, uid)
        ),
        conditions=conditions_of(custom),
        generation=custom.metadata.generation,
        router=_router(router, controllers, pods),
        old_routers=tuple(
            each.metadata.name for kind, each in controllers if _routes(kind, each) and not _is_of(each, router)
        ),
        registrations_known=known is not None,
        partly_known={
            pod.metadata.name: partly_known[pod.metadata.name]
            for pod in pods
            if pod.metadata.name in partly_known and pod.alive
        },
        silent_routers=tuple(sorted(routers - reports_of_ready.keys())) if reports_of_ready else (),
        evidence=evidence,
        proved=_text(custom.status.get("proved")),
        troubles=troubles(pods, (each for _, each in controllers), products, domains),
        deletion_costs=_deletion_costs(pods, known or {}),
        served=served,
    )


def conditions_of(custom: CustomObject) -> tuple[Condition, ...]:
    """Return the conditions in the status of an object; empty if somebody else has written invalid conditions."""
    try:
        return msgspec.convert(custom.status.get("conditions", []), tuple[Condition, ...])
    except msgspec.ValidationError:
        return ()


def scalers_of(store: InformerCaches, namespace: str, deployment: str) -> dict[str, CustomObject]:
    """Return the RoleScalers of a deployment by role.

    If a role has several RoleScalers, use the RoleScaler whose name is `<deployment>-<role>`, which the operator creates,
    or else the RoleScaler whose name sorts first.
    """
    found: dict[str, CustomObject] = {}
    for name, each in sorted(store.of(kinds.ROLE_SCALER, CustomObject).of(namespace, deployment).items(), reverse=True):
        role = str(each.spec.get("target", {}).get("role"))
        if role not in found or found[role].metadata.name != f"{deployment}-{role}":
            found[role] = each
        assert each.metadata.name == name
    return found


def routers_of(pods: Iterable[Pod]) -> Iterator[Pod]:
    """Yield the router pods that are not being deleted, except those with the phase Succeeded or Failed."""
    return (pod for pod in pods if pod.alive and pod.metadata.labels.get(TYPE) == RoleType.ROUTER)


def _text(value: object) -> str:
    """Return the text in a field of a status; empty if somebody else has written a value that is not a text."""
    return value if isinstance(value, str) else ""


def _running(pods: Iterable[Pod]) -> tuple[RunningPod, ...]:
    return tuple(sorted(RunningPod(pod.metadata.name, pod.restarts, pod.metadata.uid) for pod in pods))


def _owned(named: Mapping[str, Kept], deployment: str, uid: str) -> Iterator[Kept]:
    return (each for each in named.values() if _is_owned(each, deployment, uid))


def _is_owned(item: NamedObject, deployment: str, uid: str) -> bool:
    metadata = item.metadata
    if metadata.owner_references:
        return metadata.owner_uid == uid
    ours = {MANAGED_BY: OPERATOR, INSTANCE: deployment}
    return ours.items() <= metadata.labels.items() and not metadata.deleted and _has_our_name(item, deployment)


def _has_our_name(item: NamedObject, deployment: str) -> bool:
    """Return whether the operator may have created an object that has no owner.

    A workload must have the name that the operator would give it. Its labels alone prove nothing, because a user's copy of
    the workload has the same labels. For objects of all other kinds, return True.
    """
    if not isinstance(item, WorkloadResource):
        # The operator applies objects of other kinds only under its own names, and never removes orphans of these kinds. So
        # it does no harm to another object that has its labels.
        return True
    labels = item.metadata.labels
    parts = (deployment, labels.get(ROLE), labels.get(REVISION), labels.get(GROUP_LABEL))
    return item.metadata.name == "-".join(part for part in parts if part)


def _sizes(custom: CustomObject) -> dict[str, int]:
    """Return the desired number of replicas of each role, as the status of the deployment records it."""
    roles = custom.status.get("roles")
    found = [each for each in roles if isinstance(each, dict)] if isinstance(roles, list) else []
    return {
        name: size
        for each in found
        if isinstance(name := each.get("name"), str) and isinstance(size := each.get("desired", 0), int)
    }


def _routes(kind: ApiKind, controller: WorkloadResource) -> bool:
    """Return whether a workload is a Deployment of routers; only such Deployments have no revision."""
    return kind == kinds.DEPLOYMENT and REVISION not in controller.metadata.labels


def _is_of(item: NamedObject, role: str) -> bool:
    return item.metadata.labels.get(ROLE) == role


def _router(
    role: str, controllers: Iterable[tuple[ApiKind, WorkloadResource]], pods: Iterable[Pod]
) -> ObservedRouter | None:
    for kind, each in controllers:
        if _routes(kind, each) and _is_of(each, role):
            current = each.status.observed_generation >= each.metadata.generation
            # A pod without an owner does not count: somebody has changed its labels, so its ReplicaSet has replaced it
            # by another pod.
            ready = [pod for pod in routers_of(pods) if pod.ready and pod.metadata.owner_uid and _is_of(pod, role)]
            return ObservedRouter(
                name=each.metadata.name,
                asked=each.spec.replicas,
                replicas=each.status.replicas,
                # The status and the pods come from two watches, so one of the two may be outdated. The smaller number
                # counts.
                ready=min(each.status.ready_replicas, len(ready)) if current else 0,
                updated=each.status.updated_replicas if current else 0,
                pods=_running(ready),
                addresses=tuple(sorted(pod.status.pod_ip for pod in ready if pod.status.pod_ip)),
                tls=any(SPEAKS_TLS in pod.metadata.labels for pod in ready),
            )
    return None


def _children(
    controllers: Iterable[tuple[ApiKind, WorkloadResource]],
    pods: Iterable[Pod],
    known: Mapping[str, WorkerRegistration] | None,
    partly_known: Container[str],
    now: datetime,
) -> Iterator[ObservedChild]:
    """Yield the observed child of each role and revision that has a workload object, or at least a pod."""
    by_child: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        labels = pod.metadata.labels
        if REVISION in labels and ROLE in labels and labels.get(TYPE) != RoleType.ROUTER:
            by_child.setdefault((labels[ROLE], labels[REVISION]), []).append(pod)
    groups: dict[tuple[str, str], list[WorkloadResource]] = {}
    for kind, each in controllers:
        labels = each.metadata.labels
        if REVISION not in labels:
            continue
        key = (labels.get(ROLE, ""), labels[REVISION])
        if kind == kinds.STATEFUL_SET:
            groups.setdefault(key, []).append(each)
            continue
        yield _child(kind.name, each.metadata.name, key, each.spec.replicas, by_child.pop(key, []), known, partly_known)
    for key, sets in groups.items():
        yield _group_child(key, sets, by_child.pop(key, []), known, partly_known, now)
    for key, left in by_child.items():
        yield _child("", "", key, 0, left, known, partly_known)


def _group_child(
    key: tuple[str, str],
    sets: Iterable[WorkloadResource],
    pods: Sequence[Pod],
    known: Mapping[str, WorkerRegistration] | None,
    partly_known: Container[str],
    now: datetime,
) -> ObservedChild:
    """Return what exists of one role in one revision, if each of its replicas is a StatefulSet of its own (a worker group)."""
    staying = {each.metadata.name: each for each in sets if not each.metadata.deleted}
    sizes = {each.metadata.labels.get(GROUP_LABEL, ""): each.spec.replicas for each in sets}
    half_scheduled, left_behind, ready, warm = [], [], [], {}
    placements: dict[str, GroupPlacement] = {}
    nodes: dict[str, tuple[str, ...]] = {}
    gated: list[GatedGroup] = []
    reports = known if known is not None else {}
    for name, each in sorted(staying.items()):
        members = [pod for pod in pods if pod.alive and pod.metadata.owner_uid == each.metadata.uid]
        placements[name] = _placement(each)
        nodes[name] = tuple(sorted({pod.spec.node_name for pod in members if pod.spec.node_name}))
        before = now - timedelta(seconds=PARTIAL_GROUP_SECONDS + crc32(name.encode()) % PARTIAL_GROUP_SECONDS)
        if _is_half_scheduled(members, before) or (placements[name].chosen and _is_unscheduled(members, before)):
            half_scheduled.append(name)
        if placements[name].gated and len(members) >= each.spec.replicas:
            gated.append(gated_group(name, members, unplaced=_is_unscheduled(members, before)))
        registrations = [reports[pod.metadata.name] for pod in members if pod.metadata.name in reports]
        if members and _group_ready(members, each.spec.replicas) and (known is None or registrations):
            ready.append(name)
        if blocks := [found.warm_blocks for found in registrations if found.warm_blocks is not None]:
            warm[name] = sum(blocks)
        left_behind += _left_behind(members, now - timedelta(seconds=GROUP_REJOIN_SECONDS))
    child = _child(kinds.STATEFUL_SET.name, "", key, len(staying), pods, known, partly_known, sizes)
    return msgspec.structs.replace(
        child,
        members=tuple(sorted(staying)),
        ready_members=tuple(ready),
        warm=warm,
        half_scheduled=tuple(half_scheduled),
        placements=placements,
        nodes=nodes,
        gated=tuple(gated),
        left_behind=tuple(left_behind),
    )


def _is_half_scheduled(pods: Sequence[Pod], before: datetime) -> bool:
    """Return whether some pods of a group have a node, while another pod began to wait for a node before `before`."""
    unplaced = [pod.unplaced_since for pod in pods if pod.unplaced_since is not None]
    return len(pods) > len(unplaced) > 0 and min(unplaced) < before


def _is_unscheduled(pods: Sequence[Pod], before: datetime) -> bool:
    """Return whether all pods of a group still wait for a node, and began to wait earlier than `before`."""
    return bool(pods) and all(pod.unplaced_since is not None and pod.unplaced_since < before for pod in pods)


def _placement(controller: WorkloadResource) -> GroupPlacement:
    """Return where the annotations of a StatefulSet let its pods run: the domain, the avoided nodes, and the gate."""
    annotations = controller.metadata.annotations
    avoided = annotations.get(AVOIDED, "")
    return GroupPlacement(
        domain=annotations.get(DOMAIN, "").partition("=")[2],
        avoided=tuple(avoided.split(",")) if avoided else (),
        gated=bool(annotations.get(GATED)),
    )


def _left_behind(pods: Sequence[Pod], before: datetime) -> list[str]:
    """Return the names of the pods that have restarted less often than another pod of their group.

    The list is empty if a container of a pod with the most restarts last ended after the instant `before`, because the group
    still has time to become ready. It is also empty if no such end is known, or if all pods of the group are ready again.
    """
    most = max((pod.restarts for pod in pods), default=0)
    ended = [
        each.last_state.terminated.finished_at
        for pod in pods
        if pod.restarts == most
        for each in pod.status.container_statuses or ()
        if each.last_state.terminated is not None and each.last_state.terminated.finished_at is not None
    ]
    if not ended or max(ended) > before or all(pod.ready for pod in pods):
        return []
    return [pod.metadata.name for pod in pods if pod.restarts < most]


def _child(
    kind: str,
    name: str,
    key: tuple[str, str],
    asked: int,
    pods: Iterable[Pod],
    known: Mapping[str, WorkerRegistration] | None,
    partly_known: Container[str],
    sizes: Mapping[str, int] | None = None,
) -> ObservedChild:
    replicas: dict[str, list[Pod]] = {}
    for pod in pods:
        labels = pod.metadata.labels
        group = labels.get(GROUP_LABEL) or labels.get(LEADER_GROUP) or pod.metadata.name
        replicas.setdefault(group, []).append(pod)
    alive = {group: found for group, each in replicas.items() if (found := [pod for pod in each if pod.alive])}
    ready = [group for group, each in alive.items() if _group_ready(each, (sizes or {}).get(group))]
    registered_ones = [
        group for group, each in alive.items() if known is None or any(pod.metadata.name in known for pod in each)
    ]
    serving = set(ready) & set(registered_ones)
    of_all = [
        group
        for group in registered_ones
        if known is not None
        and any(pod.metadata.name in known and pod.metadata.name not in partly_known for pod in alive[group])
    ]
    return ObservedChild(
        kind=kind,
        name=name,
        role=key[0],
        replicas=RevisionReplicas(
            revision=key[1],
            asked=asked,
            pods=len(alive),
            ready=len(serving),
            leaving=sum(
                any(pod.metadata.deleted for pod in each) for group, each in replicas.items() if group not in alive
            ),
        ),
        ready_pods=len(ready),
        registered=len(of_all),
        serving=_running(pod for group in serving for pod in alive[group] if pod.metadata.name in (known or ())),
    )


def _group_ready(pods: Iterable[Pod], size: int | None) -> bool:
    every = list(pods)
    size = size or int(every[0].metadata.annotations.get("leaderworkerset.sigs.k8s.io/size", "1") or 1)
    return len(every) >= size and all(pod.ready for pod in every)


def _deletion_costs(
    pods: Iterable[Pod], known: Mapping[str, WorkerRegistration]
) -> dict[tuple[str, str], tuple[PodDeletionCost, ...]]:
    """Return the deletion costs of all worker pods that are not part of a worker group, by role and revision."""
    found: dict[tuple[str, str], list[PodDeletionCost]] = {}
    for pod in pods:
        labels = pod.metadata.labels
        if (
            not pod.alive
            or REVISION not in labels
            or ROLE not in labels
            or LEADER_GROUP in labels
            or GROUP_LABEL in labels
        ):
            continue
        warm = known[pod.metadata.name].warm_blocks if pod.metadata.name in known else None
        worth = PodDeletionCost(pod=pod.metadata.name, blocks=warm, said=pod.metadata.annotations.get(DELETION_COST))
        found.setdefault((labels[ROLE], labels[REVISION]), []).append(worth)
    return {key: tuple(sorted(each, key=lambda worth: worth.pod)) for key, each in found.items()}
