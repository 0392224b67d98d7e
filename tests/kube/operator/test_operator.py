"""Operator on an API server: the objects and the status that it writes, and the objects that it does not touch."""

import json
import logging
import time

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from operators.controller import loop as looking
from operators.observed.registrations import WorkerRegistration
from operators.status import rate_limiter as pace
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

GPU = {"gpus": {"perReplica": 1, "product": "NVIDIA-H100-80GB-HBM3"}}
EXTERNAL = {"scaling": {"mode": "External", "most": 5}}


async def test_deployment_becomes_pods_and_ready(asked):
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)

    status = asked.status()
    assert asked.replicas() == {"prefill": 1, "decode": 2}
    assert (status["ratio"], status["observedGeneration"], status["readyRoles"]) == ("1:2", 1, "3/3")
    assert {each["name"]: (each["ready"], each["registered"]) for each in status["roles"]} == {
        "prefill": (1, 1),
        "decode": (2, 2),
        "router": (1, 1),
    }


async def test_change_writes_children_once_and_status_twice(asked, monkeypatch):
    monkeypatch.setattr(pace, "SHORT", Nanos(SECOND))  # as in production
    async with an_operator(asked) as operator:
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        made = asked.writes()
        asked.server.forget_requests()

        asked.apply(a_deployment(routing={"policy": "round_robin"})).expect(200)
        await until(lambda: asked.ready() and not operator.waiting())
        changed = asked.writes()
        asked.server.forget_requests()
        operator.enqueue_all()
        await until(lambda: not operator.waiting())

        assert asked.writes() == []

    def status_writes(of):
        return sum(resource == "disaggdeployments/status" for _, resource, _ in of)

    children = [each for each in made if "/status" not in each[1]]
    scaled = [each for each in children if each[1] == "deployments"]
    # A role's replicas are added one at a time (balance.maxStep): one write makes its child, one adds the second.
    # Two Secrets are made, the operator's own and the deployment's; the record of a creation does not have their names.
    assert len(children) == len(set(children)) + 2
    assert len(scaled) == 4
    assert status_writes(made) <= 2
    assert {each for each in changed if "/status" not in each[1]} == {
        ("patch", "configmaps", "dd-router"),
        ("patch", "deployments", "dd-router"),
    }
    assert len(changed) - status_writes(changed) == 2
    assert status_writes(changed) <= 2


async def test_progress_is_not_written_each_time(asked, nodes, monkeypatch):
    monkeypatch.setattr(pace, "LONG", Nanos(60 * SECOND))  # for slow machines
    async with an_operator(asked) as operator:
        asked.apply(a_deployment()).expect(201)
        await until(lambda: asked.ready() and not operator.waiting())
        asked.server.forget_requests()

        nodes.working = False
        asked.apply(a_deployment(image="another:2")).expect(200)
        await until(lambda: asked.status()["observedGeneration"] == 2)
        # Pods become ready, but for longer than SHORT no router knows them.
        nodes.working, nodes.registers = True, False
        leases = asked.path("leases", "", "coordination.k8s.io/v1")
        await until(lambda: len(asked.api.get(leases).expect(200)["items"]) == 1)
        began = time.monotonic()
        await until(lambda: time.monotonic() > began + 3 * pace.SHORT / SECOND and not operator.waiting())
        nodes.registers = True
        await until(asked.ready)
        await until(lambda: not operator.waiting())

    written = [each for each in asked.writes() if each[1] == "disaggdeployments/status"]
    assert len(written) == 2


async def test_scale_change_reaches_the_child_in_under_a_second(asked):
    roles = ({"name": "all", "type": "aggregated", "replicas": 2, **EXTERNAL},)
    async with an_operator(asked):
        asked.apply(a_deployment(*roles)).expect(201)
        await until(asked.ready)

        async def quickest(*replicas: int) -> float:
            took = []
            for each in replicas:
                began = time.monotonic()
                scale = {"spec": {"replicas": each}}
                asked.api.patch(asked.path("rolescalers", "dd-all/scale"), "merge", scale).expect(200)
                await until(lambda each=each: asked.replicas() == {"all": each})
                took.append(time.monotonic() - began)
                await until(asked.ready)
            return min(took)

        while await quickest(3, 4, 5) >= 1:  # for busy machines
            pass

        scale = await until(
            lambda: (
                (found := asked.api.get(asked.path("rolescalers", "dd-all/scale")).expect(200))["status"]["replicas"]
                == 5
                and found
            )
        )
        asked.apply(a_deployment(roles[0] | {"replicas": 4})).expect(200)
        await until(asked.ready)

    assert scale["status"]["selector"] == "app.kubernetes.io/instance=dd,fleet-serving.io/role=all"
    assert asked.replicas() == {"all": 5}
    scaler = asked.api.get(asked.path("rolescalers", "dd-all")).expect(200)
    assert scaler["status"]["lastScaleTime"]
    assert {each["type"]: each["status"] for each in scaler["status"]["conditions"]} == {
        "Bound": "True",
        "WithinBounds": "True",
    }


