"""Tests of a worker with an embedded KV store node: real processes, real sockets and the simulated engine.

Processes start slowly, so tests that need none run node and engine in their own process.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import psutil
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fleet.app.worker import run_worker
from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import Source
from fleet.core.roles import KvPath, Role
from kvstore.block import chain
from kvstore.client.store_client import StoreClient
from kvstore.errors import NodeEnded
from kvstore.security.credentials import Credentials
from kvstore.service import embedded
from kvstore.service.settings import StoreSettings
from tests.support.kvstore.builders import a_short_folder, file_names_in
from tests.support.servers.processes import a_free_port
from tests.support.shared_memory import segments_of
from tests.support.waiting import until_answered
from tests.support.workers.engine_driver import (
    EngineDriver,
    an_attempt,
    blocks_from,
    driven_engines,
    fresh_prompt,
    run_disaggregated,
)
from tests.support.workers.simulated_clusters import BLOCK_TOKENS, namespace, simulated_worker
from tests.support.workers.worker_processes import WorkerProcess, a_router_stream, a_worker_process
from workers.engines.simulated.launch import open_engine
from workers.settings import SimulatedSettings, WorkerSettings
from workers.store.embedded import open_embedded_store

pytestmark = pytest.mark.integration

BLOCKS = 6
ANSWER = 8


@pytest.fixture
def folder():
    with a_short_folder() as folder:
        yield folder


def node_in(folder: Path, **fields) -> StoreSettings:
    told = {
        "store_id": "embedded",
        "listen": [f"unix:{folder}/kv", "127.0.0.1:0"],
        "shm_socket": f"{folder}/pool",
        "data_listen": "127.0.0.1:0",
        "capacity_bytes": 4 << 20,
        **fields,
    }
    return msgspec.convert(told, StoreSettings)


def a_worker(folder: Path, *, node: StoreSettings | None = None, **fields) -> WorkerSettings:
    node = node or node_in(folder)
    return msgspec.structs.replace(
        simulated_worker(**fields), embedded_store=node, kv_paths=(KvPath.STORE,), listen=f"unix:{folder}/worker"
    )


def start_error(folder: Path, settings: WorkerSettings) -> str:
    """Return the line that a worker prints when it cannot start."""
    path = folder / "refused.json"
    path.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "fleet.cli.main", "serve", "worker", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fleet: ")]
    return line.removeprefix("fleet: ")


def a_prompt() -> bytes:
    return fresh_prompt(BLOCKS * BLOCK_TOKENS + 5)


async def until_held(address: str, prompt: bytes) -> None:
    """Wait until the node has all full blocks of a prompt, asked like any process of the host."""
    client = await asyncio.to_thread(StoreClient.connect, address, namespace())
    with client:

        async def held() -> bool:
            return len(await asyncio.to_thread(client.match, chain(prompt, BLOCK_TOKENS), lease_seconds=0)) >= BLOCKS

        await until_answered(held)


async def answer_of(worker: WorkerProcess, prompt: bytes, **fields):
    async with a_router_stream(worker.address) as stream:
        return await stream.do(an_attempt(prompt, ANSWER, **fields))


@asynccontextmanager
async def an_engine_here(settings: WorkerSettings) -> AsyncIterator[EngineDriver]:
    """Run a worker's engine and embedded node in this process."""
    async with (
        open_embedded_store(settings, uvloop.new_event_loop) as furnished,
        open_engine(furnished.settings) as engine,
        driven_engines(engine) as (one,),
    ):
        yield one


@asynccontextmanager
async def a_worker_that_has_answered(folder: Path, prompt: bytes, **fields):
    async with a_worker_process(folder, a_worker(folder, **fields)) as worker:
        worker.tokens, end = await answer_of(worker, prompt)
        assert blocks_from(end.kv, Source.COMPUTED) == BLOCKS + 1
        await until_held(f"unix:{folder}/kv", prompt)
        yield worker


