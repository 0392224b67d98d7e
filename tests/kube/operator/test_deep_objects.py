"""The operator reads an object that is nested as deeply as an API server accepts, and all other objects beside it."""

from contextlib import asynccontextmanager

import msgspec
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from aiohttp import web

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.views import CustomObject
from tests.support.kube.api.running import RunningApiServer

LEVELS = 9_900  # kube-apiserver's JSON decoder stops at 10,000


def an_object(name, deep):
    metadata = msgspec.json.encode({"name": name, "namespace": "a", "resourceVersion": "5"})
    return b'{"metadata": %b, "spec": {"apply": true, "podTemplate": %b}}' % (metadata, deep)


OBJECTS = [an_object("deep", b'{"a":' * LEVELS + b"1" + b"}" * LEVELS), an_object("other", b'{"spec": {}}')]


@asynccontextmanager
async def a_server(folder):
    async def answer(request):
        if "watch" in request.query:
            body = b"".join(b'{"type": "ADDED", "object": %b}\n' % each for each in OBJECTS)
        else:
            body = b'{"metadata": {"resourceVersion": "5"}, "items": [%b]}' % b",".join(OBJECTS)
        return web.Response(body=body, content_type="application/json")

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = RunningApiServer(f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with open_api_client(str(server.kubeconfig(folder)), "test") as cluster:
            yield cluster
    finally:
        await runner.cleanup()


async def test_too_deep_object_does_not_hide_others(tmp_path):
    async with a_server(tmp_path) as cluster:
        listed = (await cluster.list(kinds.SERVING_REQUEST, CustomObject, "a")).items
        told = [each.item async for each in cluster.watch(kinds.SERVING_REQUEST, CustomObject, "a", "1")]

    assert [each.metadata.name for each in listed] == ["deep", "other"]
    assert [each.spec["apply"] for each in listed] == [True, True]
    assert listed[1].spec["podTemplate"] == {"spec": {}}
    assert [each.metadata.name for each in told] == ["deep", "other"]
