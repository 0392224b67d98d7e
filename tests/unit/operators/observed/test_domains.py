"""Topology domains: a group gets the smallest domain with room for all its pods, on nodes that its pods can use."""

from decimal import Decimal

import msgspec
import pytest

from operators.manifests.names import DOMAIN
from operators.observed.domains import (
    ClusterRoom,
    GroupDemand,
    Node,
    PlacedPod,
    choose,
    cluster_room,
    demand_of,
    requested,
    slots_by_domain,
)

GPU = "nvidia.com/gpu"
LABEL = "clique"


def a_node(name, domain, gpus=8, *, taints=(), unschedulable=False, ready="True", **labels):
    content = {
        "metadata": {"name": name, "labels": {LABEL: domain, **labels}},
        "spec": {"unschedulable": unschedulable, "taints": list(taints)},
        "status": {
            "allocatable": {GPU: str(gpus), "memory": "1Ti"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
    return msgspec.convert(content, Node)


def a_pod(node="", gpus=8, phase="Running", domain=""):
    annotations = {DOMAIN: f"{LABEL}={domain}"} if domain else {}
    containers = [{"name": "main", "resources": {"limits": {GPU: gpus}}}]
    content = {
        "metadata": {"name": "pod", "annotations": annotations},
        "spec": {"nodeName": node, "containers": containers},
        "status": {"phase": phase},
    }
    return msgspec.convert(content, PlacedPod)


def a_group(pods=2, gpus=8, **fields):
    return GroupDemand(LABEL, pods, {GPU: Decimal(gpus)}, **fields)


def test_half_free_domain_is_not_chosen():
    nodes = [a_node("a1", "a"), a_node("a2", "a"), a_node("b1", "b"), a_node("b2", "b")]

    assert choose(cluster_room(nodes, [a_pod("a1")]), a_group())[0] == "b"
    assert choose(cluster_room(nodes, [a_pod("a1"), a_pod("b2")]), a_group())[0] == ""
    assert choose(cluster_room(nodes, [a_pod("a1", phase="Succeeded"), a_pod("b2")]), a_group())[0] == "a"


def test_smallest_domain_that_fits_is_chosen():
    nodes = [*(a_node(f"a{n}", "a") for n in range(4)), *(a_node(f"b{n}", "b") for n in range(2))]

    assert choose(cluster_room(nodes, []), a_group())[0] == "b"
    assert choose(cluster_room(nodes, []), a_group(pods=3))[0] == "a"


def test_chosen_and_promised_room_is_taken():
    nodes = [a_node("a1", "a"), a_node("a2", "a"), a_node("b1", "b"), a_node("b2", "b")]
    first, left = choose(cluster_room(nodes, []), a_group())

    assert (first, choose(left, a_group())[0]) == ("a", "b")
    assert choose(cluster_room(nodes, [], [(a_group(), "a")]), a_group())[0] == "b"
    waiting = [a_pod(domain="a", phase="Pending"), a_pod(domain="a", phase="Pending")]
    assert choose(cluster_room(nodes, waiting), a_group())[0] == "b"


@pytest.mark.parametrize(
    "unusable",
    [
        {"unschedulable": True},
        {"ready": "False"},
        {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
        {"product": "old"},
    ],
    ids=("cordoned", "not-ready", "tainted", "other-product"),
)
def test_unusable_nodes_do_not_count(unusable):
    group = a_group(selector={"product": "new"})
    nodes = [a_node("a1", "a", product="new"), a_node("a2", "a", **({"product": "new"} | unusable))]

    assert slots_by_domain(cluster_room(nodes, []), group) == {"a": 1}


def test_tolerated_taint_is_no_obstacle():
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    room = cluster_room([a_node("a1", "a", taints=[taint])], [])

    for toleration in ({"operator": "Exists"}, {"key": "gpu", "value": "yes"}, {"key": "gpu", "operator": "Exists"}):
        assert slots_by_domain(room, a_group(tolerations=(toleration,))) == {"a": 1}
    assert slots_by_domain(room, a_group(tolerations=({"key": "gpu", "value": "no"},))) == {}


def test_demand_is_that_of_all_containers():
    containers = [
        {"name": "main", "resources": {"limits": {GPU: 4}, "requests": {"cpu": "1500m", "memory": "2Gi"}}},
        {"name": "side", "resources": {"limits": {"cpu": "0.5"}, "requests": {"memory": "strange"}}},
    ]
    template = {"spec": {"containers": containers, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}}

    demand = demand_of(template, LABEL, 2)

    assert demand.each == {GPU: 4, "cpu": 2, "memory": 2 << 30, "pods": 1} == requested(containers)
    assert (demand.pods, demand.selector, demand.tolerations) == (2, {"a": "b"}, ({"operator": "Exists"},))


def test_demand_counts_init_containers_and_overhead():
    def container(cpu, **fields):
        return {"resources": {"requests": {"cpu": cpu}}, **fields}

    side = container("1", restartPolicy="Always")
    spec = {"containers": [container("2")], "overhead": {"cpu": "250m"}}

    def cpu(*init):
        return demand_of({"spec": spec | {"initContainers": list(init)}}, LABEL, 2).each["cpu"]

    assert cpu() == Decimal("2.25")
    assert cpu(container("1")) == Decimal("2.25"), "it ends before the container starts"
    assert cpu(container("4")) == Decimal("4.25")
    assert cpu(side) == Decimal("3.25"), "it runs beside the container"
    assert (cpu(side, container("4")), cpu(container("4"), side)) == (Decimal("5.25"), Decimal("4.25"))


def test_requests_of_init_containers_of_other_pods_count():
    init = {"name": "fetch", "resources": {"requests": {GPU: "8"}}}
    pod = msgspec.convert(
        {"metadata": {"name": "pod"}, "spec": {"nodeName": "a1", "initContainers": [init]}}, PlacedPod
    )

    assert slots_by_domain(cluster_room([a_node("a1", "a")], [pod]), a_group()) == {"a": 0}


@pytest.mark.parametrize(
    ("terms", "usable"),
    [
        ([], ["a", "b", "c"]),
        ([{}], ["a", "b", "c"]),
        ([{"matchExpressions": [{"key": "gen", "operator": "In", "values": ["8", "9"]}]}], ["a", "b"]),
        ([{"matchExpressions": [{"key": "gen", "operator": "NotIn", "values": ["8"]}]}], ["b", "c"]),
        ([{"matchExpressions": [{"key": "gen", "operator": "Exists"}]}], ["a", "b"]),
        ([{"matchExpressions": [{"key": "gen", "operator": "DoesNotExist"}]}], ["c"]),
        ([{"matchExpressions": [{"key": "gen", "operator": "Gt", "values": ["8"]}]}], ["b"]),
        ([{"matchExpressions": [{"key": "gen", "operator": "Lt", "values": ["9"]}]}], ["a"]),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["c1"]}]}], ["c"]),
        (
            [
                {"matchExpressions": [{"key": "gen", "operator": "In", "values": ["8"]}]},
                {"matchExpressions": [{"key": "gen", "operator": "In", "values": ["9"]}]},
            ],
            ["a", "b"],
        ),
        (
            [{"matchExpressions": [{"key": "gen", "operator": "Exists"}, {"key": "gen", "operator": "DoesNotExist"}]}],
            [],
        ),
    ],
    ids=("no-term", "empty", "in", "not-in", "exists", "not-exists", "gt", "lt", "field", "either", "both"),
)
def test_nodes_that_required_affinity_excludes_do_not_count(terms, usable):
    room = cluster_room([a_node("a1", "a", gen="8"), a_node("b1", "b", gen="9"), a_node("c1", "c")], [])
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}

    assert sorted(slots_by_domain(room, demand_of({"spec": {"affinity": affinity}}, LABEL, 1))) == usable


