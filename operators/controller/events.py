"""Kubernetes events for `kubectl describe`: changes of conditions, and steps of scaling. Pure.

Rules:

1. A change is recorded once, also by an operator that was killed and records it again (`fleet.net.kubernetes.events`).
2. Notes are made of condition messages, which contain no secrets, and are cut at the API's limit.
"""

from collections.abc import Iterator, Sequence

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.events import KubernetesEvent
from fleet.net.kubernetes.kinds import GROUP
from operators.api.fields import Condition
from operators.controller.reconcile import Action, DeletePod, Remove, Scale

RECORDED_CONDITIONS = ("Ready", "Degraded", "Scheduled", "RolesRegistered", "ScalingLimited", "Feasible")
"""Conditions whose changes are recorded."""

HEALTHY_STATUS = {
    "Ready": "True",
    "Degraded": "False",
    "Scheduled": "True",
    "RolesRegistered": "True",
    "ScalingLimited": "False",
    "Feasible": "True",
}
CONTROLLER = f"{GROUP}/operator"


def turns(before: Sequence[Condition], after: Sequence[Condition]) -> Iterator[KubernetesEvent]:
    """Yield an event for each condition whose status or reason has changed."""
    was = {each.type: (each.status, each.reason) for each in before}
    for each in after:
        if each.type in RECORDED_CONDITIONS and was.get(each.type, (HEALTHY_STATUS[each.type], "")) != (
            each.status,
            each.reason,
        ):
            well = each.status == HEALTHY_STATUS[each.type]
            if well and each.type not in was:
                continue  # there was no problem before
            note = f"{each.type} is {each.status}" + (f": {each.message}" if each.message else "")
            yield KubernetesEvent(reason=each.reason, note=note, warning=not well, generation=each.observed_generation)


def steps(actions: Sequence[Action], generation: int) -> Iterator[KubernetesEvent]:
    """Yield an event for each scaling action."""
    for each in actions:
        match each:
            case Scale(kind, name, replicas, was):
                note = f"{kind} {name}: {replicas} replicas" + (f", was {was}" if was is not None else "")
                yield KubernetesEvent(reason="Scaled", note=note, warning=False, generation=generation)
            case Remove(kind, name) if kind in {each.name for each in kinds.WORKLOAD_KINDS}:
                yield KubernetesEvent(reason="Removed", note=f"{kind} {name}", warning=False, generation=generation)
            case DeletePod(pod):
                yield KubernetesEvent(reason="GroupRestarted", note=f"Pod {pod}", warning=True, generation=generation)
            case _:
                pass
