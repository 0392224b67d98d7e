"""Kubernetes events, which `kubectl describe` and `kubectl get events` show: makes their manifests, without I/O.

The same event is recorded at most once in each hour: its name is derived from the object's uid, the event's content and
generation, and the hour. A process that was killed, and tries to record the event again, therefore finds that it exists.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.ports import Manifest
from fleet.net.kubernetes.views import ObjectMetadata

MOST_CHARACTERS = 1000


class KubernetesEvent(Struct, frozen=True, kw_only=True):
    """A change of an object, described in a text for people."""

    reason: str
    note: str
    warning: bool = False
    generation: int = 0


def event_manifest(
    happening: KubernetesEvent,
    kind: ApiKind,
    about: ObjectMetadata,
    now: datetime,
    *,
    controller: str,
    identity: str,
    action: str = "Reconcile",
) -> Manifest:
    """Return the manifest of the Event, which is in the namespace of the changed object.

    Args:
        happening: The change.
        kind: Kind of the changed object.
        about: The object's name, namespace and uid.
        now: The time of the change.
        controller: Name of the program that reports the change.
        identity: Name of the process of this program, such as that of its pod.
        action: One word for what the program was doing.
    """
    said = f"{about.uid} {happening.generation} {happening.reason} {happening.note}"
    # The name depends on the hour, so that the same change in a later hour is recorded as a second event.
    name = f"{about.name[:200]}.{hashlib.sha256(f'{said} {now:%Y%m%d%H}'.encode()).hexdigest()[:16]}"
    regarding: dict[str, Any] = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": about.name,
        "namespace": about.namespace,
        "uid": about.uid,
    }
    return {
        "apiVersion": kinds.EVENT.api_version,
        "kind": kinds.EVENT.name,
        "metadata": {"name": name, "namespace": about.namespace},
        "eventTime": now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": controller,
        "reportingInstance": identity[:128],
        "action": action,
        "reason": happening.reason[:128],
        "note": happening.note[:MOST_CHARACTERS],
        "type": "Warning" if happening.warning else "Normal",
        "regarding": regarding,
    }