async def test_scaler_without_role_or_out_of_bounds_reports_it(asked):
    lost = {"metadata": {"name": "lost"}, "spec": {"target": {"deployment": "nowhere", "role": "all"}, "replicas": 3}}

    def conditions(name):
        found = asked.api.get(asked.path("rolescalers", name))
        said = found.body.get("status", {}).get("conditions", ()) if found.code == 200 else ()
        return {each["type"]: each["reason"] for each in said}

    async with an_operator(asked):
        asked.api.post(asked.path("rolescalers"), lost).expect(201)
        asked.apply(a_deployment({"name": "all", "type": "aggregated", **EXTERNAL})).expect(201)
        await until(lambda: conditions("lost") == {"Bound": "NoTarget"})
        await until(asked.ready)
        asked.api.patch(asked.path("rolescalers", "dd-all"), "merge", {"spec": {"replicas": 9}}).expect(200)

        await until(lambda: conditions("dd-all").get("WithinBounds") == "OutOfBounds")
        await until(lambda: asked.replicas() == {"all": 5})


async def test_plan_reports_that_no_planner_exists(asked):
    plan = {"metadata": {"name": "plan"}, "spec": {"deployment": "dd"}}

    def reasons():
        status = asked.api.get(asked.path("servingplans", "plan")).expect(200).get("status", {})
        return {each["type"]: each["reason"] for each in status.get("conditions", ())}

    async with an_operator(asked):
        asked.api.post(asked.path("servingplans"), plan).expect(201)

        await until(lambda: reasons() == {"TargetFound": "NoTarget", "Settled": "NoPlanner"})


async def test_rollout_ends_with_new_revision_within_budget(asked, nodes):
    roles = (
        {"name": "prefill", "type": "prefill", **GPU},
        {"name": "decode", "type": "decode", "replicas": 2, **GPU},
    )
    async with an_operator(asked):
        asked.apply(a_deployment(*roles, balance={"gpuBudget": 4})).expect(201)
        await until(asked.ready)
        first = asked.status()["currentRevision"]

        # A pair of the new revision needs two GPUs, and the old one may not lose any: it reports that, and removes nothing.
        asked.apply(a_deployment(*roles, balance={"gpuBudget": 4}, image="another:2")).expect(200)
        await until(lambda: asked.condition("ScalingLimited").get("reason") == "NoRoom")
        assert nodes.most_gpus == 4
        asked.apply(a_deployment(*roles, balance={"gpuBudget": 5}, image="another:2")).expect(200)
        await until(asked.ready)

    assert asked.status()["currentRevision"] != first
    assert not [name for name in (*asked.children(), *asked.children("configmaps", "v1")) if first in name]
    assert asked.replicas() == {"prefill": 1, "decode": 2}
    assert nodes.most_gpus == 5


async def test_foreign_object_is_not_changed_until_it_is_removed(asked):
    theirs = {"metadata": {"name": "dd-router"}, "spec": {"ports": [{"port": 1}], "selector": {"theirs": "yes"}}}
    asked.api.post(asked.path("services", "", "v1"), theirs).expect(201)
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(lambda: asked.condition("Ready").get("reason") == "NameTaken")
        await until(lambda: asked.replicas() == {"prefill": 1, "decode": 2})
        assert asked.children("services", "v1")["dd-router"]["spec"]["selector"] == {"theirs": "yes"}
        assert asked.condition("Degraded")["message"] == "not made by this deployment: Service dd-router"

        asked.api.delete(asked.path("services", "dd-router", "v1")).expect(200)

        await until(asked.ready)
        assert "theirs" not in asked.children("services", "v1")["dd-router"]["spec"]["selector"]


