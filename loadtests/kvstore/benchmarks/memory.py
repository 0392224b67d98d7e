"""Benchmark of the CPU tier: blocks to and from a node's pool, by its client and by the tier itself, compared with memcpy.

`warm`: all memory was used before. `first touch`: the memory that is written to (the pool in a put, the destination in a get) was not
used before. A get of the client is a match, verified copies, and a release. A put is a write reservation, for which the pool evicts
blocks, then checksums, copies, and the publication. Compared systems do not verify checksums.

The limit copies between arrays of this process, which are in huge pages if the system offers them. A pool is shared memory, which is in
small pages on most systems (`pages` in the node's log); memcpy is up to a third slower there.
"""

import itertools
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import cast

import numpy as np

from kvstore.block import BlockHash, chain
from kvstore.buffers import ByteArray
from kvstore.client.store_client import StoreClient
from kvstore.messages import Address, BlockKey
from kvstore.namespace import KvNamespace
from kvstore.tiers.shared_memory import SharedMemoryTier
from loadtests.kvstore.benchmarks.plan import MIB, BenchmarkPlan
from loadtests.kvstore.compared.answering import empty_caches
from loadtests.kvstore.compared.systems import GIGABYTE, ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, Contestant, LineDirection
from loadtests.kvstore.nodes import StoreNode, running

CALL_SECONDS = 10.0
BLOCK_TOKENS = 32
NOBODY: Mapping[str, Contestant] = {}


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:
    """Yield the lines of the CPU tier; they use memory until the context ends."""
    found = []
    # The blocks of the gets and one put fill the pool. So every measured put evicts blocks, as in a node that has run for a while.
    capacity = 2 * plan.moved_bytes
    with ExitStack() as held:
        node = cache(lambda: held.enter_context(running(capacity_bytes=capacity)))  # starts when it is first needed
        for block_bytes in plan.block_sizes:
            found += _lines_of(plan, peers, node, block_bytes)
        yield found


def named(block_bytes: int, model: str = "bench") -> KvNamespace:
    """Return a namespace with this block size."""
    return KvNamespace(
        model=f"{model}-{block_bytes}",
        revision="r1",
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
        layers=1,
        kv_heads=1,
        head_dim=block_bytes // (2 * BLOCK_TOKENS),
        block_bytes=block_bytes,
    )


def chains(blocks: int) -> Iterator[list[BlockHash]]:
    """Yield new chains of `blocks` block hashes, without end."""
    for number in itertools.count():
        tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32)
        tokens[0] = number
        yield chain(tokens.tobytes(), BLOCK_TOKENS)


