"""Observation of a deployment: ownership, pods, groups and registrations."""

from datetime import UTC, datetime, timedelta

import msgspec

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import OptionalKinds
from fleet.net.kubernetes.views import (
    ContainerState,
    ContainerStatus,
    ContainerTerminated,
    CustomObject,
    KubernetesLease,
    LeaseSpec,
    NamedObject,
    ObjectCondition,
    ObjectMetadata,
    OwnerReference,
    Pod,
    PodStatus,
    WorkloadResource,
    WorkloadSpec,
    WorkloadStatus,
)
from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.manifests.names import GROUP_LABEL, INSTANCE, REVISION, ROLE, SPEAKS_TLS, TYPE
from operators.observed.caches import InformerCaches
from operators.observed.observe import PARTIAL_GROUP_SECONDS, observe
from operators.observed.registrations import WARM, WorkerLease, WorkerRegistration, registered
from operators.probes.evidence import RunningPod

NOW = datetime(2026, 11, 22, tzinfo=UTC)
SPEC = msgspec.convert({"model": {"name": "m"}, "roles": [{"name": "all", "type": "aggregated"}]}, DisaggDeploymentSpec)
CUSTOM = CustomObject(metadata=ObjectMetadata(name="dd", namespace="ns", uid="dd-uid", generation=3))
LABELS = {INSTANCE: "dd", ROLE: "all", REVISION: "r1", TYPE: "aggregated"}
OLD = NOW - timedelta(seconds=3 * PARTIAL_GROUP_SECONDS)


def owned(name, by="dd-uid", **labels):
    owner = OwnerReference(kind="DisaggDeployment", name="dd", uid=by, controller=True)
    return ObjectMetadata(
        name=name, namespace="ns", uid=f"{name}-uid", owner_references=(owner,), labels=LABELS | labels
    )


def a_child(replicas=1, name="dd-all-r1", **labels):
    return WorkloadResource(metadata=owned(name, **labels), spec=WorkloadSpec(replicas=replicas))


def a_pod(name, *, of="dd-all-r1-uid", ready=True, deleted=None, unplaced=None, restarts=0, ended=None, **labels):
    owner = OwnerReference(kind="ReplicaSet", name="x", uid=of, controller=True)
    metadata = ObjectMetadata(
        name=name,
        namespace="ns",
        uid=name,
        labels=LABELS | labels,
        owner_references=(owner,),
        deletion_timestamp=deleted,
    )
    said = ObjectCondition(type="Ready", status=str(ready))
    if unplaced is not None:
        said = ObjectCondition(
            type="PodScheduled", status="False", reason="Unschedulable", last_transition_time=unplaced
        )
    last = ContainerState(terminated=ContainerTerminated(exit_code=1, finished_at=ended)) if ended else ContainerState()
    container = ContainerStatus(name="main", restart_count=restarts, last_state=last)
    return Pod(
        metadata=metadata, status=PodStatus(phase="Running", conditions=(said,), container_statuses=(container,))
    )


def a_lease(pod, *, renewed=NOW, seconds=30, holder=None):
    metadata = ObjectMetadata(name=pod, namespace="ns", labels=LABELS)
    spec = LeaseSpec(
        holder_identity=pod if holder is None else holder,
        lease_duration_seconds=seconds,
        renew_time=renewed.isoformat(),
    )
    return KubernetesLease(metadata=metadata, spec=spec)


def observed(*objects, reports=None, stateful=False):
    store = InformerCaches()
    for each in objects:
        kind = {
            Pod: kinds.POD,
            KubernetesLease: kinds.LEASE,
            WorkloadResource: kinds.STATEFUL_SET if stateful else kinds.DEPLOYMENT,
        }
        store.any(kind.get(type(each), kinds.SERVICE)).put(each)
    return observe(store, CUSTOM, SPEC, reports, NOW, OptionalKinds(leader_worker_sets=not stateful))


def test_replica_serves_when_ready_and_known_to_the_router():
    pods = [a_pod("a"), a_pod("b"), a_pod("c", ready=False)]

    [child] = observed(a_child(3), *pods, a_lease("a"), a_lease("c")).children

    assert (child.replicas.pods, child.ready_pods, child.registered, child.replicas.ready) == (3, 2, 2, 1)


def test_ended_or_released_lease_does_not_count():
    old, given_up = a_lease("a", renewed=NOW - timedelta(seconds=36)), a_lease("b", holder="")

    found = observed(a_child(2), a_pod("a"), a_pod("b"), old, given_up)
    nothing_told = observed(a_child(1), a_pod("a"))

    assert (found.registrations_known, found.children[0].registered) == (True, 0)
    # Without reports, ready pods count for scaling, so that a rollout can proceed; but the deployment is not Ready.
    assert (nothing_told.registrations_known, nothing_told.children[0].registered) == (False, 0)
    assert nothing_told.children[0].replicas.ready == 1


