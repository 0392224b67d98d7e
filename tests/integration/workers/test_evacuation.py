"""Tests of evacuation: other workers can read the warm blocks of a leaving worker. Nodes, Redis and processes are real."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import msgspec
import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import Incarnation
from fleet.core.requests import Finish, Source
from fleet.core.roles import KvPath
from fleet.core.system_clock import SystemClock
from fleet.core.work import Draining, Step
from kvstore import circuit_breaker as breaker
from kvstore.block import chain
from kvstore.client.store_client import StoreClient
from kvstore.messages import BlockKey
from kvstore.service.settings import StoreSettings
from kvstore.tiers.peer.backend import ranking
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.builders import token_bytes
from tests.support.kvstore.builders import NodeProcess, a_node, a_short_folder, a_store_client
from tests.support.servers.processes import RedisServer, a_redis_server, shared_redis
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually, until
from tests.support.workers.engine_driver import an_attempt, blocks_from, driven_engines, fresh_prompt
from tests.support.workers.simulated_clusters import BLOCK_BYTES, BLOCK_TOKENS, namespace, simulated_worker
from tests.support.workers.worker_processes import a_router_stream, a_worker_process
from workers.engines.simulated.launch import open_engine
from workers.machine import LifePhase
from workers.ports import RecentPrompt
from workers.server import WorkerServer
from workers.store.evacuation import MOST_FAILURES, StoreEvacuator, open_evacuator

pytestmark = pytest.mark.integration

BLOCKS = 6
ANSWER = 8
DRAIN = Nanos(3 * SECOND)


@pytest.fixture
def folder() -> Iterator[Path]:
    with a_short_folder() as folder:
        yield folder


def a_prompt(blocks: int = BLOCKS) -> bytes:
    return fresh_prompt(blocks * BLOCK_TOKENS + 5)


def names_of(prompt: bytes) -> list:
    return chain(prompt, BLOCK_TOKENS)


def redis_tier(server: RedisServer, prefix: str) -> dict:
    """Return the usual settings, which do not store a block that was used only once."""
    return {"kind": "redis", "url": server.url, "key_prefix": prefix, "keep": "reused"}


@contextmanager
def a_client(node: NodeProcess) -> Iterator[StoreClient]:
    with a_store_client(node.address, namespace()) as client:
        yield client


def held(client: StoreClient, prompt: bytes) -> int:
    return len(client.match(names_of(prompt), lease_seconds=0))


def keys_in(server: RedisServer, prefix: str) -> set[str]:
    with server.client() as client:
        return {key.decode().rpartition(":")[2] for key in client.scan_iter(f"{prefix}:*")}


def hexes(names) -> set[str]:
    return {name.hex() for name in names}


async def tokens_and_tiers(node: NodeProcess, prompt: bytes):
    """Run a new engine on that node; return its tokens and the blocks by tier."""
    async with open_engine(simulated_worker(node.address)) as engine, driven_engines(engine) as (one,):
        tokens, end = await one.do(an_attempt(prompt, ANSWER))
    return tokens, {origin.tier: origin.blocks for origin in end.kv.origins if origin.source is Source.STORE}


@asynccontextmanager
async def an_evacuator(engine, address: str, *, leaving: bool = True, most_bytes: int = 1 << 30):
    facts = engine.facts
    settings = simulated_worker(address)
    async with open_evacuator(
        address,
        facts.kv,
        settings.store_credentials,
        engine,
        SystemClock(),
        leaving=leaving,
        most_bytes=most_bytes,
    ) as evacuator:
        yield evacuator


@asynccontextmanager
async def a_warm_worker(node: NodeProcess, *prompts: bytes, **fields) -> AsyncIterator[tuple]:
    """Yield an evacuator and an engine that has answered these prompts and whose blocks are in the node."""
    async with open_engine(simulated_worker(node.address)) as engine, driven_engines(engine) as (one,):
        said = [(await one.do(an_attempt(prompt, ANSWER)))[0] for prompt in prompts]
        with a_client(node) as client:
            for prompt in prompts:
                blocks = len(names_of(prompt))
                await asyncio.to_thread(eventually, lambda p=prompt, n=blocks: held(client, p) >= n)
        async with an_evacuator(engine, node.address, **fields) as evacuator:
            yield one, evacuator, said


async def run_evacuation(evacuator: StoreEvacuator, *prompts: bytes, within: Nanos = DRAIN):
    await evacuator.evacuate([RecentPrompt(each, b"") for each in prompts], [], Nanos(SystemClock().now() + within))
    return evacuator.summary


# Normal operation


def a_worker(folder: Path, name: str, tier: dict, **fields):
    node = {
        "store_id": name,
        "listen": [f"unix:{folder}/{name}-kv"],
        "shm_socket": f"{folder}/{name}-pool",
        "capacity_bytes": 4 << 20,
        "tiers": [tier],
    }
    return msgspec.structs.replace(
        simulated_worker(),
        worker_id=name,
        embedded_store=msgspec.convert(node, StoreSettings),
        kv_paths=(KvPath.STORE,),
        listen=f"unix:{folder}/{name}",
        **fields,
    )


async def test_worker_of_another_store_reads_evacuated_blocks(folder):
    """Check also that the running answer completes and that its blocks are evacuated too."""
    server, prompt, cold = shared_redis(), a_prompt(), a_prompt()
    tier = redis_tier(server, "warm")
    slow = msgspec.structs.replace(simulated_worker().simulated, speedup=2)
    async with (
        a_worker_process(folder, a_worker(folder, "one", tier, simulated=slow)) as one,
        a_worker_process(folder, a_worker(folder, "two", tier)) as two,
    ):
        async with a_router_stream(one.address) as stream:
            expected, end = await stream.do(an_attempt(prompt, ANSWER))
            assert blocks_from(end.kv, Source.COMPUTED) == BLOCKS + 1
            under_way = an_attempt(fresh_prompt(40), 100)
            await stream.say(under_way)
            await stream.until(lambda message: stream.tokens_of(under_way.request_id) or None)

            one.terminate()

            await stream.next(Draining)
            answer, end = await stream.end_of(under_way.request_id)
            assert (len(answer), end.finish) == (100, Finish.LENGTH)
            assert await one.ended() == 0

        async with a_router_stream(two.address) as stream:
            tokens, end = await stream.do(an_attempt(prompt, ANSWER))
            assert tokens == expected
            assert {origin.tier: origin.blocks for origin in end.kv.origins if origin.source is Source.STORE} == {
                "redis": BLOCKS
            }
            _, end = await stream.do(an_attempt(under_way.tokens + token_bytes(answer), ANSWER))
            assert blocks_from(end.kv, Source.STORE) == (40 + 100) // BLOCK_TOKENS
            _, end = await stream.do(an_attempt(cold, ANSWER))
            assert blocks_from(end.kv, Source.COMPUTED) == BLOCKS + 1


# Choice of blocks and destinations


async def test_most_valuable_missing_blocks_go_first_within_budget():
    server = shared_redis()
    hot, once = a_prompt(4), a_prompt(4)
    with a_node(tiers=[redis_tier(server, "worth")]) as node:
        async with a_warm_worker(node, once, hot, most_bytes=5 * BLOCK_BYTES) as (_, evacuator, _):
            brought = await run_evacuation(evacuator, hot, hot, once)

            assert (brought.tier, brought.moved, brought.moved_bytes) == ("redis", 5, 5 * BLOCK_BYTES)
            assert (brought.warm, brought.there, brought.left) == (8, 0, 3)
            assert keys_in(server, "worth") == hexes([*names_of(hot), names_of(once)[0]])
            assert (await run_evacuation(evacuator, hot, hot, once)).moved == 0, "a second round moves no more"

        async with a_warm_worker(node, once, hot) as (_, evacuator, _):
            brought = await run_evacuation(evacuator, hot, hot, once)

            assert (brought.moved, brought.there, brought.left) == (3, 5, 0)
            assert keys_in(server, "worth") == hexes([*names_of(hot), *names_of(once)])


async def test_blocks_only_in_the_engine_are_evacuated_too():
    server, prompt = shared_redis(), a_prompt()
    with a_node(tiers=[redis_tier(server, "engine")]) as node:
        async with a_warm_worker(node, prompt) as (one, evacuator, (expected,)):
            node.kill()
            node.start()  # with an empty pool
            with a_client(node) as client:
                assert held(client, prompt) == 0
            brought = await run_evacuation(evacuator, prompt)
            assert (brought.saved, brought.moved, brought.left) == (BLOCKS, BLOCKS, 0)
            one.engine.check()
        with a_node(tiers=[redis_tier(server, "engine")]) as other:
            assert await tokens_and_tiers(other, prompt) == (expected, {"redis": BLOCKS})


async def test_without_shared_tier_only_a_leaving_node_fills_peers():
    prompt = a_prompt()
    with a_node(store_id="survivor") as survivor:
        with a_node(tiers=[{"kind": "peer", "peers": [survivor.address]}]) as node:
            async with a_warm_worker(node, prompt, leaving=False) as (_, evacuator, _):
                assert (await run_evacuation(evacuator, prompt)).tier == ""
            async with a_warm_worker(node, prompt, leaving=True) as (_, evacuator, (expected,)):
                with a_client(survivor) as client:
                    assert held(client, prompt) == 0
                    brought = await run_evacuation(evacuator, prompt)
                    assert (brought.tier, brought.moved, brought.left) == ("peer", BLOCKS, 0)
                    assert held(client, prompt) == BLOCKS
        assert await tokens_and_tiers(survivor, prompt) == (expected, {"cpu": BLOCKS})


async def test_unreachable_peer_does_not_stop_an_evacuation():
    prompt = a_prompt()
    with a_node(store_id="one") as one, a_node(store_id="two") as two:
        peers = [one.address, two.address]
        with a_node(tiers=[{"kind": "peer", "peers": peers}]) as node:
            async with a_warm_worker(node, prompt) as (_, evacuator, (expected,)):
                first = BlockKey(namespace().digest, names_of(prompt)[0])
                away, other = (one, two) if ranking(peers, first)[0] == one.address else (two, one)
                away.kill()
                brought = await run_evacuation(evacuator, prompt)
                assert (brought.tier, brought.moved, brought.left) == ("peer", BLOCKS, 0)
        with a_client(other) as client:
            assert held(client, prompt) == BLOCKS
        assert await tokens_and_tiers(other, prompt) == (expected, {"cpu": BLOCKS})


async def test_node_without_peers_evacuates_to_its_disk(folder):
    disk = {"kind": "ssd", "directories": [str(folder)], "capacity_bytes": 8 << 20, "segment_bytes": 1 << 20}
    prompt = a_prompt()
    with a_node(tiers=[disk]) as node:
        async with a_warm_worker(node, prompt) as (_, evacuator, (expected,)):
            brought = await run_evacuation(evacuator, prompt)
            assert (brought.tier, brought.moved) == ("ssd", BLOCKS)
        node.kill()
        node.start()
        assert await tokens_and_tiers(node, prompt) == (expected, {"ssd": BLOCKS})


async def test_evacuation_respects_read_only_tiers_and_write_budgets(folder):
    server, prompt = shared_redis(), a_prompt()
    only_read = redis_tier(server, "read") | {"keep": "none"}
    little = redis_tier(server, "little") | {"daily_write_bytes": 3 * BLOCK_BYTES}
    for tier, name, moved in ((only_read, "", 0), (little, "redis", 3)):
        with a_node(tiers=[tier]) as node:
            async with a_warm_worker(node, prompt) as (_, evacuator, _):
                brought = await run_evacuation(evacuator, prompt)
                assert (brought.tier, brought.moved) == (name, moved)
                assert brought.left == (BLOCKS - moved if name else 0)


async def test_watcher_learns_where_evacuated_blocks_are():
    server, prompt = shared_redis(), a_prompt()
    with a_node(tiers=[redis_tier(server, "watched")]) as node:
        async with (
            a_warm_worker(node, prompt) as (_, evacuator, _),
            grpc.aio.insecure_channel(node.address) as channel,
        ):
            watching = pb_grpc.BlockStoreStub(channel).Watch(pb.WatchRequest())
            await watching.initial_metadata()
            await run_evacuation(evacuator, prompt)
            told: set[bytes] = set()
            async with asyncio.timeout(60):
                async for changes in watching:
                    if changes.tier == "redis":
                        told |= {changes.stored[at : at + 16] for at in range(0, len(changes.stored), 16)}
                    if len(told) == BLOCKS:
                        break
    assert told == set(names_of(prompt))


async def test_too_many_names_are_rejected_with_the_field():
    with a_node() as node:
        async with grpc.aio.insecure_channel(node.address) as channel:
            with a_client(node) as client:
                request = pb.EvacuateRequest(
                    digest=namespace().digest,
                    hashes=bytes(16 * 4097),
                    incarnation=client.connection.session.incarnation,
                )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pb_grpc.BlockStoreStub(channel).Evacuate(request, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("hashes: more than 4096")


# Failures


class RecordingStream:
    """Router's end of a stream that records what it receives."""

    full = False

    def __init__(self) -> None:
        self.stepped = asyncio.Event()
        self.finished = asyncio.Event()

    def put(self, message) -> None:
        if isinstance(message, Step):
            self.stepped.set()
        if any(one.finish is not None for one in getattr(message, "progress", ())):
            self.finished.set()

    def end(self, why: str) -> None: ...


