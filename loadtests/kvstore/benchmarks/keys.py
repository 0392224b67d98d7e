"""Benchmark of block hashes: time to compute them, time to look them up, and memory per hash."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import numpy as np
import xxhash

from kvstore.block import HashAlgorithm, chain
from kvstore.client.store_client import StoreClient
from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.pool.extents import PAGE_BYTES
from kvstore.pool.machine import BlockMachine
from loadtests.kvstore.benchmarks.memory import chains, named
from loadtests.kvstore.benchmarks.plan import BenchmarkPlan
from loadtests.kvstore.benchmarks.resident_memory import measured
from loadtests.kvstore.compared.answering import best_of
from loadtests.kvstore.compared.systems import MICROSECONDS, MILLISECONDS, ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, Contestant, LineDirection
from loadtests.kvstore.nodes import running

LOOKUP_KEYS = 512  # the blocks of a prompt of 128k tokens, with 256 tokens per block
HELD_KEYS = 16_384  # number of blocks that the store holds
PROMPTS = (8_192, 131_072)  # lengths of prompts in tokens
BLOCK_TOKENS = (16, 64, 256)

RAW: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.SHA256_128: lambda data: hashlib.sha256(data).digest(),
    HashAlgorithm.XXH3_128: xxhash.xxh3_128_digest,
}


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:
    """Yield the lines for look-up, hashing and memory."""
    with ExitStack() as held:

        def connect() -> StoreClient:
            node = held.enter_context(running(capacity_bytes=2 * HELD_KEYS * PAGE_BYTES))
            return held.enter_context(
                StoreClient.connect(node.address, named(PAGE_BYTES), call_timeout_seconds=10, timeout_seconds=30)
            )

        yield [*_lookup_lines(cache(connect), peers), *_hashing_lines(peers), _memory_line(plan, peers)]


def _lookup_lines(client: Callable[[], StoreClient], peers: ComparedSystems) -> list[BenchmarkLine]:
    namespace = named(PAGE_BYTES)
    names = next(chains(HELD_KEYS))
    asked = names[:LOOKUP_KEYS]
    table = {name: index for index, name in enumerate(names)}
    machine = BlockMachine(2 * HELD_KEYS * PAGE_BYTES, LruEviction(), epoch=1)
    machine.open(namespace, Nanos(0))
    reservation = machine.reserve(namespace.digest, names, owner="bench", lease=Nanos(1), now=Nanos(0))
    checksums = {reserved.index: 7 for reserved in reservation.reserved}
    machine.publish(reservation.reservation_id, checksums, owner="bench", now=Nanos(0))

    def in_a_dict() -> float:
        return MICROSECONDS * best_of(lambda: [table[name] for name in asked])

    def in_the_node() -> float:
        def match() -> None:
            found = machine.match(namespace.digest, asked, lease=Nanos(0), now=Nanos(0))
            assert len(found.slots) == LOOKUP_KEYS

        return MICROSECONDS * best_of(match)

    def by_a_client() -> float:
        block = np.zeros(PAGE_BYTES, dtype=np.uint8)
        client().write(asked, lambda _: block)

        def match() -> None:
            assert len(client().match(asked, lease_seconds=0)) == LOOKUP_KEYS

        return MICROSECONDS * best_of(match)

    in_node, by_client = f"lookup of {LOOKUP_KEYS} keys, in the node", f"lookup of {LOOKUP_KEYS} keys, by a client"
    return [
        BenchmarkLine(
            name=name,
            unit="µs",
            better=LineDirection.LESS,
            limit=in_a_dict,
            limit_is="a loop over a dict",
            fleet=ours,
            peers=others,
        )
        for name, ours, others in ((in_node, in_the_node, {}), (by_client, by_a_client, peers.lookup(LOOKUP_KEYS)))
    ]


def _hashing_lines(peers: ComparedSystems) -> list[BenchmarkLine]:
    found = []
    for algorithm in HashAlgorithm:
        for tokens in PROMPTS:
            for block_tokens in BLOCK_TOKENS:
                ids = np.random.default_rng(1).integers(0, 150_000, tokens, dtype=np.uint32).tobytes()
                found.append(
                    BenchmarkLine(
                        name=f"keys of {tokens // 1024}k tokens, block {block_tokens}, {algorithm.value}",
                        unit="ms",
                        better=LineDirection.LESS,
                        limit=partial(_raw_hashes, RAW[algorithm], ids, 4 * block_tokens),
                        limit_is="the same hash on each block, unchained",
                        fleet=partial(_chain, ids, block_tokens, algorithm),
                        peers=peers.hashing(tokens, block_tokens),
                    )
                )
    return found


def _raw_hashes(digest: Callable[[bytes], bytes], ids: bytes, size: int) -> float:
    return MILLISECONDS * best_of(lambda: [digest(ids[start : start + size]) for start in range(0, len(ids), size)])


def _chain(ids: bytes, block_tokens: int, algorithm: HashAlgorithm) -> float:
    return MILLISECONDS * best_of(lambda: chain(ids, block_tokens, algorithm=algorithm))


def _memory_line(plan: BenchmarkPlan, peers: ComparedSystems) -> BenchmarkLine:
    """Return the line for memory. The contestants measure bytes per key, which is the same number as megabytes per million keys."""
    limit: Contestant = partial(measured, "dict", plan.keys)
    return BenchmarkLine(
        name="memory per million keys",
        unit="MB",
        better=LineDirection.LESS,
        limit=limit,
        limit_is="a dict of names",
        fleet=partial(measured, "fleet", plan.keys),
        peers=peers.memory(min(plan.keys, 100_000)),
    )
