"""Cluster of the fault matrix: processes of the soak test with relays between them, and a store node with an SSD tier."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import psutil

from fleet.client import AsyncClient, FleetError
from fleet.config import default_cache_dir
from fleet.core.ids import WorkerId
from fleet.core.requests import TOKEN_BYTES, Sampling
from fleet.core.roles import KvPath, Role
from fleet.frontend.text.codec import load_codec
from fleet.hardware.latency.linear import EngineLatency
from fleet.local.tiny_model import build_tiny_model
from fleet.router.settings.router import RouterSettings
from kvstore.client.store_client import StoreClient
from kvstore.messages import Stats
from loadtests.kvstore.nodes import StoreNode
from loadtests.kvstore.torture.__main__ import SSD_SIZES
from loadtests.kvstore.torture.leaks import FILLING
from loadtests.kvstore.torture.redis_server import RedisServer
from loadtests.router.soak.churn import BLOCK_TOKENS, MODEL
from loadtests.router.soak.clients import SoakClients, TextOf
from loadtests.router.soak.processes import SoakProcess
from loadtests.router.soak.requests import SoakRequest
from tests.faults.relay import Relay
from tests.support.waiting import until_answered
from workers.engines.simulated.answer_oracle import AnswerOracle
from workers.engines.simulated.model import SimulatedModel
from workers.settings import SimulatedSettings, WorkerSettings

ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "d2": Role.DECODE}
SIMULATED = SimulatedSettings(
    latency=EngineLatency(
        prefill_ms_per_token=2.0, step_base_ms=60.0, step_ms_per_sequence=0.0, transfer_base_ms=2500.0
    ),
    kv_blocks=1024,
    direct_lease_ms=3000,
    load_timeout_ms=6000,
)
DRAIN_SECONDS = 20.0
JOIN_SECONDS = 90.0  # time limit for all workers to join, for a busy machine
CALL_SECONDS = 5.0
RESUME_SECONDS = 60.0  # time in which gRPC clients try to continue their answers, until a killed router is back
STORE_BYTES = 8 << 20


class FaultCluster:
    """A router, workers, a store node, and clients whose answers are known; `async with` starts and ends it."""

    def __init__(self, folder: Path, seed: int, *, redis: bool):
        self.folder = folder
        self.chance = random.Random(seed)
        tiers: list[dict[str, object]] = [
            {"kind": "ssd", "keep": "all", "directories": [str(folder / "ssd")], **SSD_SIZES}
        ]
        self.redis = RedisServer(folder) if redis else None
        if self.redis is not None:
            tiers.append({"kind": "redis", "keep": "all", "url": self.redis.url})
        self.node = StoreNode(folder, capacity_bytes=STORE_BYTES, tiers=tiers)
        self.store_link = Relay(folder / "sl", self.node.address, frames=False)
        self.links = {name: Relay(folder / f"{name}l", f"{folder}/{name}s", frames=True) for name in ROLES}
        self.workers: dict[str, SoakProcess] = {}
        self.router: SoakProcess
        self.registry_link: Relay
        self.operator: AsyncClient
        self.endpoints: dict[str, str] = {}
        self._oracle = AnswerOracle(
            SimulatedModel(
                seed=SIMULATED.seed,
                vocab_size=SIMULATED.vocab_size,
                eos_token_ids=SIMULATED.eos_token_ids,
                eos_probability=SIMULATED.eos_probability,
                block_bytes=BLOCK_TOKENS * SIMULATED.bytes_per_token,
            ),
            BLOCK_TOKENS,
        )
        self._stack = AsyncExitStack()
        self._text_of: TextOf

    async def __aenter__(self) -> Self:
        model_dir = build_tiny_model(default_cache_dir(), tokenizer_only=True)
        codec = load_codec(model_dir)

        def text_of(prompt: Sequence[int], tokens: Sequence[int]) -> str:
            decoder = codec.decoder(b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in prompt))
            return "".join(map(decoder.add, tokens)) + decoder.flush()

        self._text_of = text_of
        stack = self._stack
        try:
            if self.redis is not None:
                self.redis.start()
                stack.callback(self.redis.stop)
            self.node.start()
            stack.callback(self.node.kill)
            await stack.enter_async_context(self.store_link.serve())
            settings = RouterSettings(
                http_listen=f"127.0.0.1:{self._port()}",
                grpc_listen=f"127.0.0.1:{self._port()}",
                control_listen=f"unix:{self.folder}/control",
                models={MODEL: str(model_dir)},
                store=self.node.address,
                remote_prefill_min_tokens=128,
            )
            self.router = SoakProcess("router", "router", self.folder, settings)
            stack.push_async_callback(self._kill_all)
            await self.start_router()
            self.registry_link = Relay(self.folder / "rl", f"{self.folder}/control", frames=False)
            await stack.enter_async_context(self.registry_link.serve())
            for link in self.links.values():
                await stack.enter_async_context(link.serve())
            for name, role in ROLES.items():
                self.workers[name] = self._worker(name, role)
            await asyncio.gather(*(worker.start() for worker in self.workers.values()))
            self.operator = AsyncClient(self.endpoints["grpc"], control=f"unix:{self.folder}/control")
            stack.push_async_callback(self.operator.close)
            await self.until_whole()
        except BaseException:
            await stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _kill_all(self) -> None:
        for process in (*self.workers.values(), self.router):
            process.kill()
            await process.ended(JOIN_SECONDS)

    async def start_router(self) -> None:
        self.endpoints = dict(await self.router.start())

    def _port(self) -> int:
        from tests.support.servers.processes import a_free_port

        return a_free_port()

    def _worker(self, name: str, role: Role) -> SoakProcess:
        settings = WorkerSettings(
            worker_id=WorkerId(name),
            role=role,
            engine="simulated",
            model=MODEL,
            listen=f"unix:{self.folder}/{name}s",
            advertise=self.links[name].address,
            registry=self.registry_link.address,
            store=self.store_link.address,
            kv_paths=(KvPath.STORE, KvPath.DIRECT),
            block_tokens=BLOCK_TOKENS,
            max_running=8,
            drain_timeout_ms=int(DRAIN_SECONDS * 1000),
            simulated=SIMULATED,
        )
        return SoakProcess("worker", name, self.folder, settings)

    # Requests.

    def clients(self) -> SoakClients:
        """Return clients with counts of their own. Their gRPC streams continue after a restart of the router."""
        return SoakClients(
            self.endpoints["http"], self.endpoints["grpc"], MODEL, self._text_of, resume_seconds=RESUME_SECONDS
        )

    def request(self, tokens: int, answer: int, *, over_http: bool = False, **options: object) -> SoakRequest:
        """Return a request with a new random prompt of `tokens` tokens, and its expected answer of `answer` tokens."""
        prompt = tuple(self.chance.randrange(64, 4000) for _ in range(tokens))
        sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)
        return SoakRequest(
            prompt=prompt,
            sampling=sampling,
            expected=self._oracle.answer(b"".join(each.to_bytes(TOKEN_BYTES, "little") for each in prompt), sampling),
            over_http=over_http,
            session="",
            options=options,  # type: ignore[arg-type]
        )

    # State.

    async def until_whole(self) -> None:
        """Wait until the router reports every worker as serving."""
        missing = set(ROLES)

        async def is_whole() -> bool:
            nonlocal missing
            missing = set(ROLES) - set(await self.serving())
            return not missing

        await until_answered(is_whole, JOIN_SECONDS, lambda: f"the router does not know {sorted(missing)}")

    async def serving(self) -> Sequence[str]:
        """Return the ids of the workers that the router reports as serving; none if the router does not answer."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                pools = (await self.operator.status()).pools
        except (FleetError, TimeoutError):
            return []
        return [worker.worker_id for pool in pools for worker in pool.workers if worker.state == "serving"]

    async def prefilling(self) -> bool:
        """Return whether the router has reserved a request on a prefill worker."""
        pools = (await self.operator.status()).pools
        return any(
            worker.booked_requests for pool in pools for worker in pool.workers if worker.worker_id.startswith("p")
        )

    async def until_drained(self, name: str) -> None:
        """Wait for the end of a draining worker; kill it if it does not end in time, because a fault may have stopped it."""
        if await self.workers[name].ended(DRAIN_SECONDS + CALL_SECONDS) is None:
            self.workers[name].kill()
            await self.workers[name].ended(CALL_SECONDS)

    async def held(self) -> list[str]:
        """Return a text for each thing that the router, a worker or the store node holds although all requests have ended."""
        status = await self.operator.status()
        left = [f"{status.router.active} requests are active"] if status.router.active else []
        for pool in status.pools:
            for worker in pool.workers:
                counts = {
                    "booked": worker.booked_requests,
                    "running": worker.running,
                    "kv blocks": worker.kv_blocks_used,
                }
                left += [f"{worker.worker_id}: {count} {what}" for what, count in counts.items() if count]
        stats = await asyncio.to_thread(self._store_stats)
        if stats is not None:
            counts = {"leases": stats.leases, "reservations": stats.reservations, "pinned": stats.pinned}
            left += [f"store: {count} {what}" for what, count in counts.items() if count]
        return left

    def _store_stats(self) -> Stats | None:
        client = StoreClient.join(self.node.address, FILLING, wait_seconds=CALL_SECONDS)
        try:
            return client.stats()
        finally:
            client.close()

    async def restore(self) -> None:
        """End the faults of all links, start processes that have ended, and wait until all workers serve."""
        for link in (self.store_link, self.registry_link, *self.links.values()):
            link.heal()
        if not self.node.alive:
            await asyncio.to_thread(self.node.start)
        if not self.router.alive:
            await self.start_router()
        dead = [worker for worker in self.workers.values() if not worker.alive]
        await asyncio.gather(*(worker.start() for worker in dead))
        await self.until_whole()

    async def reap(self) -> None:
        """Collect the exit statuses of killed processes, so that they count as ended."""
        for process in (*self.workers.values(), self.router):
            await process.ended(0.2)
        if not self.node.alive:
            self.node.kill()

    def files(self) -> int:
        return psutil.Process(self.router.pid).num_fds()
