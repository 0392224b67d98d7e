"""Tests of a node with tiers below its memory: real processes, files and servers."""

import asyncio
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from fleet.backends.workers.store_watch import GrpcStoreWatch
from fleet.core.system_clock import SystemClock
from fleet.membership.compatibility import IncompatiblePeers
from fleet.router.messages import StoreChanged
from fleet.router.settings.router import RouterSettings
from kvstore.client.store_client import StoreClient
from kvstore.clock import Nanos, nanos
from kvstore.errors import InvalidArgument, StoreNotStarted
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.tier_states import AdmitEverything, TierRule
from kvstore.hierarchy.transfers import Demote, Fetch, Find, TierTransfer
from kvstore.messages import BlockKey, BlockOutcome, FetchResult, Stats
from kvstore.service.server import open_node
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock
from operators.chart.metric_catalogue import STORE
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    MachineDriver,
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
)
from tests.support.metric_pages import differences
from tests.support.servers.processes import a_free_port, a_redis_server
from tests.support.waiting import eventually

POOL_BLOCKS = 8
MAX_WAIT = 5.0


def an_ssd(folder, **fields):
    return {"kind": "ssd", "directories": [str(folder)], "capacity_bytes": 8 << 20, "segment_bytes": 1 << 20, **fields}


@contextmanager
def a_client(node) -> Iterator[StoreClient]:
    with a_store_client(node.address, a_namespace()) as client:
        yield client


def block_of(name: bytes) -> np.ndarray:
    return a_block(int.from_bytes(name[-8:], "big") + len(name))


def write(client: StoreClient, chain: list[bytes]) -> int:
    return client.write(chain, [block_of(name) for name in chain])


def read(client: StoreClient, chain: list[bytes]) -> int:
    """Return how many leading blocks can be read; compare the bytes of each."""
    match = client.match_and_wait(chain, lease_seconds=10, max_wait_seconds=MAX_WAIT)
    buffers = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(len(match))]
    arrived = client.read(match, range(len(match)), buffers)
    client.release(match.lease_id)
    for name, buffer, whole in zip(chain, buffers, arrived, strict=False):
        assert whole
        assert np.array_equal(buffer, block_of(name))
    return len(match)


def stats_of(client: StoreClient) -> Stats:
    stats = client.stats()
    assert stats is not None
    return stats


def wait_until_kept(client: StoreClient, blocks: int, tier: int = 0) -> None:
    eventually(lambda: stats_of(client).tiers[tier].blocks >= blocks)


def in_pool(client: StoreClient, chain: list[bytes]) -> int:
    return len(client.match(chain, lease_seconds=0))


def test_block_evicted_from_the_pool_returns_from_disk(tmp_path):
    with (
        a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node,
        a_client(node) as client,
    ):
        chains = [a_chain(6, of) for of in "abcd"]
        for index, chain in enumerate(chains, 1):
            assert write(client, chain) == 6
            wait_until_kept(client, 6 * index)
        assert in_pool(client, chains[0]) == 0
        for chain in chains:
            assert read(client, chain) == 6
        (ssd,) = stats_of(client).tiers
        assert ssd.hits == 24, "each chain evicted the one that is read next"


def test_a_killed_node_finds_its_blocks_on_the_disk_again(tmp_path):
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        with a_client(node) as client:
            write(client, a_chain(6))
            wait_until_kept(client, 6)
        node.kill()
        node.start()
        with a_client(node) as client:
            assert in_pool(client, a_chain(6)) == 0
            assert read(client, a_chain(6)) == 6
            assert in_pool(client, a_chain(6)) == 6


def test_match_reports_promoted_blocks_once(tmp_path):
    """Check that a look-up reports nothing, and that blocks written since count as the memory's own."""
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        with a_client(node) as client:
            write(client, a_chain(6))
            wait_until_kept(client, 6)
        node.kill()
        node.start()
        with a_client(node) as client:
            write(client, a_chain(2))
            found = client.match_and_wait(a_chain(6), lease_seconds=1, max_wait_seconds=MAX_WAIT)
            assert (len(found), found.promoted) == (6, {"ssd": 4})
            again = client.match(a_chain(6), lease_seconds=1)
            assert (len(again), again.promoted) == (6, {})


def test_promoted_block_evicted_unread_is_new_when_rewritten(tmp_path):
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        with a_client(node) as client:
            write(client, a_chain(6))
            wait_until_kept(client, 6)
        node.kill()
        node.start()
        with a_client(node) as client:
            client.match(a_chain(6), lease_seconds=0, max_wait_seconds=MAX_WAIT)
            eventually(lambda: in_pool(client, a_chain(6)) == 6)
            for of in "bcd":
                write(client, a_chain(6, of))
            eventually(lambda: in_pool(client, a_chain(6)) == 0)
            write(client, a_chain(6))
            assert client.match(a_chain(6), lease_seconds=1).promoted == {}


