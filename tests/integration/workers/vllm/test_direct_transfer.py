"""Tests of blocks that move from one vLLM engine's memory to another's by vLLM's own NIXL connector.

On a few cores NIXL stalls for seconds now and then, since its progress thread and the engine share a core. The tests
therefore say nothing about speed.
"""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fleet.core.requests import Source
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import PulledBlocks
from fleet.local.tiny_model import build_tiny_model
from kvstore.block import blocks_for, chain
from tests.support.kvstore.builders import NodeProcess, a_node, a_store_client
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually
from tests.support.workers.engine_driver import (
    an_attempt,
    blocks_from,
    bytes_from,
    fresh_prompt,
    reported_early_and_late,
    run_disaggregated,
    without_tiers,
)
from tests.support.workers.engine_memory import LentMemory
from tests.support.workers.vllm_engines import VllmEngines, hosted, tiny_namespace, vllm_worker
from workers.engines.vllm.blocks.handoff_checksums import CHECKSUMS
from workers.engines.vllm.launch import direct_available

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
    pytest.mark.skipif(direct_available() is not None, reason=direct_available() or ""),
]

BLOCK_TOKENS = 32
BLOCK_BYTES = 128 << 10


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with a_node(capacity_bytes=64 << 20) as node:
        yield node


@pytest.fixture(scope="module")
def pair(model_dir: Path, node: NodeProcess) -> Iterator[VllmEngines]:
    """Open two engines that also have a store; direct handoffs do not use it."""
    workers = [
        vllm_worker(model_dir, role=role, store=node.address, kv_paths=(KvPath.DIRECT, KvPath.STORE))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    with hosted(*workers) as pair:
        yield pair


@pytest.mark.parametrize("length", [20, 64, 200, 3000])
def test_direct_transfer_gives_the_tokens_of_one_engine(pair, length):
    prompt = fresh_prompt(length)

    async def run():
        prefill, decode = pair.engines
        moved = await run_disaggregated(prefill, decode, prompt, 40, KvPath.DIRECT, pass_first_token=False)
        alone, _ = await decode.do(an_attempt(prompt, 40, salt=b"x" * 32))
        return moved, alone

    (tokens, prefilled, decoded), alone = pair.run(run())

    blocks = blocks_for(length, BLOCK_TOKENS)  # including the last block, which may not be full
    assert tokens == alone
    assert blocks_from(prefilled.kv, Source.COMPUTED) == blocks
    assert blocks_from(decoded.kv, Source.DIRECT) == blocks
    assert bytes_from(decoded.kv, Source.DIRECT) == blocks * BLOCK_BYTES
    assert decoded.kv.cached_tokens == length - 1  # the last token is always computed
    assert reported_early_and_late(pair.engines[1].told[decoded.request_id], decoded.kv, decoded.kv)


def test_only_direct_handoffs_count_as_lent(pair):
    prefill = pair.engines[0]

    async def run():
        await prefill.do(an_attempt(fresh_prompt(64), phase=Phase.PREFILL, kv_path=KvPath.DIRECT))
        lent, leases = prefill.engine.lent, set(prefill.engine.lent_until)
        await prefill.do(an_attempt(fresh_prompt(64), phase=Phase.PREFILL, kv_path=KvPath.STORE))
        more = set(prefill.engine.lent_until) - leases
        prefill.engine.lent_until = deque([0.0])  # as if all leases had ended
        return lent, more, prefill.engine.lent

    lent, more, left = pair.run(run())

    assert lent >= 1
    assert (more, left) == (set(), 0)


def test_blocks_that_the_decode_side_has_are_not_moved_again(pair):
    prompt = fresh_prompt(100)
    prefill, decode = pair.engines
    pair.run(run_disaggregated(prefill, decode, prompt, 4, KvPath.DIRECT, pass_first_token=False))

    longer = prompt + fresh_prompt(100)
    _, _, decoded = pair.run(run_disaggregated(prefill, decode, longer, 4, KvPath.DIRECT, pass_first_token=False))

    assert blocks_from(decoded.kv, Source.ENGINE) == 3
    assert blocks_from(decoded.kv, Source.DIRECT) == 4


@pytest.mark.parametrize("params", [b"", b"[]", b"{}", b'{"do_remote_decode": true}'])
def test_useless_handoff_costs_only_time(pair, params):
    prompt = fresh_prompt(100)
    prefill, decode = pair.engines
    first, prefilled = pair.run(prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.DIRECT)))
    handoff = msgspec.structs.replace(prefilled.handoff, params=params)

    tokens, end = pair.run(decode.do(an_attempt(prompt, 6, phase=Phase.DECODE, handoff=handoff)))

    assert tokens[:1] == first
    assert blocks_from(end.kv, Source.DIRECT) == 0
    # The store may have the blocks by now.
    assert blocks_from(end.kv, Source.COMPUTED) + blocks_from(end.kv, Source.STORE) == 4


