"""HTTP server of the API server for tests: paths, verbs, media types, faults, and the log of requests.

Besides the paths of Kubernetes, the server has paths for tests: `/fleet-test/faults` (POST orders a fault, GET lists
all faults, DELETE removes one or all), `/fleet-test/compact` (POST: the server forgets old changes) and
`/fleet-test/requests` (GET lists the logged requests, DELETE clears the log).
"""

import asyncio
import collections
import logging
import time
from collections.abc import Mapping

import msgspec
import yaml
from aiohttp import web

from tests.support.kube.api import controllers, errors, subresources
from tests.support.kube.api.cluster import NAMESPACES, ObjectStore, Options, Validation, as_version
from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.faults import Fault, Faults, Request
from tests.support.kube.api.http import answers, discovery, permissions, protobuf, tables
from tests.support.kube.api.http import watches as watching
from tests.support.kube.api.http.openapi import Documents
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.kinds.selectors import Test, field_test, label_test
from tests.support.kube.api.values import Json, Object, without
from tests.support.waiting import pace, until

log = logging.getLogger(__name__)

BODY_BYTES = 3 * 1024 * 1024  # the limit of kube-apiserver
LOGGED_REQUESTS = 100_000
FORBIDDEN = Fault(kind="forbid")
HOLD_SECONDS = 600.0  # longest time that a fault holds a request back
WATCH_SECONDS = 1800  # kube-apiserver ends watches after 30 to 60 minutes
V2_PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}
PATCHES = {
    "application/json-patch+json": "json-patch",
    "application/merge-patch+json": "merge-patch",
    "application/strategic-merge-patch+json": "strategic-merge-patch",
    "application/apply-patch+yaml": "apply-patch",
}


class Target(msgspec.Struct, frozen=True):
    """Holds the parts of an object's path; a part that the path does not have is empty."""

    resource: ServedResource
    namespace: str
    name: str
    subresource: str


