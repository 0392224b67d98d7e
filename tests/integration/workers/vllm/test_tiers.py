"""Tests of real vLLM engines over a store with tiers: a known prompt is not computed again, whichever tier has its blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from fleet.core.requests import Source
from fleet.core.roles import KvPath
from fleet.local.tiny_model import build_tiny_model
from kvstore.client.store_client import StoreClient
from kvstore.messages import Stats
from tests.support.kvstore.builders import NodeProcess, a_node, a_store_client
from tests.support.servers.processes import a_redis_server
from tests.support.waiting import eventually, until
from tests.support.workers.engine_driver import EngineDriver, an_attempt, blocks_from, fresh_prompt
from tests.support.workers.vllm_engines import VllmEngines, hosted, tiny_namespace, vllm_worker
from workers.settings import VllmSettings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

BLOCK_TOKENS = 32
TOKENS = 2050
BLOCKS = TOKENS // BLOCK_TOKENS
SMALL_CACHE = VllmSettings(kv_cache_gib=0.02, dtype="float32")  # 163 blocks: two other prompts evict one
MAX_RUNNING = 2  # small, so that requests queue soon


class TieredEngines(NamedTuple):
    """Two engines with a node each; the nodes share a Redis server, and the first one has a disk."""

    hosted: VllmEngines
    nodes: tuple[NodeProcess, NodeProcess]
    clients: tuple[StoreClient, StoreClient]

    def ask(self, engine: int, prompt: bytes) -> tuple[tuple[int, ...], int]:
        """Return the answer's tokens and the number of prompt blocks from the store."""
        driver: EngineDriver = self.hosted.engines[engine]
        tokens, end = self.hosted.run(driver.do(an_attempt(prompt, 8)))
        return tokens, blocks_from(end.kv, Source.STORE)

    def ask_by_tier(self, engine: int, prompt: bytes) -> tuple[tuple[int, ...], dict[str, int]]:
        """Return the number of blocks by the node's tier."""
        tokens, end = self.hosted.run(self.hosted.engines[engine].do(an_attempt(prompt, 8)))
        return tokens, {origin.tier: origin.blocks for origin in end.kv.origins if origin.source is Source.STORE}

    def push_out(self, engine: int) -> None:
        """Evict a prompt from the engine's own cache."""
        for _ in range(3):
            self.ask(engine, fresh_prompt(TOKENS))

    def stats(self, node: int) -> Stats:
        stats = self.clients[node].stats()
        assert stats is not None
        return stats

    def until_kept(self, node: int, tier: int, before: int) -> None:
        """Wait until the latest prompt is in a lower tier too."""
        eventually(lambda: self.stats(node).tiers[tier].bytes_written - before >= BLOCKS * tiny_block_bytes, 30)

    def written(self, node: int, tier: int) -> int:
        return self.stats(node).tiers[tier].bytes_written


tiny_block_bytes = 128 << 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredEngines]:
    model_dir: Path = build_tiny_model(tmp_path_factory.mktemp("models"))
    folder = str(tmp_path_factory.mktemp("ssd"))
    with a_redis_server() as redis:
        ssd = {
            "kind": "ssd",
            "directories": [folder],
            "capacity_bytes": 256 << 20,
            "segment_bytes": 16 << 20,
            "keep": "all",
        }
        shared = {"kind": "redis", "url": redis.url, "keep": "all"}
        with (
            a_node(store_id="first", capacity_bytes=128 << 20, tiers=[ssd, shared]) as first,
            a_node(store_id="second", capacity_bytes=128 << 20, tiers=[shared]) as second,
        ):
            workers = [
                structs.replace(
                    vllm_worker(model_dir, store=node.address, kv_paths=(KvPath.STORE,)),
                    vllm=SMALL_CACHE,
                    max_running=MAX_RUNNING,
                )
                for node in (first, second)
            ]
            namespace = tiny_namespace(model_dir)
            with (
                a_store_client(first.address, namespace) as one,
                a_store_client(second.address, namespace) as two,
                hosted(*workers) as engines,
            ):
                yield TieredEngines(engines, (first, second), (one, two))


def test_prompt_is_served_from_memory_disk_and_redis_in_turn(cluster):
    prompt = fresh_prompt(TOKENS)
    before = cluster.written(0, 0), cluster.written(0, 1)
    tokens, stored = cluster.ask(0, prompt)
    assert stored == 0
    cluster.until_kept(0, 0, before[0])
    cluster.until_kept(0, 1, before[1])

    cluster.push_out(0)
    assert cluster.ask_by_tier(0, prompt) == (tokens, {"cpu": BLOCKS})
    assert cluster.stats(0).tiers[0].hits == 0, "the blocks were not in memory"

    cluster.push_out(0)
    cluster.nodes[0].kill()
    cluster.nodes[0].start()
    assert cluster.ask_by_tier(0, prompt) == (tokens, {"ssd": BLOCKS})
    ssd, redis = cluster.stats(0).tiers
    assert ssd.hits >= BLOCKS
    assert redis.hits == 0

    assert cluster.ask_by_tier(1, prompt) == (tokens, {"redis": BLOCKS})
    assert cluster.stats(1).tiers[0].hits >= BLOCKS


def test_a_prompt_that_no_tier_has_is_computed_without_a_wait(cluster):
    before = cluster.stats(0).tiers[0].hits
    _, stored = cluster.ask(0, fresh_prompt(TOKENS))
    assert stored == 0
    assert cluster.stats(0).tiers[0].hits == before


ATTEMPTS = 3  # a busy machine may miss the deadline of a fetch; then blocks come when their request is scheduled


def test_blocks_are_promoted_from_redis_during_queueing(cluster):
    engine = cluster.hosted.engines[1]

    def come_up_meanwhile() -> bool:
        prompt, before = fresh_prompt(TOKENS), cluster.written(0, 1)
        tokens, _ = cluster.ask(0, prompt)
        cluster.until_kept(0, 1, before)
        hits = cluster.stats(1).tiers[0].hits
        running = [an_attempt(fresh_prompt(40), 3000) for _ in range(MAX_RUNNING)]  # for as long as it takes
        queued = an_attempt(prompt, 8)

        def ended() -> bool:
            return any(start.request_id in engine.ends for start in running)

        async def run() -> bool:
            engine.submit(*running)
            await engine.until(lambda: all(engine.tokens[each.request_id] for each in running))
            engine.submit(queued)
            await until(lambda: cluster.stats(1).tiers[0].hits - hits >= BLOCKS or ended())
            there = cluster.stats(1).tiers[0].hits - hits
            waits = engine.tokens[queued.request_id] == () and not ended()
            for each in running:
                engine.engine.cancel(each.request_id)
            await engine.end_of(queued)
            return there >= BLOCKS and waits

        came = cluster.hosted.run(run())
        assert engine.tokens[queued.request_id] == tokens
        return came

    assert any(come_up_meanwhile() for _ in range(ATTEMPTS))
