"""Tests of real workers and a real router that find each other in a folder, without a registry."""

import asyncio
import json
import signal
import sys

import httpx
import msgspec
import pytest

from fleet.core.discovery import FileDiscovery
from fleet.core.ids import ModelName, WorkerId
from fleet.router.settings.router import RouterSettings
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import until_answered
from tests.support.workers.worker_processes import SECONDS, a_worker_process
from workers.settings import SimulatedSettings, WorkerSettings

pytestmark = pytest.mark.integration


@pytest.fixture
def folder():
    with a_short_folder() as folder:
        (folder / "workers").mkdir()
        yield folder


def discovery(folder) -> FileDiscovery:
    return FileDiscovery(folder=str(folder / "workers"), lease_seconds=20, poll_ms=50)


def a_worker(folder, name: str) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId(name),
        engine="simulated",
        model=ModelName("tiny"),
        listen=f"unix:{folder}/{name}.sock",
        discovery=discovery(folder),
        simulated=SimulatedSettings(speedup=20, kv_blocks=64),
    )


async def test_cold_router_finds_workers_and_readmits_a_killed_one(folder, model_dir):
    settings = RouterSettings(
        http_listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        models={ModelName("tiny"): str(model_dir)},
        discovery=discovery(folder),
        max_reconnect_seconds=0.2,
    )
    config = folder / "router.json"
    config.write_bytes(msgspec.json.encode(settings))
    async with (
        a_worker_process(folder, a_worker(folder, "one")) as worker,
        a_worker_process(folder, a_worker(folder, "two")),
    ):
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(config)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SECONDS):
                http = json.loads(await router.stdout.readline())["http"]
            async with httpx.AsyncClient(base_url=f"http://{http}", trust_env=False) as client:

                async def workers() -> int:
                    text = (await client.get("/metrics")).text
                    return sum(line.startswith("fleet_worker_running{") for line in text.splitlines())

                async def both() -> bool:
                    return await workers() == 2

                async def only_one() -> bool:
                    return await workers() == 1

                async def served() -> bool:
                    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
                    return (await client.post("/v1/completions", json=asked)).status_code == 200

                await until_answered(both)
                worker.kill()
                await worker.ended()
                await until_answered(only_one, 10)  # long before its lease would end
                assert all([await served() for _ in range(8)])
                (folder / "one.sock").unlink(missing_ok=True)
                await worker.start()
                await until_answered(both)
        finally:
            router.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SECONDS):
                assert await router.wait() == 0
