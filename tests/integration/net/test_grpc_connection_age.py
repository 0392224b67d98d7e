"""Tests of the age limit of client connections: clients move to another connection without losing a call."""

import asyncio

import grpc
import pytest

from fleet.net.grpc import http2 as grpc_http2
from fleet.net.grpc.client_servers import client_server
from fleet.net.grpc.options import SHARED_SERVER_OPTIONS, frontend_server_options
from fleet.net.settings import GrpcLibrary, GrpcSettings
from tests.support.waiting import pace, until_answered

pytestmark = pytest.mark.integration

SECONDS = 0.2


@pytest.fixture(params=[*GrpcLibrary, "gateways"])
async def server(request, monkeypatch):
    monkeypatch.setattr(grpc_http2, "SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(grpc_http2, "SHUTDOWN_NOTICE_SECONDS", 0.05)
    if request.param != "gateways":
        limits = GrpcSettings(library=request.param)
        return client_server(limits, connection_seconds=SECONDS, max_held_bytes=1 << 30)
    return grpc.aio.server(options=frontend_server_options(shared=False, connection_seconds=SECONDS))


async def test_connections_end_by_age_without_losing_calls(server):
    peers: set[str] = set()

    async def answer(content: bytes, context: grpc.aio.ServicerContext) -> bytes:
        peers.add(context.peer())
        return b"answer"

    async def stream(content: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(8):
            await context.write(b"part")
            await pace(SECONDS / 2, "the stream lasts for four times the age limit of its connection")

    methods = {
        "Ask": grpc.unary_unary_rpc_method_handler(answer),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            streaming = channel.unary_stream("/a.Service/Stream")(b"")
            ask = channel.unary_unary("/a.Service/Ask")

            async def moved_twice() -> bool:
                assert await ask(b"") == b"answer"
                return len(peers) >= 3

            await until_answered(moved_twice)

            assert [part async for part in streaming] == [b"part"] * 8
    finally:
        await server.stop(None)


def test_connections_without_an_age_limit_stay_open():
    assert frontend_server_options(shared=True, connection_seconds=0) == SHARED_SERVER_OPTIONS