def test_node_has_room_for_as_many_pods_as_it_may_run():
    node = a_node("a1", "a", gpus=64)
    few = msgspec.structs.replace(node.status, allocatable={**node.status.allocatable, "pods": "3"})
    room = cluster_room([msgspec.structs.replace(node, status=few)], [a_pod("a1", gpus=0)])
    demand = demand_of({"spec": {"containers": [{"resources": {"limits": {GPU: 1}}}]}}, LABEL, 2)

    assert slots_by_domain(room, demand) == {"a": 2}
    assert slots_by_domain(choose(room, demand)[1], demand) == {"a": 0}


def test_failed_domain_is_chosen_only_if_no_other_has_room():
    room = cluster_room([a_node("a1", "a"), a_node("b1", "b", gpus=16), a_node("c1", "c", gpus=4)], [])
    one = a_group(pods=1)

    assert choose(room, one)[0] == "a"
    assert choose(room, one, ("a",))[0] == "b"
    assert choose(room, one, ("b", "a"))[0] == "b", "the one that failed longer ago"
    assert choose(room, one, ("a", "b"))[0] == "a"


def test_pods_without_requests_fit_on_each_node():
    room = cluster_room([a_node("a1", "a"), a_node("a2", "a")], [])

    assert choose(room, GroupDemand(LABEL, 2, {}))[0] == "a"
    assert choose(ClusterRoom(()), a_group())[0] == ""
