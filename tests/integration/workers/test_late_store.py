"""Tests of workers whose store does not answer at their start: they serve without it and join it later without a restart."""

import asyncio
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fleet.core.errors import RequestRejected
from fleet.core.requests import Sampling, Source
from fleet.core.roles import KvPath, Phase, Placement, Role
from kvstore.client import node_connection as link
from kvstore.client.store_client import StoreClient
from kvstore.errors import LayoutMismatch
from kvstore.security.credentials import Credentials
from tests.support.certificates import Authority
from tests.support.kvstore.builders import (
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
    empty_buffers,
)
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually, until, until_answered
from tests.support.workers.engine_driver import fresh_prompt
from tests.support.workers.worker_cluster import WorkerCluster, sources, worker_settings
from tests.support.workers.worker_processes import a_worker_process

pytestmark = pytest.mark.integration

PATHS = (KvPath.STORE,)


@asynccontextmanager
async def a_cluster_beside(node):
    """Run a prefill worker and a decode worker whose only KV path is the store, and their router."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(a_short_folder())
        told = [
            worker_settings(f"{role}-0", role, node.address, kv_paths=PATHS, speedup=5)
            for role in (Role.PREFILL, Role.DECODE)
        ]
        processes = [await stack.enter_async_context(a_worker_process(folder, each)) for each in told]
        cluster = WorkerCluster([process.address for process in processes], node.address)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [
            tasks.create_task(cluster.workers.run(cluster.server.hear)),
            tasks.create_task(cluster.server.run()),
        ]
        await cluster.until(lambda status: sum(len(pool.workers) for pool in status.pools) == len(processes))
        yield cluster
        cluster.machine.check()
        for task in running:
            task.cancel()


async def goes_through_store(cluster) -> bool:
    """Return True if a prompt's blocks go through the store from one worker to the other."""
    try:
        _, complete = await cluster.ask(fresh_prompt(320), placement=Placement.DISAGGREGATED)
    except RequestRejected:  # while there is no path between the workers
        return False
    return Source.STORE in sources(complete, Phase.DECODE)


async def test_workers_start_beside_a_hung_store_and_join_it_later():
    with a_node(capacity_bytes=16 << 20) as node:
        node.freeze()
        async with a_cluster_beside(node) as cluster:
            tokens, complete = await cluster.ask(fresh_prompt(700))
            assert len(tokens) == 12
            assert [phase.phase for phase in complete.kv] == [Phase.AGGREGATED]
            assert not await goes_through_store(cluster)

            long = cluster.arrival(fresh_prompt(40), sampling=Sampling(temperature=0, max_tokens=400, ignore_eos=True))
            streaming = asyncio.ensure_future(cluster.answer(long, after_first=node.thaw))
            await until_answered(lambda: goes_through_store(cluster))

            tokens, complete = await streaming
            assert len(tokens) == 400
            assert [phase.phase for phase in complete.kv] == [Phase.AGGREGATED], "the stream stays on its worker"


async def test_single_worker_fills_the_store_it_joined_late():
    with a_node(capacity_bytes=16 << 20) as node:
        node.kill()
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(a_short_folder())
            process = await stack.enter_async_context(
                a_worker_process(folder, worker_settings("both-0", Role.BOTH, node.address, kv_paths=PATHS))
            )
            cluster = WorkerCluster([process.address], node.address)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = [
                tasks.create_task(cluster.workers.run(cluster.server.hear)),
                tasks.create_task(cluster.server.run()),
            ]
            await cluster.until(lambda status: len(status.pools) == 1)
            await cluster.ask(fresh_prompt(320))
            node.start()

            async def ask_until_stored():
                while not cluster.server.status().stores:
                    await cluster.ask(fresh_prompt(320))

            async with asyncio.timeout(60):
                await ask_until_stored()
            await until(lambda: sum(store.blocks for store in cluster.server.status().stores) > 0)
            for task in running:
                task.cancel()


