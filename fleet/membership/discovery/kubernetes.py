"""Kubernetes directory: one Lease per worker, and one EndpointSlice per worker if the settings name a Service.

Rules:

1. A worker's Lease contains the worker's record in an annotation. Its holder is the worker's id, which is the name of
   the pod. The incarnation that started last takes the Lease over. If an incarnation renews and does not find its own
   record, it has been replaced. Every write names the version that it is based on, so one of two concurrent writers
   fails.
2. A renewal changes `renewTime`. Routers only compare it with the previous value and never with a clock, because the
   clocks of nodes may differ.
3. A router lists the Leases and then watches them. When the watch ends, expires (410) or brings nothing for
   `SILENCE_SECONDS`, the router lists them again.
4. No object stays for ever. The worker's pod owns the Lease, and the Lease owns the EndpointSlice. If nobody renews a
   Lease in time, a router deletes it, but only if its version has not changed meanwhile (`lease_expiry.py`). If the
   worker still runs, it creates the Lease again.
5. A worker's EndpointSlice has one endpoint. The worker writes it after it has taken its Lease, and deletes it together
   with the Lease. The worker counts as registered only when the EndpointSlice is written.
6. A Lease of the same name that belongs to another cluster is not touched.
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
from fleet.membership.ports import DirectoryUnreachable, RegistryUnreachable, WorkerSuperseded
from fleet.net.kubernetes.directory_objects import CONFLICT, FORBIDDEN, LEASES, NOT_FOUND, DiscoveryObjects, Manifest
from fleet.net.kubernetes.endpoint_slices import endpoint_slice
from fleet.net.kubernetes.kubeconfig import api_configuration
from fleet.net.kubernetes.own_pod import OwnPod, own_namespace, own_pod
from fleet.net.kubernetes.ports import KubernetesError

log = logging.getLogger(__name__)

GROUP = "fleet-serving.io"
REGISTRATION = f"{GROUP}/registration"
CLUSTER = "app.kubernetes.io/instance"
RECORD = f"{GROUP}/record"
WARM = f"{GROUP}/warm-blocks"
AGENT = MANAGER = "fleet-worker"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")

SILENCE_SECONDS = 30.0  # a watch without events for this time counts as broken: workers renew their Leases more often
SWEEP_SECONDS = 1.0  # time between two checks for ended Leases
EXPIRED = 410
# Maximum length of a line of a watch in bytes; after a longer one, the watch counts as failed. With etcd, an object has at
# most 1.5 MiB.
LONGEST_EVENT = 2 << 20
# Number of attempts to write or delete a Lease that others change at the same time; then this process gives up.
TRIES = 3
# Exceptions that are raised while a malformed object is decoded.
MALFORMED = (KeyError, TypeError, ValueError, msgspec.DecodeError)


class LeaseWatchEvent(Struct, frozen=True):
    """One line of a watch: the kind of change, and the changed object."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: Manifest


