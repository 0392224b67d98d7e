"""Domains: finds the NVLink domain, rack or zone that has room for a group of pods. Pure.

Rules:

1. A domain is all nodes with the same value of one label (`topology.domain`). A group fits into a domain if the nodes
   of the domain have room for all pods of the group. The room of a node is its allocatable resources, less the requests
   of all pods on the node, whoever owns these pods. A pod requests the resources of its containers and init containers,
   and its overhead. It also counts as one of the limited number of pods that a node may run (`PODS`).
2. As soon as a domain was chosen for a group, the room that the group needs there counts as taken, even before its pods
   exist.
3. Among the domains with enough room, the domain with the least room is chosen, so that the other domains stay free for
   larger groups. Domains in which pods of the role found no nodes in the time `operators.controller.group_placer.FAILED` are
   chosen last: the scheduler may know obstacles that this module does not know.
4. Nodes that a pod cannot use do not count: nodes that are unschedulable or not ready, nodes that the pod's
   nodeSelector or its required nodeAffinity excludes, and nodes with taints that the pod does not tolerate.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
from msgspec import Struct

from fleet.net.kubernetes.views import NamedObject, ObjectCondition
from operators.manifests.names import DOMAIN
from operators.manifests.objects import Manifest, mapping

Amounts = Mapping[str, Decimal]
"""Amounts of resources, by the name of the resource."""

QUANTITY = re.compile(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+)?([KMGTPE]i|[numkMGTPE])?")
FACTORS = {
    **{
        letter: Decimal(1000) ** power
        for power, letter in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
PODS = "pods"
"""Name of a resource of nodes: the number of pods that the node may run."""

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

REPELLING = frozenset({"NoSchedule", "NoExecute"})


class _Part(Struct, frozen=True, rename="camel"):
    """Base class of types that read a part of a Kubernetes object; it maps `node_name` to the API's name `nodeName`."""


class Taint(_Part, frozen=True):
    key: str
    effect: str
    value: str = ""


