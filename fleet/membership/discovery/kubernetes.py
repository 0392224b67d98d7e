"""The Kubernetes API as the directory of workers: a Lease each, and an EndpointSlice where a Service is to have it.

Rules:

1. A worker's Lease carries its record in an annotation; the holder is the worker's id, which is its pod's name. The last incarnation to
   begin takes it over; who finds another one's record when renewing has been replaced. Every write names the version that it is based
   on, so that of two writers one is told so.
2. A renewal is another `renewTime`. Routers compare it with the one they saw before and never with a clock: nodes' clocks may differ.
3. A router lists, watches until the watch ends, is too old (410) or says nothing for `SILENCE_SECONDS`, and lists again.
4. What is written here goes, whatever becomes of its worker. The Lease belongs to the worker's pod, the EndpointSlice to the Lease; and a
   Lease that nobody renews is removed by whoever follows it, in the version that has ended (`fleet.membership.discovery.lease_expiry`): who was believed
   dead makes it anew with its next renewal.
5. A worker's EndpointSlice has one endpoint, itself, and is written when the worker takes its Lease and deleted with it. Until it
   is written the worker is not registered.
6. A Lease of the same name that is not of this cluster is left alone.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, Self

import aiohttp
import msgspec
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from msgspec import Struct

from fleet.core.clock import Clock, Nanos
from fleet.core.discovery import KubernetesDiscovery, WorkerRecord
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation, WorkerId
from fleet.core.system_clock import SystemClock, unix_milliseconds
from fleet.membership.discovery.lease_expiry import ExpiredLease, LeaseExpiry
from fleet.membership.messages import DirectoryListing, DirectoryReading, RecordMissing, RecordSeen
from fleet.membership.ports import DirectoryUnreachable
from fleet.net.kubernetes.directory_objects import CONFLICT, FORBIDDEN, LEASES, NOT_FOUND, DiscoveryObjects, Manifest
from fleet.net.kubernetes.endpoint_slices import endpoint_slice
from fleet.net.kubernetes.kubeconfig import api_configuration
from fleet.net.kubernetes.own_pod import OwnPod, own_namespace, own_pod
from fleet.net.kubernetes.ports import KubernetesError
from workers.ports import RegistryUnreachable, WorkerSuperseded

log = logging.getLogger(__name__)

GROUP = "fleet-serving.io"
REGISTRATION = f"{GROUP}/registration"
CLUSTER = "app.kubernetes.io/instance"
RECORD = f"{GROUP}/record"
WARM = f"{GROUP}/warm-blocks"
AGENT = MANAGER = "fleet-worker"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")

SILENCE_SECONDS = 30.0  # workers renew more often: what is silent for longer is cut, or has none
SWEEP_SECONDS = 1.0  # between two looks for leases that have ended
EXPIRED = 410
LONGEST_EVENT = 2 << 20  # bytes; an object is 1.5 MiB at most where etcd keeps it
TRIES = 3  # of a write that others' writes come before
MALFORMED = (KeyError, TypeError, ValueError, msgspec.DecodeError)  # what is not as the API has it


class LeaseWatchEvent(Struct, frozen=True):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: Manifest


class KubernetesDirectory:
    """Implements `workers.ports.Registry` and `fleet.membership.ports.Directory`; an async context manager that owns its connections."""

    def __init__(
        self,
        settings: KubernetesDiscovery,
        clock: Clock | None = None,
        now_unix_ms: Callable[[], int] = unix_milliseconds,
        warm_blocks: Callable[[], int] | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            settings: Where, and for which cluster.
            clock: By which leases end; None: the system's.
            now_unix_ms: For people who read the Lease; nothing is decided by it.
            warm_blocks: Of a worker, said anew with each renewal: what it would cost to end it (`operators.observed.registrations`).
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._now_unix_ms = now_unix_ms
        self._warm_blocks = warm_blocks
        self._pod = OwnPod(settings.pod, settings.pod_uid) if settings.pod else None
        self._unrenewed = LeaseExpiry()
        self._may_remove = True
        self._held: dict[tuple[WorkerId, Incarnation], Manifest] = {}  # Leases as they were last written here
        self._sliced: dict[tuple[WorkerId, Incarnation], Manifest] = {}  # their EndpointSlices, likewise
        self._last_ms = 0

    async def __aenter__(self) -> Self:
        """Connect when first asked.

        Raises:
            ConfigurationRefused: It is not said how to reach the API.
        """
        if self._pod is None and not self._settings.kubeconfig:
            self._pod = own_pod()
        self._client = await _client(self._settings)
        self._namespace = _namespace(self._settings)
        self._objects = DiscoveryObjects(self._client, self._namespace, MANAGER)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # it says what it takes, not what it gives

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        record = WorkerRecord(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            lease_seconds=self._settings.lease_seconds,
        )
        me = (worker_id, incarnation)
        async with _registry_errors():
            if not await self._renew(record):
                self._sliced.pop(me, None)
                await self._take(record)
            if self._settings.service and me not in self._sliced:
                self._sliced[me] = await self._apply_slice(record)
        return record.lease

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        held = self._held.pop((worker_id, incarnation), None)
        sliced = self._sliced.pop((worker_id, incarnation), None)
        async with _registry_errors():
            for _ in range(TRIES):
                if held is None or _incarnation(held) != incarnation:
                    return
                name = held["metadata"]["name"]
                if await self._objects.delete_lease(name, held["metadata"]["resourceVersion"]):
                    if sliced is not None:  # the collector of garbage would take its time
                        await self._objects.delete_slice(name, sliced["metadata"]["resourceVersion"])
                    return
                held = await self._objects.lease(name)

    async def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        selected = f"{REGISTRATION}=worker,{CLUSTER}={self._settings.cluster}"
        async with _directory_errors():
            listed, revision = await self._objects.leases(selected)
            found = [seen for item in listed if (seen := self._look(item)) is not None]
            self._unrenewed.only(item["metadata"]["name"] for item in listed)
        yield DirectoryListing(all=tuple(found))
        async with _directory_errors():
            answer = await self._objects.watch_leases(selected, revision, SILENCE_SECONDS)
        async with answer, _directory_errors():
            answer.raise_for_status()
            async for event in self._events(answer):
                if event.type == "BOOKMARK":
                    continue
                seen = self._look(event.object, gone=event.type == "DELETED")
                if seen is not None:
                    yield RecordMissing(worker_id=seen.record.worker_id) if event.type == "DELETED" else seen

    async def _events(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[LeaseWatchEvent, None]:
        """Of a watch, until it ends, has expired or fallen silent. Meanwhile leases that have ended are removed."""
        begun, silent = b"", 0.0
        while silent < SILENCE_SECONDS:
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    part = await answer.content.readany()
            except TimeoutError:
                silent += SWEEP_SECONDS
            else:
                *lines, begun = (begun + part).split(b"\n")
                for line in lines:
                    if (event := _event(line)) is None:
                        return
                    yield event
                if not part:
                    return
                if len(begun) > LONGEST_EVENT:
                    raise DirectoryUnreachable(f"Kubernetes: an event is longer than {LONGEST_EVENT} bytes")
                silent = 0.0
            for ended in self._unrenewed.ended(self._clock.now()):
                await self._remove(ended)

    def _look(self, lease: Manifest, *, gone: bool = False) -> RecordSeen | None:
        """What is to be known of a Lease that the API tells of; None: it is no worker's."""
        if (seen := _seen(lease)) is not None:
            name = lease["metadata"]["name"]
            if gone:
                self._unrenewed.gone(name)
            else:
                version = lease["metadata"]["resourceVersion"]
                self._unrenewed.saw(name, version, seen.record.lease, self._clock.now())
        return seen

    async def _remove(self, ended: ExpiredLease) -> None:
        """A Lease that nobody renews, if it is still as it was."""
        if not self._may_remove:
            return
        try:
            if await self._objects.delete_lease(ended.name, ended.version):
                log.info("removed the lease of a worker that is gone", extra={"lease": ended.name})
        except ApiException as error:
            if error.status != FORBIDDEN:
                raise
            self._may_remove = False
            log.warning("leases of dead workers stay: the service account has not the verb delete")

    async def _renew(self, record: WorkerRecord) -> bool:
        """False where there is nothing to renew.

        Raises:
            Superseded: The Lease is another's.
        """
        me = (record.worker_id, record.incarnation)
        if (held := self._held.get(me)) is None:
            return False
        for _ in range(TRIES):
            try:
                self._held[me] = await self._objects.replace_lease(self._lease(record, held))
            except ApiException as error:
                if error.status == NOT_FOUND:
                    del self._held[me]
                    return False
                if error.status != CONFLICT:
                    raise
            else:
                return True
            found = await self._objects.lease(held["metadata"]["name"])
            if found is None:
                del self._held[me]
                return False
            if _incarnation(found) != record.incarnation:
                del self._held[me]
                raise WorkerSuperseded(
                    f"{record.worker_id} is held by a newer process; every worker needs an id of its own"
                )
            held = found
        raise RegistryUnreachable(f"the lease {held['metadata']['name']} changes all the time")

    async def _take(self, record: WorkerRecord) -> None:
        """Make the Lease, or take it over from an incarnation before.

        Raises:
            RegistryUnreachable: It is somebody else's, or others write it all the time.
        """
        name = _name(record.worker_id)
        for _ in range(TRIES):
            found = await self._objects.lease(name)
            if found is not None and not self._labels().items() <= found["metadata"].get("labels", {}).items():
                raise RegistryUnreachable(
                    f"the lease {self._namespace}/{name} is not of the cluster {self._settings.cluster!r}; rename the worker"
                )
            lease = self._lease(record, found)
            try:
                write = self._objects.create_lease if found is None else self._objects.replace_lease
                written = await write(lease)
            except ApiException as error:
                if error.status not in {NOT_FOUND, CONFLICT}:
                    raise
            else:
                self._held[record.worker_id, record.incarnation] = written
                return
        raise RegistryUnreachable(f"the lease {self._namespace}/{name} changes all the time")

    def _lease(self, record: WorkerRecord, found: Manifest | None) -> Manifest:
        """The Lease with the record in it, renewed now, in place of what was found."""
        now = self._now()
        before: Manifest = {} if found is None else found["spec"]
        taken = found is None or _incarnation(found) != record.incarnation
        metadata: Manifest = self._metadata(record)
        if self._warm_blocks is not None:
            metadata["annotations"][WARM] = str(self._warm_blocks())
        if found is not None:
            metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        return {
            "apiVersion": "/".join(LEASES),
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": record.worker_id,
                "leaseDurationSeconds": record.lease_seconds,
                "acquireTime": now if taken else before.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": before.get("leaseTransitions", -1) + 1
                if taken
                else before.get("leaseTransitions", 0),
            },
        }

    async def _apply_slice(self, record: WorkerRecord) -> Manifest:
        ours = self._metadata(record)
        try:
            body = endpoint_slice(
                record.address,
                self._held[record.worker_id, record.incarnation]["metadata"],
                service=self._settings.service,
                port="worker",
                pod=self._pod,
                labels=ours["labels"],
                annotations={RECORD: ours["annotations"][RECORD]},
            )
        except ValueError as error:
            raise RegistryUnreachable(
                f"discovery.service: {record.address} is no IP address and port; set `advertise` to the pod's"
            ) from error
        return await self._objects.apply_slice(body)

    def _metadata(self, record: WorkerRecord) -> Manifest:
        metadata: Manifest = {
            "name": _name(record.worker_id),
            "namespace": self._namespace,
            "labels": self._settings.labels | self._labels(),
            "annotations": {RECORD: msgspec.json.encode(record).decode()},
        }
        if self._pod is not None:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._pod.name, "uid": self._pod.uid}
            metadata["ownerReferences"] = [owner]
        return metadata

    def _labels(self) -> dict[str, str]:
        """By which its leases are found."""
        return {REGISTRATION: "worker", CLUSTER: self._settings.cluster}

    def _now(self) -> str:
        """As `MicroTime` has it; later than the last one, whatever the clock does."""
        self._last_ms = max(self._last_ms + 1, self._now_unix_ms())
        return datetime.fromtimestamp(self._last_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _client(settings: KubernetesDiscovery) -> client.ApiClient:
    """What speaks to the API.

    Raises:
        ConfigurationRefused: There is no service account, or no such file.
    """
    try:
        configuration = await api_configuration(settings.kubeconfig)
    except KubernetesError as error:
        raise ConfigurationRefused(f"discovery.{error}") from error
    connected = client.ApiClient(configuration)
    connected.user_agent = AGENT
    return connected


def _namespace(settings: KubernetesDiscovery) -> str:
    """Where the leases are.

    Raises:
        ConfigurationRefused: None is named, and this is no pod.
    """
    namespace = settings.namespace or own_namespace()
    if not namespace:
        raise ConfigurationRefused("discovery.namespace: is needed outside of a pod")
    return namespace


def _event(line: bytes) -> LeaseWatchEvent | None:
    """What a watch says; None: that it has expired.

    Raises:
        DirectoryUnreachable: The server says that it cannot watch, for another reason: listing again at once would only add to that.
    """
    event = msgspec.json.decode(line, type=LeaseWatchEvent)
    if event.type != "ERROR":
        return event
    code, reason = event.object.get("code"), event.object.get("reason")
    if code == EXPIRED:
        return None
    raise DirectoryUnreachable(f"Kubernetes: {code} {reason}, in a watch")


@asynccontextmanager
async def _registry_errors() -> AsyncIterator[None]:
    try:
        yield
    except (ApiException, aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise RegistryUnreachable(_said(error)) from error


@asynccontextmanager
async def _directory_errors() -> AsyncIterator[None]:
    try:
        yield
    except (ApiException, aiohttp.ClientError, TimeoutError, OSError, *MALFORMED) as error:
        raise DirectoryUnreachable(_said(error)) from error


def _said(error: Exception) -> str:
    if not isinstance(error, ApiException):
        return f"Kubernetes: {str(error) or type(error).__name__}"
    hint = "; does the service account have the verbs?" if error.status == FORBIDDEN else ""
    return f"Kubernetes: {error.status} {error.reason}{hint}"


def _name(worker_id: WorkerId) -> str:
    """The worker's id, as it is of a pod; where it is no name, what stands for it."""
    if NAME.fullmatch(worker_id):
        return worker_id
    return f"worker-{hashlib.sha256(worker_id.encode()).hexdigest()[:32]}"


def _incarnation(lease: Manifest) -> Incarnation | None:
    seen = _seen(lease)
    return None if seen is None else seen.record.incarnation


def _seen(lease: Manifest) -> RecordSeen | None:
    """None where somebody made a Lease with our label and no record."""
    try:
        record = msgspec.json.decode(lease["metadata"]["annotations"][RECORD], type=WorkerRecord)
        return RecordSeen(record=record, renewal=lease["spec"]["renewTime"])
    except (KeyError, TypeError, msgspec.DecodeError, RecursionError):
        log.warning(
            "a lease with the label of workers has no record",
            extra={"lease": str(lease.get("metadata", {}).get("name"))[:200]},
        )
        return None
