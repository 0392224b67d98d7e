"""Tests of the simulated engine's KV: a wrong, missing or swapped block changes its output, and checksums prevent that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import Source
from fleet.core.roles import KvPath, Phase, Role
from kvstore.block import chain
from kvstore.client.store_client import StoreClient
from tests.support.kvstore.builders import a_node
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually, turns, until
from tests.support.workers.engine_driver import (
    EngineDriver,
    an_attempt,
    blocks_from,
    bytes_from,
    driven_engines,
    fresh_prompt,
    run_disaggregated,
)
from workers.engines.simulated import launch as simulated_engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.launch import open_engine
from workers.engines.simulated.store import SimulatedStore
from workers.settings import SimulatedSettings, WorkerSettings

pytestmark = pytest.mark.integration

BLOCK_TOKENS = 32
PROMPT_TOKENS = 6 * BLOCK_TOKENS + 5
ANSWER = 12


@pytest.fixture
def node():
    with a_node() as node:
        yield node


def settings(store: str = "", path: KvPath | None = None, **simulated) -> WorkerSettings:
    if path is None and store:
        path = KvPath.STORE
    return WorkerSettings(
        worker_id=WorkerId("worker"),
        role=Role.BOTH,
        engine="simulated",
        model=ModelName("tiny"),
        store=store,
        kv_paths=(path,) if path is not None else (),
        simulated=SimulatedSettings(speedup=20, kv_blocks=64, **simulated),
    )


@asynccontextmanager
async def an_engine(told: WorkerSettings) -> AsyncIterator[EngineDriver]:
    async with open_engine(told) as engine, driven_engines(engine) as (one,):
        yield one
        engine.check()


@asynccontextmanager
async def a_client(address: str, told: WorkerSettings) -> AsyncIterator[StoreClient]:
    """Return a client of the engines' namespace."""
    namespace = simulated_engine.namespace_of(told, simulated_engine.model_of(told))
    client = await asyncio.to_thread(StoreClient.connect, address, namespace)
    try:
        yield client
    finally:
        client.close()


async def computed_by_one(node, prompt) -> tuple[int, ...]:
    """Return the tokens of an engine that computes everything and has published all blocks of the prompt."""
    async with an_engine(settings(node.address)) as one:
        tokens, end = await one.do(an_attempt(prompt, ANSWER))
        assert blocks_from(end.kv, Source.COMPUTED) == 7
        async with a_client(node.address, settings(node.address)) as client:
            for _ in range(5):  # publishing has a deadline, which a busy machine may miss
                await one.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE))
                if len(client.match(chain(prompt, BLOCK_TOKENS), lease_seconds=0)) == 6:
                    return tokens
    raise AssertionError("the store does not take the blocks")


# Without verification, wrong bytes change the output.


class Unverified(SimulatedStore):
    """Client that hands over tampered blocks, like a store that does not verify."""

    tamper = staticmethod(lambda blocks: blocks)

    async def load(self, names, deadline: Nanos, trace: bytes = b""):
        loaded = await super().load(names, deadline, trace)
        return msgspec.structs.replace(loaded, blocks=self.tamper(loaded.blocks))


def flip(blocks: list[bytes]) -> list[bytes]:
    wrong = bytearray(blocks[2])
    wrong[17] ^= 0x40
    return [*blocks[:2], bytes(wrong), *blocks[3:]]


def drop(blocks: list[bytes]) -> list[bytes]:
    return [*blocks[:2], bytes(len(blocks[2])), *blocks[3:]]


def swap(blocks: list[bytes]) -> list[bytes]:
    return [blocks[0], blocks[2], blocks[1], *blocks[3:]]


def keep(blocks: list[bytes]) -> list[bytes]:
    return blocks


@pytest.mark.parametrize(("tamper", "same"), [(keep, True), (flip, False), (drop, False), (swap, False)])
async def test_unnoticed_bad_block_changes_the_output(node, monkeypatch, tamper, same):
    prompt = fresh_prompt(PROMPT_TOKENS)
    expected = await computed_by_one(node, prompt)
    monkeypatch.setattr(Unverified, "tamper", staticmethod(tamper))
    monkeypatch.setattr(simulated_engine, "SimulatedStore", Unverified)

    async with an_engine(settings(node.address)) as one:
        tokens, end = await one.do(an_attempt(prompt, ANSWER))

    assert blocks_from(end.kv, Source.STORE) == 6
    assert (tokens == expected) is same


