"""The Kubernetes API as the directory of workers: a Lease each, and an EndpointSlice where a Service is to have it.

Rules:

1. A worker's Lease carries its record in an annotation; the holder is the worker's id, which is its pod's name. The last incarnation to
   begin takes it over; who finds another one's record when renewing has been replaced. Every write names the version that it is based
   on, so that of two writers one is told so.
2. A renewal is another `renewTime`. Routers compare it with the one they saw before and never with a clock: nodes' clocks may differ.
3. A router lists, watches until the watch ends, is too old (410) or says nothing for `SILENCE_SECONDS`, and lists again.
4. What is written here belongs to the worker's pod, where that is named, and goes with it. A Lease of the same name that is not
   of this cluster is left alone.
5. A worker's EndpointSlice has one endpoint, itself, and is written when the worker takes its Lease and deleted with it. Until it
   is written the worker is not registered.
"""

import asyncio
import hashlib
import ipaddress
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException
from msgspec import Struct

from fleet.adapters.clock import unix_milliseconds
from fleet.clock import Nanos
from fleet.control.messages import Listed, Missing, Seen, Sighting
from fleet.control.ports import DirectoryUnreachable
from fleet.discovery import KubernetesDiscovery, Record
from fleet.errors import ConfigurationRefused
from fleet.ids import Incarnation, WorkerId
from kvstore.addresses import host_port
from workers.ports import RegistryUnreachable, Superseded

log = logging.getLogger(__name__)

GROUP = "fleet-serving.io"
REGISTRATION = f"{GROUP}/registration"
CLUSTER = "app.kubernetes.io/instance"
RECORD = f"{GROUP}/record"
SERVICE = "kubernetes.io/service-name"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
LEASES = ("coordination.k8s.io", "v1")
SLICES = ("discovery.k8s.io", "v1")
APPLY = "application/apply-patch+yaml"
AGENT = MANAGER = "fleet-worker"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")

CALL_SECONDS = 5.0
WATCH_SECONDS = 240
SILENCE_SECONDS = 30.0  # workers renew more often: what is silent for longer is cut, or has none
EXPIRED = 410
TRIES = 3  # of a write that others' writes come before
MALFORMED = (KeyError, TypeError, ValueError, msgspec.DecodeError)  # what is not as the API has it

Manifest = dict[str, Any]


class Event(Struct, frozen=True):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: Manifest


