"""API server client: lists, watches and writes over the official client's credentials, TLS and connections.

Rules:

1. Objects are decoded straight into views (`fleet.net.kubernetes.views`). The official client's models would make 50
   Python objects of each, and its watch would pass a broken line on as an event.
2. The server ends a watch after `WATCH_SECONDS`. If it does not, the client ends the watch a little later, so that a
   silent connection is noticed.
3. `ApiServerClient.make` creates an object by a server-side apply with a resourceVersion that no object ever has. The
   server creates a missing object whatever the version is, and refuses to change an existing one. A POST
   (`ApiServerClient.create`) would do the same, but the fields would belong to a second manager (`Update` beside
   `Apply`). A later apply would then never remove the fields that its manifest leaves out.
   (API servers before Kubernetes 1.24 refuse to create a Service in this way. `tests/support/kube/README.md` has the
   sources, and says that this was not recorded from a real server.)
4. A server's error message passes `fleet.net.kubernetes.status_errors` before it is shown or logged.
5. If an object is nested too deeply, its deepest levels are left out (`fleet.net.kubernetes.nesting`), so that the other
   objects of a list can be read.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from msgspec import Struct

from fleet.net.connection_errors import connection_problem
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.kubeconfig import api_configuration
from fleet.net.kubernetes.nesting import shallow
from fleet.net.kubernetes.ports import (
    ApiServerUnreachable,
    Manifest,
    NameTaken,
    ObjectConflict,
    ObjectList,
    ObjectMissing,
    RequestDenied,
    WatchEvent,
)
from fleet.net.kubernetes.status_errors import ApiStatus, refuse
from fleet.net.kubernetes.views import FIELD_MANAGER, ChildObject, NamedObject, View

MANAGER = FIELD_MANAGER
CALL_SECONDS = 30.0
WATCH_SECONDS = 300
WATCH_GRACE_SECONDS = 15
NEVER_BORN = "1"
"""A resource version that no object has, because the first revision of etcd is that of the empty store."""

GATES_SINCE = (1, 30)
"""The Kubernetes release in which scheduling gates became stable."""

PAGE = 500
MOST_CONNECTIONS = 64
LONGEST_EVENT = 8 << 20
"""Maximum length of a line of a watch in bytes; a longer one ends the watch. etcd stores objects of at most 1.5 MiB."""

NAMES_ONLY = "application/json;as=PartialObjectMetadata{list};g=meta.k8s.io;v=v1,application/json"
NAMED_ONLY: tuple[type[NamedObject], ...] = (NamedObject, ChildObject)
"""Views for which only metadata is requested from the server."""

Decoded = TypeVar("Decoded")


class _ListMetadata(Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _Page(Struct, frozen=True):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _RawWatchEvent(Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Version(Struct, frozen=True):
    major: str = ""
    minor: str = ""
    """Minor version; some providers add a sign, as in `33+`."""


class _Resources(Struct, frozen=True):
    class Resource(Struct, frozen=True):
        name: str

    resources: list[Resource]


class ApiServerClient:
    """Makes calls to one API server. Implements `fleet.net.kubernetes.ports.KubernetesApi`."""

    def __init__(self, client: ApiClient, manager: str = MANAGER) -> None:
        self._client = client
        self._manager = manager

    async def served(self) -> OptionalKinds:
        found = {}
        for kind in kinds.OPTIONAL_KINDS:
            try:
                content = await self._call("GET", f"/apis/{kind.group}/{kind.version}")
            except ObjectMissing:
                found[kind] = False
                continue
            names = {each.name for each in _decoded(content, _Resources).resources}
            found[kind] = kind.plural in names
        return OptionalKinds(
            leader_worker_sets=found[kinds.LEADER_WORKER_SET],
            pod_monitors=found[kinds.POD_MONITOR],
            inference_pools=found[kinds.INFERENCE_POOL],
            scheduling_gates=await self._release() >= GATES_SINCE,
        )

    async def _release(self) -> tuple[int, int]:
        """Return the major and the minor version of the server; zeros if it does not report them."""
        try:
            version = _decoded(await self._call("GET", "/version"), _Version)
        except (ObjectMissing, RequestDenied):
            return 0, 0
        major, minor = version.major.rstrip("+"), version.minor.rstrip("+")
        return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)

    async def list(self, kind: ApiKind, of: type[View], namespace: str, selector: str = "") -> ObjectList[View]:
        items: list[View] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        accept = NAMES_ONLY.format(list="List") if of in NAMED_ONLY else "application/json"
        while True:
            content = await self._call("GET", kind.path(namespace), query, accept=accept)
            page = _decoded(content, _Page)
            items += [_decoded(each, of) for each in page.items or ()]
            if not page.metadata.continue_:
                return ObjectList(tuple(items), page.metadata.resource_version)
            query["continue"] = page.metadata.continue_

    async def watch(
        self,
        kind: ApiKind,
        of: type[View],
        namespace: str,
        version: str,
        selector: str = "",
        began: Callable[[], None] | None = None,
    ) -> AsyncGenerator[WatchEvent[View], None]:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        } | ({"labelSelector": selector} if selector else {})
        accept = NAMES_ONLY.format(list="") if of in NAMED_ONLY else "application/json"
        within = aiohttp.ClientTimeout(total=WATCH_SECONDS + WATCH_GRACE_SECONDS, sock_connect=CALL_SECONDS)
        async with self._answer("GET", kind.path(namespace), query, accept=accept, within=within) as answer:
            if began is not None:
                began()
            async for line in _lines(answer):
                event = _decoded(line, _RawWatchEvent)
                if event.type == "ERROR":
                    refuse(_decoded(event.object, ApiStatus))
                if event.type == "BOOKMARK":
                    yield WatchEvent(_decoded(event.object, _Bookmark).metadata.resource_version)
                else:
                    item = _decoded(event.object, of)
                    yield WatchEvent(item.metadata.resource_version, item, gone=event.type == "DELETED")

    async def get(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View:
        return _decoded(await self._call("GET", kind.path(namespace, name)), of)

    async def find(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View | None:
        accept = NAMES_ONLY.format(list="List") if of in NAMED_ONLY else "application/json"
        content = await self._call(
            "GET", kind.path(namespace), {"fieldSelector": f"metadata.name={name}"}, accept=accept
        )
        return next((_decoded(each, of) for each in _decoded(content, _Page).items or ()), None)

    async def create(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        query = {"fieldManager": self._manager}
        try:
            return _decoded(await self._call("POST", kind.path(namespace), query, body=manifest), of)
        except RequestDenied as error:
            if error.reason == "AlreadyExists":
                raise NameTaken("an object of that name exists already") from error
            raise

    async def make(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Create an object by an apply (rule 3)."""
        unborn = manifest | {"metadata": manifest["metadata"] | {"namespace": namespace, "resourceVersion": NEVER_BORN}}
        try:
            return await self.apply(kind, of, unborn)
        except ObjectConflict as error:
            raise NameTaken("an object of that name exists already") from error

    async def replace(self, kind: ApiKind, of: type[View], namespace: str, name: str, manifest: Manifest) -> View:
        query = {"fieldManager": self._manager}
        return _decoded(await self._call("PUT", kind.path(namespace, name), query, body=manifest), of)

    async def apply(self, kind: ApiKind, of: type[View], manifest: Manifest, part: str = "") -> View:
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], part)
        query = {"fieldManager": self._manager, "force": "true"}
        content = await self._call("PATCH", path, query, body=manifest, media="application/apply-patch+yaml")
        return _decoded(content, of)

    async def patch(
        self, kind: ApiKind, of: type[View], namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> View:
        query = {"fieldManager": self._manager}
        path = kind.path(namespace, name)
        try:
            content = await self._call("PATCH", path, query, body=list(operations), media="application/json-patch+json")
        except RequestDenied as error:
            if error.reason == "Invalid" and any(each["op"] == "test" for each in operations):
                raise ObjectConflict("the object has changed since it was read") from error
            raise
        return _decoded(content, of)

    async def delete(self, kind: ApiKind, namespace: str, name: str, uid: str) -> None:
        options: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        options["preconditions"] = {"uid": uid}
        await self._call("DELETE", kind.path(namespace, name), body=options)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        accept: str = "application/json",
        media: str = "application/json",
    ) -> bytes:
        within = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with self._answer(method, path, query, body=body, accept=accept, media=media, within=within) as answer:
            content: bytes = await answer.read()
            return content

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        *,
        within: aiohttp.ClientTimeout,
        body: Any = None,
        accept: str = "application/json",
        media: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and yield its answer; release the connection in every case.

        Raises:
            KubernetesError: The server cannot be reached, or answered with an error or not in time.
        """
        client = self._client
        headers = {"Accept": accept, "Content-Type": media, "User-Agent": client.user_agent}
        url = f"{client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        response: aiohttp.ClientResponse | None = None
        try:
            await client.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
            given = await client.rest_client.request(  # type: ignore[no-untyped-call]
                method, url, headers=headers, body=body, _request_timeout=within
            )
            response = given.response
            assert response is not None
            if response.status >= 400:
                _refuse_answer(response, await response.read())
            yield response
        except TimeoutError as error:
            raise ApiServerUnreachable("no answer in time") from error
        except aiohttp.ClientError as error:
            raise ApiServerUnreachable(connection_problem(error)) from error
        finally:
            if response is not None:
                # A fully read connection goes back to the pool; an unfinished stream is closed.
                response.release() if response.content.at_eof() else response.close()


class _Bookmark(Struct, frozen=True):
    class Metadata(Struct, frozen=True, rename="camel"):
        resource_version: str

    metadata: Metadata


@asynccontextmanager
async def open_api_client(kubeconfig: str, agent: str, manager: str = MANAGER) -> AsyncIterator[ApiServerClient]:
    """Open a client of the API server while the context is open.

    Args:
        kubeconfig: A file; empty: the service account of this pod.
        agent: The user agent in the server's log.
        manager: The field manager in an object's `managedFields`.

    Raises:
        KubernetesError: The configuration is missing or unusable.
    """
    configuration = await api_configuration(kubeconfig)
    configuration.connection_pool_maxsize = MOST_CONNECTIONS
    async with ApiClient(configuration) as client:
        client.user_agent = agent
        yield ApiServerClient(client, manager)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield whole lines. If the stream breaks off within a line, that line is dropped."""
    kept = bytearray()
    async for part in answer.content.iter_any():
        kept += part
        *whole, rest = kept.split(b"\n")
        kept = rest
        for line in whole:
            if line.strip():
                yield bytes(line)
        if len(kept) > LONGEST_EVENT:
            raise ApiServerUnreachable(f"an event is longer than {LONGEST_EVENT} bytes")


def _decoded(content: bytes | msgspec.Raw, of: type[Decoded]) -> Decoded:
    try:
        try:
            return msgspec.json.decode(content, type=of)
        except RecursionError:
            return msgspec.json.decode(shallow(bytes(content)), type=of)
    except msgspec.DecodeError as error:
        # The message does not contain the value, which may be secret.
        raise ApiServerUnreachable(f"an answer that is not a {of.__name__}") from error


def _refuse_answer(answer: aiohttp.ClientResponse, content: bytes) -> NoReturn:
    try:
        status = msgspec.json.decode(content, type=ApiStatus)
    except msgspec.DecodeError:
        status = ApiStatus()
    after = answer.headers.get("Retry-After", "")
    refuse(msgspec.structs.replace(status, code=answer.status), float(after) if after.isdecimal() else None)