# Reports name the source tier.


async def test_report_names_the_tier_of_the_blocks(tmp_path):
    """Check that blocks come from the disk after the node has lost its memory, and from memory for the next request."""
    disk = {"kind": "ssd", "directories": [str(tmp_path)], "capacity_bytes": 8 << 20, "segment_bytes": 1 << 20}
    prompt = fresh_prompt(PROMPT_TOKENS)
    with a_node(tiers=[{**disk, "keep": "all"}]) as node:
        expected = await computed_by_one(node, prompt)
        async with a_client(node.address, settings(node.address)) as client:
            eventually(lambda: client.stats().tiers[0].blocks >= 6)
        node.kill()
        node.start()
        tiers = []
        for _ in range(2):
            async with an_engine(settings(node.address)) as one:
                tokens, end = await one.do(an_attempt(prompt, ANSWER))
            assert tokens == expected
            tiers += [
                (origin.tier, origin.blocks, origin.bytes) for origin in end.kv.origins if origin.source is Source.STORE
            ]

    assert tiers == [("ssd", 6, 6 * 2048), ("cpu", 6, 6 * 2048)]


# With verification, damaged blocks only cost computing time.


@pytest.mark.parametrize("damage", ["nothing", "flip", "swap"])
async def test_damaged_store_block_is_computed_again(node, damage):
    prompt = fresh_prompt(PROMPT_TOKENS)
    expected = await computed_by_one(node, prompt)
    names = chain(prompt, BLOCK_TOKENS)
    async with a_client(node.address, settings(node.address)) as client:
        match = eventually(lambda: client.match(names, lease_seconds=0) or None)  # a busy machine may miss a deadline
        size = client.namespace.block_bytes
        third, fourth = (
            client.connection.session.transport.mapping.block(match.slots[index].offset, size) for index in (2, 3)
        )
        if damage == "flip":
            third[17] ^= 0x40
        if damage == "swap":
            third[:], fourth[:] = fourth.copy(), third.copy()

    async with an_engine(settings(node.address)) as one:
        tokens, end = await one.do(an_attempt(prompt, ANSWER))

    assert tokens == expected
    whole = 6 if damage == "nothing" else 2
    assert blocks_from(end.kv, Source.STORE) == whole
    assert bytes_from(end.kv, Source.STORE) == whole * 2048
    assert blocks_from(end.kv, Source.COMPUTED) == 7 - whole


async def test_missing_store_block_is_computed_with_its_successors(node):
    prompt = fresh_prompt(PROMPT_TOKENS)
    names = chain(prompt, BLOCK_TOKENS)
    async with an_engine(settings()) as alone:  # without a store
        expected, _ = await alone.do(an_attempt(prompt, ANSWER))
        assert isinstance(alone.engine, SimulatedEngine)
        blocks = [bytes(content) for content in alone.engine.memory.find(names)]
    async with a_client(node.address, settings(node.address)) as client:
        assert client.write([*names[:3], *names[4:]], [*blocks[:3], *blocks[4:]]) == 5

    async with an_engine(settings(node.address)) as one:
        tokens, end = await one.do(an_attempt(prompt, ANSWER))

    assert tokens == expected
    assert blocks_from(end.kv, Source.STORE) == 3
    assert blocks_from(end.kv, Source.COMPUTED) == 4


async def test_block_damaged_after_lending_is_computed_by_borrower():
    prompt = fresh_prompt(PROMPT_TOKENS)

    async with (
        an_engine(settings(path=KvPath.DIRECT)) as prefill,
        an_engine(settings(path=KvPath.DIRECT)) as decode,
        an_engine(settings(path=KvPath.DIRECT)) as other,
    ):
        expected, _ = await other.do(an_attempt(prompt, ANSWER))

        def damage(handoff):
            prefill.engine.memory.find(chain(prompt, BLOCK_TOKENS))[4][0] ^= 1
            return handoff

        tokens, _, end = await run_disaggregated(prefill, decode, prompt, ANSWER, KvPath.DIRECT, between=damage)

        assert tokens == expected
        assert blocks_from(end.kv, Source.DIRECT) == 4
        assert blocks_from(end.kv, Source.COMPUTED) == 3
        await prefill.idle()


