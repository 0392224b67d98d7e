"""Views of Kubernetes objects: Structs with only the fields that decisions need.

All other fields are skipped while an object is decoded. So a cache of a thousand pods takes only a few megabytes, and a
decoded event leaves nothing else in memory.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import GROUP, ApiKind
from fleet.net.kubernetes.nesting import DEEPEST, prune

FIELD_MANAGER = "fleet-operator"
"""The operator's name in an object's `managedFields`."""

CONTENT_FIELDS = (b'"f:spec"', b'"f:data"', b'"f:binaryData"')

READ_ANNOTATIONS = (f"{GROUP}/", "leaderworkerset.sigs.k8s.io/", "controller.kubernetes.io/")
"""Prefixes of the annotations that decisions need; all other annotations are dropped."""


class _View(Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of an object, whose field names in JSON have the API's spelling (camel case)."""


class OwnerReference(_View, frozen=True):
    kind: str
    name: str
    uid: str
    controller: bool | None = False


class FieldOwnership(Struct, frozen=True):
    """Summary of `metadata.managedFields` of a child object: digests of the fields that the operator and others own."""

    ours: str = ""
    """Digest of the fields that the operator's last apply owns. The digest changes when another manager changes or removes one
    of these fields."""

    others: str = ""
    """Digest of the fields of the specification or of the data that other managers own; empty: they own none."""

    managers: tuple[str, ...] = ()
    """Names of the managers whose fields `others` covers."""


class ManagedFieldsEntry(_View, frozen=True):
    manager: str = ""
    operation: str = ""
    subresource: str = ""
    time: str = ""
    fields_v1: msgspec.Raw = msgspec.Raw(b"")


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
    ownership: FieldOwnership = FieldOwnership()
    """Known for child objects only (`ChildMetadata`)."""

    def __post_init__(self) -> None:
        """Drop the annotations that no decision needs.

        They may be long: kubectl stores the whole object in one of them.
        """
        if self.annotations:
            kept = {name: text for name, text in self.annotations.items() if name.startswith(READ_ANNOTATIONS)}
            msgspec.structs.force_setattr(self, "annotations", kept)

    @property
    def owner_uid(self) -> str:
        """Uid of the controlling owner; empty: the object has none."""
        return next((each.uid for each in self.owner_references if each.controller), "")

    @property
    def deleted(self) -> bool:
        """True if the object is being deleted."""
        return self.deletion_timestamp is not None

    @property
    def order(self) -> int:
        """A number that grows with each change on the API server, for comparing two versions of an object.

        ResourceVersions are defined as numbers since Kubernetes 1.35, and were numbers in practice before. The order
        is 0 for a version that is no number.
        """
        return int(self.resource_version) if self.resource_version.isdecimal() else 0


class ChildMetadata(ObjectMetadata, frozen=True):
    """Metadata of an object that the operator applies."""

    managed_fields: tuple[ManagedFieldsEntry, ...] | None = ()
    """The managed fields as the server sends them; emptied after they are summed up in `ownership`."""

    def __post_init__(self) -> None:
        """Replace the managed fields, which are long, by their digest in `ownership`."""
        ObjectMetadata.__post_init__(self)
        if self.managed_fields:
            msgspec.structs.force_setattr(self, "ownership", _ownership(self.managed_fields))
            msgspec.structs.force_setattr(self, "managed_fields", ())


class NamedObject(_View, frozen=True):
    """An object of which only the metadata is decoded."""

    metadata: ObjectMetadata

    def essence(self) -> Self:
        """Return the object without its resourceVersion, so that two versions are equal if no other stored field differs."""
        return msgspec.structs.replace(self, metadata=_unversioned(self.metadata))


class ChildObject(NamedObject, frozen=True):
    """An object that the operator applies; only its metadata is decoded."""

    metadata: ChildMetadata


class SecretData(NamedObject, frozen=True):
    """A Secret with its content; `data` has the values in base64."""

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

    metadata: ChildMetadata
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


class PodSchedulingGate(_View, frozen=True):
    name: str


class PodSpec(_View, frozen=True):
    node_name: str = ""
    scheduling_gates: tuple[PodSchedulingGate, ...] | None = ()


class Pod(NamedObject, frozen=True):
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def alive(self) -> bool:
        return not self.metadata.deleted and self.status.phase not in {"Succeeded", "Failed"}

    @property
    def unplaced_since(self) -> datetime | None:
        """Instant since which the scheduler finds no node with room for the pod.

        None: the pod has a node, or the scheduler has not tried yet.
        """
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
    """Number of times that the Lease was renewed after it had ended, as far as this process has seen it (`with_renewal_time`)."""

    def essence(self) -> Self:
        """Return the Lease without its renewal time and annotations, which change with each renewal."""
        spec = msgspec.structs.replace(self.spec, renew_time=None)
        metadata = msgspec.structs.replace(_unversioned(self.metadata), annotations={})
        return msgspec.structs.replace(self, metadata=metadata, spec=spec)

    def with_renewal_time(self, now: datetime, before: Self | None, *, news: bool) -> Self:
        """Return the Lease with the renewal time `now`, at which this process learned of this version by its own clock.

        If the Lease is not news (`fleet.net.kubernetes.informer`, rule 3), its own renewal time is used, or `now` if that
        time is in the future. If the known version (`before`) had ended, the renewal is counted in `lapses`, so it
        counts as a change.
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
    """An object of a custom kind.

    Its specification is converted only when it is needed, because the conversion may fail.
    """

    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Remove the parts of the specification that are nested too deeply (`fleet.net.kubernetes.nesting`)."""
        prune(self.spec, DEEPEST - 1)


View = TypeVar("View", bound=NamedObject)


VIEW_OF_KIND: Mapping[ApiKind, type[NamedObject]] = {
    **dict.fromkeys(kinds.CUSTOM_KINDS, CustomObject),
    **dict.fromkeys(kinds.WORKLOAD_KINDS, WorkloadResource),
    **dict.fromkeys(kinds.SUPPORTING_KINDS, ChildObject),
    kinds.POD: Pod,
    kinds.LEASE: KubernetesLease,
}


def _ownership(entries: Sequence[ManagedFieldsEntry]) -> FieldOwnership:
    """Return the ownership; entries of subresources are left out, because they belong to controllers that write statuses."""
    whole = [each for each in entries if not each.subresource]
    ours = [bytes(each.fields_v1) for each in whole if (each.manager, each.operation) == (FIELD_MANAGER, "Apply")]
    others = [
        each
        for each in whole
        if each.manager != FIELD_MANAGER and any(part in bytes(each.fields_v1) for part in CONTENT_FIELDS)
    ]
    return FieldOwnership(
        ours=_digest(*ours),
        others=_digest(*(part for each in others for part in (each.time.encode(), bytes(each.fields_v1)))),
        managers=tuple(sorted({each.manager for each in others})),
    )


def _digest(*parts: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(b"\0".join(parts)) if parts else ""


def _unversioned(metadata: ObjectMetadata) -> ObjectMetadata:
    return msgspec.structs.replace(metadata, resource_version="")
