"""Gates: reads the scheduling gates of worker groups, by which the operator holds pods back from the scheduler.

Pure.

The operator creates the pods of a group with a gate if the scheduler has to choose the domain
(`operators.controller.group_placer`). A user's podTemplate may name further gates, which other controllers remove. Such
gates are called foreign gates here.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from fleet.net.kubernetes.views import Pod
from operators.manifests.names import GATE, GATED


class GatedGroup(Struct, frozen=True):
    """Describes the gates of a group whose pods were created with a scheduling gate and all exist."""

    name: str
    """Name of the group's StatefulSet."""

    closed: tuple[str, ...] = ()
    """Names of the pods that still have the operator's gate."""

    held: bool = False
    """True if a pod has a foreign gate, so that the scheduler would not place the group even without the operator's
    gate."""

    begun: bool = False
    """True if the operator's gate has been removed from at least one of the pods."""

    unplaced: bool = False
    """True if no pod has the operator's gate any more, and all pods have waited for a node for longer than the time limit,
    which is one to two times `operators.observed.observe.PARTIAL_GROUP_SECONDS`."""


def gated_group(name: str, pods: Sequence[Pod], *, unplaced: bool) -> GatedGroup:
    """Return the state of the gates of a group's pods.

    `unplaced` is true if all pods have waited for a node for longer than the time limit, which is one to two times
    `operators.observed.observe.PARTIAL_GROUP_SECONDS`.
    """
    closed = tuple(sorted(pod.metadata.name for pod in pods if _is_closed(pod)))
    held = any(True for pod in pods for _ in foreign_gates(pod))
    return GatedGroup(name, closed, held, begun=len(closed) < len(pods), unplaced=unplaced and not closed)


def _is_closed(pod: Pod) -> bool:
    """Return whether a pod has the operator's gate."""
    return any(each.name == GATE for each in pod.spec.scheduling_gates or ())


def foreign_gates(pod: Pod) -> Iterator[str]:
    """Yield the gates of a pod that other controllers have to remove."""
    return (each.name for each in pod.spec.scheduling_gates or () if each.name != GATE)


def is_passing(pod: Pod) -> bool:
    """Return whether the scheduler is placing a pod of a gated group: the pod has no gate any more, and no node yet."""
    gated = pod.alive and bool(pod.metadata.annotations.get(GATED))
    return gated and not pod.spec.scheduling_gates and not pod.spec.node_name
