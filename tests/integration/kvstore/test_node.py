"""Tests of the node process: its start, its watchers and its end."""

import asyncio
import os
import socket
import time
from collections import Counter
from contextlib import suppress

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fleet.net.grpc.options import CHANNEL_OPTIONS
from kvstore.buffers import crc32c
from kvstore.client.store_client import StoreClient
from kvstore.errors import StoreNotStarted
from kvstore.pool.extents import PAGE_BYTES
from kvstore.service import block_store as service
from kvstore.service import server
from kvstore.service.block_store import CONDEMNED_NAMES
from kvstore.service.server import SERVICE, open_node, serve
from kvstore.system_clock import MonotonicClock
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
    file_names_in,
    node_settings,
)
from tests.support.shared_memory import segments_of
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.integration


async def test_a_cancelled_node_leaves_nothing_behind():
    with a_short_folder() as folder:
        shared_before = segments_of(os.getpid())
        files_before = len(file_names_in("/proc/self/fd"))
        ready = asyncio.Event()
        node = asyncio.get_running_loop().create_task(serve(node_settings(folder), lambda _: ready.set()))
        async with asyncio.timeout(60):
            await ready.wait()
            assert {path.name for path in folder.iterdir()} == {"c", "m"}
            assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir()), "only this user may connect"
            node.cancel()
            with pytest.raises(asyncio.CancelledError):
                await node

        assert list(folder.iterdir()) == []
        assert segments_of(os.getpid()) <= shared_before
        await until(lambda: len(file_names_in("/proc/self/fd")) <= files_before + 4)  # gRPC keeps a few of its own


def test_killed_node_leaves_no_memory_and_can_restart():
    with a_node(capacity_bytes=64 << 20) as node:
        with a_store_client(node.address, a_namespace()) as client:
            client.write(a_chain(1), [a_block(1)])
            assert segments_of(node.process.pid) == set(), "the shared memory has a name"
            node.kill()
        assert sorted(path.name for path in node.folder.iterdir()) == ["c", "m"], "the sockets are left behind"

        node.start()

        with a_store_client(node.address, a_namespace()) as client:
            assert client.write(a_chain(1), [a_block(1)]) == 1


async def test_ports_are_filled_in_and_every_address_serves():
    with a_short_folder() as folder:
        async with open_node(node_settings(folder), MonotonicClock()) as endpoints:
            assert endpoints.listen[0] == f"unix:{folder}/c"
            assert not endpoints.listen[1].endswith(":0")
            assert not endpoints.data_address.endswith(":0")
            for address in endpoints.listen:
                async with grpc.aio.insecure_channel(address) as channel:
                    stats = await pb_grpc.BlockStoreStub(channel).Stats(pb.StatsRequest(), timeout=60)
                    assert stats.capacity_bytes == 1 << 20


async def test_health_and_reflection_answer():
    with a_short_folder() as folder:
        async with (
            open_node(node_settings(folder), MonotonicClock()) as endpoints,
            grpc.aio.insecure_channel(endpoints.listen[0]) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in reflection.ServerReflectionInfo(iter([question]), timeout=60):
                assert SERVICE in {service.name for service in answer.list_services_response.service}
                break
            newer = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            async for same in newer(iter([question]), timeout=60):
                assert same == answer
                break


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        (r"listen\[0\]", lambda folder, port: {"listen": (f"127.0.0.1:{port}",)}),
        ("data_listen", lambda folder, port: {"data_listen": f"127.0.0.1:{port}"}),
        ("shm_socket", lambda folder, port: {"shm_socket": f"{folder}/taken"}),
        (r"listen\[1\]", lambda folder, port: {"listen": (f"unix:{folder}/c", f"unix:{folder}/taken")}),
        ("shm_socket", lambda folder, port: {"shm_socket": f"{folder}/missing/m"}),
        ("shm_socket", lambda folder, port: {"shm_socket": f"{folder}/{'x' * 100}"}),
        ("shm_socket", lambda folder, port: {"shm_socket": f"{folder}/file"}),
        ("capacity_bytes", lambda folder, port: {"capacity_bytes": 1 << 62}),
    ],
)
async def test_impossible_settings_are_rejected_by_field(field, fields):
    with (
        a_short_folder() as folder,
        socket.create_server(("127.0.0.1", 0)) as busy,
        socket.socket(socket.AF_UNIX) as taken,
    ):
        taken.bind(f"{folder}/taken")
        taken.listen()
        (folder / "file").write_text("precious")

        with pytest.raises(StoreNotStarted, match=f"^{field}: "):
            await serve(node_settings(folder, **fields(folder, busy.getsockname()[1])), lambda _: None)

        assert sorted(path.name for path in folder.iterdir()) == ["file", "taken"], "files were left behind or removed"


