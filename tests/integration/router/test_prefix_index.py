"""Tests of a router's prefix index against what its workers hold: a cold router, and a worker that dies."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fleet.backends.workers.streams import WorkerStreams
from fleet.core.ids import WorkerId
from fleet.core.requests import Sampling
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.router.kv_index.prefix_index import engine_cache_holder
from fleet.router.machine import RouterMachine
from fleet.router.messages import Complete
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from tests.support.builders import an_arrival
from tests.support.kvstore.builders import a_short_folder
from tests.support.stopwatch import at_most
from tests.support.waiting import until
from tests.support.workers.engine_driver import fresh_prompt
from tests.support.workers.simulated_clusters import simulated_worker
from tests.support.workers.worker_processes import WorkerProcess, a_worker_process

pytestmark = pytest.mark.integration

PATIENCE_SECONDS = 5.0  # lease of a worker's stream; a worker that is silent for longer counts as lost
IDS = ("w1", "w2", "w3")


class RunningRouter:
    def __init__(self, addresses: list[str], name: str) -> None:
        settings = RouterSettings(router_id=name, heartbeat_timeout_seconds=PATIENCE_SECONDS, max_reconnect_seconds=0.2)
        self.streams = WorkerStreams(settings, addresses=addresses)
        self.machine = RouterMachine(settings, random.Random(0))
        self.server = RouterServer(self.machine, self.streams, SystemClock())
        self._asked = 0

    async def ask(self, prompt: bytes, pin: str | None = None) -> None:
        self._asked += 1
        arrived = an_arrival(
            request_id=f"r{self._asked}",
            tokens=prompt,
            sampling=Sampling(temperature=0, max_tokens=4),
            pin=None if pin is None else WorkerId(pin),
        )
        async with asyncio.timeout(60), self.server.submit(arrived) as events:
            async for event in events:
                if isinstance(event, Complete):
                    return

    def view(self) -> dict[str, set[int]]:
        """Return the block keys by worker."""
        index = self.machine.registry.index
        return {
            each: set(index.held[engine_cache_holder(WorkerId(each))])
            for each in IDS
            if engine_cache_holder(each) in index
        }


@asynccontextmanager
async def workers() -> AsyncIterator[dict[str, WorkerProcess]]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(a_short_folder())
        yield {
            each: await stack.enter_async_context(
                a_worker_process(folder, simulated_worker(role=Role.BOTH, worker_id=WorkerId(each)))
            )
            for each in IDS
        }


@asynccontextmanager
async def a_router(processes: dict[str, WorkerProcess], name: str) -> AsyncIterator[RunningRouter]:
    router = RunningRouter([process.address for process in processes.values()], name)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(router.streams.run(router.server.hear)),
            tasks.create_task(router.server.run()),
        ]
        await until(lambda: len(router.view()) == len(IDS))
        yield router
        for task in running:
            task.cancel()


async def test_cold_router_learns_caches_and_forgets_dead_workers():
    rng = random.Random(3)
    async with workers() as processes, a_router(processes, "first") as first:
        for number in range(30):
            await first.ask(fresh_prompt(rng.randrange(100, 500)), pin=IDS[number % 3])
        await until(lambda: min(map(len, first.view().values())) >= 40)

        async with a_router(processes, "second") as second:
            await until(lambda: second.view() == first.view())  # all of it, not 99 %

            processes["w2"].kill()
            with at_most(PATIENCE_SECONDS / 2):  # the broken connection shows it, before the lease ends
                await until(lambda: "w2" not in second.view())
                await until(lambda: "w2" not in first.view())
            processes["w3"].freeze()
            try:
                with at_most(2 * PATIENCE_SECONDS):
                    await until(lambda: "w3" not in second.view())
                await second.ask(fresh_prompt(300))  # neither event stops it from serving
                assert second.view().keys() == {"w1"}
                assert first.machine.registry.index.blocks.keys() == {engine_cache_holder(WorkerId("w1"))}
            finally:
                processes["w3"].thaw()
            await until(lambda: "w3" in second.view() and second.view()["w3"])
            second.machine.check()
