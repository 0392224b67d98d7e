"""Pod troubles: finds out why pods do not run, and explains it in texts that conditions show.

The causes come from the statuses that the scheduler, the kubelet and the controllers of Kubernetes write.

Pure.

Rules:

1. Pods that are being deleted, or that have the phase Succeeded or Failed, are not considered.
2. The last output of a container is shown only if it is a line of Fleet's own command. Such a line begins with `fleet: `
   and never contains secrets. Other output is not shown, because it may contain secrets.
3. A trouble has one of the reasons in `TroubleReason`. A reason that can cause another reason precedes it in the order:
   a pod without a node, for example, cannot pull its image.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from msgspec import Struct

from fleet.net.kubernetes.status_errors import ApiStatus, public_message
from fleet.net.kubernetes.views import ContainerStatus, Pod, WorkloadResource
from operators.manifests.names import DOMAIN, GROUP_LABEL, ROLE
from operators.observed.gates import foreign_gates

MOST_CHARACTERS = 300
OURS = "fleet: "
REFUSED = 3
"""Exit status of a Fleet process that has refused its configuration."""


class TroubleReason(IntEnum):
    """Reasons why a pod does not run; a reason with a lower number takes precedence. Conditions show these names."""

    QuotaExceeded = 1
    PodsRefused = 2
    """Admission control or validation refused the pods. The message comes from the condition of the workload object that
    could not create them."""

    NoDomainFits = 3
    """No domain has room for a worker group. Its pods were not created, or the scheduler has found no node for any of
    them."""

    NoSuchGpu = 4
    InsufficientCapacity = 5
    Unschedulable = 6
    SchedulingGated = 7
    """The scheduler ignores the pod until another controller removes a scheduling gate from it."""

    ImagePull = 8
    ConfigurationMissing = 9
    """A Secret, ConfigMap or volume that a container names is missing."""

    ModelNotFound = 10
    HubUnreachable = 11
    """The model hub cannot be reached, or has sent no data for too long."""

    ConfigurationRefused = 12
    OutOfMemory = 13
    CrashLooping = 14


UNPLACED = frozenset(
    {
        TroubleReason.QuotaExceeded,
        TroubleReason.PodsRefused,
        TroubleReason.NoDomainFits,
        TroubleReason.NoSuchGpu,
        TroubleReason.InsufficientCapacity,
        TroubleReason.Unschedulable,
        TroubleReason.SchedulingGated,
    }
)

IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
CONFIGURATION = frozenset({"CreateContainerConfigError", "CreateContainerError"})


class PodTrouble(Struct, frozen=True, order=True):
    reason: TroubleReason
    where: str
    """Name of the pod, of its worker group, or of the workload object that could not create pods."""

    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.message else self.where


def troubles(
    pods: Sequence[Pod],
    controllers: Iterable[WorkloadResource],
    products: Sequence[str],
    domains: Mapping[str, str],
) -> tuple[PodTrouble, ...]:
    """Return the troubles of a deployment's pods, sorted by their reasons (rule 3).

    Args:
        pods: All pods of the deployment.
        controllers: The child objects of the deployment that create pods.
        products: GPU products that the deployment's roles name.
        domains: The node labels that `topology.domain` of the roles names, by role. Roles without one are left out.
    """
    found = [trouble for each in controllers if (trouble := _refused_pods(each)) is not None]
    found += _unfit_groups(pods, domains)
    found += [trouble for each in pods if each.alive and (trouble := _of_pod(each, products)) is not None]
    return tuple(sorted(found))


def _refused_pods(controller: WorkloadResource) -> PodTrouble | None:
    for each in controller.status.conditions or ():
        if each.type == "ReplicaFailure" and each.status == "True":
            said = public_message(ApiStatus(reason=each.reason, message=each.message))
            reason = TroubleReason.QuotaExceeded if "exceeded quota: " in said else TroubleReason.PodsRefused
            return PodTrouble(reason, controller.metadata.name, _short(said))
    return None


def _unfit_groups(pods: Iterable[Pod], domains: Mapping[str, str]) -> Iterator[PodTrouble]:
    """Yield a trouble for each worker group if the scheduler reports for all its pods that it finds no node.

    Only groups whose domain the scheduler chooses are examined.
    """
    groups: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        labels = pod.metadata.labels
        chosen_by_scheduler = labels.get(ROLE) in domains and DOMAIN not in pod.metadata.annotations
        if pod.alive and GROUP_LABEL in labels and chosen_by_scheduler:
            groups.setdefault((pod.metadata.name.rpartition("-")[0], labels[ROLE]), []).append(pod)
    for (name, role), members in groups.items():
        words = [_unplaced_words(pod) for pod in members]
        if all(words):
            said = f"{len(members)} pods need room in one {domains[role]}; the scheduler found none: {words[0]}"
            yield PodTrouble(TroubleReason.NoDomainFits, name, said)


def _unplaced_words(pod: Pod) -> str:
    """Return the scheduler's message that says why it finds no node for a pod; empty if it reports no such problem."""
    for each in pod.status.conditions or ():
        if each.type == "PodScheduled" and each.status == "False" and each.reason == "Unschedulable":
            return _short(each.message) or each.reason
    return ""