# The store alone.


async def test_blocks_of_one_engine_are_found_by_another(node):
    prompt = fresh_prompt(PROMPT_TOKENS)
    async with an_engine(settings(node.address)) as first:
        answer, _ = await first.do(an_attempt(prompt, 2 * BLOCK_TOKENS))
        names = chain(prompt + b"".join(token.to_bytes(4, "little") for token in answer[:-1]), BLOCK_TOKENS)
        assert len(names) == 8
        async with a_client(node.address, settings(node.address)) as client:
            await until(lambda: len(client.match(names, lease_seconds=0)) == 8)

    async with an_engine(settings(node.address)) as second:
        conversation = prompt + b"".join(token.to_bytes(4, "little") for token in answer)
        _, end = await second.do(an_attempt(conversation, 1))

    assert blocks_from(end.kv, Source.STORE) == 8


async def test_hung_store_delays_a_request_only_to_its_deadline(node):
    prompt = fresh_prompt(PROMPT_TOKENS)
    expected = await computed_by_one(node, prompt)
    async with an_engine(settings(node.address, load_timeout_ms=200, publish_timeout_ms=200)) as one:
        node.freeze()
        with at_most(20):
            tokens, end = await one.do(an_attempt(prompt, ANSWER))
            _, prefilled = await one.do(an_attempt(fresh_prompt(100), phase=Phase.PREFILL, kv_path=KvPath.STORE))
        node.thaw()

    assert tokens == expected
    assert blocks_from(end.kv, Source.COMPUTED) == 7
    assert prefilled.handoff is not None


async def test_a_store_that_dies_is_a_miss(node):
    prompt = fresh_prompt(PROMPT_TOKENS)
    expected = await computed_by_one(node, prompt)
    async with an_engine(settings(node.address)) as one:
        node.kill()
        tokens, end = await one.do(an_attempt(prompt, ANSWER))

    assert tokens == expected
    assert blocks_from(end.kv, Source.COMPUTED) == 7


async def test_cancelling_during_a_transfer_frees_everything(node):
    prompt = fresh_prompt(PROMPT_TOKENS)
    await computed_by_one(node, prompt)
    async with an_engine(settings(node.address)) as one:
        starts = [an_attempt(prompt, ANSWER) for _ in range(5)]
        one.submit(*starts)
        await turns()
        for start in starts:
            one.engine.cancel(start.request_id)
        for start in starts:
            await one.end_of(start)
        await one.idle()
        _, end = await one.do(an_attempt(prompt, ANSWER))
        assert blocks_from(end.kv, Source.STORE) == 6


async def test_unfetched_blocks_are_freed_when_their_lease_ends():
    told = settings(path=KvPath.DIRECT, direct_lease_ms=100)
    async with an_engine(told) as prefill:
        _, end = await prefill.do(an_attempt(fresh_prompt(PROMPT_TOKENS), phase=Phase.PREFILL, kv_path=KvPath.DIRECT))
        assert end.handoff is not None
        assert prefill.engine.load().kv_blocks_used == 6

        await prefill.idle()

        assert prefill.engine.lending.expired == 1


async def test_request_waiting_for_lent_blocks_starts_at_lease_end():
    told = settings(path=KvPath.DIRECT, direct_lease_ms=100)
    told = msgspec.structs.replace(told, simulated=msgspec.structs.replace(told.simulated, kv_blocks=8))
    async with an_engine(told) as prefill:
        await prefill.do(an_attempt(fresh_prompt(PROMPT_TOKENS), phase=Phase.PREFILL, kv_path=KvPath.DIRECT))

        tokens, _ = await prefill.do(an_attempt(fresh_prompt(PROMPT_TOKENS), 3))

    assert len(tokens) == 3


async def test_engines_with_other_weights_share_no_block(node):
    prompt = fresh_prompt(PROMPT_TOKENS)
    await computed_by_one(node, prompt)

    async with an_engine(settings(node.address, seed=1)) as other:
        _, end = await other.do(an_attempt(prompt, ANSWER))
        assert other.engine.facts.fingerprint != await fingerprint(settings())

    assert blocks_from(end.kv, Source.COMPUTED) == 7


async def fingerprint(told: WorkerSettings) -> str:
    async with open_engine(msgspec.structs.replace(told, kv_paths=())) as engine:
        return engine.facts.fingerprint