def test_without_max_wait_no_lower_tier_is_searched(tmp_path):
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        with a_client(node) as client:
            write(client, a_chain(6))
            wait_until_kept(client, 6)
        node.kill()
        node.start()
        with a_client(node) as client:
            assert len(client.match(a_chain(6), lease_seconds=1)) == 0
            assert in_pool(client, a_chain(6)) == 0


def test_scan_writes_nothing_and_reused_blocks_are_kept(tmp_path):
    with a_node(tiers=[an_ssd(tmp_path, keep="reused")]) as node, a_client(node) as client:
        for of in "abcd":
            write(client, a_chain(6, of))
            assert read(client, a_chain(6, of)) == 6, "the use by the request itself does not count"
        assert stats_of(client).tiers[0].bytes_written == 0
        eventually(lambda: read(client, a_chain(6, "a")) and stats_of(client).tiers[0].blocks == 6, 30)


def test_daily_write_budget_is_kept(tmp_path):
    tier = an_ssd(tmp_path, keep="all", daily_write_bytes=4 * BLOCK_BYTES)
    with a_redis_server() as redis:
        tiers = [tier, {"kind": "redis", "url": redis.url, "keep": "all"}]
        with a_node(tiers=tiers) as node, a_client(node) as client:
            write(client, a_chain(10))
            eventually(lambda: stats_of(client).tiers[1].bytes_written >= 10 * BLOCK_BYTES)
            eventually(lambda: stats_of(client).tiers[0].blocks == 4)
            assert stats_of(client).tiers[0].bytes_written < 5 * (BLOCK_BYTES + 4096)


def test_miss_in_all_tiers_costs_no_wait(tmp_path):
    with a_node(tiers=[an_ssd(tmp_path)]) as node, a_client(node) as client:
        match = client.match(a_chain(6), lease_seconds=1, max_wait_seconds=MAX_WAIT)
        assert (len(match), match.loading) == (0, 0)


class DecidingNode:
    """The decisions of the same node: machine and hierarchy over tiers that answer at once."""

    def __init__(self, tiers: int):
        self.store = MachineDriver(blocks=POOL_BLOCKS)
        self.below: list[set[BlockKey]] = [set() for _ in range(tiers)]
        self.restart()

    def restart(self) -> None:
        """Empty the pool."""
        self.store = MachineDriver(blocks=POOL_BLOCKS)
        rules = [TierRule(name=str(index), admission=AdmitEverything()) for index in range(len(self.below))]
        self.hierarchy = Hierarchy(self.store.machine, rules)

    def write(self, chain: list[bytes]) -> None:
        self.store.hold(chain)
        self._settle()

    def read(self, chain: list[bytes]) -> int:
        self._match(chain)
        self.hierarchy.prefetch(self.store.digest, chain, self.store.look(chain), nanos(MAX_WAIT), Nanos(0))
        loads = not self.hierarchy.is_idle
        self._settle()
        return self._match(chain) if loads else self.store.look(chain)

    def loaded(self) -> list[int]:
        return [self.hierarchy.counters(tier).loaded for tier in range(len(self.below))]

    def _match(self, chain: list[bytes]) -> int:
        leased = self.store.match(chain)
        self.store.release(leased.lease_id)
        self.hierarchy.offer(self.store.digest, chain[: len(leased.slots)], Nanos(0))
        self._settle()
        return len(leased.slots)

    def _settle(self) -> None:
        while True:
            for change in self.store.machine.changes():
                self.hierarchy.offer(change.digest, change.stored, Nanos(0))
            if not (transfers := self.hierarchy.commands()):
                return
            for transfer in transfers:
                self._perform(transfer)

    def _perform(self, transfer: TierTransfer) -> None:
        held = self.below[transfer.tier]
        match transfer:
            case Find():
                count = next((i for i, key in enumerate(transfer.keys) if key not in held), len(transfer.keys))
                self.hierarchy.found(transfer.promotion_id, count, Nanos(0))
            case Fetch():
                answers = [FetchResult(BlockOutcome.MOVED, 7) for _ in transfer.addresses]
                self.hierarchy.fetched(transfer.promotion_id, answers, Nanos(0))
            case Demote():
                held |= {address.key for address in transfer.addresses}
                self.hierarchy.kept(transfer.demotion_id, [True] * len(transfer.addresses), Nanos(0))


