"""Reconciliation: a cluster that follows its objects reaches the desired state, even if the operator is interrupted."""

import random

import msgspec
import pytest

from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.controller.reconcile import Apply, DeletePod, Remove, Scale, SetDeletionCost, reconcile
from operators.manifests.names import REVISION, ROLE, DesiredDeployment
from operators.manifests.objects import DIGEST
from operators.manifests.pods import Images
from operators.observed.state import ApiRefusal, ObservedChild, ObservedRouter, ObservedState, PodDeletionCost
from operators.replica_steps import RevisionReplicas

IMAGES = Images(router="router", worker_cpu="cpu", worker_cuda="cuda", worker_rocm="rocm")
NOW, LATER = "2026-11-22T00:00:00Z", "2026-11-22T01:00:00Z"


def desired_deployment(*roles, **spec):
    roles = roles or ({"name": "prefill", "type": "prefill"}, {"name": "decode", "type": "decode", "replicas": 2})
    content = {"model": {"name": "m"}, "roles": list(roles)} | spec
    return DesiredDeployment(name="dd", namespace="ns", uid="1", spec=msgspec.convert(content, DisaggDeploymentSpec))


class Cluster:
    """Fake cluster: it keeps applied objects, and starts and ends pods when the test lets time pass."""

    def __init__(self):
        self.objects = {}
        self.pods = {}  # by kind and name: pods, ready, leaving
        self.conditions = ()
        self.writes = []
        self.registers = True

    def observed(self, foreign=frozenset()):
        children = []
        for (kind, name), each in self.objects.items():
            labels = each["metadata"].get("labels", {})
            if kind in ("Deployment", "LeaderWorkerSet") and REVISION in labels:
                pods, ready, leaving = self.pods.get((kind, name), (0, 0, 0))
                replicas = RevisionReplicas(
                    revision=labels[REVISION], asked=each["spec"]["replicas"], pods=pods, ready=ready, leaving=leaving
                )
                known = {"ready_pods": ready, "registered": ready if self.registers else 0}
                children.append(ObservedChild(kind=kind, name=name, role=labels[ROLE], replicas=replicas, **known))
        return ObservedState(
            children=tuple(children),
            digests={key: each["metadata"]["annotations"][DIGEST] for key, each in self.objects.items()},
            foreign=foreign,
            scalers={
                each["spec"]["target"]["role"]: each["spec"]["replicas"]
                for (kind, _), each in self.objects.items()
                if kind == "RoleScaler"
            },
            own_scalers=frozenset(name for kind, name in self.objects if kind == "RoleScaler"),
            conditions=self.conditions,
            generation=1,
            router=self.router(),
            registrations_known=self.registers,
        )

    def router(self):
        found = self.objects.get(("Deployment", "dd-router"))
        if found is None:
            return None
        asked = found["spec"]["replicas"]
        return ObservedRouter(name="dd-router", asked=asked, replicas=asked, ready=asked, updated=asked)

    def do(self, action):
        self.writes.append(action)
        match action:
            case Apply(manifest):
                key = manifest["kind"], manifest["metadata"]["name"]
                kept = self.objects.get(key, {}).get("spec", {}).get("replicas")
                self.objects[key] = msgspec.json.decode(msgspec.json.encode(manifest))
                if kept is not None and "replicas" not in manifest["spec"]:
                    self.objects[key]["spec"]["replicas"] = kept
            case Scale(kind, name, replicas):
                self.objects[kind, name]["spec"]["replicas"] = replicas
            case Remove(kind, name):
                self.objects.pop((kind, name), None)
        self.check()

    def check(self):
        """Assert that every ConfigMap exists that a pod template refers to."""
        for (kind, _), each in self.objects.items():
            if kind == "Deployment":
                for volume in each["spec"]["template"]["spec"]["volumes"]:
                    assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in self.objects

    def pass_time(self):
        for each in self.observed().children:
            asked, pods, leaving = each.replicas.asked, each.replicas.pods, each.replicas.leaving
            self.pods[each.kind, each.name] = (asked, min(asked, pods), max(0, pods - asked) if not leaving else 0)

    def settle(self, desired, most=100):
        """Reconcile and let time pass until nothing is left to do; return the last status."""
        for _ in range(most):
            outcome = reconcile(desired, self.observed(), IMAGES, NOW)
            for action in outcome.actions:
                self.do(action)
            self.conditions = outcome.status.conditions
            before = dict(self.pods)
            self.pass_time()
            if not outcome.actions and self.pods == before:
                return outcome.status
        raise AssertionError("it never came to rest")


def condition(status, kind):
    return next(each for each in status.conditions if each.type == kind)


def replicas(cluster):
    return {each.role: each.replicas.asked for each in cluster.observed().children}


def test_empty_cluster_reaches_desired_state_and_rests():
    cluster = Cluster()

    status = cluster.settle(desired_deployment())

    assert condition(status, "Ready").status == "True"
    assert (status.ratio, status.ready_roles) == ("1:2", "3/3")
    assert replicas(cluster) == {"prefill": 1, "decode": 2}
    assert reconcile(desired_deployment(), cluster.observed(), IMAGES, LATER).actions == ()