async def test_deleted_or_suspended_deployment_runs_nothing(asked):
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        asked.apply(a_deployment(suspend=True)).expect(200)
        await until(lambda: asked.condition("Ready").get("reason") == "Suspended" and not asked.children("pods", "v1"))
        asked.apply(a_deployment(suspend=False)).expect(200)
        await until(asked.ready)

        asked.api.delete(asked.path("disaggdeployments", "dd")).expect(200)

        await until(lambda: not (asked.children() or asked.children("pods", "v1")))
    for kind, group in (("services", "v1"), ("configmaps", "v1"), ("poddisruptionbudgets", "policy/v1")):
        assert asked.children(kind, group) == {}
    assert asked.children("networkpolicies", "networking.k8s.io/v1") == {}


@pytest.mark.parametrize(
    ("trouble", "spec", "condition", "reason", "words"),
    [
        ({"gpus": 1}, {}, "Scheduled", "InsufficientCapacity", "Insufficient nvidia.com/gpu"),
        ({"products": ("NVIDIA-B200",)}, {}, "Scheduled", "NoSuchGpu", "node affinity/selector"),
        ({"broken_images": {"bad:1"}}, {"image": "bad:1"}, "Degraded", "ImagePull", "ImagePullBackOff"),
        (
            {"crashes": {"bad:1": "INFO password=hunter2\nfleet: model_dir: '/models/x' is not a folder\n"}},
            {"image": "bad:1"},
            "Degraded",
            "ModelNotFound",
            "model_dir: '/models/x' is not a folder",
        ),
        ({"crashes": {"bad:1": "hunter2"}}, {"image": "bad:1"}, "Degraded", "ConfigurationRefused", "exit status"),
        ({"quota": 2}, {}, "Scheduled", "QuotaExceeded", "requested: pods=1"),
        ({"registers": False}, {}, "RolesRegistered", "NotTold", "neither a router nor a Lease"),
    ],
    ids=lambda each: each if isinstance(each, str) and each[0].isupper() and " " not in each else "",
)
async def test_not_ready_has_a_reason(asked, nodes, trouble, spec, condition, reason, words):
    for name, value in trouble.items():
        setattr(nodes, name, value)
    roles = ({"name": "prefill", "type": "prefill", **GPU}, {"name": "decode", "type": "decode", **GPU})
    async with an_operator(asked):
        asked.apply(a_deployment(*roles, **spec)).expect(201)

        await until(lambda: asked.condition(condition).get("reason") == reason)

    found = asked.condition(condition)
    assert words in found["message"]
    assert asked.condition("Ready")["status"] == "False"
    assert "hunter2" not in json.dumps(asked.deployment())


async def test_pods_unknown_to_routers_are_not_ready(asked, nodes):
    nodes.registers = False
    known = []

    class Routers:
        async def workers(self, address, secret):
            return tuple(WorkerRegistration(pod=pod) for pod in known)

    async with an_operator(asked, routers=Routers(), ask_routers_seconds=0.05):
        asked.apply(a_deployment()).expect(201)
        await until(lambda: asked.condition("Ready").get("reason") == "NotRegistered")
        assert asked.condition("RolesRegistered")["status"] == "False"

        def register():
            known[:] = asked.workers()
            return asked.ready()

        await until(register)  # one by one: the second decode replica is added when the first serves


async def test_server_refusal_is_a_condition_without_the_value(asked, caplog):
    caplog.set_level(logging.DEBUG)
    bad = {"spec": {"containers": [{"name": "main", "ports": [{"containerPort": "hunter2"}]}]}}
    roles = ({"name": "all", "type": "aggregated", "podTemplate": bad},)
    async with an_operator(asked):
        asked.apply(a_deployment(*roles)).expect(201)
        found = await until(lambda: (each := asked.condition("Degraded")).get("status") == "True" and each)
        assert found["reason"] == "Invalid"
        where = 'spec.template.spec.containers[name="main"].ports[containerPort=...,protocol="TCP"].containerPort'
        assert f"{where}: expected numeric (int or float)" in found["message"]

        asked.apply(a_deployment({"name": "all", "type": "aggregated"})).expect(200)
        await until(asked.ready)

    events = asked.children("events", "events.k8s.io/v1")
    assert [each for each in events.values() if each["type"] == "Warning" and each["reason"] == found["reason"]]
    for told in (found, list(events.values()), [record.__dict__ for record in caplog.records]):
        assert "hunter2" not in json.dumps(told, default=str)


