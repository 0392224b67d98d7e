"""Worker groups without LeaderWorkerSet: the operator gives each a domain with room, or reports that none has room."""

from datetime import UTC, datetime

import msgspec
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import RequestDenied
from operators.controller import loop, room_reader
from operators.manifests.names import DOMAIN as OF_DOMAIN
from operators.manifests.names import GATE
from operators.observed import observe
from tests.support.kube.nodes import DOMAIN
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import stays, until

WIDE = {
    "name": "wide",
    "type": "aggregated",
    "nodesPerReplica": 2,
    "gpus": {"perReplica": 4},
    "parallelism": {"tensor": 4},
    "topology": {"domain": DOMAIN},
}


def a_node(name, domain, gpus):
    allocatable = {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
    return {
        "metadata": {"name": name, "labels": {DOMAIN: domain, "kubernetes.io/hostname": name}},
        "status": {"allocatable": allocatable, "capacity": allocatable, "conditions": [ready]},
    }


@pytest.fixture
def machines(asked):
    """Create nodes in domains: in `half` only one node is free, and `free` has two free nodes."""
    made = []

    def create(*nodes):
        for each in nodes:
            name = each["metadata"]["name"]
            asked.api.post("/api/v1/nodes", {"metadata": each["metadata"]}).expect(201)
            made.append(name)
            asked.api.patch(f"/api/v1/nodes/{name}/status", "merge", {"status": each["status"]}).expect(200)

    yield create
    for name in made:
        asked.api.delete(f"/api/v1/nodes/{name}")


HALF = (a_node("h1", "half", 2), a_node("h2", "half", 0))
FREE = (a_node("w1", "whole", 2), a_node("w2", "whole", 2))


def places(asked):
    return sorted(
        each["spec"].get("nodeName", "") for name, each in asked.children("pods", "v1").items() if "wide" in name
    )


async def test_group_goes_to_the_domain_with_room(asked, machines):
    machines(*HALF, *FREE)
    async with an_operator(asked):
        asked.apply(a_deployment(WIDE)).expect(201)
        await until(asked.ready)

    assert places(asked) == ["w1", "w2"]
    [made] = asked.children("statefulsets").values()
    [term] = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": DOMAIN, "operator": "In", "values": ["whole"]}]}


async def test_two_groups_do_not_get_the_same_room(asked, machines):
    machines(*FREE, a_node("x1", "other", 2), a_node("x2", "other", 2))
    async with an_operator(asked):
        asked.apply(a_deployment(WIDE | {"replicas": 2}, balance={"maxStep": 2})).expect(201)
        await until(asked.ready)

    assert places(asked) == ["w1", "w2", "x1", "x2"]


async def test_lack_of_room_is_reported_and_places_no_pod(asked, machines, monkeypatch):
    monkeypatch.setattr(loop, "TROUBLE_RECHECK", loop.SECOND // 2)
    machines(*HALF, a_node("w1", "whole", 2))
    async with an_operator(asked) as operator:
        asked.apply(a_deployment(WIDE)).expect(201)
        said = await until(lambda: (each := asked.condition("Scheduled")).get("reason") == "NoDomainFits" and each)

        assert f"2 pods need room in one {DOMAIN}; there is room for half: 1, whole: 1" in said["message"]
        assert asked.condition("Ready")["reason"] == "NoDomainFits"
        await until(lambda: not operator.waiting())
        assert asked.children("statefulsets") == {}
        assert places(asked) == []

        machines(a_node("w2", "whole", 2))
        await until(asked.ready)
    assert places(asked) == ["w1", "w2"]


class WithoutNodes:
    """Wraps a cluster whose API server does not let the operator read nodes, as with a Role of one namespace."""

    def __init__(self, connected):
        self._cluster = connected

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    async def list(self, kind, *arguments):
        if kind == kinds.NODE:
            raise RequestDenied("Forbidden", 'User "operator" cannot list resource "nodes"')
        return await self._cluster.list(kind, *arguments)


class WithoutGates(WithoutNodes):
    """Wraps a cluster that also has no scheduling gates."""

    async def served(self):
        return msgspec.structs.replace(await self._cluster.served(), scheduling_gates=False)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(observe, "PARTIAL_GROUP_SECONDS", 1)
    monkeypatch.setattr(loop, "TROUBLE_RECHECK", loop.SECOND // 2)
    monkeypatch.setattr(loop, "TURN_RECHECK", loop.SECOND // 10)


async def test_domain_whose_nodes_the_scheduler_refused_is_avoided(asked, machines, impatient, monkeypatch):
    """The operator does not count podAffinity, so it takes the domain that comes first by name."""
    # A promise to the removed group must not hide that its domain seems free, as after a minute in a cluster.
    monkeypatch.setattr(room_reader, "PROMISED", 0)
    powered = [a_node("w1", "whole", 2), a_node("w2", "whole", 2)]
    for each in powered:
        each["metadata"]["labels"]["power"] = "feed-1"
    machines(a_node("a1", "alike", 2), a_node("a2", "alike", 2), *powered)
    term = {"topologyKey": "power", "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": "dd"}}}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    async with an_operator(asked):
        asked.apply(a_deployment(WIDE | {"podTemplate": {"spec": {"affinity": affinity}}})).expect(201)
        [first] = await until(lambda: asked.children("statefulsets").values())
        assert first["metadata"]["annotations"][OF_DOMAIN] == f"{DOMAIN}=alike"
        await until(asked.ready)

    assert places(asked) == ["w1", "w2"]


def gates(asked):
    """Return the scheduling gates of the pods of each worker group."""
    return {
        name: [each["name"] for each in pod["spec"].get("schedulingGates") or ()]
        for name, pod in asked.children("pods", "v1").items()
        if "wide" in name
    }


@pytest.mark.parametrize("wrap", [WithoutNodes, WithoutGates])
async def test_without_the_right_to_read_nodes_full_nodes_are_avoided(asked, machines, impatient, wrap):
    machines(*HALF, *FREE)
    async with an_operator(asked, wrap=wrap):
        asked.apply(a_deployment(WIDE)).expect(201)
        await until(lambda: places(asked) == ["", "h1"])
        await until(asked.ready)

    assert places(asked) == ["w1", "w2"]
    gated = [
        each["spec"]["template"]["spec"].get("schedulingGates") for each in asked.children("statefulsets").values()
    ]
    assert gated == [[{"name": GATE}] if wrap is WithoutNodes else None]


def opened(asked):
    """Return the deployments that have a worker group whose pods have no scheduling gate any more."""
    return {name.partition("-")[0] for name, each in gates(asked).items() if not each}


async def test_gated_groups_pass_the_scheduler_one_at_a_time(asked, machines, nodes, impatient):
    machines(*FREE, a_node("x1", "other", 2), a_node("x2", "other", 2))
    nodes.working = False
    async with an_operator(asked, wrap=WithoutNodes):
        for name in ("one", "two"):
            asked.apply(a_deployment(WIDE, name=name)).expect(201)
        await until(lambda: sorted(map(len, gates(asked).values())) == [0, 0, 1, 1])
        [first] = opened(asked)
        await stays(lambda: opened(asked) == {first}, 1, "nothing is written while a group waits")

        nodes.working = True
        await until(lambda: asked.ready("one") and asked.ready("two"))

    assert places(asked) == ["w1", "w2", "x1", "x2"]


async def test_group_that_fits_nowhere_is_reported_and_blocks_no_other(asked, machines, impatient):
    machines(*FREE)
    small = WIDE | {"gpus": {"perReplica": 2}, "parallelism": {"tensor": 2}}
    large = WIDE | {"gpus": {"perReplica": 8}, "parallelism": {"tensor": 8}}
    async with an_operator(asked, wrap=WithoutNodes):
        asked.apply(a_deployment(large, name="large")).expect(201)
        said = await until(
            lambda: (each := asked.condition("Scheduled", "large")).get("reason") == "NoDomainFits" and each
        )
        assert f"2 pods need room in one {DOMAIN}; the scheduler found none: 0/2 nodes are available" in said["message"]

        asked.apply(a_deployment(small, name="small")).expect(201)
        await until(lambda: asked.ready("small"))

    assert "large" not in "".join(
        name
        for name, each in asked.children("pods", "v1").items()
        if each["spec"].get("nodeName") and "router" not in name
    )


async def test_foreign_gate_is_named_and_holds_no_other_group_up(asked, machines, impatient):
    machines(*FREE, a_node("x1", "other", 2), a_node("x2", "other", 2))
    foreign = {"podTemplate": {"spec": {"schedulingGates": [{"name": "example.com/quota"}]}}}
    async with an_operator(asked, wrap=WithoutNodes):
        asked.apply(a_deployment(WIDE | foreign, name="held")).expect(201)
        said = await until(
            lambda: (each := asked.condition("Scheduled", "held")).get("reason") == "SchedulingGated" and each
        )
        assert "waits for the scheduling gate example.com/quota" in said["message"]
        asked.apply(a_deployment(WIDE, name="free")).expect(201)
        await until(lambda: asked.ready("free"))
        held = [each for name, each in gates(asked).items() if name.startswith("held")]
        assert held == [["example.com/quota", GATE]] * 2

        for name, each in asked.children("pods", "v1").items():
            if name.startswith("held-wide"):
                left = {"spec": {"schedulingGates": [{"name": GATE}]}, "metadata": {"uid": each["metadata"]["uid"]}}
                asked.api.patch(asked.path("pods", name, "v1"), "merge", left).expect(200)
        await until(lambda: asked.ready("held"))

    assert places(asked) == ["w1", "w2", "x1", "x2"]


async def test_replaced_pod_of_a_gated_group_starts_again(asked, machines, impatient):
    machines(*FREE)
    async with an_operator(asked, wrap=WithoutNodes):
        asked.apply(a_deployment(WIDE)).expect(201)
        await until(asked.ready)
        pods = asked.children("pods", "v1")
        [lost] = [name for name in pods if "wide" in name and name.endswith("-1")]
        asked.api.delete(asked.path("pods", lost, "v1"))
        await until(
            lambda: (
                (each := asked.children("pods", "v1").get(lost))
                and each["metadata"]["uid"] != pods[lost]["metadata"]["uid"]
                and each["spec"].get("nodeName")
            )
        )

    assert places(asked) == ["w1", "w2"]