def test_store_blocks_after_a_failed_pull_are_reported_as_store(pair, node, model_dir):
    """End the answer with a stop string, before the engine's last report."""
    prompt = fresh_prompt(200)
    prefill, decode = pair.engines
    _, prefilled = pair.run(prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.DIRECT)))
    with a_store_client(node.address, tiny_namespace(model_dir)) as client:
        eventually(lambda: len(client.match(chain(prompt, BLOCK_TOKENS), lease_seconds=0)) == 6, 20)
    params = json.loads(prefilled.handoff.params) | {"remote_engine_id": "gone", "remote_port": a_free_port()}
    handoff = msgspec.structs.replace(prefilled.handoff, params=json.dumps(params).encode())
    start = an_attempt(prompt, 6, phase=Phase.DECODE, handoff=handoff)

    tokens, end = pair.run(decode.do(start))

    assert tokens == pair.run(decode.do(an_attempt(prompt, 6, salt=b"f" * 32)))[0]
    assert (blocks_from(end.kv, Source.STORE), blocks_from(end.kv, Source.DIRECT)) == (6, 0)
    assert reported_early_and_late(decode.told[start.request_id], without_tiers(end.kv), end.kv)


BLOCKS = 7  # of a prompt of 200 tokens; the last one is not full


def pulled_by(engine) -> PulledBlocks:
    return engine.engine.load().pulled


def since(before: PulledBlocks, after: PulledBlocks) -> tuple[int, int, int]:
    """Return how many blocks were verified, corrupt and unverified between two counts."""
    return (
        after.verified - before.verified,
        after.corrupt - before.corrupt,
        after.unverified - before.unverified,
    )


def hand_over(pair, change, prompt):
    """Hand a prompt over, and change the handoff or the lent memory on the way.

    Return the tokens, the tokens of one engine, the KV report of the decode side, and what its check has counted.
    """
    prefill, decode = pair.engines
    before = pulled_by(decode)

    async def run():
        moved, _, end = await run_disaggregated(
            prefill, decode, prompt, 40, KvPath.DIRECT, between=change, pass_first_token=False
        )
        alone, _ = await decode.do(an_attempt(prompt, 40, salt=b"x" * 32))
        return moved, alone, end.kv

    moved, alone, report = pair.run(run())
    return moved, alone, report, since(before, pulled_by(decode))


def params_of(handoff) -> dict:
    return json.loads(handoff.params)


def with_params(handoff, params: dict):
    return msgspec.structs.replace(handoff, params=json.dumps(params).encode())


def test_pulled_blocks_are_verified(pair):
    moved, alone, report, counted = hand_over(pair, lambda handoff: handoff, fresh_prompt(200))

    assert moved == alone
    assert blocks_from(report, Source.DIRECT) == BLOCKS
    assert counted == (BLOCKS, 0, 0)


@pytest.mark.parametrize(
    ("position", "layer", "byte"), [(0, 0, 0), (3, 2, 12_345), (BLOCKS - 1, 3, 3)], ids=["first", "middle", "last"]
)
def test_flipped_bit_of_a_lent_block_changes_no_token(pair, position, layer, byte):
    def damage(handoff):
        LentMemory(params_of(handoff)).flip(position, layer=layer, first=byte)
        return handoff

    moved, alone, report, counted = hand_over(pair, damage, fresh_prompt(200))

    assert moved == alone
    assert counted == (BLOCKS - 1, 1, 0)
    assert blocks_from(report, Source.DIRECT) == position
    assert blocks_from(report, Source.DIRECT) + blocks_from(report, Source.COMPUTED) == BLOCKS


def test_blocks_in_wrong_order_change_no_token(pair):
    def swap(handoff):
        params = params_of(handoff)
        (ids,) = params["remote_block_ids"]
        ids[1], ids[4] = ids[4], ids[1]
        return with_params(handoff, params)

    moved, alone, report, counted = hand_over(pair, swap, fresh_prompt(200))

    assert moved == alone
    assert counted == (BLOCKS - 2, 2, 0)
    assert blocks_from(report, Source.DIRECT) == 1


def test_handoff_of_the_previous_version_is_pulled_unverified(pair):
    def forget(handoff):
        params = params_of(handoff)
        del params[CHECKSUMS]
        return with_params(handoff, params)

    moved, alone, report, counted = hand_over(pair, forget, fresh_prompt(200))

    assert moved == alone
    assert blocks_from(report, Source.DIRECT) == BLOCKS
    assert counted == (0, 0, BLOCKS)


def test_damage_without_checksums_does_change_the_tokens(pair):
    """Show that the damage in the tests above is not harmless."""

    def damage_unnoticed(handoff):
        params = params_of(handoff)
        memory = LentMemory(params)
        for layer in range(memory.layers):
            memory.flip(3, layer=layer, first=3, step=4)  # the exponents of all numbers
        del params[CHECKSUMS]
        return with_params(handoff, params)

    moved, alone, _, counted = hand_over(pair, damage_unnoticed, fresh_prompt(200))

    assert counted == (0, 0, BLOCKS)
    assert moved != alone


def test_only_pulled_blocks_of_a_longer_prompt_are_verified(pair):
    prompt = fresh_prompt(100)
    hand_over(pair, lambda handoff: handoff, prompt)

    moved, alone, report, counted = hand_over(pair, lambda handoff: handoff, prompt + fresh_prompt(100))

    assert moved == alone
    assert counted == (blocks_from(report, Source.DIRECT), 0, 0) == (4, 0, 0)
