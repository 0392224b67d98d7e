"""Tests of LoRA adapters end to end: simulated engines in their own processes, a router, and OpenAI's client.

The simulated tokens depend on the adapter and on every byte of earlier KV, so blocks shared between adapters would change the answer.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import openai
import pytest
from msgspec import Struct, structs
from prometheus_client import CollectorRegistry

from fleet.backends.workers.streams import WorkerStreams
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.generation import Generation
from fleet.frontend.openai.service import open_http_frontend
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.settings import HttpSettings
from fleet.router.machine import RouterMachine
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from fleet.router.tenants import Tenants
from tests.support.kvstore.builders import a_node, a_short_folder
from tests.support.waiting import until
from tests.support.workers.worker_processes import a_worker_process
from workers.settings import SimulatedSettings, WorkerSettings

pytestmark = pytest.mark.integration

TINY, OTHER = ModelName("tiny"), ModelName("other")
ADAPTERS = {ModelName("ada"): "/adapters/ada", ModelName("bob"): "/adapters/bob"}
PROMPT = "the quick brown fox jumps over the lazy dog " * 12


class LoraCluster(Struct):
    client: openai.AsyncOpenAI
    router: RouterServer
    machine: RouterMachine

    async def ask(self, model: str, prompt: str = PROMPT, **fleet: object) -> tuple[str, int]:
        """Return the answer's text and the number of cached prompt tokens."""
        answer = await self.client.completions.create(
            model=model, prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True, "fleet": fleet}
        )
        assert answer.model == model
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

    def loaded(self) -> dict[str, set[str]]:
        """Return the adapters of each worker as the router knows them."""
        workers = self.machine.registry
        return {worker.description.worker_id: set(worker.load.adapters) for worker in workers}

    async def home_of(self, adapter: str) -> str:
        """Return the first worker that has the adapter."""
        homes = await until(lambda: [worker for worker, held in self.loaded().items() if adapter in held])
        return homes[0]

    async def until_loaded(self, expected: dict[str, set[str]]) -> None:
        await until(lambda: self.loaded() == expected)


def a_worker(worker_id: str, store: str = "", **fields) -> WorkerSettings:
    return WorkerSettings(
        **{
            "worker_id": WorkerId(worker_id),
            "engine": "simulated",
            "model": TINY,
            "load_interval_ms": 20,
            "heartbeat_ms": 100,
            "store": store,
            "kv_paths": (KvPath.STORE,) if store else (),
            "adapters": ADAPTERS,
            "adapter_slots": 1,
            "simulated": SimulatedSettings(speedup=20, kv_blocks=512),
            **fields,
        }
    )


@asynccontextmanager
async def a_world(model_dir: Path, *workers: WorkerSettings, store: str = "") -> AsyncIterator[LoraCluster]:
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(a_short_folder())
        told = [structs.replace(each, model_dir=str(model_dir)) for each in workers]
        async with asyncio.TaskGroup() as starting:
            processes = [
                starting.create_task(stack.enter_async_context(a_worker_process(folder, each))) for each in told
            ]
        settings = RouterSettings(store=store, max_reconnect_seconds=0.2)
        streams = WorkerStreams(settings, addresses=[process.result().address for process in processes])
        machine = RouterMachine(settings, random.Random(0))
        router = RouterServer(machine, streams, clock)
        codec = load_codec(model_dir)
        registry = CollectorRegistry()
        threads = TokenizerThreads()
        stack.callback(threads.close)
        generation = Generation(
            router,
            {TINY: codec, OTHER: codec},
            clock=clock,
            tenants=Tenants({}, clock.now()),
            tenant_secret=b"secret",
            metrics=RouterProcessMetrics(registry),
            threads=threads,
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [tasks.create_task(streams.run(router.hear)), tasks.create_task(router.run())]
        http = await stack.enter_async_context(
            open_http_frontend("127.0.0.1:0", HttpSettings(), generation, registry, clock)
        )
        await until(lambda: sum(len(pool.workers) for pool in router.status().pools) == len(workers))
        async with openai.AsyncOpenAI(
            base_url=f"http://{http.address}/v1", api_key="none", max_retries=0, timeout=20
        ) as client:
            yield LoraCluster(client, router, machine)
        machine.check()
        for task in running:
            task.cancel()


async def test_adapters_are_models_and_go_where_they_are_loaded(model_dir):
    async with a_world(model_dir, a_worker("w1"), a_worker("w2"), a_worker("x1", model=OTHER, adapters={})) as world:
        listed = {model.id: model.model_extra.get("parent") for model in (await world.client.models.list()).data}
        assert listed == {"tiny": None, "ada": "tiny", "bob": "tiny", "other": None}
        assert world.loaded() == {"w1": set(), "w2": set(), "x1": set()}

        first, cached = await world.ask("ada")  # neither worker has it, so one of the two loads it
        assert cached == 0
        home = await world.home_of("ada")
        elsewhere = "w2" if home == "w1" else "w1"
        await world.until_loaded({home: {"ada"}, elsewhere: set(), "x1": set()})

        other, cached = await world.ask("bob")  # the other worker has a free slot
        assert cached == 0
        await world.until_loaded({home: {"ada"}, elsewhere: {"bob"}, "x1": set()})

        for _ in range(3):
            again, cached = await world.ask("ada")
            assert again == first
            assert cached > 0, "the request did not go to its blocks"
        plain, cached = await world.ask("tiny")
        assert cached == 0, "the model itself shares no block with either"
        foreign, _ = await world.ask("other")

        assert len({first, other, plain}) == 3
        assert foreign == plain, "the same weights in a separate pool"
        with pytest.raises(openai.NotFoundError, match="ada, bob, other, tiny"):
            await world.ask("eve")


async def test_one_slot_serves_two_adapters_in_turn(model_dir):
    async with a_world(model_dir, a_worker("w1")) as world:
        alone = {name: (await world.ask(name))[0] for name in ("ada", "bob", "tiny")}

        async with asyncio.TaskGroup() as tasks:
            asked = [(name, tasks.create_task(world.ask(name))) for _ in range(4) for name in ("ada", "bob", "tiny")]

        assert [(name, task.result()[0]) for name, task in asked] == [(name, alone[name]) for name, _ in asked]
        assert len(set(alone.values())) == 3
        tenant, cached = await world.ask("ada", tenant="acme")
        assert (tenant, cached) == (alone["ada"], 0), "tenants share an adapter but no blocks"


async def test_adapter_blocks_move_only_between_its_own_workers(model_dir):
    with a_node(capacity_bytes=16 << 20) as node:
        pair = (
            a_worker("p1", node.address, role=Role.PREFILL, adapter_slots=2),
            a_worker("d1", node.address, role=Role.DECODE, adapter_slots=2),
        )
        async with a_world(model_dir, *pair, a_worker("w9", model=OTHER, adapters={}), store=node.address) as world:
            alone = {name: (await world.ask(name, placement="aggregated"))[0] for name in ("ada", "bob", "tiny")}

            longer = PROMPT + "and then some "
            apart = {name: (await world.ask(name, longer, placement="disaggregated"))[0] for name in alone}
            whole = {name: (await world.ask(name, longer, placement="aggregated"))[0] for name in alone}

            assert apart == whole
            assert len(set(alone.values())) == len(set(apart.values())) == 3
            status = world.router.status()
            assert (status.counters.disaggregated, status.counters.fallbacks) == (3, 0)
