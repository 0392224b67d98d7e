"""Test of the limit of the reasoning on a real vLLM engine, also where another worker has begun the answer."""

import msgspec
import pytest

from fleet.frontend.text.codec import load_codec
from fleet.local.tiny_model import build_tiny_model
from tests.support.builders import token_bytes
from tests.support.workers.engine_driver import an_attempt, fresh_prompt, greedy
from tests.support.workers.vllm_engines import VllmEngines, hosted, vllm_worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

START, END = "(", ")"  # in place of <think> and </think>, which the vocabulary of the built-in model lacks
BUDGET, ANSWER = 7, 20


def test_reasoning_ends_after_its_budget(tmp_path):
    folder = build_tiny_model(tmp_path)
    worker, codec = vllm_worker(folder), load_codec(folder)
    start, end = codec.encode(START, False), memoryview(codec.encode(END, False)).cast("I").tolist()
    config = {"reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END}}
    settings = msgspec.structs.replace(worker.vllm, extra_args=config)
    with hosted(msgspec.structs.replace(worker, vllm=settings)) as engines:
        engines.run(reasoning_ends(engines, start, end))


async def reasoning_ends(engines: VllmEngines, start: bytes, end: list[int]) -> None:
    (one,) = engines.engines
    prompt = fresh_prompt(50) + start

    free, _ = await one.do(an_attempt(prompt, sampling=greedy(ANSWER)))
    limited, _ = await one.do(an_attempt(prompt, sampling=greedy(ANSWER, thinking_tokens=BUDGET)))

    assert "thinking_tokens" in one.engine.facts.sampling_fields
    assert end[0] not in free
    assert list(limited[: BUDGET + len(end)]) == [*free[:BUDGET], *end]
    for begun in (1, BUDGET - 1, BUDGET + 1):
        rest = greedy(ANSWER - begun, thinking_tokens=BUDGET)
        known = prompt + token_bytes(limited[:begun])
        continued, _ = await one.do(an_attempt(known, sampling=rest, generated_tokens=begun))

        assert continued == limited[begun:], f"from token {begun}"
