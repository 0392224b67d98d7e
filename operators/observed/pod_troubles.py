"""Pod troubles: why pods do not run, in words for a condition, from what scheduler, kubelet and controllers report.

Pure.

Rules:

1. Only pods that should exist count, not those that are being deleted.
2. A container's last output is repeated only if it is a line of ours (`fleet: …`, one line without secrets by the rules
   of the command), because logs may contain anything.
3. A trouble has one of the reasons below, ordered by how much it explains: a pod without a node cannot pull its image.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from msgspec import Struct

from fleet.net.kubernetes.status_errors import ApiStatus, public_message
from fleet.net.kubernetes.views import ContainerStatus, Pod, WorkloadResource
from operators.manifests.names import DOMAIN, GROUP_LABEL, ROLE

MOST_CHARACTERS = 300
OURS = "fleet: "
REFUSED = 3
"""Exit status of a process whose configuration was refused."""


class TroubleReason(IntEnum):
    """Reasons in the order of precedence, named as in conditions."""

    QuotaExceeded = 1
    PodsRefused = 2
    """By admission control or validation, whose words are in the ReplicaSet's condition."""

    NoDomainFits = 3
    """No domain has room for a group of pods, so none was made, or the scheduler has found no node for any of them."""

    NoSuchGpu = 4
    InsufficientCapacity = 5
    Unschedulable = 6
    ImagePull = 7
    ConfigurationMissing = 8
    """A Secret, ConfigMap or volume that a container names is missing."""

    ModelNotFound = 9
    HubUnreachable = 10
    """The model hub sent nothing."""

    ConfigurationRefused = 11
    OutOfMemory = 12
    CrashLooping = 13


UNPLACED = frozenset(
    {
        TroubleReason.QuotaExceeded,
        TroubleReason.PodsRefused,
        TroubleReason.NoDomainFits,
        TroubleReason.NoSuchGpu,
        TroubleReason.InsufficientCapacity,
        TroubleReason.Unschedulable,
    }
)

IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
CONFIGURATION = frozenset({"CreateContainerConfigError", "CreateContainerError"})


class PodTrouble(Struct, frozen=True, order=True):
    reason: TroubleReason
    where: str
    """Pod or controller."""

    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.message else self.where


def troubles(
    pods: Sequence[Pod],
    controllers: Iterable[WorkloadResource],
    products: Sequence[str],
    domains: Mapping[str, str],
) -> tuple[PodTrouble, ...]:
    """Return all troubles, the most informative first, at most one for each pod and one for each group.

    Args:
        pods: Pods of a deployment.
        controllers: Its children with replicas.
        products: GPU products that its roles name.
        domains: The labels (`topology.domain`) by role that has one.
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
    """Yield a trouble for each group for whose pods the scheduler had to choose a domain, and found no node at all."""
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
    """Return why the scheduler finds no node for a pod; empty: it has one, or was not looked at."""
    for each in pod.status.conditions or ():
        if each.type == "PodScheduled" and each.status == "False" and each.reason == "Unschedulable":
            return _short(each.message) or each.reason
    return ""


def _of_pod(pod: Pod, products: Sequence[str]) -> PodTrouble | None:
    name = pod.metadata.name
    if words := _unplaced_words(pod):
        return PodTrouble(_unplaced(words, products), name, words)
    statuses = (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ()))
    found = (_of_container(name, each, ready=pod.ready) for each in statuses)
    return min((each for each in found if each is not None), default=None)


def _unplaced(message: str, products: Sequence[str]) -> TroubleReason:
    """Return the reason from kube-scheduler's words: `0/3 nodes are available: 2 Insufficient nvidia.com/gpu …`."""
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
    # the restarted container tries again for the same time
    if said.startswith("hub.endpoint:") and not (runs and ready):
        return PodTrouble(TroubleReason.HubUnreachable, pod, _short(said))
    if runs:  # the container has recovered
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
