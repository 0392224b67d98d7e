"""A router with real workers, which run simulated engines in their own processes."""

import asyncio
import random

from fleet.backends.workers.streams import WorkerStreams
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import Sampling, Source
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.system_clock import SystemClock
from fleet.router.machine import RouterMachine
from fleet.router.messages import Arrived, Complete, StartedOver
from fleet.router.placement.decision import PlacementReason
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from tests.support.builders import an_arrival
from tests.support.waiting import until
from workers.settings import SimulatedSettings, WorkerSettings

ANSWER = 12
GREEDY = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


class WorkerCluster:
    """Sends requests to a router with workers, and gives each request an id."""

    def __init__(self, addresses: list[str], store: str):
        settings = RouterSettings(store=store, max_reconnect_seconds=0.2)
        self.workers = WorkerStreams(settings, addresses=addresses)
        self.machine = RouterMachine(settings, random.Random(0))
        self.server = RouterServer(self.machine, self.workers, SystemClock())
        self._requests = 0

    def arrival(self, prompt: bytes, **fields) -> Arrived:
        self._requests += 1
        return an_arrival(request_id=f"r{self._requests}", tokens=prompt, **{"sampling": GREEDY, **fields})

    async def ask(self, prompt: bytes, **fields) -> tuple[list[int], Complete]:
        return await self.answer(self.arrival(prompt, **fields))

    async def answer(self, arrived: Arrived, after_first=None) -> tuple[list[int], Complete]:
        tokens: list[int] = []
        async with asyncio.timeout(30), self.server.submit(arrived) as events:
            async for event in events:
                if isinstance(event, Complete):
                    return tokens, event
                if isinstance(event, StartedOver):
                    tokens.clear()
                    continue
                tokens.extend(event.token_ids)
                if after_first is not None:
                    after_first()
                    after_first = None
        raise AssertionError("no end")

    async def until(self, condition) -> None:
        await until(lambda: condition(self.server.status()))

    def why(self, complete: Complete) -> PlacementReason:
        return self.server.explain(complete.request_id).placements[-1].why


def worker_settings(
    worker_id: str,
    role: Role,
    store: str,
    *,
    speedup: float = 20,
    kv_paths: tuple[KvPath, ...] = (KvPath.STORE, KvPath.DIRECT),
    model_dir: str = "",
) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId(worker_id),
        role=role,
        engine="simulated",
        model=ModelName("tiny"),
        model_dir=model_dir,
        store=store,
        kv_paths=kv_paths,
        load_interval_ms=20,
        heartbeat_ms=100,
        simulated=SimulatedSettings(speedup=speedup, kv_blocks=1024),
    )


def sources(complete: Complete, phase: Phase) -> dict[Source, tuple[int, int]]:
    """Return by source how many blocks, and how many bytes, came from there in one phase."""
    (found,) = [one for one in complete.kv if one.phase is phase]
    return {origin.source: (origin.blocks, origin.bytes) for origin in found.report.origins}
