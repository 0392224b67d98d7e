"""Tests of a worker process with a real vLLM engine: it says what it does while it starts, the store pins its sessions, and a kill
leaves nothing else."""

import asyncio
import os
import subprocess
from itertools import takewhile
from pathlib import Path

import msgspec
import psutil
import pytest

from fleet.core.requests import Sampling
from fleet.core.roles import KvPath
from fleet.local.tiny_model import build_tiny_model
from fleet.router.messages import Complete
from kvstore.client.store_client import StoreClient
from tests.support.builders import an_arrival
from tests.support.fleet_processes import FLEET, command_of
from tests.support.kvstore.builders import a_node, a_short_folder, a_store_client
from tests.support.shared_memory import abandoned_segments
from tests.support.waiting import eventually, until
from tests.support.workers import worker_processes
from tests.support.workers.engine_driver import fresh_prompt
from tests.support.workers.simulated_clusters import a_router_for
from tests.support.workers.vllm_engines import START_SECONDS, tiny_namespace, vllm_worker
from tests.support.workers.worker_processes import WorkerProcess, a_worker_process

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(400)]

PROMPT_TOKENS, ANSWER = 165, 40
CHAIN_BLOCKS = (PROMPT_TOKENS + ANSWER - 1) // 32
END_SECONDS = 15  # the orphan reaper kills after 5


async def test_killed_vllm_worker_keeps_sessions_leaves_nothing_else(tmp_path, monkeypatch):
    """Test both with one engine, which takes long to start."""
    model_dir, before = build_tiny_model(tmp_path), abandoned_segments()
    monkeypatch.setattr(worker_processes, "SECONDS", START_SECONDS)
    with a_node(capacity_bytes=64 << 20) as node, a_short_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        settings = vllm_worker(model_dir, store=node.address, kv_paths=(KvPath.STORE,))
        with a_store_client(node.address, tiny_namespace(model_dir)) as client:
            async with a_worker_process(folder, settings) as worker:
                await a_session_is_held(worker, node.address, client)
                killed_it_leaves_nothing(worker, folder)
    eventually(lambda: abandoned_segments() <= before)


async def a_session_is_held(worker: WorkerProcess, store: str, client: StoreClient) -> None:
    """Check that the store pins prompt and answer after the request has ended."""
    async with a_router_for(worker, store=store) as router:
        greedy = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        arrived = an_arrival(request_id="r1", tokens=fresh_prompt(PROMPT_TOKENS), sampling=greedy, session="agent")
        async with asyncio.timeout(60), router.submit(arrived) as events:
            async for event in events:
                if isinstance(event, Complete):
                    break

        await until(lambda: client.stats().held_bytes == CHAIN_BLOCKS * client.namespace.block_bytes)


def killed_it_leaves_nothing(worker: WorkerProcess, folder: Path) -> None:
    assert worker.process is not None
    children = psutil.Process(worker.process.pid).children(recursive=True)
    assert "VLLM::EngineCore" in {command for child in children for command in command_of(child)[:1]}
    shared = {Path(part.path) for child in children for part in child.memory_maps() if "/dev/shm/" in part.path}
    assert list(folder.glob("fleet-vllm-*"))

    worker.kill()

    assert psutil.wait_procs(children, timeout=END_SECONDS)[1] == []
    assert [file for file in shared if file.exists()] == []
    assert list(folder.glob("fleet-vllm-*")) == []


@pytest.mark.long
def test_worker_tells_its_supervisor_when_it_loads_and_warms_up(tmp_path):
    config = tmp_path / "worker.json"
    config.write_bytes(msgspec.json.encode(vllm_worker(build_tiny_model(tmp_path))))
    reading, writing = os.pipe()
    options = ("--config", str(config), "--ready-fd", str(writing), "--heartbeat")
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [*FLEET, "serve", "worker", *options], pass_fds=[writing], stdout=log, stderr=subprocess.STDOUT
        )
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        lines = list(takewhile(lambda line: not line.startswith(b"{"), told))
        worker.terminate()
        worker.wait(START_SECONDS)

    assert lines == [b"# loading\n", b"# warming up\n"], (tmp_path / "log").read_text()
