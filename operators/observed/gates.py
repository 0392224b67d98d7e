"""Scheduling gates of groups: which pods the scheduler may not place yet, and which groups it is placing. Pure.

The operator makes pods of a group with a gate if the scheduler has to choose the domain (`operators.controller.group_placer`).
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from fleet.net.kubernetes.views import Pod
from operators.manifests.names import GATE, GATED


class GatedGroup(Struct, frozen=True):
    """A group whose pods were created with a scheduling gate and all exist."""

    name: str
    """Its StatefulSet."""

    closed: tuple[str, ...] = ()
    """Pods that still have the gate, by name."""

    begun: bool = False
    """True if some pods have the gate no more."""

    unplaced: bool = False
    """True if no pod has the gate, and the scheduler has found a node for none of them for a while."""


def gated_group(name: str, pods: Sequence[Pod], *, unplaced: bool) -> GatedGroup:
    """Return the gates of a group's pods; `unplaced`: the scheduler has found a node for none of them for a while."""
    closed = tuple(sorted(pod.metadata.name for pod in pods if is_closed(pod)))
    return GatedGroup(name, closed, begun=len(closed) < len(pods), unplaced=unplaced and not closed)


def is_closed(pod: Pod) -> bool:
    """Return whether a pod has the operator's gate."""
    return any(each.name == GATE for each in pod.spec.scheduling_gates or ())


def is_passing(pods: Iterable[Pod]) -> bool:
    """Return whether a group passes the scheduler: a pod of it has its gate no more, and no node yet."""
    return any(
        pod.alive and pod.metadata.annotations.get(GATED) and not is_closed(pod) and not pod.spec.node_name
        for pod in pods
    )