async def test_a_watcher_gets_a_dump_and_then_every_change():
    with a_short_folder() as folder:
        async with (
            open_node(node_settings(folder, capacity_bytes=4 * BLOCK_BYTES), MonotonicClock()) as endpoints,
            grpc.aio.insecure_channel(endpoints.listen[0]) as channel,
        ):
            client = await asyncio.to_thread(StoreClient.connect, endpoints.listen[0], a_namespace())
            await asyncio.to_thread(client.write, a_chain(2, "before"), a_block)
            watch = pb_grpc.BlockStoreStub(channel).Watch(pb.WatchRequest())
            held: set[bytes] = set()
            sequences = []

            async def hear_until(expected: set[bytes]) -> None:
                async with asyncio.timeout(60):
                    while held != expected:
                        changes = await watch.read()
                        assert changes.digest == client.namespace.digest
                        sequences.append(changes.sequence)
                        held.difference_update(names(changes.removed))
                        held.update(names(changes.stored))

            await hear_until(set(a_chain(2, "before")))
            await asyncio.to_thread(client.write, a_chain(4, "after"), a_block)
            await hear_until(set(a_chain(4, "after")))
            assert sequences == list(range(1, len(sequences) + 1))
            watch.cancel()
            client.close()


async def test_a_slow_watcher_is_cut_and_can_watch_again():
    tiny = a_namespace(block_bytes=64)
    blocks = [a_block(1, 64)] * 2048
    with a_short_folder() as folder:
        async with (
            open_node(
                node_settings(folder, capacity_bytes=2048 * PAGE_BYTES, watch_queue=2), MonotonicClock()
            ) as endpoints,
            grpc.aio.insecure_channel(endpoints.listen[0], options=[("grpc.http2.bdp_probe", 0)]) as channel,
        ):
            client = await asyncio.to_thread(StoreClient.connect, endpoints.listen[0], tiny)
            watch = pb_grpc.BlockStoreStub(channel).Watch(pb.WatchRequest())
            async with asyncio.timeout(30):
                await watch.read()  # the empty dump
                for number in range(40):  # 64 KiB of names each, more than the connection takes before the queue fills
                    written = await asyncio.to_thread(client.write, a_chain(2048, f"n{number}"), blocks)
                    assert written == 2048
                last = set(a_chain(2048, "n39"))
                while not watch.done():
                    with suppress(grpc.aio.AioRpcError):
                        await watch.read()
                assert await watch.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

                again = pb_grpc.BlockStoreStub(channel).Watch(pb.WatchRequest())
                assert set(names((await again.read()).stored)) == last
            again.cancel()
            client.close()


async def test_watcher_that_pings_the_node_is_not_cut(monkeypatch):
    monkeypatch.setattr(server, "MIN_PING_MS", 800)  # scaled down from a quarter of a minute
    pings = dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000}  # gRPC sends pings no more often
    with a_short_folder() as folder:
        async with (
            open_node(node_settings(folder), MonotonicClock()) as endpoints,
            grpc.aio.insecure_channel(endpoints.listen[0], options=list(pings.items())) as channel,
        ):
            watch = pb_grpc.BlockStoreStub(channel).Watch(pb.WatchRequest())

            async def cut() -> None:
                while await watch.read() is not grpc.aio.EOF:
                    pass

            with pytest.raises(TimeoutError):  # the connection is idle and stays
                await asyncio.wait_for(cut(), 4.5)  # the fourth ping in a row is one too many


