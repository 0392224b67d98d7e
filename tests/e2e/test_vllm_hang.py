"""Test of a hung vLLM engine: `kill -STOP` of the engine core in a cluster of `fleet up`."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from importlib.util import find_spec

import psutil
import pytest

from fleet.client import AsyncClient
from fleet.client.results import WorkerStatus
from tests.support.fleet_processes import alive, fleet_up
from tests.support.waiting import until, until_answered

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

READY_SECONDS = 300
OUT_SECONDS = 200  # the patience is twenty steps, and a step takes seconds where other tests use the cores too
PROMPTS = [list(range(100 + each, 180 + each)) for each in range(4)]
ASK = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True, "timeout_seconds": 500.0}
TOPOLOGY = """
cluster.kv_paths = []

[[pools]]
role = "both"
replicas = 2
vllm.kv_cache_gib = 0.25
watchdog.floor_seconds = 4.0
"""


def engine_core(worker: int) -> psutil.Process:
    """Return the process with vLLM's scheduler of a worker."""
    (core,) = [each for each in psutil.Process(worker).children() if "EngineCore" in " ".join(each.cmdline())]
    return core


class Streamed:
    """One request and its answer so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.workers: list[str] = []

    async def read(self, client: AsyncClient, prompt: list[int]) -> None:
        async with client.generate(prompt, **ASK) as stream:
            async for delta in stream:
                self.tokens += delta.token_ids
        self.workers = workers_of(stream.result)


def workers_of(result) -> list[str]:
    return [phase.worker_id for phase in result.kv]


async def workers_now(client: AsyncClient) -> list[WorkerStatus]:
    return [worker for pool in (await client.status()).pools for worker in pool.workers]


async def serving(client: AsyncClient) -> set[str]:
    return {worker.worker_id for worker in await workers_now(client) if worker.state == "serving"}


async def busy_worker(client: AsyncClient) -> str | None:
    """Return a worker that computes an answer now; None if all are idle."""
    return next((worker.worker_id for worker in await workers_now(client) if worker.running), None)


async def test_streams_of_a_stopped_engine_continue_exactly_elsewhere(tmp_path):
    topology = tmp_path / "fleet.toml"
    topology.write_text(TOPOLOGY)
    log = tmp_path / "up.log"
    async with AsyncExitStack() as held:
        up = held.enter_context(
            fleet_up(tmp_path, "--config", str(topology), engine="vllm", ready_seconds=READY_SECONDS)
        )
        client = await held.enter_async_context(AsyncClient(up.grpc))
        expected = [(await client.complete(prompt, **ASK)).token_ids for prompt in PROMPTS]
        streams = [Streamed() for _ in PROMPTS]
        async with asyncio.TaskGroup() as tasks:
            for each, prompt in zip(streams, PROMPTS, strict=True):
                tasks.create_task(each.read(client, prompt))
            await until(lambda: all(each.tokens for each in streams))
            # An idle engine cannot be seen to hang, and one that was busy first may have sent its answers already.
            stopped = await until_answered(lambda: busy_worker(client))
            (other,) = {"both-0", "both-1"} - {stopped}
            worker = up.endpoints["pids"][stopped]
            core = engine_core(worker)
            family = [core.pid, *(child.pid for child in core.children(recursive=True))]

            os.kill(core.pid, signal.SIGSTOP)

            await until_answered(
                lambda: is_out(client, stopped), OUT_SECONDS, lambda: f"{stopped} still serves: {log.read_text()}"
            )
            for number in range(8):
                late = await client.complete([number + 5, *PROMPTS[0]], **ASK | {"max_tokens": 2})
                assert workers_of(late) == [other]
            await until(lambda: not alive([worker, *family]))

        assert [tuple(each.tokens) for each in streams] == [tuple(tokens) for tokens in expected]
        assert any(len(each.workers) > 1 for each in streams), "none of the streams ran on the stopped engine"
        await until_answered(lambda: is_whole(client), READY_SECONDS)
        assert engine_core(up.pid_of(stopped)).pid != core.pid
        assert "EngineHung: vllm" in log.read_text()


async def is_out(client: AsyncClient, worker_id: str) -> bool:
    return worker_id not in await serving(client)


async def is_whole(client: AsyncClient) -> bool:
    return await serving(client) == {"both-0", "both-1"}