def test_tier_hits_match_the_simulation(tmp_path):
    with a_redis_server() as redis:
        tiers = [an_ssd(tmp_path / "ssd", keep="all"), {"kind": "redis", "url": redis.url, "keep": "all"}]
        with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=tiers) as node:
            simulated = DecidingNode(tiers=2)
            prompts = [a_chain(3, "a"), [*a_chain(2, "a"), *a_chain(2, "x")], a_chain(5, "b")]

            def compare(client: StoreClient) -> None:
                stats, counted = stats_of(client), simulated.store.machine.stats()
                assert [tier.hits for tier in stats.tiers] == simulated.loaded()
                assert (stats.hits, stats.misses, stats.evicted) == (counted.hits, counted.misses, counted.evicted)

            def settle(client: StoreClient) -> None:
                """Finish all demotions, whose blocks are pinned and could not be evicted."""

                def is_settled() -> bool:
                    stats = stats_of(client)
                    kept = (stats.tiers[0].blocks, redis.client().dbsize())
                    return kept == tuple(map(len, simulated.below)) and stats.pinned == 0

                eventually(is_settled)

            with a_client(node) as client:
                for chain in prompts:
                    write(client, chain)
                    simulated.write(chain)
                    settle(client)
                for chain in prompts * 2:
                    assert read(client, chain) == simulated.read(chain) == len(chain)
                    settle(client)
                compare(client)
                assert simulated.loaded()[0] > 0
                assert simulated.loaded()[1] == 0
            node.kill()
            shutil.rmtree(tmp_path / "ssd")
            node.start()
            simulated.below[0].clear()
            simulated.restart()
            with a_client(node) as client:
                for chain in prompts:
                    assert read(client, chain) == simulated.read(chain) == len(chain)
                    settle(client)
                compare(client)
                assert simulated.loaded()[1] > 0


def test_block_written_by_one_node_is_found_through_redis():
    with a_redis_server() as redis:
        tier = {"kind": "redis", "url": redis.url, "keep": "all"}
        with a_node(tiers=[tier]) as writer, a_client(writer) as client:
            write(client, a_chain(6))
            eventually(lambda: redis.client().dbsize() == 6)
        with a_node(tiers=[tier]) as reader, a_client(reader) as client:
            assert read(client, a_chain(6)) == 6
            assert stats_of(client).tiers[0].hits == 6


def test_peer_block_is_read_from_memory_and_missed_after_death():
    with a_node(data_listen="127.0.0.1:0") as first, a_client(first) as client:
        write(client, a_chain(6))
        with a_node(tiers=[{"kind": "peer", "peers": [first.address]}]) as second, a_client(second) as other:
            assert read(other, a_chain(4)) == 4
            first.kill()
            assert read(other, a_chain(6)) == 4, "transferred blocks stay and the others are misses"


def test_lost_redis_is_a_miss_and_is_found_again():
    with (
        a_redis_server() as redis,
        a_node(
            capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[{"kind": "redis", "url": redis.url, "keep": "all"}]
        ) as node,
        a_client(node) as client,
    ):
        write(client, a_chain(6))
        eventually(lambda: redis.client().dbsize() == 6)
        redis.kill()
        write(client, a_chain(8, "b"))
        assert in_pool(client, a_chain(6)) == 0
        assert read(client, a_chain(6)) == 0
        redis.start()
        eventually(lambda: write(client, a_chain(8, "c")) + redis.client().dbsize() >= 1, 30)
        assert stats_of(client).tiers[0].failures > 0


def test_compressed_and_sealed_blocks_round_trip(tmp_path):
    codec = {"compression": "zstd", "sealing_secrets": ["5a" * 32]}
    tiers = [an_ssd(tmp_path, keep="all", codec=codec)]
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=tiers) as node, a_client(node) as client:
        write(client, a_chain(6))
        wait_until_kept(client, 6)
        write(client, a_chain(8, "b"))
        wait_until_kept(client, 14)
        assert read(client, a_chain(6)) == 6
    plain = block_of(a_chain(6)[0]).tobytes()[:64]
    segments = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert sum(map(len, segments)) > 6 * BLOCK_BYTES
    assert not any(plain in segment for segment in segments)


class StoreWatcher:
    """The view of a router that watches a node's tiers."""

    def __init__(self, address: str, tasks: asyncio.TaskGroup):
        self.held: dict[str, set[bytes]] = {}
        self._heard: asyncio.Queue[StoreChanged] = asyncio.Queue()
        self.watching = tasks.create_task(
            GrpcStoreWatch(address, RouterSettings(), IncompatiblePeers(SystemClock())).run(self._heard.put)
        )

    async def until(self, **held: list[bytes]) -> None:
        expected = {tier: set(names) for tier, names in held.items()}
        async with asyncio.timeout(60):
            while {tier: names for tier, names in self.held.items() if names} != expected:
                change = await self._heard.get()
                known = self.held.get(change.tier, set())
                self.held[change.tier] = known - set(change.removed) | set(change.stored)


