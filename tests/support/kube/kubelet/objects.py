"""Object cache of the one-node cluster: keeps the objects of an API server by watches, and writes objects."""

import asyncio
import json
import ssl
from collections.abc import Iterable
from typing import Any

import aiohttp

from tests.support.waiting import pace

Object = dict[str, Any]

PATHS = {
    "nodes": "/api/v1",
    "pods": "/api/v1",
    "services": "/api/v1",
    "configmaps": "/api/v1",
    "secrets": "/api/v1",
    "serviceaccounts": "/api/v1",
    "deployments": "/apis/apps/v1",
    "statefulsets": "/apis/apps/v1",
    "endpointslices": "/apis/discovery.k8s.io/v1",
}
MERGE = "application/merge-patch+json"
PAUSE_SECONDS = 0.2


class Refused(Exception):
    """Raised when the server refuses a request.

    Attributes:
        code: The HTTP status code.
    """

    def __init__(self, code: int, text: str):
        super().__init__(f"{code}: {text[:500]}")
        self.code = code


class Objects:
    """Caches all objects of `PATHS`; while `run` runs, it sets `changed` after every change."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self.changed = asyncio.Event()
        self._url = url
        self._tls = tls
        self._found: dict[str, dict[tuple[str, str], Object]] = {plural: {} for plural in PATHS}
        self._listed = {plural: asyncio.Event() for plural in PATHS}

    async def run(self) -> None:
        """Watch all kinds until cancelled."""
        connector = aiohttp.TCPConnector(ssl=self._tls or True, limit=100)
        async with (
            aiohttp.ClientSession(
                self._url, connector=connector, headers={"User-Agent": "toy-kubelet"}
            ) as self._session,
            asyncio.TaskGroup() as tasks,
        ):
            for plural in PATHS:
                tasks.create_task(self._follow(plural))

    async def ready(self) -> None:
        for listed in self._listed.values():
            await listed.wait()

    def all(self, plural: str) -> list[Object]:
        return list(self._found[plural].values())

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        return self._found[plural].get((namespace, name))

    async def create(self, plural: str, item: Object) -> Object:
        return self._keep(plural, await self._ask("POST", plural, item, name=""))

    async def replace(self, plural: str, item: Object) -> Object:
        return self._keep(plural, await self._ask("PUT", plural, item))

    async def patch_status(self, plural: str, item: Object, status: Object) -> Object | None:
        """Patch an object's status and return the object, or None if it no longer exists."""
        try:
            answer = await self._ask("PATCH", plural, item, body={"status": status}, subresource="/status")
        except Refused as refused:
            if refused.code == 404:
                return None
            raise
        return self._keep(plural, answer)

    async def bind(self, pod: Object, node: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        await self._ask(
            "POST", "pods", pod, body={"metadata": pod["metadata"], "target": target}, subresource="/binding"
        )

    async def delete(self, plural: str, item: Object, *, at_once: bool = False) -> None:
        """Delete an object; do nothing if it no longer exists, or if a new object has its name now."""
        options: Object = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": item["metadata"]["uid"]},
        }
        if at_once:
            options["gracePeriodSeconds"] = 0
        try:
            answer = await self._ask("DELETE", plural, item, body=options)
        except Refused as refused:
            if refused.code not in {404, 409}:
                raise
            return
        if answer.get("kind") != "Status":  # the object still exists, and is being deleted
            self._keep(plural, answer)

    async def _ask(
        self,
        method: str,
        plural: str,
        item: Object,
        *,
        body: Object | None = None,
        name: str | None = None,
        subresource: str = "",
    ) -> Object:
        metadata = item["metadata"]
        namespace = f"/namespaces/{metadata['namespace']}" if metadata.get("namespace") else ""
        name = f"/{metadata['name']}" if name is None else name
        headers = {"Content-Type": MERGE if method == "PATCH" else "application/json"}
        path = f"{PATHS[plural]}{namespace}/{plural}{name}{subresource}"
        content = json.dumps(item if body is None else body)
        async with self._session.request(method, path, data=content, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise Refused(answer.status, text)
            return json.loads(text)

    def _keep(self, plural: str, item: Object) -> Object:
        """Store an object that was just written, unless a watch has already reported a later version of it."""
        key = _key(item)
        known = self._found[plural].get(key)
        if known is None or _version(item) > _version(known):
            self._found[plural][key] = item
            self.changed.set()
        return item

    async def _follow(self, plural: str) -> None:
        while True:
            try:
                await self._watch(plural)
            except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
                await pace(PAUSE_SECONDS, "the pause before a watch is opened again")

    async def _watch(self, plural: str) -> None:
        path = f"{PATHS[plural]}/{plural}"
        async with self._session.get(path) as answer:
            answer.raise_for_status()
            listed = json.loads(await answer.text())
        self._found[plural] = {_key(item): item for item in listed["items"]}
        self._listed[plural].set()
        self.changed.set()
        since = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
        async with self._session.get(path, params=since, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            while line := await answer.content.readline():
                event = json.loads(line)
                item = event["object"]
                match event["type"]:
                    case "ERROR":
                        return
                    case "DELETED":
                        known = self._found[plural].get(_key(item))
                        if known is not None and known["metadata"]["uid"] == item["metadata"]["uid"]:
                            del self._found[plural][_key(item)]
                            self.changed.set()
                    case "ADDED" | "MODIFIED":
                        self._keep(plural, item)


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _version(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


def owned(items: Iterable[Object], owner: Object) -> list[Object]:
    """Return the objects that have this object among their owners."""
    uid = owner["metadata"]["uid"]
    return [
        each
        for each in items
        if any(reference["uid"] == uid for reference in each["metadata"].get("ownerReferences", ()))
    ]


def owner_reference(api: str, kind: str, owner: Object) -> Object:
    metadata = owner["metadata"]
    return {"apiVersion": api, "kind": kind, "name": metadata["name"], "uid": metadata["uid"], "controller": True}


def matches(selector: dict[str, str], item: Object) -> bool:
    return selector.items() <= item["metadata"].get("labels", {}).items()


def ends(item: Object) -> bool:
    return "deletionTimestamp" in item["metadata"]


def condition(item: Object, kind: str) -> bool:
    return any(
        each["type"] == kind and each["status"] == "True" for each in item.get("status", {}).get("conditions", ())
    )
