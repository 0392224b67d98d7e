"""Test of seeds on a real vLLM engine whose steps are shorter than a prompt: nothing ends it, and the tokens stay the same."""

import msgspec
import pytest

from fleet.core.requests import Sampling
from fleet.local.tiny_model import build_tiny_model
from tests.support.builders import token_bytes
from tests.support.workers.engine_driver import an_attempt, fresh_prompt
from tests.support.workers.vllm_engines import VllmEngines, hosted, vllm_worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

PROMPT_TOKENS, STEP_TOKENS, ANSWER, BEGUN = 200, 64, 12, 5


def seeded(max_tokens: int) -> Sampling:
    return Sampling(temperature=1.0, seed=3, max_tokens=max_tokens, ignore_eos=True)


def test_seed_survives_prompts_that_take_several_steps(tmp_path):
    worker = vllm_worker(build_tiny_model(tmp_path))
    settings = msgspec.structs.replace(worker.vllm, extra_args={"max_num_batched_tokens": STEP_TOKENS})
    with hosted(msgspec.structs.replace(worker, vllm=settings)) as engines:
        engines.run(tokens_stay_the_same(engines))


async def tokens_stay_the_same(engines: VllmEngines) -> None:
    (one,) = engines.engines
    prompt, salts = fresh_prompt(PROMPT_TOKENS), (b"a" * 32, b"b" * 32)

    in_parts, end = await one.do(an_attempt(prompt, sampling=seeded(ANSWER), salt=salts[0]))
    cached, again = await one.do(an_attempt(prompt, sampling=seeded(ANSWER), salt=salts[0]))
    begun = prompt + token_bytes(in_parts[:BEGUN])
    continued, last = await one.do(
        an_attempt(begun, sampling=seeded(ANSWER - BEGUN), salt=salts[1], generated_tokens=BEGUN)
    )

    assert [each.kv.cached_tokens > PROMPT_TOKENS - STEP_TOKENS for each in (end, again, last)] == [False, True, False]
    assert cached == in_parts
    assert continued == in_parts[BEGUN:]