class KubeHttpServer:
    """Serves a store of objects over HTTP.

    Args:
        cluster: The objects to serve.
        with_controllers: Also delete objects whose owners are gone, and all objects of deleted namespaces, as a
            controller-manager does.
    """

    def __init__(self, cluster: ObjectStore, *, with_controllers: bool = False):
        self.cluster = cluster
        self.faults = Faults()
        self._documents = Documents(cluster.catalogue)
        self._requests: collections.deque[Object] = collections.deque(maxlen=LOGGED_REQUESTS)
        self._with_controllers = with_controllers
        self._closing = False

    def application(self) -> web.Application:
        made = web.Application(client_max_size=BODY_BYTES)
        made.router.add_route("*", "/{path:.*}", self._answer)
        made.on_shutdown.append(self._end_watches)
        return made

    async def _end_watches(self, _: web.Application) -> None:
        self._closing = True
        self.cluster.storage.wake()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._dispatch(request)
        except ApiError as refused:
            return answers.refusal(refused)
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:  # supervisor: an error of this server becomes an answer, as on a real one
            log.exception("a request failed", extra={"method": request.method, "path": request.path})
            return answers.refusal(ApiError("InternalError", f"{type(error).__name__}: {error}"))

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        match request.path.strip("/").split("/"):
            case ["fleet-test", *rest]:
                return await self._administer(request, rest)
            case ["healthz" | "readyz" | "livez"]:
                return web.Response(text="ok")
            case ["version"]:
                return answers.as_json(discovery.version())
            case ["openapi", *rest]:
                return self._openapi(request, rest)
            case ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"]:
                return await self._access_review(request)
            case ["api" | "apis" as root]:
                return self._groups(request, root)
            case ["api", version]:
                return answers.as_json(self._resources("", version))
            case ["apis", group]:
                found = next((each for each in discovery.groups(self.cluster.catalogue) if each["name"] == group), None)
                if found is not None:
                    return answers.as_json({"kind": "APIGroup", "apiVersion": "v1"} | found)
            case ["apis", group, version]:
                return answers.as_json(self._resources(group, version))
            case ["api", version, *rest]:
                return await self._resource(request, self._target("", version, rest))
            case ["apis", group, version, *rest]:
                return await self._resource(request, self._target(group, version, rest))
        raise errors.no_such_path()

    # Documents.

    def _groups(self, request: web.Request, root: str) -> web.Response:
        catalogue = self.cluster.catalogue
        for version in ("v2", "v2beta1"):
            form = f"g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList"
            if form in request.headers.get("Accept", "").replace(" ", ""):
                whole = answers.as_json(discovery.aggregated(catalogue, legacy=root == "api", version=version))
                # By this header, clients check that they got the requested form.
                whole.headers["Content-Type"] = f"application/json;{form}"
                return whole
        if root == "api":
            address = {"clientCIDR": "0.0.0.0/0", "serverAddress": request.host}
            return answers.as_json({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [address]})
        return answers.as_json({"kind": "APIGroupList", "apiVersion": "v1", "groups": discovery.groups(catalogue)})

    def _resources(self, group: str, version: str) -> Object:
        if (listed := discovery.resource_list(self.cluster.catalogue, group, version)) is None:
            raise errors.no_such_path()
        return listed

    def _openapi(self, request: web.Request, rest: list[str]) -> web.Response:
        accept = request.headers.get("Accept", "")
        document: bytes | None = None
        match rest:
            case ["v2"] if "protobuf" in accept and "json" not in accept.partition("protobuf")[0]:
                return web.Response(body=self._documents.v2_protobuf(), headers={"Content-Type": V2_PROTOBUF})
            case ["v2"]:
                document = self._documents.v2()
            case ["v3"]:
                document = self._documents.v3_index()
            case ["v3", "api", version]:
                document = self._documents.v3("", version)
            case ["v3", "apis", group, version]:
                document = self._documents.v3(group, version)
        if document is None:
            raise errors.no_such_path()
        if accept and "json" not in accept and "*/*" not in accept:
            raise ApiError("NotAcceptable", "only application/json is served here")
        return web.Response(body=document, content_type="application/json")

    # Objects.

    def _target(self, group: str, version: str, rest: list[str]) -> Target:
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource, *more = [*rest, "", ""][: max(3, len(rest))]
        resource = self.cluster.catalogue.find(group, version, plural)
        if resource is None or more or bool(namespace) > resource.namespaced:
            raise errors.no_such_path()
        if resource.namespaced and name and not namespace:
            raise errors.no_such_path()
        extra = {("", "pods"): ["eviction", "binding"], NAMESPACES: ["finalize"]}.get(resource.place, [])
        if subresource and subresource not in {*resource.subresources, *extra}:
            raise errors.no_such_path()
        return Target(resource, namespace, name, subresource)

    async def _resource(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, verb = target.resource, _verb(request, target)
        seen = Request(
            verb=verb,
            group=resource.group,
            resource=resource.plural + (f"/{target.subresource}" if target.subresource else ""),
            namespace=target.namespace,
            name=target.name,
            user=_user(request),
            agent=request.headers.get("User-Agent", ""),
        )
        entry = msgspec.to_builtins(seen) | {"at": time.monotonic(), "code": 0, "dry_run": "dryRun" in request.query}
        self._requests.append(entry)
        try:
            fault = self.faults.strike(seen) if permissions.allowed(self.cluster, seen) else FORBIDDEN
            if fault is not None and fault.kind == "forbid":
                raise errors.forbidden(*resource.place, target.name, permissions.refusal(seen))
            if fault is not None and fault.kind == "deny":
                raise errors.denied(*resource.place, target.name, fault.message)
            if fault is not None:
                await self._suffer(fault)
            if verb == "watch":
                watch = _watch(request, target)
                entry["code"] = 200
                return await watching.stream(request, watch, self.cluster.storage, fault, lambda: self._closing)
            body = await request.read()
            answer = self._perform(request, target, verb, body)
        except ApiError as refused:
            entry["code"] = refused.code
            raise
        entry |= {"code": answer.status, "bytes": len(body)}
        if self._with_controllers and verb not in {"get", "list"}:
            # As in a real cluster, the controllers run soon after the request, not within it.
            asyncio.get_running_loop().call_soon(controllers.settle, self.cluster)
        if fault is not None and fault.kind == "drop":
            return answers.close(request)
        return await answers.half(request, answer) if fault is not None and fault.kind == "cut" else answer

    async def _suffer(self, fault: Fault) -> None:
        """Wait or raise the error that the fault demands, before the request is carried out.

        Raises:
            ApiError: The fault refuses the request.
        """
        if fault.kind == "status":
            reason: errors.Reason = next(
                (each for each, code in errors.CODES.items() if code == fault.code), "InternalError"
            )
            text = fault.message or f"ordered by the test: {fault.code}"
            raise ApiError(reason, text, code=fault.code, retry_after_seconds=fault.retry_after_seconds)
        if fault.kind == "delay":
            await pace(fault.seconds, "the fault delays the request")
        if fault.kind == "hold":
            await until(lambda: self._closing or not self.faults.stands(fault), HOLD_SECONDS)

    def _perform(self, request: web.Request, target: Target, verb: str, body: bytes) -> web.Response:
        """Carry out a request that is not a watch, without waiting."""
        cluster, resource, namespace, name = self.cluster, target.resource, target.namespace, target.name
        query, form = request.query, answers.form_of(request)
        options = _options(request, target)
        match verb, target.subresource:
            case "list", _:
                return answers.as_json(self._list(target, query, form))
            case "get", "scale":
                return answers.as_json(subresources.scale_of(resource, cluster.get(resource, namespace, name)))
            case "get", _:
                return answers.as_json(answers.shaped(resource, cluster.get(resource, namespace, name), form))
            case "create", "eviction":
                return answers.as_json(subresources.evict(cluster, resource, namespace, name, _decode(body)), 201)
            case "create", "binding":
                subresources.bind(cluster, resource, namespace, name, _decode(body))
                return answers.success()
            case "update", "scale":
                return answers.as_json(
                    subresources.replace_scale(cluster, resource, namespace, name, _decode(body), options)
                )
            case "patch", "scale":
                patch = _decode(body)
                return answers.as_json(
                    subresources.patch_scale(cluster, resource, namespace, name, _patch(request), patch, options)
                )
            case "create", "" if not name:
                written = cluster.create(resource, namespace, _decode(body), options)
            case "update", _ if name:
                written = cluster.replace(resource, namespace, name, _decode(body), options)
            case "patch", _ if name:
                written = cluster.patch(resource, namespace, name, _patch(request), _decode(body), options)
            case "delete", "":
                return self._delete(target, _delete_options(query, body), dry_run=options.dry_run)
            case "deletecollection", "":
                wanted = _delete_options(query, body)
                for each in self._selected(target, query):
                    where = each["metadata"].get("namespace", "")
                    cluster.delete(resource, where, each["metadata"]["name"], wanted, dry_run=options.dry_run)
                return answers.success()
            case _:
                raise _not_allowed()
        shown = answers.shaped(resource, as_version(written.item, resource), form)
        answer = answers.as_json(shown, 201 if written.created else 200)
        for warning in written.warnings:
            quoted = warning.replace('"', r"\"")
            answer.headers.add("Warning", f'299 - "{quoted}"')
        return answer

    def _delete(self, target: Target, wanted: Object, *, dry_run: bool) -> web.Response:
        resource, name = target.resource, target.name
        item, gone = self.cluster.delete(resource, target.namespace, name, wanted, dry_run=dry_run)
        if not gone:
            return answers.as_json(item)
        details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": item["metadata"]["uid"]}
        return answers.success({key: value for key, value in details.items() if value})

    def _selected(self, target: Target, query: Mapping[str, str]) -> list[Object]:
        test = _test(target.resource, query)
        items = self.cluster.storage.items(target.resource.place, target.namespace)
        return [as_version(each, target.resource) for each in items if test(each)]

    def _list(self, target: Target, query: Mapping[str, str], form: answers.AnswerForm) -> Object:
        storage, resource = self.cluster.storage, target.resource
        if token := query.get("continue"):
            rest = storage.rest(token)
            items, revision = rest.items, rest.revision
        else:
            items, revision = self._selected(target, query), storage.revision
        shown, token = storage.chunk(items, _number("limit", query), revision)
        metadata: Object = {"resourceVersion": str(revision)}
        if token:
            metadata["continue"] = token
            if not (query.get("labelSelector") or query.get("fieldSelector")):
                metadata["remainingItemCount"] = len(items) - len(shown)
        if form.name == "Table":
            return tables.table(resource, shown, metadata, form.include, form.version)
        kind, version = resource.list_kind, resource.api_version
        if form.name == "PartialObjectMetadata":
            kind, version = "PartialObjectMetadataList", f"meta.k8s.io/{form.version}"
            shown = [tables.partial(each, form.version) for each in shown]
        elif not resource.custom:  # as on a real server, items of built-in lists have no apiVersion and kind
            shown = [without(each, "kind", "apiVersion") for each in shown]
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": shown}

    # For tests.

    async def _administer(self, request: web.Request, rest: list[str]) -> web.Response:
        match request.method, rest:
            case "POST", ["faults"]:
                fault = msgspec.json.decode(await request.read(), type=Fault)
                return answers.as_json({"fault": self.faults.add(fault)}, 201)
            case "GET", ["faults"]:
                ordered = self.faults.ordered().items()
                return answers.as_json({str(number): msgspec.to_builtins(fault) for number, fault in ordered})
            case "DELETE", ["faults", number]:
                self.faults.remove(int(number))
            case "DELETE", ["faults"]:
                self.faults.clear()
            case "POST", ["compact"]:
                self.cluster.storage.compact()
            case "GET", ["requests"]:
                return answers.as_json(list(self._requests))
            case "DELETE", ["requests"]:
                self._requests.clear()
            case _:
                raise errors.no_such_path()
        return answers.as_json({})

    async def _access_review(self, request: web.Request) -> web.Response:
        review = _decode(await request.read())
        wanted = review.get("spec", {}).get("resourceAttributes") or {}
        part = wanted.get("subresource")
        seen = Request(
            verb=wanted.get("verb", ""),
            group=wanted.get("group", ""),
            resource=wanted.get("resource", "") + (f"/{part}" if part else ""),
            namespace=wanted.get("namespace", ""),
            name=wanted.get("name", ""),
            user=_user(request),
            agent="",
        )
        return answers.as_json(review | {"status": {"allowed": permissions.allowed(self.cluster, seen)}}, 201)


def _user(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _verb(request: web.Request, target: Target) -> str:
    verb = VERBS.get(request.method)
    if verb is None:
        raise _not_allowed()
    if verb == "get" and request.query.get("watch") in {"true", "1"}:
        return "watch"
    return verb if target.name else {"get": "list", "delete": "deletecollection"}.get(verb, verb)


def _not_allowed() -> ApiError:
    return ApiError("MethodNotAllowed", "the server does not allow this method on the requested resource")


def _options(request: web.Request, target: Target) -> Options:
    query = request.query
    validation = query.get("fieldValidation") or "Warn"
    try:
        chosen = Validation(validation)
    except ValueError as error:
        allowed = ", ".join(f'"{each}"' for each in Validation)
        text = f'fieldValidation: Unsupported value: "{validation}": supported values: {allowed}'
        raise ApiError("BadRequest", text) from error
    return Options(
        manager=query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0],
        dry_run="All" in query.getall("dryRun", []),
        validation=chosen,
        force=query.get("force") == "true",
        subresource=target.subresource,
    )


def _watch(request: web.Request, target: Target) -> watching.Watch:
    query = request.query
    if target.name:
        raise ApiError("BadRequest", "watch the collection with a field selector for metadata.name")
    return watching.Watch(
        resource=target.resource,
        namespace=target.namespace,
        test=_test(target.resource, query),
        since=_number("resourceVersion", query),
        initial_events=query.get("sendInitialEvents") == "true",
        bookmarks=query.get("allowWatchBookmarks") in {"true", "1"},
        seconds=_number("timeoutSeconds", query) or WATCH_SECONDS,
    )


def _test(resource: ServedResource, query: Mapping[str, str]) -> Test:
    labels, fields = label_test(query.get("labelSelector", "")), field_test(query.get("fieldSelector", ""), resource)
    return lambda item: labels(item) and fields(item)


def _number(name: str, query: Mapping[str, str]) -> int:
    text = query.get(name) or "0"
    if not text.isdecimal():
        raise ApiError("BadRequest", f'{name}: Invalid value: "{text}": must be a number')
    return int(text)


def _patch(request: web.Request) -> str:
    kind = PATCHES.get(request.content_type)
    if kind is None:
        known = ", ".join(PATCHES)
        text = f"the body of the request was in an unknown format - accepted media types include: {known}"
        raise ApiError("UnsupportedMediaType", text)
    if kind == "apply-patch" and not request.query.get("fieldManager"):
        raise ApiError(
            "BadRequest",
            "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch",
        )
    return kind


def _decode(body: bytes) -> Json:
    """Decode a body: protobuf (some kinds of objects), JSON or YAML."""
    if body.startswith(protobuf.MAGIC):
        return protobuf.decode(body)
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        pass
    try:
        return yaml.safe_load(body)
    except yaml.YAMLError as error:
        raise ApiError("BadRequest", f"the object provided is unrecognized: {error}") from error


def _delete_options(query: Mapping[str, str], body: bytes) -> Object:
    wanted = (_decode(body) if body else None) or {}
    if not isinstance(wanted, dict):
        raise ApiError("BadRequest", "the body is no DeleteOptions")
    if "propagationPolicy" in query:
        wanted["propagationPolicy"] = query["propagationPolicy"]
    if "gracePeriodSeconds" in query:
        wanted["gracePeriodSeconds"] = _number("gracePeriodSeconds", query)
    return wanted