class KubernetesDirectory:
    """Publishes workers as Kubernetes Leases, and reads the published workers.

    Implements `Registry` and `Directory` of `fleet.membership.ports`.

    It is an async context manager that owns its connections.
    """

    def __init__(
        self,
        settings: KubernetesDiscovery,
        clock: Clock | None = None,
        now_unix_ms: Callable[[], int] = unix_milliseconds,
        warm_blocks: Callable[[], int] | None = None,
    ) -> None:
        """Prepare the directory; nothing is read from the API server yet.

        Args:
            settings: The cluster and how to reach the API server.
            clock: Measures the durations of Leases; None: the system's clock.
            now_unix_ms: Returns the Unix time in milliseconds that is written into Leases. Routers only compare it with
                the previous value (rule 2).
            warm_blocks: Returns the number of a worker's warm blocks, which is published with each renewal as the cost
                of ending the worker. None: nothing is published, as in a router.
        """
        self.settings = settings
        self._clock = clock or SystemClock()
        self._now_unix_ms = now_unix_ms
        self._warm_blocks = warm_blocks
        self._pod = OwnPod(settings.pod, settings.pod_uid) if settings.pod else None
        self._unrenewed = LeaseExpiry()
        self._may_remove = True
        # For each worker that this process publishes, its Lease in the version that this process wrote last.
        self._held: dict[tuple[WorkerId, Incarnation], Manifest] = {}
        # For each worker that this process publishes, its EndpointSlice in the version that this process wrote last.
        self._sliced: dict[tuple[WorkerId, Incarnation], Manifest] = {}
        self._last_ms = 0

    async def __aenter__(self) -> Self:
        """Open the API client; it connects at its first call.

        Raises:
            ConfigurationRefused: The kubeconfig is unusable. Or outside of a pod, the settings name no kubeconfig or no namespace.
        """
        if self._pod is None and not self.settings.kubeconfig:
            self._pod = own_pod()
        self._client = await connect(self.settings)
        self._namespace = _namespace(self.settings)
        self._objects = DiscoveryObjects(self._client, self._namespace, MANAGER)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # the stub types the argument, but not the result

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        record = WorkerRecord(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            lease_seconds=self.settings.lease_seconds,
        )
        me = (worker_id, incarnation)
        async with _registry_errors():
            if not await self._renew(record):
                self._sliced.pop(me, None)
                await self._take(record)
            if self.settings.service and me not in self._sliced:
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
                    # Delete the EndpointSlice now, because Kubernetes' garbage collection would delete it only later.
                    if sliced is not None:
                        await self._objects.delete_slice(name, sliced["metadata"]["resourceVersion"])
                    return
                held = await self._objects.lease(name)

    async def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        selected = f"{REGISTRATION}=worker,{CLUSTER}={self.settings.cluster}"
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
        """Yield the events of a watch until it ends, expires or stays silent.

        Delete ended Leases while waiting for events.
        """
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
                    if (event := parse_event(line)) is None:
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
        """Return the record in a Lease; None if it contains no valid record.

        Report the Lease's version to `LeaseExpiry`, or its deletion if it is `gone`.
        """
        if (seen := _seen(lease)) is not None:
            name = lease["metadata"]["name"]
            if gone:
                self._unrenewed.gone(name)
            else:
                version = lease["metadata"]["resourceVersion"]
                self._unrenewed.saw(name, version, seen.record.lease, self._clock.now())
        return seen

    async def _remove(self, ended: ExpiredLease) -> None:
        """Delete a Lease that has ended, unless it was renewed meanwhile. Do nothing once the API server has forbidden a deletion."""
        if not self._may_remove:
            return
        try:
            if await self._objects.delete_lease(ended.name, ended.version):
                log.info("lease of a dead worker removed", extra={"lease": ended.name})
        except ApiException as error:
            if error.status != FORBIDDEN:
                raise
            self._may_remove = False
            log.warning("leases of dead workers stay, the service account lacks the verb delete")

    async def _renew(self, record: WorkerRecord) -> bool:
        """Renew the Lease that this process holds for a worker, and return True.

        Return False if this process does not hold it yet, or if it was deleted.

        Raises:
            WorkerSuperseded: Another process owns the Lease.
            RegistryUnreachable: Other processes changed the Lease during `TRIES` attempts.
            ApiException: The API server refused a call for another reason.
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
        """Create the Lease of a worker, or take it over from an earlier incarnation.

        Raises:
            RegistryUnreachable: The Lease belongs to another cluster, or other processes changed it during `TRIES`
                attempts.
            ApiException: The API server refused a call for another reason.
        """
        name = _name(record.worker_id)
        for _ in range(TRIES):
            found = await self._objects.lease(name)
            if found is not None and not self._labels().items() <= found["metadata"].get("labels", {}).items():
                raise RegistryUnreachable(
                    f"the lease {self._namespace}/{name} is not of the cluster {self.settings.cluster!r}; rename the worker"
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
        """Return a renewed Lease that contains the record, based on the present Lease `found` (None: there is none)."""
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
                service=self.settings.service,
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
            "labels": self.settings.labels | self._labels(),
            "annotations": {RECORD: msgspec.json.encode(record).decode()},
        }
        if self._pod is not None:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._pod.name, "uid": self._pod.uid}
            metadata["ownerReferences"] = [owner]
        return metadata

    def _labels(self) -> dict[str, str]:
        """Return the labels by which routers find the Lease."""
        return {REGISTRATION: "worker", CLUSTER: self.settings.cluster}

    def _now(self) -> str:
        """Return the present time as `MicroTime`. It is later than the previous result, even if the clock has stepped back."""
        self._last_ms = max(self._last_ms + 1, self._now_unix_ms())
        return datetime.fromtimestamp(self._last_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def connect(settings: KubernetesDiscovery) -> client.ApiClient:
    """Build the client of the API server.

    Raises:
        ConfigurationRefused: The kubeconfig is unusable. Or the settings name none, and there is no service account.
    """
    try:
        configuration = await api_configuration(settings.kubeconfig)
    except KubernetesError as error:
        raise ConfigurationRefused(f"discovery.{error}") from error
    connected = client.ApiClient(configuration)
    connected.user_agent = AGENT
    return connected


def _namespace(settings: KubernetesDiscovery) -> str:
    """Return the namespace of the Leases.

    Raises:
        ConfigurationRefused: The settings name no namespace, and this process is not in a pod.
    """
    namespace = settings.namespace or own_namespace()
    if not namespace:
        raise ConfigurationRefused("discovery.namespace: is needed outside of a pod")
    return namespace


def parse_event(line: bytes) -> LeaseWatchEvent | None:
    """Decode a line of a watch. Return None if the watch has expired, so that the caller must list the Leases again.

    Raises:
        DirectoryUnreachable: The watch failed for another reason. The caller should pause before the next listing, to
            spare the API server.
        msgspec.DecodeError: The line is no event of a watch.
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
    """Return the name of a worker's Lease: the worker's id or, if that is not valid, a name with the id's hash."""
    if NAME.fullmatch(worker_id):
        return worker_id
    return f"worker-{hashlib.sha256(worker_id.encode()).hexdigest()[:32]}"


def _incarnation(lease: Manifest) -> Incarnation | None:
    seen = _seen(lease)
    return None if seen is None else seen.record.incarnation


def _seen(lease: Manifest) -> RecordSeen | None:
    """Return the record of a Lease; None if the Lease has no valid record although it has the label of workers."""
    try:
        record = msgspec.json.decode(lease["metadata"]["annotations"][RECORD], type=WorkerRecord)
        return RecordSeen(record=record, renewal=lease["spec"]["renewTime"])
    except (KeyError, TypeError, msgspec.DecodeError, RecursionError):
        log.warning(
            "lease ignored, it has the label of workers but no record",
            extra={"lease": str(lease.get("metadata", {}).get("name"))[:200]},
        )
        return None
