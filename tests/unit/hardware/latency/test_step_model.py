"""Step model: limits of the hardware, additional times, and monotony."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.hardware.latency.step_model import Efficiency, pairs, step_model, work
from tests.support.sim.model_configs import DEEPSEEK_V3, GPT_OSS, LLAMA_70B, MIXTRAL, a_placement

PERFECT = Efficiency(
    memory=1,
    compute=1,
    experts_memory=1,
    experts_compute=1,
    attention=1,
    kv=1,
    link=1,
    exchange_us=0,
    layer_us=0,
    moe_layer_us=0,
    step_us=0,
    sequence_us=0,
)

USUAL = Efficiency(
    memory=0.75,
    compute=0.5,
    experts_memory=0.7,
    experts_compute=0.5,
    attention=0.6,
    kv=0.8,
    link=0.5,
    exchange_us=4,
    layer_us=40,
    moe_layer_us=35,
    step_us=150,
    sequence_us=20,
)

MODELS = [
    step_model(work(a_placement(LLAMA_70B, tp=8)), USUAL),
    step_model(work(a_placement(MIXTRAL, tp=2)), USUAL),
    step_model(work(a_placement(DEEPSEEK_V3, on="h200", tp=8)), USUAL),
    step_model(work(a_placement(DEEPSEEK_V3, on="b200", tp=1, dp=8, ep=8)), USUAL),
    step_model(work(a_placement(GPT_OSS, tp=1)), USUAL),
]

TOKENS = st.integers(0, 100_000)
SEQUENCES = st.integers(1, 2_000)


def test_single_sequence_decodes_at_memory_speed():
    step = step_model(work(a_placement(LLAMA_70B, tp=4)), PERFECT)

    weights = (70.55e9 - 8192 * 128256) * 2 / 4 / 3.35e12
    assert step.seconds(0, 0, 1, 0) == pytest.approx(weights, rel=0.02)


def test_long_prompt_runs_at_compute_speed():
    step = step_model(work(a_placement(LLAMA_70B, tp=4)), PERFECT)

    multiplying = 2 * 68.45e9 * 100_000 / 4 / 989.4e12
    exchanging = 2 * 80 * 2 * 3 / 4 * 16_384 * 100_000 / 450e9
    assert step.seconds(100_000, 0, 0, 0) == pytest.approx(multiplying + exchanging, rel=0.02)


def test_attention_grows_with_square_of_prompt():
    step = step_model(work(a_placement(LLAMA_70B, tp=4)), PERFECT)

    attention = step.seconds(32_768, pairs(32_768, 0), 0, 0) - step.seconds(32_768, 0, 0, 0)
    assert attention == pytest.approx(4 * 80 * 64 * 128 * 32_768**2 / 2 / 4 / 989.4e12)


def test_context_is_read_once_per_decode_step():
    step = step_model(work(a_placement(LLAMA_70B, tp=8)), PERFECT)

    assert step.seconds(0, 0, 8, 80_000) - step.seconds(0, 0, 8, 0) == pytest.approx(80_000 * 40_960 / 3.35e12)


def test_few_tokens_read_few_experts():
    step = step_model(work(a_placement(DEEPSEEK_V3, on="h200", tp=8)), PERFECT)

    some, many = (step.seconds(0, 0, decodes, 0) for decodes in (1, 64))
    assert many > 3 * some


def test_chunks_have_as_many_pairs_as_whole_prompt():
    assert pairs(1000, 0) + pairs(1000, 1000) == pairs(2000, 0)


@pytest.mark.parametrize("step", MODELS)
@given(prefill=TOKENS, context=TOKENS, more=TOKENS, decodes=SEQUENCES)
def test_more_work_never_takes_less_time(step, prefill, context, more, decodes):
    base = step.seconds(prefill, pairs(prefill, context), decodes, context)

    assert base > 0
    assert step.seconds(prefill + more, pairs(prefill + more, context), decodes, context) >= base
    assert step.seconds(prefill, pairs(prefill, context + more), decodes, context) >= base
    assert step.seconds(prefill, pairs(prefill, context), decodes + more, context) >= base
    assert step.seconds(prefill, pairs(prefill, context), decodes, context + more) >= base


@pytest.mark.parametrize("step", MODELS)
def test_mixed_step_takes_less_than_two_steps(step):
    mixed = step.seconds(512, pairs(512, 0), 16, 16_000)

    assert mixed < step.seconds(512, pairs(512, 0), 0, 0) + step.seconds(0, 0, 16, 16_000)


def test_more_gpus_never_take_longer_at_large_batches():
    times = [
        step_model(work(a_placement(LLAMA_70B, on="h200", tp=tp)), USUAL).seconds(0, 0, 64, 64_000) for tp in (2, 4, 8)
    ]

    assert times == sorted(times, reverse=True)


def test_arrays_give_same_results_as_numbers():
    step = MODELS[3]
    prefill, decodes = np.array([0.0, 512.0, 8192.0]), np.array([1.0, 64.0, 0.0])

    together = step.seconds(prefill, pairs(prefill, 0.0), decodes, decodes * 1000)

    one_by_one = [
        step.seconds(each, pairs(each, 0.0), some, some * 1000) for each, some in zip(prefill, decodes, strict=True)
    ]
    assert together.tolist() == pytest.approx(one_by_one, rel=1e-12)


def test_call_takes_microseconds():
    """Limit the time of a call, because the simulator makes 100,000 calls a second; a call takes about 1 µs on an idle machine."""
    step = MODELS[2]
    best = min(_seconds(step, 2_000) for _ in range(20))

    assert best / 2_000 < 20e-6


def _seconds(step, calls):
    begun = time.perf_counter()
    for _ in range(calls):
        step.seconds(512, 131_072.0, 32, 64_000)
    return time.perf_counter() - begun