class NodeSpec(_Part, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = ()


class NodeStatus(_Part, frozen=True):
    allocatable: Mapping[str, str] = {}
    conditions: tuple[ObjectCondition, ...] | None = ()


class Node(NamedObject, frozen=True, kw_only=True, rename="camel"):
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def usable(self) -> bool:
        conditions = self.status.conditions or ()
        return not self.spec.unschedulable and all(each.status == "True" for each in conditions if each.type == "Ready")


class PlacedPodSpec(_Part, frozen=True):
    node_name: str = ""
    containers: tuple[dict[str, Any], ...] = ()
    init_containers: tuple[dict[str, Any], ...] | None = ()
    overhead: dict[str, Any] | None = None


class PlacedPodStatus(_Part, frozen=True):
    phase: str = ""


class PlacedPod(NamedObject, frozen=True, kw_only=True, rename="camel"):
    """Holds the node, the phase and the resource requests of any pod in the cluster."""

    spec: PlacedPodSpec = PlacedPodSpec()
    status: PlacedPodStatus = PlacedPodStatus()


class GroupDemand(Struct, frozen=True):
    """Describes what a worker group needs: the number of pods, the resources of each pod, and the nodes that fit."""

    label: str
    """Name of the node label whose values are the domains."""

    pods: int
    each: Amounts
    selector: Mapping[str, str] = {}
    terms: tuple[Mapping[str, Any], ...] = ()
    """Terms of the required nodeAffinity. A node has to match at least one of them; if there are none, every node matches."""

    tolerations: tuple[Mapping[str, Any], ...] = ()


class NodeRoom(Struct, frozen=True):
    """Holds the name, labels and taints of a node, and its free resources, which no pod has requested."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    free: Amounts


class ClusterRoom(Struct, frozen=True):
    """Holds the free resources of all usable nodes. `nodes` is None if the operator may not list nodes and pods."""

    nodes: tuple[NodeRoom, ...] | None = None


def cluster_room(
    nodes: Iterable[Node], pods: Iterable[PlacedPod], promised: Sequence[tuple[GroupDemand, str]] = ()
) -> ClusterRoom:
    """Return the room on all nodes that are schedulable and ready.

    Args:
        nodes: All nodes.
        pods: All pods.
        promised: Groups whose pods do not exist yet, each with the domain that was chosen for it (rule 2).
    """
    used: dict[str, dict[str, Decimal]] = {}
    waiting: list[tuple[GroupDemand, str]] = list(promised)
    for pod in pods:
        if pod.status.phase in {"Succeeded", "Failed"}:
            continue
        asked = requested(pod.spec.containers, pod.spec.init_containers or (), pod.spec.overhead)
        if pod.spec.node_name:
            there = used.setdefault(pod.spec.node_name, {})
            for resource, amount in asked.items():
                there[resource] = there.get(resource, Decimal(0)) + amount
        elif label := pod.metadata.annotations.get(DOMAIN):
            name, _, value = label.partition("=")
            waiting.append((GroupDemand(name, 1, asked), value))
    room = [
        NodeRoom(
            each.metadata.name,
            each.metadata.labels,
            tuple(each.spec.taints or ()),
            _less(_amounts(each.status.allocatable), used.get(each.metadata.name, {})),
        )
        for each in sorted(nodes, key=lambda node: node.metadata.name)
        if each.usable
    ]
    for demand, value in waiting:
        _take(room, demand, value)
    return ClusterRoom(tuple(room))


def choose(room: ClusterRoom, demand: GroupDemand, avoided: Sequence[str] = ()) -> tuple[str, ClusterRoom]:
    """Return the domain for a group, and the room that is left after the group has taken its share.

    The domain is an empty text if no domain has enough room. The room must be known: `room.nodes` is not None. A domain
    in `avoided` is chosen only if no other domain has room. Among the avoided domains, the first in the list is chosen.
    """
    slots = {value: count for value, count in slots_by_domain(room, demand).items() if count >= demand.pods}
    if not slots:
        return "", room
    value = min(slots, key=lambda each: (avoided.index(each) if each in avoided else -1, slots[each], each))
    left = list(room.nodes or ())
    _take(left, demand, value)
    return value, ClusterRoom(tuple(left))


def slots_by_domain(room: ClusterRoom, demand: GroupDemand) -> dict[str, int]:
    """Return the number of pods of the group for which each domain has room, by domain."""
    found: dict[str, int] = {}
    for node in room.nodes or ():
        if (value := node.labels.get(demand.label)) and _usable(node, demand):
            found[value] = found.get(value, 0) + _slots(node, demand)
    return found


def demand_of(template: Manifest, label: str, pods: int) -> GroupDemand:
    """Return the demand of a group of `pods` pods that are made from this pod template."""
    spec = mapping(template.get("spec"))
    required = mapping(mapping(mapping(spec.get("affinity")).get("nodeAffinity")).get(REQUIRED))
    return GroupDemand(
        label=label,
        pods=pods,
        each=requested(
            _objects(spec.get("containers")), _objects(spec.get("initContainers")), mapping(spec.get("overhead"))
        ),
        selector={key: value for key, value in mapping(spec.get("nodeSelector")).items() if isinstance(value, str)},
        terms=_objects(required.get("nodeSelectorTerms")),
        tolerations=_objects(spec.get("tolerations")),
    )


def requested(
    containers: Iterable[Mapping[str, Any]],
    init_containers: Iterable[Mapping[str, Any]] = (),
    overhead: Mapping[str, Any] | None = None,
) -> dict[str, Decimal]:
    """Return the resources that a pod requests, as the scheduler counts them.

    Init containers run one after the other before the containers. An init container that always restarts (a sidecar)
    keeps running, so its requests are added to those of all containers that start after it.
    """
    beside: dict[str, Decimal] = {}
    most: dict[str, Decimal] = {}
    for each in init_containers:
        running = _sum(beside, _request(each))
        most = _most(most, running)
        if each.get("restartPolicy") == "Always":
            beside = running
    for each in containers:
        beside = _sum(beside, _request(each))
    return {**_sum(_most(most, beside), _amounts(overhead or {})), PODS: Decimal(1)}


def _request(container: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what a container requests. A limit counts as the request if no request is set."""
    given = mapping(container.get("resources"))
    return _amounts({**mapping(given.get("limits")), **mapping(given.get("requests"))})


def _sum(one: Amounts, other: Amounts) -> dict[str, Decimal]:
    return {each: one.get(each, Decimal(0)) + other.get(each, Decimal(0)) for each in {**one, **other}}


def _most(one: Amounts, other: Amounts) -> dict[str, Decimal]:
    return {each: max(one.get(each, Decimal(0)), other.get(each, Decimal(0))) for each in {**one, **other}}


def _objects(value: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple(each for each in value if isinstance(each, dict)) if isinstance(value, list) else ()


def _amounts(quantities: Mapping[str, Any]) -> dict[str, Decimal]:
    return dict(_parsed(quantities))


def _parsed(quantities: Mapping[str, Any]) -> Iterator[tuple[str, Decimal]]:
    """Yield resources with their amounts as numbers.

    Quantities that cannot be parsed are left out, because the API server refuses them anyway.
    """
    for resource, text in quantities.items():
        if (found := QUANTITY.fullmatch(str(text))) is not None:
            try:
                yield resource, Decimal(found[1] + (found[2] or "")) * FACTORS[found[3] or ""]
            except InvalidOperation:
                continue


def _less(amounts: Amounts, used: Amounts) -> dict[str, Decimal]:
    return {resource: amount - used.get(resource, Decimal(0)) for resource, amount in amounts.items()}


def _usable(node: NodeRoom, demand: GroupDemand) -> bool:
    repelled = (
        taint for taint in node.taints if taint.effect in REPELLING and not _tolerated(taint, demand.tolerations)
    )
    return (
        demand.selector.items() <= node.labels.items()
        and (not demand.terms or any(_matches(node, each) for each in demand.terms))
        and not any(True for _ in repelled)
    )


def _matches(node: NodeRoom, term: Mapping[str, Any]) -> bool:
    """Return whether a node matches a term of a required nodeAffinity.

    In Kubernetes, a term without conditions matches no node. Here it matches every node, because the operator adds a
    condition for the domain to each term before the pods are created.
    """
    fields = {"metadata.name": node.name}
    return all(_holds(node.labels, each) for each in _objects(term.get("matchExpressions"))) and all(
        _holds(fields, each) for each in _objects(term.get("matchFields"))
    )


def _holds(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    value, given = labels.get(str(expression.get("key"))), expression.get("values")
    values = given if isinstance(given, list) else []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                difference = int(value or "") - int(values[0])
            except (ValueError, IndexError, TypeError):
                return False
            return difference > 0 if operator == "Gt" else difference < 0
        case _:
            return False


def _tolerated(taint: Taint, tolerations: Iterable[Mapping[str, Any]]) -> bool:
    return any(
        each.get("key") in (None, "", taint.key)
        and each.get("effect") in (None, "", taint.effect)
        and (
            each.get("operator") == "Exists" or (each.get("key") == taint.key and each.get("value", "") == taint.value)
        )
        for each in tolerations
    )


def _slots(node: NodeRoom, demand: GroupDemand) -> int:
    """Return the number of pods of the group for which a node has room.

    A node that does not say how many pods it may run has no such limit.
    """
    room = [
        int(node.free.get(resource, Decimal(0)) // amount)
        for resource, amount in demand.each.items()
        if amount > 0 and not (resource == PODS and PODS not in node.free)
    ]
    return max(0, min(room, default=demand.pods))


def _take(room: list[NodeRoom], demand: GroupDemand, value: str) -> None:
    """Subtract the requests of a group's pods from the free resources of a domain, for as many pods as have room."""
    left = demand.pods
    for index, node in enumerate(room):
        if node.labels.get(demand.label) == value and _usable(node, demand):
            taken = min(left, _slots(node, demand))
            all_of_them = {resource: amount * taken for resource, amount in demand.each.items()}
            room[index] = msgspec.structs.replace(node, free=_less(node.free, all_of_them))
            left -= taken
