"""Kubernetes events for `kubectl describe`: changes of conditions, steps of scaling, and edits that were undone or have no effect. Pure.

Rules:

1. A change leads to only one Event, even if an operator is killed and the next operator records the same change again
   (`fleet.net.kubernetes.events`).
2. The note of an Event about a condition contains the message of the condition. Messages of conditions contain no
   secrets. A note that is longer than the API server allows is cut.
"""

from collections.abc import Iterator, Sequence

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.events import KubernetesEvent
from fleet.net.kubernetes.kinds import GROUP
from fleet.net.kubernetes.views import CustomObject
from operators.api.disagg_deployment import ScalingMode
from operators.api.fields import Condition
from operators.controller.reconcile import Action, DeletePod, Remove, Scale

RECORDED_CONDITIONS = ("Ready", "Degraded", "Scheduled", "RolesRegistered", "ScalingLimited", "Feasible")
"""Types of the conditions whose changes are recorded as Kubernetes events."""

HEALTHY_STATUS = {
    "Ready": "True",
    "Degraded": "False",
    "Scheduled": "True",
    "RolesRegistered": "True",
    "ScalingLimited": "False",
    "Feasible": "True",
}
NORMAL_REASONS = frozenset(
    {
        *("RolesNotReady", "RollingOut", "Suspending", "Suspended", "ServedProbePending", "RouterSilent"),
        *("RegistrationUnknown", "NotRegistered", "NotTold"),
    }
)
"""Reasons that occur at every normal start, change or end. If a condition gets another status than in HEALTHY_STATUS, its
Kubernetes event has the type Warning, unless the reason is one of these. All other events of conditions are Normal."""

CONTROLLER = f"{GROUP}/operator"


def turns(before: Sequence[Condition], after: Sequence[Condition]) -> Iterator[KubernetesEvent]:
    """Yield an event for each condition in RECORDED_CONDITIONS whose status or reason has changed.

    A condition that was not there before counts as changed only if it shows a problem.
    """
    was = {each.type: (each.status, each.reason) for each in before}
    for each in after:
        if each.type in RECORDED_CONDITIONS and was.get(each.type, (HEALTHY_STATUS[each.type], "")) != (
            each.status,
            each.reason,
        ):
            well = each.status == HEALTHY_STATUS[each.type]
            if well and each.type not in was:
                continue  # nothing was known about this condition before, and it shows no problem now
            note = f"{each.type} is {each.status}" + (f": {each.message}" if each.message else "")
            warning = not well and each.reason not in NORMAL_REASONS
            yield KubernetesEvent(reason=each.reason, note=note, warning=warning, generation=each.observed_generation)


def steps(actions: Sequence[Action], generation: int) -> Iterator[KubernetesEvent]:
    """Yield an event for each action that scales or removes a workload, or that deletes a pod."""
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


def restored(kind: str, name: str, managers: Sequence[str], generation: int) -> KubernetesEvent:
    """Return the event which says that somebody has edited a child object, and that the operator has restored it."""
    who = ", ".join(managers) or "somebody"
    note = f"{kind} {name} was edited by {who}, and is set back; change the DisaggDeployment instead"
    return KubernetesEvent(reason="DriftReverted", note=note, warning=True, generation=generation)


def replicas_ignored(before: CustomObject, after: CustomObject) -> Iterator[KubernetesEvent]:
    """Yield an event for each role whose `replicas` was edited without effect, because its RoleScaler holds the number."""
    was = {role: replicas for role, _, replicas in _role_sizes(before)}
    for role, mode, replicas in _role_sizes(after):
        if mode != ScalingMode.STATIC and was.get(role, replicas) != replicas:
            scaler = f"{after.metadata.name}-{role}"
            note = (
                f"role {role}: replicas has no effect, because scaling.mode is {mode}; "
                f"use kubectl scale rolescaler {scaler} --replicas={replicas}"
            )
            yield KubernetesEvent(
                reason="ReplicasIgnored", note=note, warning=True, generation=after.metadata.generation
            )


def _role_sizes(custom: CustomObject) -> Iterator[tuple[str, str, int]]:
    """Yield name, scaling mode and replicas of each role.

    The specification may be invalid; faulty roles are left out.
    """
    roles = custom.spec.get("roles")
    for each in roles if isinstance(roles, list) else ():
        match each:
            case {"name": str(name), "scaling": {"mode": str(mode)}, "replicas": int(replicas)}:
                yield name, mode, replicas
            case _:
                pass
