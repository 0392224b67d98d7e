"""Tests of the way of a request that ARCHITECTURE.md shows: a streamed chat crosses no more files than it says.

A reader who follows a request opens these files, so their number is a cost.
"""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from fleet.app.router import run_router
from fleet.core.discovery import FileDiscovery
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import Role
from fleet.router.settings.router import RouterSettings
from tests.support.counted_calls import count_calls, file_of
from tests.support.documents import ROOT
from tests.support.waiting import NotMet, pace, until_answered
from tests.support.workers.worker_processes import a_worker_process
from workers.settings import SimulatedSettings, WorkerSettings

pytestmark = pytest.mark.integration

CROSSED = 25
"""Files in which a function runs for a streamed chat. A new concept may need a new file; a part of a known concept does not."""

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
IDLE_SECONDS = 0.25
"""More than two periods of the shortest timer. A shorter time in turn with requests kept step with this timer, so that all requests had its
calls, and no idle time."""


@asynccontextmanager
async def a_router(settings: RouterSettings) -> AsyncIterator[str]:
    """Run a whole router in this process; yield the address of its HTTP port."""
    endpoints: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    thresholds = gc.get_threshold()
    async with asyncio.TaskGroup() as tasks:
        router = tasks.create_task(run_router(settings, lambda told: endpoints.set_result(told["http"])))
        try:
            async with asyncio.timeout(60):
                address = await endpoints
            yield address
        finally:
            router.cancel()
            gc.set_threshold(*thresholds)
            gc.unfreeze()


async def stream_chat(address: str) -> bool:
    """Request a streamed chat on a connection of its own; return whether a worker answered it."""
    body = {
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
    }
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"http://{address}/v1/chat/completions", json=body)
    return answer.status_code == 200 and "data: [DONE]" in answer.text


async def test_streamed_chat_crosses_few_files(tmp_path, model_dir):
    """Leave out what also runs without a request, such as timers and load reports; a busy machine needs a few tries for that."""
    (tmp_path / "workers").mkdir()
    directory = FileDiscovery(folder=str(tmp_path / "workers"))
    worker = WorkerSettings(
        worker_id=WorkerId("w1"),
        role=Role.BOTH,
        engine="simulated",
        model=ModelName("tiny"),
        model_dir=str(model_dir),
        listen=f"unix:{tmp_path}/w.sock",
        discovery=directory,
        simulated=SimulatedSettings(speedup=20),
    )
    router = RouterSettings(
        http_listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        models={ModelName("tiny"): str(model_dir)},
        discovery=directory,
    )
    async with a_worker_process(tmp_path, worker), a_router(router) as address:
        await until_answered(lambda: stream_chat(address))
        with count_calls() as of_requests:
            assert await stream_chat(address)
        functions, idle = of_requests.by_function.keys(), set()

        async def few() -> bool:
            nonlocal functions
            with count_calls() as without:
                await pace(IDLE_SECONDS, "the time of which the idle calls are collected")
            idle.update(without.by_function)
            with count_calls() as counted:
                assert await stream_chat(address)
            functions = functions & counted.by_function.keys()
            return len(crossed()) <= CROSSED

        def crossed() -> list[str]:
            files = {file_of(function) for function in functions - idle}
            return sorted(file for file in files if "/native/" not in file)  # C modules, or their twins

        with suppress(NotMet):
            await until_answered(few)

    files = crossed()
    assert len(files) <= CROSSED, files
    assert {"net/http/server.py", "router/machine.py", "wire/worker.py"} <= set(files)
    text = " ".join(ARCHITECTURE.read_text().split())
    assert re.findall(r"runs functions in (\d+) files of the router", text) == [str(CROSSED)]
    assert [file for file in files if f"{Path(file).name}`" not in text] == []