def content(block_bytes: int, blocks: int, seed: int = 1) -> ByteArray:
    """Return blocks with random bytes, shape [blocks, block_bytes]."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def untouched(block_bytes: int, blocks: int) -> ByteArray:
    """Return an array of the shape of `content`, in memory that was never written to."""
    memory: ByteArray = np.frombuffer(mmap.mmap(-1, block_bytes * blocks), dtype=np.uint8)
    return memory.reshape(blocks, block_bytes)


def speed(moved_bytes: int, act: Callable[[], None]) -> float:
    """Call `act` once with empty processor caches, and return its speed in GB/s."""
    empty_caches()
    started = time.perf_counter()
    act()
    return moved_bytes / GIGABYTE / (time.perf_counter() - started)


def _lines_of(
    plan: BenchmarkPlan, peers: ComparedSystems, node: Callable[[], StoreNode], block_bytes: int
) -> list[BenchmarkLine]:
    blocks = plan.blocks(block_bytes)
    ends = _MemoryContestants(node, block_bytes, blocks)
    size = label(block_bytes)
    found = []
    for fresh, kind in ((False, "warm"), (True, "first touch")):
        limit = ends.memcpy(fresh=fresh)
        found += [
            _line(
                f"get {size}, {kind}", limit, ends.client_get(fresh=fresh), peers.get(block_bytes, blocks, fresh=fresh)
            ),
            _line(
                f"put {size}, {kind}", limit, ends.client_put(fresh=fresh), peers.put(block_bytes, blocks, fresh=fresh)
            ),
        ]
    limit = ends.memcpy(fresh=False)
    return [
        *found,
        _line(f"tier read {size}, no checksum", limit, ends.tier_read()),
        _line(f"tier write {size}, no checksum", limit, ends.tier_write()),
    ]


def _line(name: str, limit: Contestant, fleet: Contestant, peers: Mapping[str, Contestant] = NOBODY) -> BenchmarkLine:
    return BenchmarkLine(
        name=f"CPU {name}",
        unit="GB/s",
        better=LineDirection.MORE,
        limit=limit,
        limit_is="memcpy",
        fleet=fleet,
        peers=peers,
    )


def label(size: int) -> str:
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB"


class _MemoryContestants:
    """The contestants for one block size. They allocate their memory when the first line runs, and keep it."""

    def __init__(self, node: Callable[[], StoreNode], block_bytes: int, blocks: int):
        self._node = node
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._total = block_bytes * blocks
        self._chains = chains(blocks)
        self._opened: tuple[ByteArray, ByteArray, StoreClient, list[BlockHash]] | None = None

    def memcpy(self, *, fresh: bool) -> Contestant:
        def run() -> float:
            source, warm, _, _ = self._open()
            room = untouched(self._block_bytes, self._blocks) if fresh else warm
            return speed(self._total, lambda: copy(source, room))

        return run

    def client_get(self, *, fresh: bool) -> Contestant:
        def run() -> float:
            source, warm, client, held = self._open()
            room = list(untouched(self._block_bytes, self._blocks) if fresh else warm)
            # This writes only the blocks that are missing: all of them at first, and later the evicted ones.
            client.write(held, list(source))

            def get() -> None:
                match = client.match(held, lease_seconds=30)
                arrived = client.read(match, range(len(match)), room[: len(match)])
                client.release(match.lease_id)
                assert len(arrived) == self._blocks, f"{len(arrived)} of {self._blocks} blocks are held"
                assert all(arrived), "a block did not arrive"

            return speed(self._total, get)

        return run

    def client_put(self, *, fresh: bool) -> Contestant:
        """Return the contestant for puts. `fresh` is ignored, because a node writes to its whole pool when it starts."""
        del fresh

        def run() -> float:
            source, _, client, _ = self._open()
            names, blocks = next(self._chains), list(source)

            def put() -> None:
                written = client.write(names, blocks)
                assert written == self._blocks, f"{written} of {self._blocks} blocks were written"

            return speed(self._total, put)

        return run

    def tier_read(self) -> Contestant:
        def run() -> float:
            source, warm, _, _ = self._open()
            with _tier(self._block_bytes, self._blocks) as (tier, addresses):
                for address, block in zip(addresses, source, strict=True):
                    tier.write(address, block)
                return speed(self._total, lambda: _each(tier.read, addresses, warm))

        return run

    def tier_write(self) -> Contestant:
        def run() -> float:
            source, _, _, _ = self._open()
            with _tier(self._block_bytes, self._blocks) as (tier, addresses):
                return speed(self._total, lambda: _each(tier.write, addresses, source))

        return run

    def _open(self) -> tuple[ByteArray, ByteArray, StoreClient, list[BlockHash]]:
        if self._opened is None:
            source = content(self._block_bytes, self._blocks)
            client = StoreClient.connect(
                self._node().address, named(self._block_bytes), call_timeout_seconds=CALL_SECONDS, timeout_seconds=30
            )
            held = next(self._chains)
            self._opened = source, np.ones_like(source), client, held
        return self._opened


@contextmanager
def _tier(block_bytes: int, blocks: int) -> Iterator[tuple[SharedMemoryTier, list[Address]]]:
    tier = SharedMemoryTier(block_bytes * blocks)
    tier.mapping.populate(tier.capacity_bytes)
    addresses = [
        Address(key=BlockKey(b"", b""), offset=index * block_bytes, length=block_bytes, generation=1)
        for index in range(blocks)
    ]
    for address in addresses:
        tier.claim(address)
    try:
        yield tier, addresses
    finally:
        tier.close()


def copy(source: ByteArray, destination: ByteArray) -> None:
    """Copy all blocks, one by one."""
    for origin, place in zip(source, destination, strict=True):
        np.copyto(place, origin)


def _each(act: Callable[[Address, ByteArray], bool], addresses: list[Address], blocks: ByteArray) -> None:
    for address, block in zip(addresses, blocks, strict=True):
        done = act(address, cast("ByteArray", block))
        assert done, "the place was given away"
