"""Blocks that go from one vLLM engine's memory to another's, by vLLM's own NIXL connector.

On a few cores NIXL stalls for seconds now and then (its progress thread and the engine want the same core), so this
proves that it works and says nothing of its speed.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fleet.adapters.tiny_model import build_tiny_model
from fleet.requests import Source
from fleet.roles import KvPath, Phase, Role
from kvstore.block import blocks_for
from tests.engine_driving import blocks_from, bytes_from, fresh_prompt, split, work
from tests.vllm_hosting import Hosted, hosted, vllm_worker
from workers.engines.vllm_launch import direct_available

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM's
    pytest.mark.skipif(direct_available() is not None, reason=direct_available() or ""),
]

BLOCK_TOKENS = 32
BLOCK_BYTES = 128 << 10


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    model_dir: Path = build_tiny_model(tmp_path_factory.mktemp("models"))
    workers = [vllm_worker(model_dir, role=role, kv_paths=(KvPath.DIRECT,)) for role in (Role.PREFILL, Role.DECODE)]
    with hosted(*workers) as pair:
        yield pair


@pytest.mark.parametrize("length", [20, 64, 200, 3000])
def test_blocks_go_from_engine_to_engine_and_the_tokens_are_those_of_one(pair, length):
    prompt = fresh_prompt(length)

    async def run():
        prefill, decode = pair.engines
        moved = await split(prefill, decode, prompt, 40, KvPath.DIRECT, pass_first_token=False)
        alone, _ = await decode.do(work(prompt, 40, salt=b"x" * 32))
        return moved, alone

    (tokens, prefilled, decoded), alone = pair.run(run())

    blocks = blocks_for(length, BLOCK_TOKENS)  # the last one as well, though it may not be full
    assert tokens == alone
    assert blocks_from(prefilled.kv, Source.COMPUTED) == blocks
    assert blocks_from(decoded.kv, Source.DIRECT) == blocks
    assert bytes_from(decoded.kv, Source.DIRECT) == blocks * BLOCK_BYTES
    assert decoded.kv.cached_tokens == length - 1  # the last token is always computed
    assert pair.engines[1].told[decoded.request_id] == [decoded.kv, decoded.kv]  # with the first tokens, and at the end


def test_blocks_that_the_decode_side_has_are_not_moved_again(pair):
    prompt = fresh_prompt(100)
    prefill, decode = pair.engines
    pair.run(split(prefill, decode, prompt, 4, KvPath.DIRECT, pass_first_token=False))

    longer = prompt + fresh_prompt(100)
    _, _, decoded = pair.run(split(prefill, decode, longer, 4, KvPath.DIRECT, pass_first_token=False))

    assert blocks_from(decoded.kv, Source.ENGINE) == 3
    assert blocks_from(decoded.kv, Source.DIRECT) == 4


@pytest.mark.parametrize("params", [b"", b"[]", b"{}", b'{"do_remote_decode": true}'])
def test_a_useless_hand_off_costs_time_and_nothing_else(pair, params):
    prompt = fresh_prompt(100)
    prefill, decode = pair.engines
    first, prefilled = pair.run(prefill.do(work(prompt, phase=Phase.PREFILL, kv_path=KvPath.DIRECT)))
    handoff = msgspec.structs.replace(prefilled.handoff, params=params)

    tokens, end = pair.run(decode.do(work(prompt, 6, phase=Phase.DECODE, handoff=handoff)))

    assert tokens[:1] == first
    assert blocks_from(end.kv, Source.COMPUTED) == 4