async def test_hung_server_delays_the_drain_only_to_its_deadline(caplog):
    caplog.set_level(logging.INFO)
    prompt = a_prompt()
    with a_redis_server() as server, a_node(tiers=[redis_tier(server, "hangs") | {"connect_seconds": 30}]) as node:
        async with AsyncExitStack() as held_open:
            settings = simulated_worker(node.address)
            engine = await held_open.enter_async_context(open_engine(settings))
            evacuator = await held_open.enter_async_context(an_evacuator(engine, node.address))
            worker = WorkerServer(settings, engine, SystemClock(), Incarnation("one"), evacuator=evacuator)
            tasks = await held_open.enter_async_context(asyncio.TaskGroup())
            running = tasks.create_task(worker.run())
            router = RecordingStream()
            session = worker.open("router", router)
            await until(lambda: worker.phase is LifePhase.SERVING)
            session.receive(an_attempt(prompt, 40))
            await held_open.enter_async_context(asyncio.timeout(60))
            await router.stepped.wait()
            server.freeze()
            began = asyncio.get_running_loop().time()
            draining = tasks.create_task(worker.drain(Nanos(10 * SECOND)))

            await router.finished.wait()

            assert not running.done(), "the answer does not wait for the evacuation"
            with at_most(30):
                assert await draining == 0
            assert asyncio.get_running_loop().time() - began > 9.9
            server.thaw()
    said = [record for record in caplog.records if record.message.startswith("warm blocks")]
    assert said