def put_into(node, chain: list[bytes]) -> None:
    with a_client(node) as client:
        write(client, chain)


def read_from(node, chain: list[bytes]) -> int:
    with a_client(node) as client:
        return read(client, chain)


async def test_router_learns_the_tier_of_a_block(tmp_path):
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        async with asyncio.TaskGroup() as tasks:
            router = StoreWatcher(node.address, tasks)
            await asyncio.to_thread(put_into, node, a_chain(6))
            await router.until(cpu=a_chain(6), ssd=a_chain(6))
            await asyncio.to_thread(put_into, node, a_chain(8, "b"))
            await router.until(cpu=a_chain(8, "b"), ssd=[*a_chain(6), *a_chain(8, "b")])
            router.watching.cancel()


async def test_late_router_learns_the_same_remote_blocks():
    with a_redis_server() as redis:
        tiers = [{"kind": "redis", "url": redis.url, "keep": "all"}]
        with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=tiers) as node:
            async with asyncio.TaskGroup() as tasks:
                early = StoreWatcher(node.address, tasks)
                await asyncio.to_thread(put_into, node, a_chain(6))
                await early.until(cpu=a_chain(6), redis=a_chain(6))
                await asyncio.to_thread(put_into, node, a_chain(8, "b"))
                both = {"cpu": a_chain(8, "b"), "redis": [*a_chain(6), *a_chain(8, "b")]}
                await early.until(**both)
                late = StoreWatcher(node.address, tasks)
                await late.until(**both)

                redis.client().flushall()
                assert await asyncio.to_thread(read_from, node, a_chain(6)) == 0

                latest = StoreWatcher(node.address, tasks)
                for router in (early, late, latest):
                    await router.until(cpu=a_chain(8, "b"), redis=a_chain(8, "b"))
                    router.watching.cancel()


def test_layout_rejected_by_a_tier_does_not_stop_others(tmp_path):
    with a_node(tiers=[an_ssd(tmp_path, codec={"compression": "fp8"})]) as node:
        with pytest.raises(InvalidArgument, match="float32"):
            a_store_client(node.address, a_namespace(dtype="float32"))
        a_store_client(node.address, a_namespace(dtype="bfloat16", head_dim=16)).close()


def test_metrics_are_reported_per_tier(tmp_path):
    port = a_free_port()
    with (
        a_node(metrics_listen=f"127.0.0.1:{port}", tiers=[an_ssd(tmp_path, keep="all")]) as node,
        a_client(node) as client,
    ):
        write(client, a_chain(3))
        wait_until_kept(client, 3)
        client.release(client.match(a_chain(5), lease_seconds=1).lease_id)
        client.match(a_chain(5, "b"), lease_seconds=1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            page = answer.read().decode()
    assert differences(page, STORE) == []
    lines = page.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['kvstore_tier_hits_total{tier="cpu"}']) == 3
    assert float(values['kvstore_tier_misses_total{tier="cpu"}']) == 2 + 5
    assert float(values['kvstore_tier_blocks{tier="ssd"}']) == 3
    assert float(values['kvstore_tier_bytes_written_total{tier="ssd"}']) >= 3 * BLOCK_BYTES
    assert float(values['kvstore_tier_operation_seconds_count{operation="keep",tier="ssd"}']) >= 1
    assert float(values['kvstore_hierarchy_kept_total{tier="ssd"}']) == 3
    at_twice_the_size = f'kvstore_shadow_hit_rate{{namespace="{a_namespace().fingerprint}",policy="lru",scale="2.0"}}'
    assert float(values[at_twice_the_size]) == pytest.approx(3 / 10)


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"kind": "dvd"}, "kind"),
        (an_ssd("/proc/nowhere"), r"^tiers\[0\]\.directories\[0\]: '/proc/nowhere' cannot be used: No such file"),
        (an_ssd("/tmp/a\0b"), r"^tiers\[0\]\.directories\[0\]: "),
        (an_ssd("/tmp", capacity_bytes=1 << 60), r"^tiers\[0\]\.segment_bytes: "),
        (
            {"kind": "redis", "url": "redis://h", "password_file": "/nowhere"},
            r"^tiers\[0\]\.password_file: /nowhere: No",
        ),
    ],
)
def test_unavailable_tier_stops_the_node_start(tier, message):
    async def start(folder):
        settings = msgspec.convert({"store_id": "s", "listen": [f"unix:{folder}/c"], "tiers": [tier]}, StoreSettings)
        async with open_node(settings, MonotonicClock()):
            raise AssertionError("it started")

    with a_short_folder() as folder, pytest.raises((StoreNotStarted, msgspec.ValidationError), match=message):
        asyncio.run(start(folder))
