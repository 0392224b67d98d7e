"""Tests of a node on a thread of another process: what it shares with its host and what it leaves alone."""

import asyncio
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.errors import NodeEnded, StoreNotStarted
from kvstore.service import embedded
from kvstore.service.embedded import open_embedded
from kvstore.system_clock import MonotonicClock
from kvstore.tiers import file_mapping as pages
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    a_block,
    a_chain,
    a_namespace,
    a_short_folder,
    a_store_client,
    file_names_in,
    node_settings,
)
from tests.support.shared_memory import segments_of
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.integration

NODE_THREAD = "kvstore-node"


def node(folder: Path, **fields):
    return open_embedded(node_settings(folder, **fields), MonotonicClock(), new_loop=uvloop.new_event_loop)


def node_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")]


def store_and_fetch(address: str, prefer=("shm",)) -> None:
    with a_store_client(address, a_namespace(), prefer=prefer) as client:
        assert client.write(a_chain(4), a_block) == 4
        match = client.match(a_chain(4), lease_seconds=5)
        into = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(4)]
        assert client.read(match, range(4), into) == [True] * 4
        assert all(np.array_equal(block, a_block(index)) for index, block in enumerate(into))
        client.release(match.lease_id)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
async def test_embedded_node_serves_its_process_and_cleans_up(new_loop):
    with a_short_folder() as folder:
        shared_before, files_before = segments_of(os.getpid()), len(file_names_in("/proc/self/fd"))
        async with open_embedded(node_settings(folder), MonotonicClock(), new_loop=new_loop) as endpoints:
            assert NODE_THREAD in node_threads()
            assert file_names_in(str(folder)) == {"c", "m"}
            assert not endpoints.data_address.endswith(":0")
            await asyncio.to_thread(store_and_fetch, endpoints.listen[0])
            assert await asyncio.to_thread(hits_over_tcp, endpoints.listen[1]) == 4

        assert file_names_in(str(folder)) == set()
        assert segments_of(os.getpid()) <= shared_before
        await until(lambda: len(file_names_in("/proc/self/fd")) <= files_before + 6)  # gRPC keeps a few of its own
        assert node_threads() == []


def hits_over_tcp(address: str) -> int:
    with a_store_client(address, a_namespace(), prefer=("tcp",)) as client:
        match = client.match(a_chain(5), lease_seconds=5)
        client.release(match.lease_id)
        return len(match)


async def test_reopened_node_reuses_its_sockets_and_frees_memory():
    with a_short_folder() as folder:
        files, pools_before = 0, pools()
        for _ in range(4):
            async with node(folder) as endpoints:
                await asyncio.to_thread(store_and_fetch, endpoints.listen[0])
                assert pools() - pools_before
            assert pools() <= pools_before
            if not files:
                files = len(file_names_in("/proc/self/fd"))
        await until(lambda: len(file_names_in("/proc/self/fd")) <= files + 1)


def pools() -> set[str]:
    """Return the inodes of the pools that are mapped in this process; earlier tests may still hold some."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "kvstore-pool" in line}


async def test_long_engine_step_does_not_delay_look_ups():
    with a_short_folder() as folder:
        async with node(folder) as endpoints:
            client = await asyncio.to_thread(a_store_client, endpoints.listen[0], a_namespace())
            stop, looks = threading.Event(), 0

            def look_up() -> None:
                nonlocal looks
                while not stop.is_set():
                    client.match(a_chain(4), lease_seconds=0)
                    looks += 1

            with client:
                looking = asyncio.get_running_loop().run_in_executor(None, look_up)
                await until(lambda: looks)
                before = looks
                # Run like a step of an engine that releases the interpreter but blocks the event loop.
                eventually(lambda: looks > before + 20)
                stop.set()
                await looking


async def test_grpc_on_two_loops_logs_nothing(caplog):
    """Check gRPC's only queue for all event loops of a process; some versions complain about two loops."""
    with a_short_folder() as folder:
        async with node(folder) as endpoints, grpc.aio.insecure_channel(endpoints.listen[0]) as channel:
            stub, health = pb_grpc.BlockStoreStub(channel), health_pb2_grpc.HealthStub(channel)
            for _ in range(200):
                stats = await stub.Stats(pb.StatsRequest(), timeout=60)
                assert stats.capacity_bytes == 1 << 20
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("capacity_bytes", {"capacity_bytes": 1 << 62}),
        (r"listen\[0\]", {"listen": ("unix:/nowhere/c",)}),
        (r"listen\[0\]", {"listen": ("0.0.0.0:0",)}),
    ],
)
async def test_invalid_settings_name_the_field_and_leave_nothing(field, fields):
    with a_short_folder() as folder:
        with pytest.raises(StoreNotStarted, match=f"^{field}: "):
            async with node(folder, **fields):
                raise AssertionError("it started")

        assert file_names_in(str(folder)) == set()
        assert node_threads() == []


