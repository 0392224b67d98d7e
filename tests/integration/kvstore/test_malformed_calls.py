"""Tests of malformed requests on a node's control plane."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.protocol import wire
from kvstore.protocol.calls import ACCEPTED, HANDSHAKE
from kvstore.security.credentials import Credentials
from kvstore.service.server import SERVICE, open_node
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.kvstore.builders import a_short_folder
from tests.support.servers.processes import a_free_port

pytestmark = pytest.mark.integration

GARBAGE = b"\xff" * 40
NOT_UTF8 = b"\x22\x02\xff\xfe"  # field 4 of a MatchRequest, a string


@asynccontextmanager
async def a_channel(**fields: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel to a node on this event loop."""
    with a_short_folder() as folder:
        settings = StoreSettings(
            **{"store_id": "s", "listen": (f"unix:{folder}/c",), "capacity_bytes": 1 << 20, **fields}
        )
        async with (
            open_node(settings, MonotonicClock()) as endpoints,
            grpc.aio.insecure_channel(endpoints.listen[0]) as channel,
        ):
            yield channel


async def ask(channel: grpc.aio.Channel, method: str, content: bytes) -> None:
    """Send one request of these bytes."""
    if method.endswith("/ServerReflectionInfo"):
        async for _ in channel.stream_stream(method)(iter([content]), timeout=60):
            pass
    elif method.endswith("/Watch"):
        async for _ in channel.unary_stream(method)(content, timeout=60):
            pass
    else:
        await channel.unary_unary(method)(content, timeout=60)


async def rejection_of(channel: grpc.aio.Channel, method: str, content: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel, method, content)
    return refused.value


@pytest.mark.parametrize(
    ("method", "content"),
    [
        (f"/{SERVICE}/Match", GARBAGE),
        (f"/{SERVICE}/Match", NOT_UTF8),
        (f"/{SERVICE}/Hello", GARBAGE),
        (f"/{SERVICE}/Condemn", GARBAGE),
        (f"/{SERVICE}/Watch", GARBAGE),
        ("/grpc.health.v1.Health/Check", GARBAGE),
        ("/grpc.health.v1.Health/Watch", GARBAGE),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", GARBAGE),
    ],
)
async def test_malformed_message_is_an_invalid_argument_logged_once(method, content, caplog):
    async with a_channel() as channel:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            refused = await rejection_of(channel, method, content)

    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.details().startswith("request: ")
    assert (wire.FIELD_KEY, "request") in tuple(refused.trailing_metadata())
    (line,) = caplog.records
    assert line.exc_info is None
    assert line.method == method


async def test_malformed_message_keeps_its_connection():
    async with a_channel() as channel:
        for _ in range(3):
            await rejection_of(channel, f"/{SERVICE}/Match", GARBAGE)

        assert (await pb_grpc.BlockStoreStub(channel).Stats(pb.StatsRequest(), timeout=60)).capacity_bytes == 1 << 20
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        questions = [reflection_pb2.ServerReflectionRequest(list_services="")] * 2
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(questions), timeout=60)
        assert len([each async for each in answers]) == 2


async def test_malformed_messages_are_counted_on_every_path():
    port = a_free_port()
    with a_short_folder() as folder:
        fields = {"listen": (f"unix:{folder}/c",), "shm_socket": f"{folder}/m", "metrics_listen": f"127.0.0.1:{port}"}
        async with a_channel(**fields) as channel:
            for _ in range(2):
                await rejection_of(channel, f"/{SERVICE}/Match", GARBAGE)
            await send_call_bytes(folder / "m", b"\x01\x00\x00\x00\x63")  # a call of method 99
            await send_call_bytes(folder / "m", b"\xff\xff\xff\xff")  # a frame of 4 GiB

            page = await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())

    assert "kvstore_undecodable_total 4.0" in page.splitlines()


async def send_call_bytes(path: Path, call: bytes) -> None:
    """Send bytes after the opening of a call connection, and wait until the node has ended it."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(HANDSHAKE + call)
    async with asyncio.timeout(60):
        assert await reader.read() == ACCEPTED
    writer.close()


async def test_unknown_client_needs_a_proof_before_any_detail(tmp_path):
    (tmp_path / "secret").write_text("a secret of this deployment\n")
    credentials = Credentials(secret_file=str(tmp_path / "secret"))
    async with a_channel(listen=("127.0.0.1:0",), credentials=credentials) as channel:
        refused = await rejection_of(channel, f"/{SERVICE}/Match", GARBAGE)

    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