async def test_workers_of_a_host_share_the_node_until_it_stops(folder):
    prompt = a_prompt()
    disk = {"kind": "ssd", "directories": [f"{folder}/ssd"], "capacity_bytes": 8 << 20, "segment_bytes": 1 << 20}
    node = node_in(folder, tiers=[{**disk, "keep": "all"}])
    async with a_worker_that_has_answered(folder, prompt, node=node) as worker:
        assert file_names_in(folder) >= {"kv", "pool", "worker"}
        assert worker.endpoints["store"] == f"unix:{folder}/kv"
        assert segments_of(worker.process.pid) == set(), "the shared memory has a name"

        other = msgspec.structs.replace(simulated_worker(f"unix:{folder}/kv"), worker_id="other")
        async with a_worker_process(folder, other) as second:
            tokens, end = await answer_of(second, prompt)
        assert tokens == worker.tokens
        assert blocks_from(end.kv, Source.STORE) == BLOCKS
        assert end.kv.origins[0].origin == "embedded"

        same_sockets = msgspec.structs.replace(a_worker(folder), worker_id="second", listen=f"unix:{folder}/second")
        said = await asyncio.to_thread(start_error, folder, same_sockets)
        assert said == f"embedded_store.shm_socket: another process listens on {folder}/pool"

        children = psutil.Process(worker.process.pid).children(recursive=True)
        async with a_router_stream(worker.address) as stream:
            await stream.say(an_attempt(fresh_prompt(500), 50))
            worker.terminate()
            assert await worker.ended() == 0
        assert not any(child.is_running() for child in children)
        assert not {"kv", "pool", "worker"} & file_names_in(folder)

        await worker.start()  # engine memory and pool are gone, so only the disk has the blocks
        tokens, end = await answer_of(worker, prompt)
        assert tokens == worker.tokens
        assert blocks_from(end.kv, Source.STORE) == BLOCKS


async def test_killed_worker_leaves_only_what_a_killed_node_leaves(folder):
    prompt = a_prompt()
    async with a_worker_that_has_answered(folder, prompt) as worker:
        other = msgspec.structs.replace(simulated_worker(f"unix:{folder}/kv"), worker_id="other")
        async with a_worker_process(folder, other) as second:
            worker.kill()
            assert await worker.ended() == -signal.SIGKILL
            assert file_names_in(folder) >= {"kv", "pool"}, "the sockets are left behind"
            tokens, end = await answer_of(second, prompt)
            assert tokens == worker.tokens
            assert blocks_from(end.kv, Source.COMPUTED) == BLOCKS + 1, "the pool outlived the worker"

            await worker.start()

            again = a_prompt()
            tokens, _ = await answer_of(worker, again)
            await until_held(f"unix:{folder}/kv", again)
            async with asyncio.timeout(60):  # until the other worker's client has found the new node
                while blocks_from((end := (await answer_of(second, again))[1]).kv, Source.STORE) == 0:
                    assert blocks_from(end.kv, Source.COMPUTED) + blocks_from(end.kv, Source.ENGINE) == BLOCKS + 1
                    again = a_prompt()
                    await answer_of(worker, again)
                    await until_held(f"unix:{folder}/kv", again)


# In the test's own process


@pytest.mark.parametrize(("tp", "layout"), [(2, "HND"), (4, "NHD")])
async def test_node_is_independent_of_ranks_and_layouts(folder, tp, layout):
    prompt = a_prompt()
    async with (
        an_engine_here(a_worker(folder, tp=tp, layout=layout)) as one,
        an_engine_here(simulated_worker(f"unix:{folder}/kv")) as other,
    ):
        expected, _ = await one.do(an_attempt(prompt, ANSWER))
        await until_held(f"unix:{folder}/kv", prompt)

        tokens, end = await other.do(an_attempt(prompt, ANSWER))

    assert tokens == expected
    assert blocks_from(end.kv, Source.STORE) == BLOCKS


