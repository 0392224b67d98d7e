"""Room reader: it lists the cluster's pods only now and then, and reserves promised room for groups that have no pods yet."""

from decimal import Decimal

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import ObjectList, RequestDenied
from fleet.net.kubernetes.views import ObjectMetadata
from operators.controller.group_placer import PlacedGroup
from operators.controller.room_reader import DENIED, FRESH, PROMISED, RoomReader
from operators.observed.domains import GroupDemand, Node, NodeStatus, PlacedPod, PlacedPodSpec, choose

GPU = "nvidia.com/gpu"
DEMAND = GroupDemand("clique", 1, {GPU: Decimal(8)})


class Time:
    def __init__(self):
        self.at = Nanos(0)

    def now(self):
        return self.at


class Cluster:
    """Fake API server with one node of eight GPUs, and the pods that the test sets."""

    def __init__(self):
        self.pods = []
        self.lists = 0
        self.allowed = True

    async def list(self, kind, of, namespace, selector=""):
        self.lists += 1
        if not self.allowed:
            raise RequestDenied("Forbidden", "no")
        node = Node(
            metadata=ObjectMetadata(name="n", labels={"clique": "a"}), status=NodeStatus(allocatable={GPU: "8"})
        )
        return ObjectList((node,) if kind == kinds.NODE else tuple(self.pods), "1")


@pytest.fixture
def world():
    clock, cluster = Time(), Cluster()
    return clock, cluster, RoomReader(cluster, clock)


async def fits(reader):
    return choose(await reader.read(), DEMAND)[0] == "a"


async def test_cluster_is_listed_once_in_a_while(world):
    clock, cluster, reader = world

    assert [await fits(reader) for _ in range(3)] == [True] * 3
    assert cluster.lists == 2, "nodes and pods"
    clock.at = FRESH
    assert await fits(reader)
    assert cluster.lists == 4


async def test_promised_room_is_kept_until_pods_exist_or_time_passes(world):
    clock, cluster, reader = world
    reader.promise("ns", PlacedGroup("dd-wide-0", DEMAND, "a"))
    assert not await fits(reader)

    clock.at = PROMISED
    assert await fits(reader), "its pods never came"

    reader.promise("ns", PlacedGroup("dd-wide-0", DEMAND, "a"))
    resources = {"limits": {GPU: 8}}
    pod = PlacedPod(
        metadata=ObjectMetadata(name="dd-wide-0-0", namespace="ns"),
        spec=PlacedPodSpec(node_name="n", containers=({"resources": resources},)),
    )
    cluster.pods.append(pod)
    clock.at = Nanos(clock.at + FRESH)
    assert not await fits(reader), "the pod holds it"
    cluster.pods.clear()
    clock.at = Nanos(clock.at + FRESH)
    assert await fits(reader)


async def test_missing_right_is_asked_for_again_after_a_while(world):
    clock, cluster, reader = world
    cluster.allowed = False

    assert (await reader.read()).nodes is None
    assert (await reader.read()).nodes is None
    assert cluster.lists == 1
    cluster.allowed = True
    clock.at = Nanos(DENIED + SECOND)
    assert await fits(reader)
