"""Test of streams that a thread reads with the client library while their server restarts."""

import asyncio
import threading
import time
from contextlib import suppress

import grpc
import pytest

from fleet.client import Client
from fleet.net.grpc.client_servers import client_server
from fleet.net.settings import GrpcSettings
from tests.support.servers.processes import a_free_port
from tests.support.waiting import pace, pace_thread, thread_stacks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

READERS = 3
ROUNDS = 40
ROUND_SECONDS = 0.5
DEADLINE_SECONDS = 5.0
END_SECONDS = 60.0  # far beyond the deadline, because other tests use the cores too


async def part_by_part(content: bytes, context: grpc.aio.ServicerContext) -> None:
    for _ in range(6):
        await context.write(content)
        await pace(0.001, "a stream has to be open when its server stops")


async def serve_and_restart(port: int, ended: threading.Event) -> None:
    """Serve streams at a port, with a restart at least three times a second, until `ended` is set."""
    methods = {"Stream": grpc.unary_stream_rpc_method_handler(part_by_part)}
    while not ended.is_set():
        server = client_server(GrpcSettings(), connection_seconds=0, max_held_bytes=1 << 30)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await pace(0.15, "clients use the server before it stops")
        await server.stop(0.05)
        await pace(0.1, "clients meet a closed port before the next server listens")


def read_streams(address: str, stop: threading.Event) -> None:
    """Read one stream after another; a stream may fail, but it has to end."""
    with Client(address, resume_seconds=1) as client:
        call = client.channel.unary_stream("/a.Service/Stream")
        while not stop.is_set():
            with suppress(grpc.RpcError):
                for _ in call(b"part", timeout=DEADLINE_SECONDS):
                    pass


def test_streams_end_by_their_deadline_when_a_server_restarts():
    port = a_free_port()
    ended = threading.Event()
    server = threading.Thread(target=lambda: asyncio.run(serve_and_restart(port, ended)), daemon=True)
    server.start()
    try:
        for _ in range(ROUNDS):
            stop = threading.Event()
            readers = [
                threading.Thread(target=read_streams, args=(f"127.0.0.1:{port}", stop), daemon=True)
                for _ in range(READERS)
            ]
            for each in readers:
                each.start()
            pace_thread(ROUND_SECONDS, "the server restarts meanwhile")
            stop.set()
            until = time.monotonic() + END_SECONDS
            for each in readers:
                each.join(until - time.monotonic())
                assert not each.is_alive(), f"a stream has not ended after {END_SECONDS:g} s:\n{thread_stacks()}"
    finally:
        ended.set()
        server.join(END_SECONDS)
