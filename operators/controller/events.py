"""Kubernetes events for `kubectl describe`: changes of conditions, and steps of scaling. Pure.

Rules:

1. A change is recorded once: the event's name is made of its content and generation, so that an operator that was
   killed and records it again finds it recorded.
2. Notes are made of condition messages, which contain no secrets, and are cut at the API's limit.
"""

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import GROUP, ApiKind
from fleet.net.kubernetes.ports import Manifest
from fleet.net.kubernetes.views import CustomObject, NamedObject
from operators.api.disagg_deployment import ScalingMode
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
NORMAL_REASONS = frozenset(
    {
        *("RolesNotReady", "RollingOut", "Suspending", "Suspended", "ServedProbePending", "RouterSilent"),
        *("RegistrationUnknown", "NotRegistered", "NotTold"),
    }
)
"""Reasons that belong to each start, change or end, and need nobody's attention; troubles have reasons of their own."""

MOST_CHARACTERS = 1000
CONTROLLER = f"{GROUP}/operator"


class KubernetesEvent(Struct, frozen=True, kw_only=True):
    reason: str
    note: str
    warning: bool
    generation: int


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
            warning = not well and each.reason not in NORMAL_REASONS
            yield KubernetesEvent(reason=each.reason, note=note, warning=warning, generation=each.observed_generation)


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


def restored(kind: str, name: str, managers: Sequence[str], generation: int) -> KubernetesEvent:
    """Return the event of a child that somebody has edited, and that was set back."""
    who = ", ".join(managers) or "somebody"
    note = f"{kind} {name} was edited by {who}, and is set back; change the DisaggDeployment instead"
    return KubernetesEvent(reason="DriftReverted", note=note, warning=True, generation=generation)


def replicas_ignored(before: CustomObject, after: CustomObject) -> Iterator[KubernetesEvent]:
    """Yield an event for each role whose `replicas` was edited although its RoleScaler has the number."""
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
    """Yield name, scaling mode and replicas of each role; nobody has checked the specification."""
    roles = custom.spec.get("roles")
    for each in roles if isinstance(roles, list) else ():
        match each:
            case {"name": str(name), "scaling": {"mode": str(mode)}, "replicas": int(replicas)}:
                yield name, mode, replicas
            case _:
                pass


def manifest(happening: KubernetesEvent, kind: ApiKind, about: NamedObject, identity: str, now: datetime) -> Manifest:
    """Return the Event, in the namespace of the object that it is about."""
    metadata = about.metadata
    said = f"{metadata.uid} {happening.generation} {happening.reason} {happening.note}"
    # The same reason may return after another one; an hour later it counts as a second event.
    name = f"{metadata.name[:200]}.{hashlib.sha256(f'{said} {now:%Y%m%d%H}'.encode()).hexdigest()[:16]}"
    regarding: dict[str, Any] = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": metadata.name,
        "namespace": metadata.namespace,
        "uid": metadata.uid,
    }
    return {
        "apiVersion": kinds.EVENT.api_version,
        "kind": kinds.EVENT.name,
        "metadata": {"name": name, "namespace": metadata.namespace},
        "eventTime": now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": CONTROLLER,
        "reportingInstance": identity[:128],
        "action": "Reconcile",
        "reason": happening.reason[:128],
        "note": happening.note[:MOST_CHARACTERS],
        "type": "Warning" if happening.warning else "Normal",
        "regarding": regarding,
    }