async def test_unreachable_server_ends_evacuation_after_some_tries(caplog):
    caplog.set_level(logging.INFO)
    prompt = a_prompt()
    few_at_a_time = {"capacity_bytes": 64 << 10}  # some blocks have not even been tried
    with a_redis_server() as server, a_node(tiers=[redis_tier(server, "away")], **few_at_a_time) as node:
        async with a_warm_worker(node, prompt) as (_, evacuator, _):
            server.kill()
            with at_most(50):
                brought = await run_evacuation(evacuator, prompt, within=Nanos(100 * SECOND))
    assert (brought.tier, brought.moved, brought.left) == ("redis", 0, BLOCKS)
    assert MOST_FAILURES <= brought.failed <= MOST_FAILURES + 10, "each call may meet a few"
    (record,) = [record for record in caplog.records if record.message == "warm blocks evacuated"]
    assert (record.tier, record.moved, record.left, record.failed) == ("redis", 0, BLOCKS, brought.failed)


async def test_server_that_returns_gets_all_blocks():
    prompt = a_prompt()
    with a_redis_server() as server, a_node(tiers=[redis_tier(server, "back")]) as node:
        async with a_warm_worker(node, prompt) as (_, evacuator, _), asyncio.TaskGroup() as tasks:
            server.kill()
            going = tasks.create_task(run_evacuation(evacuator, prompt, within=Nanos(100 * SECOND)))
            await until(lambda: evacuator.summary.failed)
            server.start()
            brought = await going
            assert (brought.tier, brought.moved, brought.left) == ("redis", BLOCKS, 0)
            assert keys_in(server, "back") == hexes(names_of(prompt))


