"""Simulated engines in any layout, and a router with workers that run them in their own processes."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fleet.backends.workers.streams import WorkerStreams
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.core.system_clock import SystemClock
from fleet.router.machine import RouterMachine
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from kvstore.namespace import KvNamespace
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import until
from tests.support.workers.worker_processes import WorkerProcess, a_worker_process
from workers.engines.simulated import launch as engine
from workers.settings import SimulatedSettings, WorkerSettings

BLOCK_TOKENS, BLOCK_BYTES = 32, 2048


def simulated_worker(
    store: str = "", tp: int = 1, layout: str = "HND", role: Role = Role.BOTH, paths=(KvPath.STORE,), **fields
) -> WorkerSettings:
    told = SimulatedSettings(
        speedup=20,
        kv_blocks=64,
        tensor_parallel=tp,
        kv_layout=layout,
        publish_timeout_ms=10_000,
        load_timeout_ms=10_000,
    )
    return WorkerSettings(
        **{
            "worker_id": WorkerId(f"{role.value}-{tp}-{layout}"),
            "role": role,
            "engine": "simulated",
            "model": ModelName("tiny"),
            "store": store,
            "kv_paths": paths if store else (),
            "load_interval_ms": 20,
            "heartbeat_ms": 100,
            "simulated": told,
            **fields,
        }
    )


def namespace() -> KvNamespace:
    """Return the namespace of these engines' blocks; it does not depend on the layout."""
    return engine.namespace_of(simulated_worker(), engine.model_of(simulated_worker()))


@asynccontextmanager
async def a_router_with_workers(*told: WorkerSettings, store: str, **fields) -> AsyncIterator[RouterServer]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(a_short_folder())
        processes = [await stack.enter_async_context(a_worker_process(folder, each)) for each in told]
        yield await stack.enter_async_context(a_router_for(*processes, store=store, **fields))


@asynccontextmanager
async def a_router_for(*processes: WorkerProcess, store: str, **fields) -> AsyncIterator[RouterServer]:
    async with AsyncExitStack() as stack:
        routing = RouterSettings(store=store, max_reconnect_seconds=0.2, **fields)
        workers = WorkerStreams(routing, addresses=[process.address for process in processes])
        server = RouterServer(RouterMachine(routing, random.Random(0)), workers, SystemClock())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [tasks.create_task(workers.run(server.hear)), tasks.create_task(server.run())]
        await until(lambda: sum(len(pool.workers) for pool in server.status().pools) == len(processes))
        yield server
        for task in running:
            task.cancel()