def test_new_specification_rolls_out_completely():
    cluster = Cluster()
    old = cluster.settle(desired_deployment()).update_revision

    status = cluster.settle(desired_deployment(image="another"))

    assert status.update_revision != old
    assert {each.replicas.revision for each in cluster.observed().children} == {status.update_revision}
    assert not any(old in name for _, name in cluster.objects)
    assert replicas(cluster) == {"prefill": 1, "decode": 2}


@pytest.mark.parametrize("seed", range(40))
def test_operator_killed_after_any_write_reaches_the_same_end(seed):
    chance = random.Random(seed)
    wishes = [
        desired_deployment(),
        desired_deployment(image="another"),
        desired_deployment(suspend=True),
        desired_deployment(balance={"gpuBudget": 3}),
    ]
    last = chance.choice(wishes)
    expected = Cluster()
    expected.settle(last)

    cluster = Cluster()
    for _ in range(chance.randint(1, 15)):
        actions = reconcile(chance.choice(wishes), cluster.observed(), IMAGES, NOW).actions
        for action in actions[: chance.randint(0, len(actions))]:  # the operator dies after some of the actions
            cluster.do(action)
        cluster.pass_time()
    cluster.settle(last)

    def kept(of):
        return {key: each["metadata"]["annotations"][DIGEST] for key, each in of.objects.items()}

    assert kept(cluster) == kept(expected)
    assert replicas(cluster) == replicas(expected)


def test_scaled_role_follows_its_scaler():
    def desired(count):
        return desired_deployment(
            {"name": "all", "type": "aggregated", "replicas": count, "scaling": {"mode": "External", "most": 5}}
        )

    cluster = Cluster()
    cluster.settle(desired(2))
    assert replicas(cluster) == {"all": 2}

    cluster.settle(desired(4))
    assert replicas(cluster) == {"all": 2}

    cluster.do(Scale("RoleScaler", "dd-all", 9))
    status = cluster.settle(desired(4))
    assert replicas(cluster) == {"all": 5}
    assert status.roles[0].desired == 5
    assert not [
        each for each in cluster.writes[1:] if isinstance(each, Apply) and each.manifest["kind"] == "RoleScaler"
    ][1:]


def test_foreign_object_with_our_name_is_left_and_reported():
    outcome = reconcile(desired_deployment(), ObservedState(foreign=frozenset({("Service", "dd-router")})), IMAGES, NOW)

    assert not [
        each
        for each in outcome.actions
        if each.manifest["metadata"]["name"] == "dd-router" and each.manifest["kind"] == "Service"
    ]
    assert condition(outcome.status, "Ready").reason == "NameTaken"
    assert "Service dd-router" in condition(outcome.status, "Degraded").message


def test_too_small_budget_is_a_condition():
    roles = [
        {"name": name, "type": name, "replicas": 2, "gpus": {"perReplica": 4}, "parallelism": {"tensor": 4}}
        for name in ("prefill", "decode")
    ]
    cluster = Cluster()

    status = cluster.settle(desired_deployment(*roles, balance={"gpuBudget": 12}))

    assert status.gpus == 12
    assert condition(status, "ScalingLimited").status == "True"
    assert "1 of 2" in condition(status, "ScalingLimited").message


def test_condition_keeps_its_time_while_status_is_equal():
    cluster = Cluster()
    cluster.settle(desired_deployment())

    same = reconcile(desired_deployment(), cluster.observed(), IMAGES, LATER).status
    changed = reconcile(desired_deployment(image="another"), cluster.observed(), IMAGES, LATER).status

    assert condition(same, "Ready").last_transition_time == NOW
    assert condition(changed, "Ready").last_transition_time == LATER


def test_removed_role_is_emptied_then_deleted():
    aside = {"name": "aside", "type": "aggregated"}
    both = [{"name": "prefill", "type": "prefill"}, {"name": "decode", "type": "decode"}]
    cluster = Cluster()
    cluster.settle(desired_deployment(*both, aside))

    cluster.settle(desired_deployment(*both))

    assert replicas(cluster) == {"prefill": 1, "decode": 1}
    assert not [name for kind, name in cluster.objects if name.startswith("dd-aside-")]


def actions(observed, desired=None):
    return reconcile(desired or desired_deployment(), observed, IMAGES, NOW).actions


def test_deletion_costs_are_annotated_before_scale_down():
    cluster = Cluster()
    cluster.settle(desired_deployment())
    desired = desired_deployment({"name": "prefill", "type": "prefill"}, {"name": "decode", "type": "decode"})
    observed = cluster.observed()
    [child] = [each for each in observed.children if each.role == "decode"]
    deletion_costs = (
        PodDeletionCost(pod="a", blocks=5),
        PodDeletionCost(pod="b", blocks=7, said="7"),
        PodDeletionCost(pod="c", blocks=None),
    )

    said = actions(
        msgspec.structs.replace(observed, deletion_costs={("decode", child.replicas.revision): deletion_costs}), desired
    )

    assert said == (SetDeletionCost("a", 5), Scale("Deployment", child.name, 1, 2))