def test_router_reports_and_leases_both_count():
    found = observed(
        a_child(2),
        a_pod("a"),
        a_pod("b"),
        a_lease("a"),
        reports={"router": (WorkerRegistration(pod="b", warm_blocks=7),)},
    )

    assert found.children[0].registered == 2
    assert [(each.pod, each.blocks) for each in found.deletion_costs["all", "r1"]] == [("a", None), ("b", 7)]


def test_lease_without_warm_blocks_keeps_the_routers_number():
    lease = WorkerLease(holder="a", renewed=NOW, duration_seconds=9)
    reports = {"router": (WorkerRegistration(pod="a", warm_blocks=7),)}

    assert registered((lease,), reports, NOW)["a"].warm_blocks == 7
    said = msgspec.structs.replace(lease, annotations={WARM: "12"})
    assert registered((said,), reports, NOW)["a"].warm_blocks == 12
    assert registered((lease,), None, NOW)["a"].warm_blocks is None


def test_pods_without_a_controller_still_count():
    [left] = observed(a_pod("a", deleted="2026-01-01T00:00:00Z")).children

    assert (left.kind, left.replicas.asked, left.replicas.leaving, left.replicas.there) == ("", 0, 1, 1)


def test_children_of_a_former_namesake_are_foreign():
    service = NamedObject(metadata=owned("dd-router", by="uid of the one before"))

    found = observed(service)

    assert ("Service", "dd-router") in found.foreign
    assert ("Service", "dd-other") not in found.foreign
    assert found.digests == {}


def group(*pods):
    """Return the observed child object of one replica that consists of two pods."""
    one = a_child(2, name="dd-all-r1-0", **{GROUP_LABEL: "0"})
    return observed(one, *pods, stateful=True).children[0]


def member(name, **fields):
    return a_pod(name, of="dd-all-r1-0-uid", **fields, **{GROUP_LABEL: "0"})


def test_group_is_one_replica_and_ready_as_a_whole():
    whole = group(member("a"), member("b"), a_lease("a"))
    part = group(member("a"), a_lease("a"))

    assert (whole.replicas.pods, whole.replicas.ready, whole.registered) == (1, 1, 1)
    assert whole.serving == (RunningPod("a", uid="a"),), "the others answer no requests"
    assert (part.replicas.pods, part.replicas.ready) == (1, 0)


def test_group_counts_warm_blocks_of_all_its_pods():
    reports = {"router": (WorkerRegistration(pod="a", warm_blocks=7), WorkerRegistration(pod="b", warm_blocks=5))}
    sets = [a_child(1, name=f"dd-all-r1-{number}", **{GROUP_LABEL: str(number)}) for number in range(3)]
    pods = [
        a_pod(name, of=f"dd-all-r1-{number}-uid", ready=name != "d", **{GROUP_LABEL: str(number)})
        for name, number in (("a", 0), ("b", 0), ("c", 1), ("d", 2))
    ]

    [child] = observed(*sets, *pods, a_lease("c"), a_lease("d"), reports=reports, stateful=True).children

    assert child.members == ("dd-all-r1-0", "dd-all-r1-1", "dd-all-r1-2")
    assert child.warm == {"dd-all-r1-0": 12}
    assert child.ready_members == ("dd-all-r1-0", "dd-all-r1-1")


def test_renewed_lease_annotations_are_no_change():
    said, other = a_lease("a"), a_lease("a", renewed=NOW + timedelta(seconds=9))
    metadata = msgspec.structs.replace(other.metadata, annotations={WARM: "12"})

    assert said.essence() == msgspec.structs.replace(other, metadata=metadata).essence()
    assert said.essence() != a_lease("a", holder="").essence()


def test_half_placed_group_is_given_back_after_a_while():
    lately = NOW - timedelta(seconds=PARTIAL_GROUP_SECONDS / 2)

    assert group(member("a"), member("b", ready=False, unplaced=lately)).half_scheduled == ()
    assert group(member("a"), member("b", ready=False, unplaced=OLD)).half_scheduled == ("dd-all-r1-0",)
    # A group of which no pod has a node may wait, because it occupies nothing.
    waiting = [member(name, ready=False, unplaced=OLD) for name in "ab"]
    assert group(*waiting).half_scheduled == ()