def test_a_client_finds_nothing_until_its_node_answers():
    with a_node(capacity_bytes=1 << 20) as node:
        node.kill()
        with StoreClient.join(node.address, a_namespace(), wait_seconds=0.1, call_timeout_seconds=30) as client:
            assert not client.joined
            began = time.monotonic()
            for _ in range(1000):
                assert client.write(a_chain(1), [a_block(1)]) == 0
                assert len(client.match(a_chain(1), lease_seconds=1)) == 0
            assert time.monotonic() - began < 20, "the calls must not wait"
            assert (client.store_id, client.path, client.stats()) == ("", None, None)

            node.start()
            eventually(lambda: client.joined)

            assert client.store_id == "store-1"
            assert client.write(a_chain(1), [a_block(1)]) == 1
            match = client.match(a_chain(1), lease_seconds=10)
            assert client.read(match, [0], empty_buffers(1)) == [True]


def causes(caplog) -> list[str]:
    return [record.cause for record in caplog.records if record.message == "store node not joined yet"]


@pytest.mark.parametrize("wait_seconds", [0.3, 0])
def test_expired_certificate_of_a_late_store_is_reported(tmp_path, caplog, monkeypatch, wait_seconds):
    monkeypatch.setattr(link, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(link, "JOIN_PAUSE_SECONDS", 0.01)
    authority = Authority(tmp_path, "authority")
    expired = Credentials(authority=authority.file, **authority.issue("node", hours=(-9, -8)))
    own = Credentials(authority=authority.file, **authority.issue("client"))
    with (
        a_node(listen=["127.0.0.1:0"], shm_socket="", credentials=expired) as node,
        StoreClient.join(node.endpoints.listen[0], a_namespace(), wait_seconds=wait_seconds, credentials=own) as client,
    ):
        eventually(lambda: causes(caplog))
        assert not client.joined
    assert " expired on " in causes(caplog)[0]
    assert len(causes(caplog)) == 1


def test_late_certificate_error_is_reported(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(link, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(link, "JOIN_PAUSE_SECONDS", 0.01)
    authority = Authority(tmp_path, "authority")
    expired = Credentials(authority=authority.file, **authority.issue("node", hours=(-9, -8)))
    own = Credentials(authority=authority.file, **authority.issue("client"))
    place = f"127.0.0.1:{a_free_port()}"
    with StoreClient.join(place, a_namespace(), wait_seconds=0.1, credentials=own):
        eventually(lambda: causes(caplog))
        assert " expired on " not in causes(caplog)[0]
        with a_node(listen=[place], shm_socket="", credentials=expired):
            eventually(lambda: any(" expired on " in cause for cause in causes(caplog)))


def test_late_client_survives_a_restart_of_its_node():
    with a_node(capacity_bytes=1 << 20) as node:
        node.freeze()
        with StoreClient.join(node.address, a_namespace(), wait_seconds=0, call_timeout_seconds=30) as client:
            node.thaw()
            eventually(lambda: client.joined)
            node.kill()
            node.start()
            eventually(lambda: client.write(a_chain(1), [a_block(1)]) == 1)


def test_node_with_another_layout_is_rejected():
    with a_node(capacity_bytes=1 << 20) as node:
        with a_store_client(node.address, a_namespace()) as first:
            first.write(a_chain(1), [a_block(1)])
        other = a_namespace(kv_heads=4)
        with pytest.raises(LayoutMismatch):
            StoreClient.join(node.address, other, wait_seconds=30)

        with StoreClient.join(node.address, other, wait_seconds=0) as late:
            joining = [thread for thread in threading.enumerate() if thread.name == "kvstore-join"]
            assert len(joining) == 1
            assert late.write(a_chain(1), [a_block(1)]) == 0
            assert not late.joined
        joining[0].join(60)
        assert not joining[0].is_alive()
