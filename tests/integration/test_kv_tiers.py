"""A node with tiers below its memory: real processes, files and servers."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.client import StoreClient
from kvstore.messages import Stats
from tests.kv_builders import BLOCK_BYTES, a_block, a_chain, a_namespace, a_node, a_short_folder, eventually

POOL_BLOCKS = 8
PATIENCE = 5.0


def an_ssd(folder, **fields):
    return {"kind": "ssd", "directories": [str(folder)], "capacity_bytes": 8 << 20, "segment_bytes": 1 << 20, **fields}


@contextmanager
def a_client(node) -> Iterator[StoreClient]:
    with StoreClient.connect(node.address, a_namespace()) as client:
        yield client


def block_of(name: bytes) -> np.ndarray:
    return a_block(int.from_bytes(name[-8:], "big") + len(name))


def write(client: StoreClient, chain: list[bytes]) -> int:
    return client.write(chain, [block_of(name) for name in chain])


def read(client: StoreClient, chain: list[bytes]) -> int:
    """How many leading blocks come back; each is compared."""
    match = client.match_patiently(chain, lease_seconds=10, patience_seconds=PATIENCE)
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


def are_kept(client: StoreClient, blocks: int, tier: int = 0) -> None:
    eventually(lambda: stats_of(client).tiers[tier].blocks >= blocks)


def in_pool(client: StoreClient, chain: list[bytes]) -> int:
    return len(client.match(chain, lease_seconds=0))


def test_what_the_pool_evicted_comes_back_from_the_disk(tmp_path):
    with (
        a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node,
        a_client(node) as client,
    ):
        chains = [a_chain(6, of) for of in "abcd"]
        for index, chain in enumerate(chains, 1):
            assert write(client, chain) == 6
            are_kept(client, 6 * index)
        assert in_pool(client, chains[0]) == 0
        for chain in chains:
            assert read(client, chain) == 6
        (ssd,) = stats_of(client).tiers
        assert ssd.hits == 24, "each chain pushed out the one that is asked for next"


def test_a_killed_node_finds_its_blocks_on_the_disk_again(tmp_path):
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        with a_client(node) as client:
            write(client, a_chain(6))
            are_kept(client, 6)
        node.kill()
        node.start()
        with a_client(node) as client:
            assert in_pool(client, a_chain(6)) == 0
            assert read(client, a_chain(6)) == 6
            assert in_pool(client, a_chain(6)) == 6


def test_nothing_is_looked_for_below_without_patience(tmp_path):
    with a_node(capacity_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=[an_ssd(tmp_path, keep="all")]) as node:
        with a_client(node) as client:
            write(client, a_chain(6))
            are_kept(client, 6)
        node.kill()
        node.start()
        with a_client(node) as client:
            assert len(client.match(a_chain(6), lease_seconds=1)) == 0
            assert in_pool(client, a_chain(6)) == 0


def test_a_miss_everywhere_costs_no_wait(tmp_path):
    with a_node(tiers=[an_ssd(tmp_path)]) as node, a_client(node) as client:
        match = client.match(a_chain(6), lease_seconds=1, patience_seconds=PATIENCE)
        assert (len(match), match.loading) == (0, 0)


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"kind": "dvd"}, "kind"),
        (an_ssd("/proc/nowhere"), "directories"),
    ],
)
def test_a_tier_that_cannot_be_had_keeps_the_node_from_starting(tier, message):
    import msgspec

    from kvstore.errors import StoreNotStarted
    from kvstore.monotonic import MonotonicClock
    from kvstore.server import open_node
    from kvstore.settings import StoreSettings

    async def start(folder):
        settings = msgspec.convert({"store_id": "s", "listen": [f"unix:{folder}/c"], "tiers": [tier]}, StoreSettings)
        async with open_node(settings, MonotonicClock()):
            raise AssertionError("it started")

    import asyncio

    with a_short_folder() as folder, pytest.raises((StoreNotStarted, msgspec.ValidationError), match=message):
        asyncio.run(start(folder))
