"""Objects as the operator keeps them: the fields that something is decided by, and no others. Pure.

Everything else that a server sends is passed over while it is decoded, so that a cache of a thousand pods is a few megabytes
and a stream of events leaves nothing behind.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.nesting import DEEPEST, prune
from operators.api.fields import GROUP

READ_ANNOTATIONS = (f"{GROUP}/", "leaderworkerset.sigs.k8s.io/", "controller.kubernetes.io/")
"""Beginnings of the names of those that something is decided by."""


class _View(Struct, frozen=True, kw_only=True, rename="camel"):
    """Of part of an object, as the API spells it."""


class OwnerReference(_View, frozen=True):
    kind: str
    name: str
    uid: str
    controller: bool | None = False


class ObjectMetadata(_View, frozen=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    deletion_timestamp: str | None = None

    def __post_init__(self) -> None:
        """Keep only what is read: in an annotation kubectl keeps the whole object, and there are as many as a cluster has."""
        if self.annotations:
            kept = {name: text for name, text in self.annotations.items() if name.startswith(READ_ANNOTATIONS)}
            msgspec.structs.force_setattr(self, "annotations", kept)

    @property
    def owner_uid(self) -> str:
        """Of the owner that controls it."""
        return next((each.uid for each in self.owner_references if each.controller), "")

    @property
    def deleted(self) -> bool:
        """Whether it is on its way out."""
        return self.deletion_timestamp is not None

    @property
    def order(self) -> int:
        """Of its last change, among those of one server; resourceVersions are numbers since Kubernetes 1.35, and always were."""
        return int(self.resource_version) if self.resource_version.isdecimal() else 0


class NamedObject(_View, frozen=True):
    """Something that is only to be recognised."""

    metadata: ObjectMetadata

    def essence(self) -> Self:
        """What has to differ for a change to be one."""
        return msgspec.structs.replace(self, metadata=_unversioned(self.metadata))


class SecretData(NamedObject, frozen=True):
    """A Secret of our own, with what is in it."""

    data: Mapping[str, str] = {}


class ObjectCondition(_View, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class WorkloadSpec(_View, frozen=True):
    replicas: int = 1


class WorkloadStatus(_View, frozen=True):
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    conditions: tuple[ObjectCondition, ...] | None = ()


class WorkloadResource(NamedObject, frozen=True):
    """A Deployment, StatefulSet or LeaderWorkerSet."""

    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()


class ContainerWaiting(_View, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerTerminated(_View, frozen=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class ContainerState(_View, frozen=True):
    waiting: ContainerWaiting | None = None
    terminated: ContainerTerminated | None = None


class ContainerStatus(_View, frozen=True):
    name: str
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    restart_count: int = 0


class PodStatus(_View, frozen=True):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[ObjectCondition, ...] | None = ()
    container_statuses: tuple[ContainerStatus, ...] | None = ()
    init_container_statuses: tuple[ContainerStatus, ...] | None = ()


class Pod(NamedObject, frozen=True):
    status: PodStatus = PodStatus()

    @property
    def alive(self) -> bool:
        return not self.metadata.deleted and self.status.phase not in {"Succeeded", "Failed"}

    @property
    def unplaced_since(self) -> datetime | None:
        """Since when no node has room for it; None: it has one, or nobody has looked for one yet."""
        for each in self.status.conditions or ():
            if each.type == "PodScheduled" and each.status == "False" and each.reason == "Unschedulable":
                return each.last_transition_time
        return None

    @property
    def restarts(self) -> int:
        return sum(each.restart_count for each in self.status.container_statuses or ())

    @property
    def ready(self) -> bool:
        return self.alive and any(
            each.type == "Ready" and each.status == "True" for each in self.status.conditions or ()
        )


class LeaseSpec(_View, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class KubernetesLease(NamedObject, frozen=True):
    spec: LeaseSpec = LeaseSpec()
    lapses: int = 0
    """How often it had ended, and was renewed after all."""

    def essence(self) -> Self:
        """A renewal changes nothing, nor does what the worker says of itself with each: that is looked at when it is needed."""
        spec = msgspec.structs.replace(self.spec, renew_time=None)
        metadata = msgspec.structs.replace(_unversioned(self.metadata), annotations={})
        return msgspec.structs.replace(self, metadata=metadata, spec=spec)

    def heard(self, now: datetime, before: Self | None, *, news: bool) -> Self:
        """As if renewed when we were told of it, by our own clock.

        Clocks of two machines are compared only where it was there before us, and then nobody's is believed that is ahead of ours. What is renewed
        after it had ended, as we knew it (`before`), is a change.
        """
        at = now if news else min(self.renewed, now)
        lapses = 0
        if before is not None:
            ended = now >= before.renewed + timedelta(seconds=before.spec.lease_duration_seconds or 0)
            lapses = before.lapses + ended
        spec = msgspec.structs.replace(self.spec, renew_time=at.isoformat())
        return msgspec.structs.replace(self, spec=spec, lapses=lapses)

    @property
    def renewed(self) -> datetime:
        return (
            datetime.fromisoformat(self.spec.renew_time) if self.spec.renew_time else datetime.min.replace(tzinfo=UTC)
        )


class CustomObject(NamedObject, frozen=True):
    """One of our own kinds. What its specification says is converted when it is obeyed, because that may fail."""

    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """What nobody can make anything of is left out (`fleet.net.kubernetes.nesting`)."""
        prune(self.spec, DEEPEST - 1)


View = TypeVar("View", bound=NamedObject)


VIEW_OF_KIND: Mapping[ApiKind, type[NamedObject]] = {
    **dict.fromkeys(kinds.CUSTOM_KINDS, CustomObject),
    **dict.fromkeys(kinds.WORKLOAD_KINDS, WorkloadResource),
    **dict.fromkeys(kinds.SUPPORTING_KINDS, NamedObject),
    kinds.POD: Pod,
    kinds.LEASE: KubernetesLease,
}


def _unversioned(metadata: ObjectMetadata) -> ObjectMetadata:
    return msgspec.structs.replace(metadata, resource_version="")