@pytest.mark.parametrize(
    ("ready", "warm", "gone"),
    [
        ((0, 1, 2), {0: 90, 1: 7, 2: 500}, [1]),
        ((0, 1, 2), {0: 90, 2: 500}, [1]),  # pod 1 is new, so nothing is known about its blocks
        ((0, 1), {0: 1, 1: 7, 2: 500}, [2]),  # pod 2 is not ready, so it goes first, whatever it holds
        ((0, 1, 2), {}, [2]),
        ((0, 1, 2), {0: 3, 1: 3, 2: 3}, [2]),
    ],
)
def test_group_with_fewest_warm_blocks_goes_first(ready, warm, gone):
    desired = desired_deployment({"name": "all", "type": "aggregated", "replicas": 2})
    observed = settled_seen(desired)
    [child] = observed.children
    groups = msgspec.structs.replace(
        child,
        kind="StatefulSet",
        replicas=msgspec.structs.replace(child.replicas, asked=3, pods=3, ready=len(ready)),
        members=("x-0", "x-1", "x-2"),
        ready_members=tuple(f"x-{index}" for index in ready),
        warm={f"x-{index}": blocks for index, blocks in warm.items()},
    )

    said = actions(msgspec.structs.replace(observed, children=(groups,)), desired)

    assert [each for each in said if isinstance(each, Remove)] == [
        Remove("StatefulSet", f"x-{index}") for index in gone
    ]


@pytest.mark.parametrize(("container", "ends"), [({"command": ["serve"]}, [DeletePod("p")]), ({"args": ["--x"]}, [])])
def test_half_group_is_removed_and_left_behind_pods_restart(container, ends):
    template = {"spec": {"containers": [{"name": "main"} | container]}}
    desired = desired_deployment({"name": "all", "type": "aggregated", "podTemplate": template})
    observed = settled_seen(desired)
    [child] = observed.children
    torn = msgspec.structs.replace(
        child, kind="StatefulSet", members=("x-0", "x-1"), half_scheduled=("x-0", "x-1"), left_behind=("p",)
    )

    said = actions(msgspec.structs.replace(observed, children=(torn,)), desired)

    assert [each for each in said if isinstance(each, Remove | DeletePod)] == [Remove("StatefulSet", "x-1"), *ends]


def settled_seen(desired):
    cluster = Cluster()
    cluster.settle(desired)
    return cluster.observed()


def test_afresh_applies_everything_with_current_replicas():
    observed = settled_seen(desired_deployment())

    again = actions(msgspec.structs.replace(observed, afresh=True))

    assert {(each.manifest["kind"], each.manifest["metadata"]["name"]) for each in again} == set(observed.digests)
    assert {each.manifest["spec"]["replicas"] for each in again if each.manifest["kind"] == "Deployment"} == {1, 2}
    assert actions(observed) == ()


def test_unregistered_workers_are_not_ready():
    cluster = Cluster()
    cluster.registers = False
    status = cluster.settle(desired_deployment())
    nobody = reconcile(
        desired_deployment(), msgspec.structs.replace(cluster.observed(), registrations_known=True), IMAGES, NOW
    ).status

    assert (condition(status, "Ready").reason, condition(status, "RolesRegistered").status) == (
        "RegistrationUnknown",
        "Unknown",
    )
    assert (condition(nobody, "Ready").reason, condition(nobody, "RolesRegistered").status) == (
        "NotRegistered",
        "False",
    )


def test_api_refusal_is_the_reason_of_not_ready():
    refusal = ApiRefusal("Deployment", "dd-all", "Invalid", "spec.x: must be positive")

    status = reconcile(desired_deployment(), ObservedState(refusals=(refusal,)), IMAGES, NOW).status

    assert (condition(status, "Ready").reason, condition(status, "Degraded").reason) == ("Invalid", "Invalid")
    assert condition(status, "Ready").message == "Deployment dd-all: spec.x: must be positive"


def test_router_with_edited_scale_is_applied_again():
    observed = settled_seen(desired_deployment())
    scaled = msgspec.structs.replace(observed, router=msgspec.structs.replace(observed.router, asked=5))

    [again] = actions(scaled)

    assert (again.manifest["metadata"]["name"], again.manifest["spec"]["replicas"]) == ("dd-router", 1)


def test_rollout_without_room_is_reported():
    gpus = {"gpus": {"perReplica": 1}, "balance": {"gpuBudget": 3}}
    roles = [
        {"name": name, "type": name, "replicas": count, "gpus": gpus["gpus"]}
        for name, count in (("prefill", 1), ("decode", 2))
    ]
    cluster = Cluster()
    cluster.settle(desired_deployment(*roles, balance=gpus["balance"]))

    status = cluster.settle(desired_deployment(*roles, balance=gpus["balance"], image="another"))

    assert condition(status, "ScalingLimited").reason == "NoRoom"
    assert condition(status, "Ready").reason == "RollingOut"