async def test_prefill_worker_with_node_hands_off_to_decode_worker(folder):
    prefill = msgspec.structs.replace(a_worker(folder), role=Role.PREFILL)
    async with (
        an_engine_here(prefill) as first,
        an_engine_here(simulated_worker(f"unix:{folder}/kv", role=Role.DECODE)) as second,
    ):
        _, _, end = await run_disaggregated(first, second, a_prompt(), ANSWER, KvPath.STORE)

    assert blocks_from(end.kv, Source.STORE) == BLOCKS


async def test_embedded_node_serves_metrics_and_health(folder):
    port, prompt = a_free_port(), a_prompt()

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return answer.read().decode()

    async with an_engine_here(a_worker(folder, node=node_in(folder, metrics_listen=f"127.0.0.1:{port}"))) as one:
        await one.do(an_attempt(prompt, ANSWER))
        await until_held(f"unix:{folder}/kv", prompt)

        assert f'kvstore_tier_blocks{{tier="cpu"}} {BLOCKS}.0' in await asyncio.to_thread(metrics)
        async with grpc.aio.insecure_channel(f"unix:{folder}/kv") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity_bytes": 1 << 62}, "embedded_store.capacity_bytes: "),
        ({"listen": ["unix:/nowhere/kv"]}, "embedded_store.listen[0]: /nowhere is not a directory"),
        ({"listen": ["unix:{}/kv", "0.0.0.0:0"]}, "embedded_store.listen[1]: 0.0.0.0:0 is open to other hosts"),
        ({"credentials": {"secret_file": "{}/none"}}, "embedded_store.credentials.secret_file: {}/none cannot be read"),
        (
            {"tiers": [{"kind": "ssd", "directories": ["{}/file"], "capacity_bytes": 1 << 30}]},
            "embedded_store.tiers[0].directories[0]: '{}/file' cannot be used: File exists",
        ),
    ],
)
async def test_invalid_node_settings_are_rejected_with_their_path(folder, fields, message):
    (folder / "file").write_text("")
    told = json.loads(json.dumps(fields).replace("{}", str(folder)))

    with pytest.raises(ConfigurationRefused) as refused:
        async with an_engine_here(a_worker(folder, node=node_in(folder, **told))):
            raise AssertionError("it started")

    assert str(refused.value).startswith(message.replace("{}", str(folder)))
    assert file_names_in(folder) == {"file"}


async def test_node_failure_ends_the_worker(folder, monkeypatch):
    serve, failing = embedded.serve, threading.Event()

    async def breaking(told, on_ready, *, clock):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(told, on_ready, clock=clock))
            await asyncio.to_thread(failing.wait)
            raise RuntimeError("a bug")

    monkeypatch.setattr(embedded, "serve", breaking)

    with pytest.raises(NodeEnded, match="the store node has ended by itself"):
        async with asyncio.timeout(60):
            await run_worker(a_worker(folder), lambda endpoints: failing.set())

    assert file_names_in(folder) == set()


async def test_blocks_larger_than_the_pool_are_refused(folder):
    settings = msgspec.structs.replace(a_worker(folder), simulated=SimulatedSettings(bytes_per_token=1 << 20))

    with pytest.raises(ConfigurationRefused, match=r"^store: namespace\.block_bytes: .* the size of the pool"):
        await run_worker(settings, lambda _: pytest.fail("it serves"))


async def test_unreadable_secret_of_the_store_is_refused(folder):
    credentials = Credentials(secret_file=f"{folder}/none")
    settings = msgspec.structs.replace(a_worker(folder), store_credentials=credentials)

    with pytest.raises(ConfigurationRefused, match=r"^store_credentials\.secret_file: .*/none cannot be read"):
        await run_worker(settings, lambda _: pytest.fail("it serves"))


async def test_node_ends_when_the_engine_rejects_its_settings(folder):
    (folder / "config.json").write_text("[]")
    settings = msgspec.structs.replace(a_worker(folder), model_dir=str(folder))

    with pytest.raises(ConfigurationRefused, match=r"config\.json: "):
        async with an_engine_here(settings):
            raise AssertionError("it started")

    assert file_names_in(folder) == {"config.json"}
