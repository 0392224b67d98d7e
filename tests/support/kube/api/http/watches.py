"""Watches: the stream of changes that a client receives, and the ways in which the stream ends."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Literal

import msgspec
from aiohttp import web

from tests.support.kube.api import errors
from tests.support.kube.api.cluster import as_version
from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.faults import Fault
from tests.support.kube.api.http import answers
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.kinds.selectors import Test
from tests.support.kube.api.storage import Storage, StoredChange
from tests.support.kube.api.values import Object

BOOKMARK_SECONDS = 10.0
LEAST_SECONDS = 5.0
"""Shortest duration, in seconds, of a watch that ends with a bookmark. kube-apiserver sends the last one 2 s before the end."""

Kind = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "STATE TOLD"]
"""The types of watch events. The last one is used only in this module: it means that all initial events have been sent."""


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the changes that a client requests.

    - `since` is a revision: the client gets every change after it. If `since` is 0, the client first gets all existing
      objects as additions, and then the changes.
    - `initial_events`: the client first gets all existing objects, then a bookmark that marks their end, then changes.
    """

    resource: ServedResource
    namespace: str
    test: Test
    since: int
    initial_events: bool
    bookmarks: bool
    seconds: float


async def stream(
    request: web.Request, watch: Watch, storage: Storage, fault: Fault | None, closing: Callable[[], bool]
) -> web.StreamResponse:
    """Send events until the time is over, the client leaves, the server is `closing`, or a fault ends the watch."""
    form = answers.form_of(request)
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    sent, headed = 0, True
    with contextlib.suppress(ConnectionError):
        async with contextlib.aclosing(_events(watch, storage, closing)) as events:
            async for kind, item in events:
                if fault is not None and sent >= fault.events and fault.kind in {"cut", "expire"}:
                    if fault.kind == "cut":
                        await answer.write(b'{"type":"MODIFIED","object":{"kin')
                        return answers.close(request, answer)
                    await answer.write(_line("ERROR", errors.expired(watch.since, storage.revision).status()))
                    break
                if kind == "ERROR":
                    await answer.write(_line(kind, item))
                elif kind != "STATE TOLD":
                    bookmark = kind == "BOOKMARK"
                    shown = answers.shaped(watch.resource, item, form, headed=headed, bookmark=bookmark)
                    await answer.write(_line(kind, shown))
                    sent, headed = sent + (not bookmark), headed and bookmark
        await answer.write_eof()
    return answer


async def _events(
    watch: Watch, storage: Storage, closing: Callable[[], bool]
) -> AsyncGenerator[tuple[Kind, Object], None]:
    resource = watch.resource
    position = watch.since
    if watch.initial_events or not watch.since:
        position = storage.revision
        for each in storage.items(resource.place, watch.namespace):
            if watch.test(each):
                yield "ADDED", as_version(each, resource)
    if watch.initial_events:
        yield "BOOKMARK", _bookmark(resource, position, {"k8s.io/initial-events-end": "true"})
    yield "STATE TOLD", {}
    ends = time.monotonic() + watch.seconds
    bookmark_at = time.monotonic() + BOOKMARK_SECONDS
    changed = storage.waiter()
    try:
        while True:
            changed.clear()
            try:
                changes = storage.changes_since(resource.place, position)
            except ApiError as refused:
                yield "ERROR", refused.status()
                return
            position = storage.revision
            for change in changes:
                for kind, item in _told(change, watch):
                    yield kind, as_version(item, resource)
            now = time.monotonic()
            if now >= ends or closing():
                break
            if watch.bookmarks and now >= bookmark_at:
                yield "BOOKMARK", _bookmark(resource, position)
                bookmark_at = now + BOOKMARK_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((min(ends, bookmark_at) if watch.bookmarks else ends) - now):
                    await changed.wait()
        if watch.bookmarks and watch.seconds >= LEAST_SECONDS:
            yield "BOOKMARK", _bookmark(resource, position)
    finally:
        storage.forget(changed)


def _told(change: StoredChange, watch: Watch) -> Iterator[tuple[Kind, Object]]:
    """Yield the event that a watcher with a selector gets for a change, or nothing.

    For this watcher, an object that starts to match is added, and an object that stops matching is deleted.
    """
    if watch.namespace and change.item["metadata"].get("namespace") != watch.namespace:
        return
    was = change.before is not None and watch.test(change.before)
    now = change.type != "DELETED" and watch.test(change.item)
    if now:
        yield "MODIFIED" if was else "ADDED", change.item
    elif was:
        yield "DELETED", change.item


def _bookmark(resource: ServedResource, revision: int, annotations: Object | None = None) -> Object:
    metadata: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    return {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}


def _line(kind: Kind, item: Object) -> bytes:
    return msgspec.json.encode({"type": kind, "object": item}) + b"\n"