async def test_later_specification_changes_nothing(asked, monkeypatch):
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
    before = asked.children()

    class Older(Struct, forbid_unknown_fields=True):
        model: dict[str, object]

    monkeypatch.setattr(looking, "DisaggDeploymentSpec", Older)
    async with an_operator(asked):
        await until(lambda: asked.condition("Ready").get("reason") == "SpecificationRefused")

    assert "unknown field" in asked.condition("Degraded")["message"]
    assert {name: each["metadata"]["resourceVersion"] for name, each in asked.children().items()} == {
        name: each["metadata"]["resourceVersion"] for name, each in before.items()
    }


async def test_warm_pods_are_removed_last(asked, nodes):
    role = {"name": "all", "type": "aggregated", "replicas": 3}
    async with an_operator(asked):
        asked.apply(a_deployment(role)).expect(201)
        await until(asked.ready)
        pods = asked.workers()
        nodes.warm = dict(zip(pods, (500, 7, 90), strict=True))
        leases = asked.path("leases", "", "coordination.k8s.io/v1")
        await until(lambda: all(asked.api.get(f"{leases}/{pod}").body["metadata"].get("annotations") for pod in pods))

        asked.apply(a_deployment(role | {"replicas": 1})).expect(200)
        await until(lambda: asked.ready() and asked.replicas() == {"all": 1})

    assert asked.workers() == [pods[0]]


async def test_ending_operator_gives_the_lease_back(asked):
    lease = asked.path("leases", "fleet-operator", "coordination.k8s.io/v1")
    async with an_operator(asked) as operator:
        await until(operator.leader.leads)
        held = asked.api.get(lease).expect(200)["spec"]

    assert held["holderIdentity"] == "first"
    assert asked.api.get(lease).expect(200)["spec"]["holderIdentity"] == ""


async def test_of_two_operators_one_acts_and_the_other_takes_over(asked):
    async with an_operator(asked, identity="second") as second:
        await until(second.leader.leads)
        async with an_operator(asked, identity="first") as first:
            asked.apply(a_deployment()).expect(201)
            await until(asked.ready)
            assert not first.leader.leads()
            assert asked.writes("fleet-operator/first") == []
            fault = asked.server.order_fault("hold", user="fleet-operator/second", resource="leases", times=-1)

            await until(first.leader.leads)

            assert not second.leader.leads()
            asked.server.remove_fault(fault)
            asked.apply(a_deployment(image="another:2")).expect(200)
            await until(asked.ready)


async def test_edited_child_is_restored(asked):
    role = {"name": "all", "type": "aggregated", "replicas": 1}
    async with an_operator(asked, resync_seconds=1):
        asked.apply(a_deployment(role)).expect(201)
        await until(asked.ready)
        [child] = [name for name in asked.children() if "-all-" in name]
        edit = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}
        asked.api.patch(asked.path("deployments", child, "apps/v1"), "strategic", edit).expect(200)

        def grace():
            return asked.children()[child]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]

        await until(lambda: grace() == 330)
        assert asked.replicas() == {"all": 1}


async def test_readiness_is_not_carried_over_a_change(asked, nodes):
    async with an_operator(asked) as operator:
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        nodes.working = False  # new pods are created, but do not start

        asked.apply(a_deployment(routing={"policy": "round_robin"})).expect(200)

        await until(lambda: asked.status()["observedGeneration"] == 2 and not operator.waiting())
        assert asked.condition("Ready")["status"] == "False"
        nodes.working = True
        await until(asked.ready)
    written = [each for each in asked.writes() if each[1] == "disaggdeployments/status"]
    assert len(written) <= 4


async def test_renamed_router_role_leaves_nothing_behind(asked):
    def named(old):
        return sorted(
            f"{kind} {name}"
            for kind, group in (("deployments", "apps/v1"), ("services", "v1"), ("configmaps", "v1"), ("pods", "v1"))
            for name in asked.children(kind, group)
            if name.startswith(f"dd-{old}")
        )

    worker = {"name": "all", "type": "aggregated"}
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(worker, {"name": "router", "type": "router"})).expect(201)
        await until(asked.ready)
        assert named("router")

        asked.apply(a_deployment(worker, {"name": "gateway", "type": "router"})).expect(200)
        await until(lambda: asked.ready() and not operator.waiting() and not named("router"))
        assert len([each for each in named("gateway") if each.startswith("pods")]) == 1
