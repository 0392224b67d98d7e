"""Conditions in use: `kubectl wait`, printed columns, and the Kubernetes events of the leader election."""

import asyncio

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from tests.support.kube.operator import a_deployment, an_operator
from tests.support.kube.tools import Command, kubectl, tools_folder
from tests.support.waiting import until

EXTERNAL = {"name": "all", "type": "aggregated", "replicas": 2, "scaling": {"mode": "External", "most": 5}}
PLAN = {"metadata": {"name": "plan"}, "spec": {"deployment": "dd"}}
REQUEST = {
    "metadata": {"name": "goals"},
    "spec": {
        "model": {"name": "llama", "uri": "nvidia/Llama-3.3-70B-Instruct-FP8"},
        "hardware": {"gpu": "h100", "count": 8},
        "workload": {"promptTokens": 1024, "answerTokens": 64, "concurrency": 2},
    },
}
EXPECTED = {
    "disaggdeployments/dd": {
        "Ready", "Available", "Progressing", "Degraded", "Scheduled", "RolesRegistered", "KVPathReady",
        "ScalingLimited", "Rebalancing",
    },
    "rolescalers/dd-all": {"Bound", "WithinBounds"},
    "servingplans/plan": {"TargetFound", "Settled"},
    "servingrequests/goals": {"Feasible", "Proposed", "Applied"},
}  # fmt: skip


@pytest.fixture
def kube(asked, tmp_path):
    """Return kubectl in the test's namespace."""
    path = asked.server.kubeconfig(tmp_path, namespace=asked.namespace)
    command = Command(kubectl(tools_folder()), path, tmp_path)

    async def run(*arguments, code=0):
        return await asyncio.to_thread(command, *arguments, code=code)

    return run


def conditions(asked, of):
    kind, _, name = of.partition("/")
    found = asked.api.get(asked.path(kind, name)).expect(200)
    return {each["type"]: each for each in found.get("status", {}).get("conditions", ())}


async def test_kubectl_waits_for_each_condition_of_each_kind(asked, kube):
    async with an_operator(asked):
        asked.apply(a_deployment(EXTERNAL)).expect(201)
        asked.api.post(asked.path("servingplans"), PLAN).expect(201)
        asked.api.post(asked.path("servingrequests"), REQUEST).expect(201)
        await until(asked.ready)

        for of, kinds in EXPECTED.items():
            await until(lambda of=of, kinds=kinds: set(conditions(asked, of)) == kinds)
            for kind, found in conditions(asked, of).items():
                said = await kube("wait", of, f"--for=condition={kind}={found['status']}", "--timeout=50s")
                assert "condition met" in said
        await kube("wait", "disaggdeployments/dd", "--for=condition=Available=False", "--timeout=1s", code=1)


async def test_wait_for_available_ends_before_ready(asked, kube, nodes):
    """One of two workers gets no node, so the deployment serves requests, but is not Ready."""
    async with an_operator(asked):
        asked.apply(a_deployment({"name": "all", "type": "aggregated"})).expect(201)
        await until(asked.ready)
        nodes.working = False
        asked.apply(a_deployment({"name": "all", "type": "aggregated", "replicas": 2})).expect(200)
        await until(lambda: asked.condition("Ready").get("status") == "False")

        await kube("wait", "dd/dd", "--for=condition=Available", "--timeout=50s")
        await kube("wait", "dd/dd", "--for=condition=Ready", "--timeout=1s", code=1)


async def test_available_is_never_lost_in_a_rollout(asked, nodes):
    async with an_operator(asked):
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
        before = asked.condition("Available")
        assert (before["status"], before["reason"]) == ("True", "Serving")

        nodes.working = False
        asked.apply(a_deployment(image="another:2")).expect(200)
        await until(lambda: asked.condition("Ready").get("reason") == "RollingOut")
        assert asked.condition("Available")["status"] == "True"
        nodes.working = True
        await until(asked.ready)

        # A condition keeps its time while its status is the same.
        assert asked.condition("Available")["lastTransitionTime"] == before["lastTransitionTime"]


async def test_available_is_lost_with_the_last_worker(asked):
    async with an_operator(asked):
        asked.apply(a_deployment(EXTERNAL | {"scaling": {"mode": "External", "least": 0}})).expect(201)
        await until(asked.ready)

        asked.api.patch(asked.path("rolescalers", "dd-all/scale"), "merge", {"spec": {"replicas": 0}}).expect(200)

        await until(lambda: asked.condition("Available").get("reason") == "NoWorkerReady")
        assert asked.condition("Available")["status"] == "False"


async def test_columns_show_availability_and_why_a_scaler_is_not_bound(asked, kube):
    async with an_operator(asked):
        asked.apply(a_deployment(EXTERNAL, {"name": "fixed", "type": "aggregated"})).expect(201)
        await until(asked.ready)
        target = {"deployment": "dd", "role": "fixed"}
        stray = {"metadata": {"name": "stray"}, "spec": {"target": target}}
        asked.api.post(asked.path("rolescalers"), stray).expect(201)
        await until(lambda: conditions(asked, "rolescalers/stray"))

        header, row = (await kube("get", "disaggdeployments")).splitlines()
        assert header.split()[:4] == ["NAME", "READY", "AVAILABLE", "REASON"]
        assert row.split()[:4] == ["dd", "True", "True", "AllRolesReady"]
        header, bound, unbound = (await kube("get", "rolescalers")).splitlines()
        assert header.split() == ["NAME", "TARGET", "ROLE", "DESIRED", "CURRENT", "BOUND", "REASON", "AGE"]
        assert bound.split()[:7] == ["dd-all", "dd", "all", "2", "2", "True", "Bound"]
        assert unbound.split()[:7] == ["stray", "dd", "fixed", "1", "1", "False", "StaticRole"]


async def test_changes_of_the_leader_are_events_of_the_lease(asked):
    def elections():
        events = asked.api.get(asked.path("events", "", "events.k8s.io/v1")).expect(200)["items"]
        return [each for each in events if each["reason"] == "LeaderElection"]

    async with an_operator(asked, identity="first") as first:
        await until(first.leader.leads)
        async with an_operator(asked, identity="second") as second:
            await until(lambda: len(elections()) == 1)
            assert not second.leader.leads()
    async with an_operator(asked, identity="second") as second:
        await until(second.leader.leads)
    await until(lambda: len(elections()) == 4)

    told = sorted(elections(), key=lambda each: each["eventTime"])
    assert [each["note"] for each in told] == [
        "first became leader",
        "first stopped leading",
        "second became leader",
        "second stopped leading",
    ]
    uid = asked.api.get(asked.path("leases", "fleet-operator", "coordination.k8s.io/v1")).expect(200)["metadata"]["uid"]
    for each in told:
        assert (each["regarding"]["kind"], each["regarding"]["uid"]) == ("Lease", uid)
        assert (each["type"], each["reportingController"]) == ("Normal", "fleet-serving.io/operator")


async def test_election_goes_on_without_the_right_to_write_events(asked, caplog):
    fault = asked.server.order_fault("status", code=403, user="fleet-operator/first", resource="events", times=-1)
    async with an_operator(asked, identity="first") as operator:
        await until(operator.leader.leads)
        asked.apply(a_deployment()).expect(201)
        await until(asked.ready)
    asked.server.remove_fault(fault)

    assert "leader event not written" in caplog.messages
