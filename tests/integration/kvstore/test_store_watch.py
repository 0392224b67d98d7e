"""Tests of the router's watch on a store node: a real one that is killed and restarted, and a misbehaving one."""

import asyncio
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from fleet.backends.workers.store_watch import GrpcStoreWatch
from fleet.core.system_clock import SystemClock
from fleet.membership.compatibility import IncompatiblePeers
from fleet.router.messages import StoreChanged
from fleet.router.settings.router import RouterSettings
from kvstore.security.credentials import Credentials
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.certificates import Authority
from tests.support.kvstore.builders import a_block, a_chain, a_namespace, a_node, a_store_client
from tests.support.waiting import until

pytestmark = pytest.mark.integration

SETTINGS = RouterSettings(max_reconnect_seconds=0.1, connect_timeout_seconds=5.0)


class WatchedStore:
    def __init__(self, address: str):
        self._heard: asyncio.Queue[StoreChanged] = asyncio.Queue()
        self._watch = GrpcStoreWatch(address, SETTINGS, IncompatiblePeers(SystemClock()))

    async def run(self) -> None:
        await self._watch.run(self._heard.put)

    async def next(self) -> StoreChanged:
        async with asyncio.timeout(60):
            return await self._heard.get()

    async def blocks(self, wanted: int) -> set[bytes]:
        """Return the held blocks once there are that many."""
        held: set[bytes] = set()
        while True:
            change = await self.next()
            held = (set() if change.reset else held) - set(change.removed) | set(change.stored)
            if len(held) == wanted:
                return held


@asynccontextmanager
async def watching(address: str):
    watching = WatchedStore(address)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watching.run())
        yield watching
        running.cancel()


async def put(address: str, chain: list[bytes]) -> None:
    def work() -> None:
        client = a_store_client(address, a_namespace())
        try:
            client.write(chain, [a_block(index) for index in range(len(chain))])
        finally:
            client.close()

    await asyncio.to_thread(work)


async def test_watch_reports_held_and_new_blocks():
    with a_node() as node:
        await put(node.address, a_chain(3))
        async with watching(node.address) as watch:
            dump = await watch.next()
            assert (dump.store_id, dump.fingerprint) == ("store-1", a_namespace().fingerprint)
            assert dump.reset
            assert set(dump.stored) == set(a_chain(3))

            await put(node.address, a_chain(5))

            assert await watch.blocks(2) == set(a_chain(5)[3:])


async def test_lost_node_holds_nothing_and_is_found_again():
    with a_node() as node:
        await put(node.address, a_chain(3))
        async with watching(node.address) as watch:
            assert len((await watch.next()).stored) == 3

            node.kill()

            gone = await watch.next()
            assert gone == StoreChanged(store_id="store-1", fingerprint=a_namespace().fingerprint, reset=True)
            node.start()
            await put(node.address, a_chain(2))
            assert await watch.blocks(2) == set(a_chain(2))


class ScriptedNode(pb_grpc.BlockStoreServicer):
    def __init__(self, *streams: list[pb.BlockChanges]):
        self._streams = list(streams)

    async def Stats(self, request, context) -> pb.StatsResponse:  # noqa: N802 - generated name
        return pb.StatsResponse(store_id="s")

    async def Watch(self, request, context):  # noqa: N802 - generated name
        for changes in self._streams.pop(0):
            yield changes
        if not self._streams:
            await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def scripted(*streams: list[pb.BlockChanges]):
    folder = Path(tempfile.mkdtemp(prefix="fleet-", dir="/tmp"))
    server = grpc.aio.server()
    pb_grpc.add_BlockStoreServicer_to_server(ScriptedNode(*streams), server)
    server.add_insecure_port(f"unix:{folder}/s")
    await server.start()
    try:
        async with watching(f"unix:{folder}/s") as watch:
            yield watch
    finally:
        await server.stop(grace=0)
        shutil.rmtree(folder)


def changes(sequence: int, **fields) -> pb.BlockChanges:
    return pb.BlockChanges(sequence=sequence, digest=b"d" * 16, **fields)


@pytest.mark.parametrize("bad", [changes(3, stored=b"b" * 16), changes(2, stored=b"torn")], ids=["gap", "torn hash"])
async def test_inconsistent_stream_is_restarted(bad):
    async with scripted([changes(1, stored=b"a" * 16), bad], [changes(1, stored=b"c" * 16)]) as watch:
        assert (await watch.next()).stored == (b"a" * 16,)
        void = await watch.next()
        assert (void.reset, void.stored) == (True, ())
        again = await watch.next()
        assert (again.reset, again.stored) == (True, (b"c" * 16,))


async def test_only_the_first_change_of_a_namespace_resets_it():
    async with scripted([changes(1, stored=b"a" * 16), changes(2, removed=b"a" * 16)]) as watch:
        assert [(await watch.next()).reset for _ in range(2)] == [True, False]


async def test_watch_blocked_by_tls_names_the_cause(tmp_path, caplog):
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    node_side = Credentials(authority=authority.file, **authority.issue("node"))
    router_side = Credentials(authority=stranger.file, **authority.issue("router"))
    with a_node(listen=["127.0.0.1:0"], credentials=node_side) as node:
        watch = GrpcStoreWatch(
            node.endpoints.listen[0], RouterSettings(store_credentials=router_side), IncompatiblePeers(SystemClock())
        )

        async def tell(change: StoreChanged) -> None:
            raise AssertionError(f"{change} from a node that is not trusted")

        def causes() -> list[str]:
            return [each.cause for each in caplog.records if each.message == "store watch ended"]

        task = asyncio.get_running_loop().create_task(watch.run(tell))
        await until(causes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert f"not signed by the authority in {stranger.file}" in causes()[0]