async def test_second_node_on_one_socket_is_rejected():
    with a_short_folder() as folder:
        async with node(folder) as endpoints:
            with pytest.raises(StoreNotStarted, match=r"^shm_socket: another process listens"):
                async with node(folder):
                    raise AssertionError("it started")
            await asyncio.to_thread(store_and_fetch, endpoints.listen[0])


async def test_node_failure_ends_the_host_body(monkeypatch):
    serve, failing = embedded.serve, threading.Event()

    async def breaking(told, on_ready, *, clock):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(told, on_ready, clock=clock))
            await asyncio.to_thread(failing.wait)
            raise RuntimeError("a bug")

    monkeypatch.setattr(embedded, "serve", breaking)
    with a_short_folder() as folder:
        worked = []

        async def work() -> None:
            async with node(folder):
                failing.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    worked.append("cancelled")

        with pytest.raises(NodeEnded, match="has ended by itself") as ended:
            await work()

        assert worked == ["cancelled"]
        assert isinstance(ended.value.__cause__, ExceptionGroup)
        assert file_names_in(str(folder)) == set()


async def test_exception_of_the_host_is_passed_on_unchanged():
    with a_short_folder() as folder:
        error = ValueError("the engine's own")
        with pytest.raises(ValueError, match="the engine's own") as raised:
            async with node(folder):
                raise error
        assert raised.value is error
        assert file_names_in(str(folder)) == set()


async def test_host_cancelled_while_allocating_leaves_nothing(
    monkeypatch,
):
    taking, chunks, in_chunks = threading.Event(), [], pages.in_chunks

    def slowly(size, act, given_up):
        def one(start):
            chunks.append(start)
            taking.set()
            assert given_up.wait(60)
            act(start)

        in_chunks(size, one, given_up)

    monkeypatch.setattr(pages, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(pages, "in_chunks", slowly)
    with a_short_folder() as folder:
        files, pools_before = len(file_names_in("/proc/self/fd")), pools()

        async def open_it() -> None:
            async with node(folder, capacity_bytes=64 << 20):
                raise AssertionError("it started")

        opening = asyncio.ensure_future(open_it())
        assert await asyncio.to_thread(taking.wait, 20)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

        assert len(chunks) <= pages.TAKING_THREADS
        assert file_names_in(folder) == set()
        assert node_threads() == []
        assert pools() <= pools_before
        await until(lambda: len(file_names_in("/proc/self/fd")) <= files)


async def test_node_without_a_thread_leaves_nothing_open(monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    loop = asyncio.new_event_loop()
    with a_short_folder() as folder, pytest.raises(RuntimeError, match="can't start new thread"):
        async with open_embedded(node_settings(folder), MonotonicClock(), new_loop=lambda: loop):
            raise AssertionError("it started")

    assert loop.is_closed()


async def test_host_cancelled_while_the_node_starts_leaves_nothing():
    with a_short_folder() as folder:

        async def open_it() -> None:
            async with node(folder, capacity_bytes=64 << 20):
                raise AssertionError("it started")

        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(open_it())
            await until(node_threads, between_seconds=0)
            opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening

        assert file_names_in(str(folder)) == set()
        assert node_threads() == []
