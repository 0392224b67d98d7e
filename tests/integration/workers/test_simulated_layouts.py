"""Tests of blocks shared between engines of different layouts and rank counts, byte for byte.

The tokens of a simulated engine depend on every byte of its KV, which it lays out by itself
(`workers.engines.simulated.layout`). Equal tokens after a handoff therefore prove the conversion.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.request import urlopen

import pytest

from fleet.core.requests import Sampling, Source
from fleet.core.roles import KvPath, Phase, Placement, Role
from fleet.router.messages import Complete
from fleet.router.server import RouterServer
from kvstore.block import chain
from kvstore.errors import LayoutMismatch
from kvstore.layouts.conversion import Conversion
from tests.support.builders import an_arrival
from tests.support.kvstore.builders import a_node, a_store_client
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually
from tests.support.workers.engine_driver import (
    EngineDriver,
    an_attempt,
    blocks_from,
    bytes_from,
    driven_engines,
    fresh_prompt,
    run_disaggregated,
)
from tests.support.workers.simulated_clusters import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    a_router_with_workers,
    namespace,
    simulated_worker,
)
from workers.engines.simulated.launch import open_engine

pytestmark = pytest.mark.integration

PROMPT_TOKENS = 6 * BLOCK_TOKENS + 5
ANSWER = 12
TP_PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2)]
LAYOUT_PAIRS = [("NHD", "HND"), ("HND", "NHD"), ("NHD", "NHD"), ("HND", "HND")]


@asynccontextmanager
async def an_engine(*told, **fields) -> AsyncIterator[EngineDriver]:
    async with open_engine(simulated_worker(*told, **fields)) as engine, driven_engines(engine) as (one,):
        yield one
        engine.check()


@pytest.fixture(scope="module")
def node():
    with a_node(capacity_bytes=4 << 20) as node:
        yield node


async def alone(prompt: bytes) -> tuple[int, ...]:
    """Return the answer of an engine without a store."""
    async with an_engine() as one:
        tokens, _ = await one.do(an_attempt(prompt, ANSWER))
        return tokens


def held(one: EngineDriver, prompt: bytes) -> list[bytes]:
    return [bytes(content) for content in one.engine.memory.find(chain(prompt, BLOCK_TOKENS))]


@pytest.mark.parametrize(("tp", "other_tp"), [*TP_PAIRS, (1, 1)])
@pytest.mark.parametrize(("layout", "other"), LAYOUT_PAIRS)
async def test_decode_engine_reads_blocks_of_another_layout(node, tp, other_tp, layout, other):
    prompt = fresh_prompt(PROMPT_TOKENS)
    expected = await alone(prompt)

    async with an_engine(node.address, tp, layout) as prefill, an_engine(node.address, other_tp, other) as decode:
        tokens, _, end = await run_disaggregated(prefill, decode, prompt, ANSWER, KvPath.STORE)

        assert tokens == expected
        assert blocks_from(end.kv, Source.STORE) == 6
        assert bytes_from(end.kv, Source.STORE) == 6 * BLOCK_BYTES
        assert blocks_from(end.kv, Source.COMPUTED) == 1
        assert (held(prefill, prompt) == held(decode, prompt)) is ((tp, layout) == (other_tp, other))


@pytest.mark.parametrize(("tp", "layout"), [(1, "NHD"), (2, "HND"), (4, "NHD")])
async def test_stored_blocks_do_not_depend_on_the_writer(node, tp, layout):
    prompt = fresh_prompt(PROMPT_TOKENS)
    names = chain(prompt, BLOCK_TOKENS)
    async with an_engine() as plain:
        await plain.do(an_attempt(prompt, 1))
        values = held(plain, prompt)

    async with an_engine(node.address, tp, layout) as prefill:
        await prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE))
        namespace = prefill.engine.facts.kv.at_rest

    with a_store_client(node.address, namespace) as client:
        match = eventually(lambda: client.match(names, lease_seconds=10) or None)
        stored = [bytearray(BLOCK_BYTES) for _ in range(len(match))]
        assert all(client.read(match, range(len(match)), stored))
    assert [bytes(each) for each in stored] == values


async def test_wrong_conversion_changes_the_tokens(node, monkeypatch):
    prompt = fresh_prompt(PROMPT_TOKENS)
    expected = await alone(prompt)
    async with an_engine(node.address, 2, "NHD") as prefill:
        await prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE))
    monkeypatch.setattr(Conversion, "read", lambda self, stored: memoryview(stored))  # as if no conversion were needed

    async with an_engine(node.address, 4, "HND") as decode:
        tokens, end = await decode.do(an_attempt(prompt, ANSWER))

    assert blocks_from(end.kv, Source.STORE) == 6
    assert tokens != expected


async def test_blocks_of_another_size_are_rejected_and_counted():
    port = a_free_port()
    with a_node(metrics_listen=f"127.0.0.1:{port}") as node:
        async with an_engine(node.address, 2, "NHD"):
            with pytest.raises(LayoutMismatch, match="block_tokens") as refused:
                async with an_engine(node.address, 4, "HND", block_tokens=64):
                    pass

        assert refused.value.field == "block_tokens"
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        assert "kvstore_mismatches_total 1.0" in metrics
        with a_store_client(node.address, namespace()) as client:
            stats = eventually(client.stats)
            assert (stats.blocks, stats.bytes_written) == (0, 0)


# With a router and workers in their own processes.


async def ask(router: RouterServer, prompt: bytes, **fields) -> tuple[list[int], Complete]:
    tokens: list[int] = []
    greedy = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    arrived = an_arrival(request_id=f"r-{len(prompt)}-{len(fields)}", tokens=prompt, sampling=greedy, **fields)
    async with asyncio.timeout(30), router.submit(arrived) as events:
        async for event in events:
            if isinstance(event, Complete):
                return tokens, event
            tokens.extend(event.token_ids)
    raise AssertionError("no end")


async def test_mixed_layouts_are_paired_through_the_store(node):
    prompt = fresh_prompt(20 * BLOCK_TOKENS + 5)
    both = (KvPath.STORE, KvPath.DIRECT)
    prefill = simulated_worker(node.address, 2, "NHD", Role.PREFILL, both)
    decode = simulated_worker(node.address, 4, "HND", Role.DECODE, both)

    async with a_router_with_workers(prefill, decode, store=node.address, prefer_direct=True) as router:
        tokens, complete = await ask(router, prompt)
        expected, _ = await ask(router, prompt, salt=b"s" * 32, placement=Placement.AGGREGATED)

        assert tokens == expected
        (fetched,) = [
            origin
            for phase in complete.kv
            if phase.phase is Phase.DECODE
            for origin in phase.report.origins
            if origin.source is not Source.COMPUTED
        ]
        assert (fetched.source, fetched.blocks, fetched.bytes) == (Source.STORE, 20, 20 * BLOCK_BYTES)
        assert router.status().counters.kv_mismatches == 0
