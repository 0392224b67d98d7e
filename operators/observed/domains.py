"""Domains: which NVLink domain, rack or zone has room for a group of pods. Pure.

Rules:

1. A domain is all nodes with one value of a label (`topology.domain`). A group fits into it if there is a node with room for
   each of its pods. Room is what a node can allocate, less the requests of all pods on it, whoever they belong to.
2. A group that was given a domain holds its room there from that moment, also before it has pods.
3. The smallest domain that is large enough is chosen, so that large ones stay free for large groups.
4. Nodes that a pod cannot use do not count: unschedulable ones, ones that are not ready, ones without the labels that it
   selects, and ones whose taints it does not tolerate.
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
"""Amounts by resource."""

QUANTITY = re.compile(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+)?([KMGTPE]i|[numkMGTPE])?")
FACTORS = {
    **{
        letter: Decimal(1000) ** power
        for power, letter in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
REPELLING = frozenset({"NoSchedule", "NoExecute"})


class _Part(Struct, frozen=True, rename="camel"):
    """Base of types that read a part of a Kubernetes object; field names are spelled as in the API."""


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


class PlacedPodStatus(_Part, frozen=True):
    phase: str = ""


class PlacedPod(NamedObject, frozen=True, kw_only=True, rename="camel"):
    """Any pod of the cluster, with the resources that it requests on its node."""

    spec: PlacedPodSpec = PlacedPodSpec()
    status: PlacedPodStatus = PlacedPodStatus()


class GroupDemand(Struct, frozen=True):
    """The needs of a group of equal pods."""

    label: str
    """The label whose values are the domains."""

    pods: int
    each: Amounts
    selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, Any], ...] = ()


class NodeRoom(Struct, frozen=True):
    """Resources of a node that no pod requests."""

    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    free: Amounts


class ClusterRoom(Struct, frozen=True):
    """Free resources of all nodes; None: the operator may not read nodes."""

    nodes: tuple[NodeRoom, ...] | None = None


def cluster_room(
    nodes: Iterable[Node], pods: Iterable[PlacedPod], promised: Sequence[tuple[GroupDemand, str]] = ()
) -> ClusterRoom:
    """Return the room on usable nodes.

    Args:
        nodes: All nodes.
        pods: All pods.
        promised: Groups whose pods do not exist yet, with their domains (rule 2).
    """
    used: dict[str, dict[str, Decimal]] = {}
    waiting: list[tuple[GroupDemand, str]] = list(promised)
    for pod in pods:
        if pod.status.phase in {"Succeeded", "Failed"}:
            continue
        asked = requested(pod.spec.containers)
        if pod.spec.node_name:
            there = used.setdefault(pod.spec.node_name, {})
            for resource, amount in asked.items():
                there[resource] = there.get(resource, Decimal(0)) + amount
        elif label := pod.metadata.annotations.get(DOMAIN):
            name, _, value = label.partition("=")
            waiting.append((GroupDemand(name, 1, asked), value))
    room = [
        NodeRoom(
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


def choose(room: ClusterRoom, demand: GroupDemand) -> tuple[str, ClusterRoom]:
    """Return the domain for a group, and the room that is left then; an empty domain: none has room.

    The room must be known.
    """
    slots = {value: count for value, count in slots_by_domain(room, demand).items() if count >= demand.pods}
    if not slots:
        return "", room
    value = min(slots, key=lambda each: (slots[each], each))
    left = list(room.nodes or ())
    _take(left, demand, value)
    return value, ClusterRoom(tuple(left))


def slots_by_domain(room: ClusterRoom, demand: GroupDemand) -> dict[str, int]:
    """Return the number of the group's pods for which each domain has room."""
    found: dict[str, int] = {}
    for node in room.nodes or ():
        if (value := node.labels.get(demand.label)) and _usable(node, demand):
            found[value] = found.get(value, 0) + _slots(node, demand)
    return found


def demand_of(template: Manifest, label: str, pods: int) -> GroupDemand:
    """Return the demand of a group of pods of this template."""
    spec = mapping(template.get("spec"))
    containers, tolerations = spec.get("containers"), spec.get("tolerations")
    return GroupDemand(
        label=label,
        pods=pods,
        each=requested([each for each in containers if isinstance(each, dict)] if isinstance(containers, list) else []),
        selector={key: value for key, value in mapping(spec.get("nodeSelector")).items() if isinstance(value, str)},
        tolerations=tuple(mapping(each) for each in tolerations) if isinstance(tolerations, list) else (),
    )


def requested(containers: Iterable[Mapping[str, Any]]) -> dict[str, Decimal]:
    """Return what containers request together; a limit without a request counts as one."""
    found: dict[str, Decimal] = {}
    for each in containers:
        given = mapping(each.get("resources"))
        for resource, amount in _amounts({**mapping(given.get("limits")), **mapping(given.get("requests"))}).items():
            found[resource] = found.get(resource, Decimal(0)) + amount
    return found


def _amounts(quantities: Mapping[str, Any]) -> dict[str, Decimal]:
    return dict(_parsed(quantities))


def _parsed(quantities: Mapping[str, Any]) -> Iterator[tuple[str, Decimal]]:
    """Yield the amounts; what cannot be parsed is left out, because the API server refuses it anyway."""
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
    return demand.selector.items() <= node.labels.items() and not any(True for _ in repelled)


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
    """Return how many of the group's pods the node has room for."""
    room = [
        int(node.free.get(resource, Decimal(0)) // amount) for resource, amount in demand.each.items() if amount > 0
    ]
    return max(0, min(room, default=demand.pods))


def _take(room: list[NodeRoom], demand: GroupDemand, value: str) -> None:
    """Take a group's room in a domain, as far as there is some."""
    left = demand.pods
    for index, node in enumerate(room):
        if node.labels.get(demand.label) == value and _usable(node, demand):
            taken = min(left, _slots(node, demand))
            all_of_them = {resource: amount * taken for resource, amount in demand.each.items()}
            room[index] = msgspec.structs.replace(node, free=_less(node.free, all_of_them))
            left -= taken