class KubernetesDirectory:
    """Implements `workers.ports.Registry` and `fleet.control.ports.Directory`; an async context manager that owns its connections."""

    def __init__(self, settings: KubernetesDiscovery, now_unix_ms: Callable[[], int] = unix_milliseconds) -> None:
        """Nothing is read yet.

        Args:
            settings: Where, and for which cluster.
            now_unix_ms: For people who read the Lease; nothing is decided by it.
        """
        self._settings = settings
        self._now_unix_ms = now_unix_ms
        self._held: dict[tuple[WorkerId, Incarnation], Manifest] = {}  # Leases as they were last written here
        self._sliced: set[tuple[WorkerId, Incarnation]] = set()  # whose EndpointSlice is written
        self._last_ms = 0

    async def __aenter__(self) -> Self:
        """Connect when first asked.

        Raises:
            ConfigurationRefused: It is not said how to reach the API.
        """
        self._client = await _client(self._settings)
        self._namespace = _namespace(self._settings)
        self._objects = client.CustomObjectsApi(
            self._client
        )  # takes any kind as it is, and spares building it from parts
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # it says what it takes, not what it gives

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        record = Record(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            lease_seconds=self._settings.lease_seconds,
        )
        me = (worker_id, incarnation)
        async with _registry_errors():
            if not await self._renew(record):
                self._sliced.discard(me)
                await self._take(record)
            if self._settings.service and me not in self._sliced:
                await self._apply_slice(record)
                self._sliced.add(me)
        return record.lease

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        held = self._held.pop((worker_id, incarnation), None)
        self._sliced.discard((worker_id, incarnation))
        async with _registry_errors():
            for _ in range(TRIES):
                if held is None or _incarnation(held) != incarnation:
                    return
                name, version = held["metadata"]["name"], held["metadata"]["resourceVersion"]
                if await self._delete(LEASES, "leases", name, {"resourceVersion": version}):
                    if self._settings.service:
                        await self._delete(SLICES, "endpointslices", name, {})
                    return
                held = await self._read(name)

    async def sightings(self) -> AsyncGenerator[Sighting, None]:
        selected = f"{REGISTRATION}=worker,{CLUSTER}={self._settings.cluster}"
        async with _directory_errors():
            listed: Any = await self._objects.list_namespaced_custom_object(
                *LEASES, self._namespace, "leases", label_selector=selected, _request_timeout=CALL_SECONDS
            )
            found = [seen for item in listed["items"] if (seen := _seen(item)) is not None]
            revision: str = listed["metadata"]["resourceVersion"]
        yield Listed(all=tuple(found))
        async with _directory_errors():
            answer = await self._objects.list_namespaced_custom_object_without_preload_content(
                *LEASES,
                self._namespace,
                "leases",
                watch=True,
                label_selector=selected,
                resource_version=revision,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_SECONDS,
                _request_timeout=WATCH_SECONDS + SILENCE_SECONDS,
            )
        async with answer, _directory_errors():
            answer.raise_for_status()
            while (event := await _next(answer)) is not None:
                if event.type != "BOOKMARK" and (seen := _seen(event.object)) is not None:
                    yield Missing(worker_id=seen.record.worker_id) if event.type == "DELETED" else seen

    async def _renew(self, record: Record) -> bool:
        """False where there is nothing to renew.

        Raises:
            Superseded: The Lease is another's.
        """
        me = (record.worker_id, record.incarnation)
        if (held := self._held.get(me)) is None:
            return False
        for _ in range(TRIES):
            try:
                self._held[me] = await self._replace(self._lease(record, held))
            except ApiException as error:
                if error.status == 404:
                    del self._held[me]
                    return False
                if error.status != 409:
                    raise
            else:
                return True
            found = await self._read(held["metadata"]["name"])
            if found is None:
                del self._held[me]
                return False
            if _incarnation(found) != record.incarnation:
                del self._held[me]
                raise Superseded(f"{record.worker_id} is held by a newer process; every worker needs an id of its own")
            held = found
        raise RegistryUnreachable(f"the lease {held['metadata']['name']} changes all the time")

    async def _take(self, record: Record) -> None:
        """Make the Lease, or take it over from an incarnation before.

        Raises:
            RegistryUnreachable: It is somebody else's, or others write it all the time.
        """
        name = _name(record.worker_id)
        for _ in range(TRIES):
            found = await self._read(name)
            if found is not None and not self._labels().items() <= found["metadata"].get("labels", {}).items():
                raise RegistryUnreachable(
                    f"the lease {self._namespace}/{name} is not of the cluster {self._settings.cluster!r}; rename the worker"
                )
            lease = self._lease(record, found)
            try:
                written = await (self._create(lease) if found is None else self._replace(lease))
            except ApiException as error:
                if error.status not in {404, 409}:
                    raise
            else:
                self._held[record.worker_id, record.incarnation] = written
                return
        raise RegistryUnreachable(f"the lease {self._namespace}/{name} changes all the time")

    def _lease(self, record: Record, found: Manifest | None) -> Manifest:
        """The Lease with the record in it, renewed now, in place of what was found."""
        now = self._now()
        before: Manifest = {} if found is None else found["spec"]
        taken = found is None or _incarnation(found) != record.incarnation
        metadata: Manifest = self._metadata(record)
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

    async def _apply_slice(self, record: Record) -> None:
        try:
            host, port = host_port(record.address)
            version = ipaddress.ip_address(host).version
        except ValueError as error:
            raise RegistryUnreachable(
                f"discovery.service: {record.address} is no IP address and port; set `advertise` to the pod's"
            ) from error
        metadata = self._metadata(record)
        metadata["labels"] |= {SERVICE: self._settings.service, MANAGED_BY: GROUP}
        body = {
            "apiVersion": "/".join(SLICES),
            "kind": "EndpointSlice",
            "metadata": metadata,
            "addressType": f"IPv{version}",
            "endpoints": [
                {"addresses": [host], "conditions": {"ready": True, "serving": True, "terminating": False}}
                | ({"targetRef": self._pod()} if self._settings.pod else {})
            ],
            "ports": [{"name": "worker", "port": port, "protocol": "TCP"}],
        }
        await self._objects.patch_namespaced_custom_object(
            *SLICES,
            self._namespace,
            "endpointslices",
            metadata["name"],
            body,
            field_manager=MANAGER,
            force=True,
            _content_type=APPLY,
            _request_timeout=CALL_SECONDS,
        )

    def _metadata(self, record: Record) -> Manifest:
        metadata: Manifest = {
            "name": _name(record.worker_id),
            "namespace": self._namespace,
            "labels": self._settings.labels | self._labels(),
            "annotations": {RECORD: msgspec.json.encode(record).decode()},
        }
        if self._settings.pod:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._settings.pod, "uid": self._settings.pod_uid}
            metadata["ownerReferences"] = [owner]
        return metadata

    def _labels(self) -> dict[str, str]:
        """By which its leases are found."""
        return {REGISTRATION: "worker", CLUSTER: self._settings.cluster}

    def _pod(self) -> Manifest:
        return {
            "kind": "Pod",
            "namespace": self._namespace,
            "name": self._settings.pod,
            "uid": self._settings.pod_uid,
        }

    def _now(self) -> str:
        """As `MicroTime` has it; later than the last one, whatever the clock does."""
        self._last_ms = max(self._last_ms + 1, self._now_unix_ms())
        return datetime.fromtimestamp(self._last_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    async def _read(self, name: str) -> Manifest | None:
        try:
            found: Any = await self._objects.get_namespaced_custom_object(
                *LEASES, self._namespace, "leases", name, _request_timeout=CALL_SECONDS
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        read: Manifest = found
        return read

    async def _create(self, lease: Manifest) -> Manifest:
        written: Any = await self._objects.create_namespaced_custom_object(
            *LEASES, self._namespace, "leases", lease, _request_timeout=CALL_SECONDS
        )
        created: Manifest = written
        return created

    async def _replace(self, lease: Manifest) -> Manifest:
        written: Any = await self._objects.replace_namespaced_custom_object(
            *LEASES, self._namespace, "leases", lease["metadata"]["name"], lease, _request_timeout=CALL_SECONDS
        )
        replaced: Manifest = written
        return replaced

    async def _delete(self, kind: tuple[str, str], plural: str, name: str, preconditions: dict[str, str]) -> bool:
        """False where it is not as it was; it is no mistake that it is not there."""
        options = (
            client.V1DeleteOptions(preconditions=client.V1Preconditions(**preconditions)) if preconditions else None
        )
        try:
            await self._objects.delete_namespaced_custom_object(
                *kind, self._namespace, plural, name, body=options, _request_timeout=CALL_SECONDS
            )
        except ApiException as error:
            if error.status not in {404, 409}:
                raise
            return bool(error.status == 404)
        return True


async def _client(settings: KubernetesDiscovery) -> client.ApiClient:
    """What speaks to the API.

    Raises:
        ConfigurationRefused: There is no service account, or no such file.
    """
    loading: Any = config  # ships no types
    configuration = client.Configuration()
    try:
        if settings.kubeconfig:
            await loading.load_kube_config(config_file=settings.kubeconfig, client_configuration=configuration)
        else:
            loading.load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        where = "discovery.kubeconfig" if settings.kubeconfig else "discovery"
        hint = "" if settings.kubeconfig else " Outside of a pod, set discovery.kubeconfig."
        raise ConfigurationRefused(f"{where}: {error}{hint}") from error
    connected = client.ApiClient(configuration)
    connected.user_agent = AGENT
    return connected


def _namespace(settings: KubernetesDiscovery) -> str:
    """Where the leases are.

    Raises:
        ConfigurationRefused: None is named, and this is no pod.
    """
    if settings.namespace:
        return settings.namespace
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError as error:
        raise ConfigurationRefused("discovery.namespace: is needed outside of a pod") from error


async def _next(answer: aiohttp.ClientResponse) -> Event | None:
    """The next event; None at the end of the watch, or where it has expired or fallen silent.

    Raises:
        DirectoryUnreachable: The server says that it cannot watch, for another reason: listing again at once would only add to that.
    """
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            line = await answer.content.readline()
    except TimeoutError:
        return None
    event = msgspec.json.decode(line, type=Event) if line else None
    if event is None or event.type != "ERROR":
        return event
    code, reason = event.object.get("code"), event.object.get("reason")
    if code == EXPIRED:
        return None
    raise DirectoryUnreachable(f"Kubernetes: {code} {reason}, in a watch")


@asynccontextmanager
async def _registry_errors() -> AsyncIterator[None]:
    try:
        yield
    except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
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
    hint = "; does the service account have the verbs?" if error.status == 403 else ""
    return f"Kubernetes: {error.status} {error.reason}{hint}"


def _name(worker_id: WorkerId) -> str:
    """The worker's id, as it is of a pod; where it is no name, what stands for it."""
    if NAME.fullmatch(worker_id):
        return worker_id
    return f"worker-{hashlib.sha256(worker_id.encode()).hexdigest()[:32]}"


def _incarnation(lease: Manifest) -> Incarnation | None:
    seen = _seen(lease)
    return None if seen is None else seen.record.incarnation


def _seen(lease: Manifest) -> Seen | None:
    """None where somebody made a Lease with our label and no record."""
    try:
        record = msgspec.json.decode(lease["metadata"]["annotations"][RECORD], type=Record)
        return Seen(record=record, renewal=lease["spec"]["renewTime"])
    except (KeyError, TypeError, msgspec.DecodeError, RecursionError):
        log.warning(
            "a lease with the label of workers has no record",
            extra={"lease": str(lease.get("metadata", {}).get("name"))[:200]},
        )
        return None