async def test_blocks_go_to_the_next_tier_when_one_fails():
    prompt = a_prompt()
    with a_redis_server() as server, a_node(store_id="survivor") as survivor:
        tiers = [redis_tier(server, "gone"), {"kind": "peer", "peers": [survivor.address]}]
        with a_node(tiers=tiers) as node:
            async with a_warm_worker(node, prompt) as (_, evacuator, _):
                server.kill()
                brought = await run_evacuation(evacuator, prompt, within=Nanos(100 * SECOND))
                assert (brought.tier, brought.moved, brought.left) == ("peer", BLOCKS, 0)
        with a_client(survivor) as client:
            assert held(client, prompt) == BLOCKS


async def test_unanswered_call_is_one_failure_and_evacuation_goes_on(monkeypatch):
    monkeypatch.setattr(breaker, "COST_FACTOR", 0)  # otherwise the client avoids the node for four seconds
    prompt, server = a_prompt(), shared_redis()
    with a_node(tiers=[redis_tier(server, "slow")]) as node:
        async with a_warm_worker(node, prompt) as (_, evacuator, _), asyncio.TaskGroup() as tasks:
            node.freeze()
            going = tasks.create_task(run_evacuation(evacuator, prompt, within=Nanos(100 * SECOND)))
            await until(lambda: evacuator.summary.failed)
            node.thaw()
            brought = await going
    assert (brought.tier, brought.moved, brought.left) == ("redis", BLOCKS, 0)
    assert keys_in(server, "slow") == hexes(names_of(prompt))


