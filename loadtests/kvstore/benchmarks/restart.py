"""Benchmark of restarts: time until the first block can be used again."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.buffers import crc32c
from kvstore.client.store_client import StoreClient
from kvstore.messages import BlockKey, BlockOutcome
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.benchmarks.disk import open_tier, soon
from loadtests.kvstore.benchmarks.memory import chains, content, named, untouched
from loadtests.kvstore.benchmarks.plan import MIB, BenchmarkPlan
from loadtests.kvstore.compared.systems import MILLISECONDS, ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, LineDirection
from loadtests.kvstore.nodes import StoreNode, short_folder

BLOCK_BYTES = MIB
KEPT_SECONDS = 60.0


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:
    """Yield a line for the restart of the SSD tier alone, and one for the restart of a whole node that was killed."""
    blocks = max(plan.disk_bytes // BLOCK_BYTES // 2, 16)
    try:
        yield [
            BenchmarkLine(
                name=f"restart of the SSD tier ({blocks} MiB) to the first hit",
                unit="ms",
                better=LineDirection.LESS,
                limit=partial(_read_one_block, plan.folder),
                limit_is="open a file and read one block",
                fleet=partial(_reopen, plan.folder / "restart", blocks, plan.disk_threads),
                peers=peers.restart(BLOCK_BYTES, plan.disk_threads),
            ),
            BenchmarkLine(
                name="start of a node after kill -9 to the first hit from SSD",
                unit="ms",
                better=LineDirection.LESS,
                limit=partial(_start_an_empty_node, plan),
                limit_is="a node that keeps nothing starts and answers",
                fleet=partial(_kill_and_start, plan, blocks),
            ),
        ]
    finally:
        shutil.rmtree(plan.folder / "restart", ignore_errors=True)


def _read_one_block(folder: Path) -> float:
    path = folder / "one-block"
    path.write_bytes(bytes(BLOCK_BYTES))
    os.sync()
    (room,) = untouched(BLOCK_BYTES, 1)
    started = time.perf_counter()
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    count = os.preadv(file, [room.data], 0)
    os.close(file)
    seconds = time.perf_counter() - started
    assert count == BLOCK_BYTES
    path.unlink()
    return MILLISECONDS * seconds


def _reopen(folder: Path, blocks: int, threads: int) -> float:
    digest = named(BLOCK_BYTES).digest
    keys = [BlockKey(digest, name) for name in next(chains(blocks))]
    sizes = 4 * blocks * BLOCK_BYTES, 32 * BLOCK_BYTES
    tier = open_tier(folder, *sizes, threads)
    source = list(content(BLOCK_BYTES, blocks))
    kept = tier.put(keys, source, soon(), [crc32c([block]) for block in source])
    assert all(kept), "blocks were not kept"
    tier.close()
    (room,) = untouched(BLOCK_BYTES, 1)
    started = time.perf_counter()
    again = open_tier(folder, *sizes, threads)
    (fetched,) = again.get(keys[-1:], [room], soon())
    seconds = time.perf_counter() - started
    again.close()
    assert fetched.outcome is BlockOutcome.MOVED, fetched
    return MILLISECONDS * seconds


def _start_an_empty_node(plan: BenchmarkPlan) -> float:
    with short_folder() as folder:
        node = StoreNode(folder, capacity_bytes=plan.moved_bytes)
        started = time.perf_counter()
        node.start()
        with StoreClient.connect(node.address, named(BLOCK_BYTES), timeout_seconds=30) as client:
            assert client.stats() is not None
        seconds = time.perf_counter() - started
        node.stop()
    return MILLISECONDS * seconds


def _kill_and_start(plan: BenchmarkPlan, blocks: int) -> float:
    names = next(chains(blocks))
    disk = plan.folder / "restart-node"
    tier = {
        "kind": "ssd",
        "keep": "all",
        "directories": [str(disk)],
        "capacity_bytes": 4 * blocks * BLOCK_BYTES,
        "segment_bytes": 32 * BLOCK_BYTES,
    }
    with short_folder() as folder:
        node = StoreNode(folder, capacity_bytes=2 * blocks * BLOCK_BYTES, tiers=[tier])
        node.start()
        try:
            with StoreClient.connect(
                node.address, named(BLOCK_BYTES), timeout_seconds=30, call_timeout_seconds=10
            ) as client:
                client.write(names, list(content(BLOCK_BYTES, blocks)))
                _wait_until_kept(client, blocks)
            node.kill()
            started = time.perf_counter()
            node.start()
            with StoreClient.connect(
                node.address, named(BLOCK_BYTES), timeout_seconds=30, call_timeout_seconds=10
            ) as client:
                room = np.ones(BLOCK_BYTES, dtype=np.uint8)
                deadline = started + KEPT_SECONDS
                while not _first_hit(client, names, room):
                    if time.perf_counter() > deadline:
                        raise SystemUnavailable("after its restart the node does not give back what its SSD holds")
            return MILLISECONDS * (time.perf_counter() - started)
        finally:
            node.stop()
            shutil.rmtree(disk, ignore_errors=True)


def _first_hit(client: StoreClient, names: list[bytes], room: np.ndarray) -> bool:
    match = client.match_and_wait(names[:1], lease_seconds=5, max_wait_seconds=5)
    arrived = client.read(match, range(len(match)), [room][: len(match)])
    client.release(match.lease_id)
    return arrived == [True]


def _wait_until_kept(client: StoreClient, blocks: int) -> None:
    deadline = time.monotonic() + KEPT_SECONDS
    while True:
        stats = client.stats()
        if stats is not None and sum(tier.blocks for tier in stats.tiers if tier.name == "ssd") >= blocks:
            return
        if time.monotonic() > deadline:
            raise SystemUnavailable(f"not all of {blocks} blocks are on SSD within {KEPT_SECONDS:.0f} s")
        time.sleep(0.02)
