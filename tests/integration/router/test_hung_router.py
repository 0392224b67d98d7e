"""Tests of a hung router as gRPC clients see it: every call fails in time, and keepalive pings break none."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fleet.client import AsyncClient, Client, Unavailable
from fleet.net.grpc.http2 import Http2Server
from fleet.net.grpc.options import CHANNEL_OPTIONS, PING_TIMEOUT_MS, SERVER_OPTIONS
from kvstore.service.server import MIN_PING_MS
from tests.support.fleet_processes import start_service
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

NOTICED_SECONDS = 8  # 4.5 until the next ping, 3.5 for its answer
SLACK_SECONDS = 1.5  # for a busy machine; together they are below the promised ten
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0, "timeout_seconds": 20}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir):
    """Run a router that nobody restarts, with a worker; yield its address and its process id."""
    folder = tmp_path_factory.mktemp("hung")
    with a_short_folder() as sockets:
        control = f"unix:{sockets}/control.sock"
        router = {
            "http_listen": "127.0.0.1:0",
            "grpc_listen": "127.0.0.1:0",
            "control_listen": control,
            "models": {"tiny": str(model_dir)},
        }
        worker = {
            "worker_id": "w0",
            "engine": "simulated",
            "model": "tiny",
            "listen": f"unix:{sockets}/worker.sock",
            "registry": control,
            "simulated": {"speedup": 0.05},  # an answer of 3,000 tokens takes minutes
        }
        processes = []
        try:
            process, endpoints = start_service("router", router, folder / "router.json")
            processes.append(process)
            processes.append(start_service("worker", worker, folder / "worker.json")[0])
            yield endpoints["grpc"], process.pid
        finally:
            for each in processes:
                each.kill()
                each.wait(60)


def is_served(address):
    """Return True when a worker has joined, as seen by a client that stays connected."""
    client = Client(address)
    eventually(client.models)
    return client


def seconds_until_unavailable(call):
    began = time.monotonic()
    with pytest.raises(Unavailable, match="ping timeout"):
        call()
    return time.monotonic() - began


async def async_calls_fail(address, hang):
    """Return the seconds until a running stream and a later call have failed."""

    async def seconds(call):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="ping timeout"):
            await call
        return time.monotonic() - began

    async def rest(stream):
        async for _ in stream:
            pass

    async with AsyncClient(address) as client, client.generate("x", **LONG) as stream:
        await anext(aiter(stream))
        await asyncio.to_thread(hang)
        return await asyncio.gather(seconds(rest(stream)), seconds(client.complete("x", **LONG)))


def test_hung_router_fails_all_calls_under_ten_seconds(cluster):
    address, process = cluster
    idle, waiting, streaming = (is_served(address) for _ in range(3))
    with ThreadPoolExecutor() as threads, streaming.generate("x", **LONG) as stream:
        next(iter(stream))
        try:
            hung = threads.submit(asyncio.run, async_calls_fail(address, lambda: os.kill(process, signal.SIGSTOP)))
            running = threads.submit(seconds_until_unavailable, lambda: list(stream))
            began = time.monotonic()
            unary = threads.submit(seconds_until_unavailable, lambda: waiting.complete("x", **LONG))
            changed = seconds_until_idle(idle)
            found = [running.result(), unary.result(), *hung.result(), changed, time.monotonic() - began]
        finally:
            os.kill(process, signal.SIGCONT)

    assert max(found) < NOTICED_SECONDS + SLACK_SECONDS, found


def seconds_until_idle(client):
    """Return the seconds until an idle connection is known to be broken."""
    began, states = time.monotonic(), []
    client.channel.subscribe(states.append)
    eventually(lambda: states and states[-1] is not grpc.ChannelConnectivity.READY, NOTICED_SECONDS + SLACK_SECONDS)
    return time.monotonic() - began


async def _endless(content, context):
    await context.write(b"one")
    await asyncio.Event().wait()


async def stays_ready(server, calls):
    """Return True if a connection outlasts the fourth ping in a row, which would be one too many."""
    methods = {"Stream": grpc.unary_stream_rpc_method_handler(_endless)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pings = dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000}  # the library sends pings no more often
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(pings.items())) as channel:
            running = [channel.unary_stream("/a.Service/Stream")(b"") for _ in range(calls)]
            for each in running:
                await each.read()
            async with asyncio.timeout(60):
                await channel.channel_ready()
            changed = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
            await asyncio.wait([changed], timeout=4.5)
            for each in (*running, changed):
                each.cancel()
            return channel.get_state() is grpc.ChannelConnectivity.READY
    finally:
        await server.stop(None)


async def test_pings_of_clients_break_no_connection():
    """Keep the proportion between the server's limit and the client's interval, both about a fifth of the real ones."""
    allowed = list((dict(SERVER_OPTIONS) | {"grpc.http2.min_ping_interval_without_data_ms": 800}).items())
    servers = [Http2Server(), Http2Server(), grpc.aio.server(options=allowed), grpc.aio.server(options=allowed)]

    ready = await asyncio.gather(*(stays_ready(server, number % 2) for number, server in enumerate(servers)))

    assert ready == [True] * 4, "idle and busy connections of clients and of operators"


def test_pings_are_no_more_frequent_than_servers_allow():
    ours = dict(CHANNEL_OPTIONS)
    assert ours["grpc.keepalive_time_ms"] > 4 * dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert ours["grpc.keepalive_time_ms"] > 4 * MIN_PING_MS
    assert ours["grpc.keepalive_time_ms"] + PING_TIMEOUT_MS <= NOTICED_SECONDS * 1000