async def test_lost_node_ends_evacuation_before_its_deadline(caplog):
    caplog.set_level(logging.INFO)
    prompt = a_prompt()
    with a_node(tiers=[redis_tier(shared_redis(), "dead")]) as node:
        async with a_warm_worker(node, prompt) as (_, evacuator, _):
            node.kill()
            with at_most(50):
                brought = await run_evacuation(evacuator, prompt, within=Nanos(100 * SECOND))
    assert (brought.moved, brought.left, brought.failed) == (0, BLOCKS, MOST_FAILURES)
    assert [record.message for record in caplog.records].count("warm blocks evacuated") == 1


# Blocks that a tier has lost


async def test_only_blocks_that_redis_lost_are_written_again():
    prompt, server = a_prompt(), shared_redis()
    with a_node(tiers=[redis_tier(server, "lost")]) as node:
        async with a_warm_worker(node, prompt) as (_, evacuator, _):
            assert (await run_evacuation(evacuator, prompt)).moved == BLOCKS
            with server.client() as client:  # without notice, like eviction, expiry and FLUSHALL
                client.delete(
                    *[key for key in client.scan_iter("lost:*") if key.decode()[-32:] in hexes(names_of(prompt)[1::2])]
                )
            assert len(keys_in(server, "lost")) == BLOCKS // 2

            brought = await run_evacuation(evacuator, prompt)

            assert (brought.moved, brought.there, brought.left) == (BLOCKS // 2, BLOCKS - BLOCKS // 2, 0)
            assert keys_in(server, "lost") == hexes(names_of(prompt))


async def test_blocks_that_a_peer_evicted_are_written_again():
    prompt = a_prompt()
    with a_node(store_id="survivor") as survivor:
        with a_node(tiers=[{"kind": "peer", "peers": [survivor.address]}]) as node:
            async with a_warm_worker(node, prompt) as (_, evacuator, _):
                assert (await run_evacuation(evacuator, prompt)).moved == BLOCKS
                survivor.kill()
                survivor.start()  # with an empty pool

                brought = await run_evacuation(evacuator, prompt, within=Nanos(100 * SECOND))

                assert (brought.tier, brought.moved, brought.left) == ("peer", BLOCKS, 0)
        with a_client(survivor) as client:
            assert held(client, prompt) == BLOCKS
