"""Groups of pods without LeaderWorkerSet: the operator gives each a domain with room, and says when none has any."""

from datetime import UTC, datetime

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import RequestDenied
from operators.controller import loop
from operators.observed import observe
from tests.support.kube.nodes import DOMAIN
from tests.support.kube.operator import a_deployment, an_operator
from tests.support.waiting import until

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
    """Create nodes in domains: of `half` only one node is free, `free` has two free nodes."""
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


async def test_no_domain_with_room_is_said_and_holds_nothing(asked, machines, monkeypatch):
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


async def test_without_the_right_to_read_nodes_full_nodes_are_avoided(asked, machines, monkeypatch):
    monkeypatch.setattr(observe, "PARTIAL_GROUP_SECONDS", 1)
    monkeypatch.setattr(loop, "TROUBLE_RECHECK", loop.SECOND // 2)
    machines(*HALF, *FREE)

    class WithoutNodes:
        def __init__(self, connected):
            self._cluster = connected

        def __getattr__(self, name):
            return getattr(self._cluster, name)

        async def list(self, kind, *arguments):
            if kind == kinds.NODE:
                raise RequestDenied("Forbidden", 'User "operator" cannot list resource "nodes"')
            return await self._cluster.list(kind, *arguments)

    async with an_operator(asked, wrap=WithoutNodes):
        asked.apply(a_deployment(WIDE)).expect(201)
        await until(lambda: places(asked) == ["", "h1"])
        await until(asked.ready)

    assert places(asked) == ["w1", "w2"]
