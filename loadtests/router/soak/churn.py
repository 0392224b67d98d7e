"""Churn: workers that join, leave, hang and die during a soak test."""

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.hardware.latency.linear import EngineLatency
from loadtests.router.soak.processes import SoakProcess
from workers.settings import SimulatedSettings, WorkerSettings

MODEL = ModelName("tiny")
BLOCK_TOKENS = 32
WHOLE_WORKERS = 4  # usual number of workers with role both
PROMPT_WORKERS = 1  # usual number of workers with role prefill
DRAIN_SECONDS = 20.0
LONGEST_DRAIN_SECONDS = DRAIN_SECONDS + 15.0  # time limit of a drain on a busy machine
FROZEN_SECONDS = 6.0  # twice the router's heartbeat timeout
SIMULATED = SimulatedSettings(
    latency=EngineLatency(prefill_ms_per_token=0.1, step_base_ms=20.0, step_ms_per_sequence=1.0),
    kv_blocks=1024,
)
HARMS = ("die", "die", "die", "leave", "leave", "join", "hang")

log = logging.getLogger("soak")


class ChurningWorkers:
    """Starts workers, and lets one at a time leave, hang, die or join."""

    def __init__(self, folder: Path, registry: str, store: str, chance: random.Random):
        self.joins = self.leaves = self.deaths = self.hangs = 0
        self.complaints: list[str] = []
        self._folder = folder
        self._registry = registry
        self._store = store
        self._chance = chance
        self._born = 0
        self._workers: list[SoakProcess] = []
        self._roles: dict[str, Role] = {}
        self._deck: list[str] = []

    def __len__(self) -> int:
        return len(self._workers)

    async def gather(self) -> None:
        """Start `WHOLE_WORKERS` workers with role both, and `PROMPT_WORKERS` prefill workers."""
        for role in (Role.BOTH,) * WHOLE_WORKERS + (Role.PREFILL,) * PROMPT_WORKERS:
            self._workers.append(await self._born_as(role))

    async def harm(self, every_seconds: float, time_left: Callable[[], float]) -> None:
        """Let one worker at a time leave, hang, die or join, and stop early enough that all workers are back at the end."""
        while time_left() > 2 * every_seconds:
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * every_seconds)
            if not self._deck:
                self._deck = [*HARMS]
                self._chance.shuffle(self._deck)
            kind = self._deck.pop()
            victim = self._chance.choice(self._workers)
            log.info("%s: %s", victim.name, kind)
            match kind:
                case "die":
                    await self._die(victim)
                case "leave":
                    await self._leave(victim, replaced=True)
                case "join":
                    await self._join_for_a_while(every_seconds)
                case "hang":
                    await self._hang(victim)
                case _:
                    raise AssertionError(kind)

    async def end(self) -> None:
        """Drain and end all workers."""
        workers, self._workers = self._workers, []
        for each in workers:
            each.ask_to_end()
        for each in workers:
            await self._gone(each)

    async def abandon(self) -> None:
        """Kill all workers."""
        for each in self._workers:
            each.kill()
            await each.ended(LONGEST_DRAIN_SECONDS)

    def unexpected_deaths(self) -> list[str]:
        return [f"{each.name} ended by itself: {each.log()[-1000:]}" for each in self._workers if not each.alive]

    async def _die(self, victim: SoakProcess) -> None:
        self._workers.remove(victim)
        victim.kill()
        self.deaths += 1
        await victim.ended(LONGEST_DRAIN_SECONDS)
        await asyncio.sleep(self._chance.uniform(0, 1))
        role = self._roles[victim.name]
        if self._chance.random() < 0.5:  # start the same worker again, as a supervisor would do
            await victim.start()
            self._workers.append(victim)
        else:
            self._workers.append(await self._born_as(role))
        self.joins += 1

    async def _leave(self, victim: SoakProcess, *, replaced: bool) -> None:
        self._workers.remove(victim)
        if replaced:
            self._workers.append(await self._born_as(self._roles[victim.name]))
            self.joins += 1
        victim.ask_to_end()
        self.leaves += 1
        await self._gone(victim)

    async def _join_for_a_while(self, seconds: float) -> None:
        one_more = await self._born_as(Role.BOTH)
        self._workers.append(one_more)
        self.joins += 1
        await asyncio.sleep(seconds)
        await self._leave(one_more, replaced=False)

    async def _hang(self, victim: SoakProcess) -> None:
        self.hangs += 1
        victim.freeze()
        await asyncio.sleep(FROZEN_SECONDS)
        victim.thaw()

    async def _gone(self, leaving: SoakProcess) -> None:
        """Wait for a draining worker to end, and note a complaint unless it ends by itself with status 0."""
        status = await leaving.ended(LONGEST_DRAIN_SECONDS)
        if status is None:
            leaving.kill()
            await leaving.ended(LONGEST_DRAIN_SECONDS)
            self.complaints.append(f"{leaving.name} did not leave within {LONGEST_DRAIN_SECONDS:.0f} s")
        elif status != 0:
            self.complaints.append(f"{leaving.name} left with status {status}: {leaving.log()[-1000:]}")

    async def _born_as(self, role: Role) -> SoakProcess:
        self._born += 1
        name = f"{role.value}-{self._born}"
        settings = WorkerSettings(
            worker_id=WorkerId(name),
            role=role,
            engine="simulated",
            model=MODEL,
            listen=f"unix:{self._folder}/{self._born}.s",
            registry=self._registry,
            store=self._store,
            kv_paths=(KvPath.STORE, KvPath.DIRECT),
            block_tokens=BLOCK_TOKENS,
            max_running=8,
            drain_timeout_ms=int(DRAIN_SECONDS * 1000),
            simulated=SIMULATED,
        )
        self._roles[name] = role
        part = SoakProcess("worker", name, self._folder, settings)
        await part.start()
        return part