async def test_client_that_pings_the_node_between_calls_is_not_cut(monkeypatch):
    monkeypatch.setattr(server, "MIN_PING_MS", 800)
    pings = dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000, "grpc.use_local_subchannel_pool": 1}
    ready = grpc.ChannelConnectivity.READY
    with a_short_folder() as folder:
        async with (
            open_node(node_settings(folder), MonotonicClock()) as endpoints,
            grpc.aio.insecure_channel(endpoints.listen[0], options=list(pings.items())) as channel,
        ):
            await pb_grpc.BlockStoreStub(channel).Stats(pb.StatsRequest(), timeout=30)
            assert channel.get_state() is ready

            with pytest.raises(TimeoutError):  # no call runs, and the connection stays
                await asyncio.wait_for(channel.wait_for_state_change(ready), 4.5)


def test_routers_ping_a_node_no_more_often_than_it_allows():
    # Pings that a busy machine delays come closer together, and three early ones cut the connection.
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] > 4 * server.MIN_PING_MS


async def test_client_with_many_bad_blocks_does_not_block_the_node(monkeypatch):
    looks: list[int] = []
    turns = 0

    def look(parts: list[np.ndarray]) -> int:
        looks.append(turns)
        return crc32c(parts)

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    loop, names = asyncio.get_running_loop(), a_chain(5 * CONDEMNED_NAMES)
    tiny = a_namespace(block_bytes=64)
    monkeypatch.setattr(service, "crc32c", look)
    with a_short_folder() as folder:
        async with open_node(
            node_settings(folder, capacity_bytes=len(names) * PAGE_BYTES), MonotonicClock()
        ) as endpoints:
            client = await asyncio.to_thread(StoreClient.connect, endpoints.listen[0], tiny)
            assert await asyncio.to_thread(client.write, names, lambda _: a_block(1, 64)) == len(names)
            slots = (await asyncio.to_thread(client.match, names, lease_seconds=0)).slots
            client.connection.session.transport.mapping.bytes[slots[7].offset] ^= 1
            slander = pb.CondemnRequest(
                digest=tiny.digest,
                hashes=b"".join(names) * 2,  # each twice
                generations=[slot.generation for slot in slots] * 2,
            )
            turn()
            async with grpc.aio.insecure_channel(endpoints.listen[0]) as channel:
                answer = await pb_grpc.BlockStoreStub(channel).Condemn(slander, timeout=60)
            await asyncio.to_thread(client.close)

    assert answer.dropped == 1
    assert len(looks) == len(names), "each block once"
    assert max(Counter(looks).values()) == CONDEMNED_NAMES


def test_leases_end_without_calls():
    with a_node(max_lease_seconds=0.2) as node, a_store_client(node.address, a_namespace()) as client:
        client.write(a_chain(2), a_block)
        match = client.match(a_chain(2), lease_seconds=60)
        assert len(match) == 2

        eventually(lambda: client.stats().pinned == 0)

        assert client.stats().expired == 1


def test_a_match_and_a_read_are_mostly_copying():
    """Match and read 94 blocks of 128 KiB, a prompt of 3,000 tokens; the limit suits a busy machine."""
    block_bytes = 128 << 10
    with (
        a_node(capacity_bytes=100 * block_bytes) as node,
        a_store_client(node.address, a_namespace(block_bytes=block_bytes)) as client,
    ):
        chain = a_chain(94)
        client.write(chain, lambda index: a_block(index, block_bytes))
        into = [bytearray(block_bytes) for _ in chain]

        def span() -> float:
            started = time.perf_counter()
            match = client.match(chain, lease_seconds=60)
            assert all(client.read(match, range(94), into))
            took = time.perf_counter() - started
            client.release(match.lease_id)
            return took

        assert any(span() < 0.030 for _ in range(200))


def names(joined: bytes) -> list[bytes]:
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]
