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
from tests.support.workers.vllm_engines import VllmEngines, hosted, tiny_namespace, vllm_worker
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
    assert (
        blocks_from(end.kv, Source.COMPUTED) + blocks_from(end.kv, Source.STORE) == 4
    )  # the store may have them by now


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