def _of_pod(pod: Pod, products: Sequence[str]) -> PodTrouble | None:
    name = pod.metadata.name
    if words := _unplaced_words(pod):
        return PodTrouble(_unplaced(words, products), name, words)
    if gates := ", ".join(foreign_gates(pod)):
        return PodTrouble(TroubleReason.SchedulingGated, name, f"waits for the scheduling gate {gates}")
    statuses = (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ()))
    found = (_of_container(name, each, ready=pod.ready) for each in statuses)
    return min((each for each in found if each is not None), default=None)


def _unplaced(message: str, products: Sequence[str]) -> TroubleReason:
    """Return the trouble reason that a message of kube-scheduler shows.

    An example of a message is `0/3 nodes are available: 2 Insufficient …`.
    """
    if "Insufficient " in message:
        return TroubleReason.InsufficientCapacity
    if products and "didn't match Pod's node affinity/selector" in message:
        return TroubleReason.NoSuchGpu
    return TroubleReason.Unschedulable


def _of_container(pod: str, container: ContainerStatus, *, ready: bool) -> PodTrouble | None:
    waiting = container.state.waiting
    if waiting is not None and waiting.reason in IMAGE:
        return PodTrouble(TroubleReason.ImagePull, pod, f"{container.name}: {waiting.reason}")
    if waiting is not None and waiting.reason in CONFIGURATION:
        return PodTrouble(TroubleReason.ConfigurationMissing, pod, f"{container.name}: {_short(waiting.message)}")
    ended = container.state.terminated or container.last_state.terminated
    if ended is None or (ended.exit_code == 0 and ended.reason != "OOMKilled"):
        return None
    said = next((line for line in reversed(ended.message.splitlines()) if line.startswith(OURS)), "")
    said = said.removeprefix(OURS)
    runs = waiting is None and container.state.terminated is None
    # A restarted container first tries again to reach the hub, so the trouble stays until the pod is ready.
    if said.startswith("hub.endpoint:") and not (runs and ready):
        return PodTrouble(TroubleReason.HubUnreachable, pod, _short(said))
    if runs:  # the container runs again
        return None
    times = f"ended {container.restart_count + 1} times, with exit status {ended.exit_code}"
    if ended.reason == "OOMKilled":
        return PodTrouble(TroubleReason.OutOfMemory, pod, f"{container.name}: {times}")
    if said.startswith("model_dir:"):
        return PodTrouble(TroubleReason.ModelNotFound, pod, _short(said))
    if ended.exit_code == REFUSED:
        return PodTrouble(TroubleReason.ConfigurationRefused, pod, _short(said) or times)
    return PodTrouble(
        TroubleReason.CrashLooping, pod, f"{container.name}: {times}" + (f": {_short(said)}" if said else "")
    )


def _short(text: Any) -> str:
    return " ".join(str(text).split())[:MOST_CHARACTERS]