def test_group_restarts_if_a_restarted_pod_is_not_taken_back():
    anew = member("a", ready=False, restarts=1, ended=OLD)

    assert group(anew, member("b")).left_behind == ("b",)
    assert group(msgspec.structs.replace(anew), member("b", ready=False, restarts=1, ended=OLD)).left_behind == ()
    assert group(member("a", ready=False, restarts=1, ended=NOW), member("b")).left_behind == ()
    assert group(member("a", restarts=1, ended=OLD), member("b")).left_behind == ()


def a_router(name, ready=True, **more):
    made = a_pod(name, ready=ready, of="dd-router-uid", **{ROLE: "router", TYPE: "router"} | more)
    labels = {key: value for key, value in made.metadata.labels.items() if key != REVISION}
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, labels=labels))


def registrations(*pods):
    return tuple(WorkerRegistration(pod=pod) for pod in pods)


def test_worker_is_registered_when_all_routers_know_it():
    pods = (a_router("r1"), a_router("r2"), a_pod("a"), a_pod("b"))

    found = observed(a_child(2), *pods, reports={"r1": registrations("a", "b"), "r2": registrations("a")})

    [child] = found.children
    assert (child.registered, child.replicas.ready) == (1, 2), "nobody takes a worker away that gets requests"
    assert found.partly_known == {"b": ("r2",)}
    leased = observed(
        a_child(2), *pods, a_lease("b"), reports={"r1": registrations("a", "b"), "r2": registrations("a")}
    )
    assert (leased.children[0].registered, leased.partly_known) == (2, {}), "a Lease is read by all"


def test_only_ready_routers_have_to_report_workers():
    pods = (a_router("r1"), a_router("r2", ready=False), a_pod("a"))

    starting = observed(a_child(1), *pods, reports={"r1": registrations("a"), "r2": ()})
    incomplete = observed(a_child(1), *pods[1:], a_router("r1"), a_router("r3"), reports={"r1": registrations("a")})

    assert (starting.children[0].registered, starting.silent_routers) == (1, ())
    assert incomplete.silent_routers == ("r3",)
    assert observed(a_child(1), *pods, a_lease("a")).silent_routers == (), "nobody is asked"


def test_serving_pods_are_listed_with_their_restarts():
    pods = (a_pod("b", restarts=2), a_pod("a"), a_pod("c", ready=False), a_pod("d"))

    found = observed(a_child(4), *pods, a_router("r1"), reports={"r1": registrations("a", "b", "c")})

    assert found.children[0].serving == (RunningPod("a", uid="a"), RunningPod("b", 2, "b"))
    router = observed(msgspec.structs.replace(a_child(), metadata=without_revision("dd-router")), a_router("r1")).router
    assert router.pods == (RunningPod("r1", uid="r1"),)


def test_routers_are_ready_when_status_and_pods_both_say_so():
    routers = WorkloadResource(
        metadata=without_revision("dd-router"),
        spec=WorkloadSpec(replicas=2),
        status=WorkloadStatus(replicas=2, ready_replicas=1, updated_replicas=2),
    )

    assert observed(routers).router.ready == 0
    assert observed(routers, a_router("r1", ready=False)).router.ready == 0
    assert observed(routers, a_router("r1")).router.ready == 1
    assert observed(routers, a_router("r1"), a_router("r2")).router.ready == 1


def test_routers_speak_tls_if_a_ready_one_does():
    routers = msgspec.structs.replace(a_child(), metadata=without_revision("dd-router"))
    plain, secured = a_router("r1"), a_router("r2", **{SPEAKS_TLS: "true"})
    waiting = a_router("r2", ready=False, **{SPEAKS_TLS: "true"})

    assert not observed(routers, plain).router.tls
    assert not observed(routers, plain, waiting).router.tls
    assert observed(routers, secured).router.tls
    assert observed(routers, plain, secured).router.tls  # during a rollout, in which no probe is sent


def test_router_pod_without_an_owner_is_not_counted():
    routers = msgspec.structs.replace(a_child(), metadata=without_revision("dd-router"))
    detached = a_router("r2")
    detached = msgspec.structs.replace(
        detached, metadata=msgspec.structs.replace(detached.metadata, owner_references=())
    )

    assert observed(routers, a_router("r1"), detached).router.pods == (RunningPod("r1", uid="r1"),)


def test_routers_of_a_renamed_role_are_old():
    old = msgspec.structs.replace(without_revision("dd-old"), labels=without_revision("dd-old").labels | {ROLE: "old"})
    current = msgspec.structs.replace(a_child(), metadata=without_revision("dd-router"))

    found = observed(msgspec.structs.replace(a_child(), metadata=old), current, a_router("r1"))

    assert (found.router.name, found.old_routers) == ("dd-router", ("dd-old",))


def without_revision(name):
    made = owned(name, **{ROLE: "router"})
    return msgspec.structs.replace(made, labels={key: value for key, value in made.labels.items() if key != REVISION})
