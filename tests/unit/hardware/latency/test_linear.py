"""Linear latency model: compared with measurements, and term by term."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.hardware.latency.linear import EngineLatency

TINY = EngineLatency()
TOKENS = st.integers(0, 100_000)


@pytest.mark.parametrize(("batch", "measured_ms"), [(1, 2.4), (8, 3.8), (32, 8.75)])
def test_decode_steps_are_within_3_percent_of_measurements(batch, measured_ms):
    assert TINY.seconds(0, 0, batch, 0) == pytest.approx(measured_ms / 1000, rel=0.03)


def test_prefill_of_3000_tokens_is_within_5_percent():
    assert TINY.seconds(3000, 0, 0, 0) == pytest.approx(0.210, rel=0.05)


@given(TOKENS, TOKENS)
def test_more_tokens_never_take_less_time(tokens, more):
    costly = EngineLatency(prefill_ms_per_token_and_context=0.001, step_ms_per_context_token=0.001)

    assert costly.seconds(tokens + more, 0, 0, 0) >= costly.seconds(tokens, 0, 0, 0)
    assert costly.seconds(tokens, more, 0, 0) >= costly.seconds(tokens, 0, 0, 0)
    assert costly.seconds(0, 0, tokens + more, 0) >= costly.seconds(0, 0, tokens, 0)
    assert costly.seconds(0, 0, tokens, more) >= costly.seconds(0, 0, tokens, 0)
    assert costly.transfer_ms(tokens + more) >= costly.transfer_ms(tokens)


def test_empty_work_takes_no_time():
    assert TINY.seconds(0, 0, 0, 0) == TINY.transfer_ms(0) == 0


def test_step_of_prompts_and_answers_adds_straight_lines():
    """Compute a step of two prompts of 100 tokens, one of them after 50 cached tokens, and three sequences with 1,000 tokens."""
    lines = EngineLatency(
        prefill_base_ms=2.0,
        prefill_ms_per_token=0.1,
        prefill_ms_per_token_and_context=0.001,
        step_base_ms=8.0,
        step_ms_per_sequence=0.5,
        step_ms_per_context_token=0.01,
    )
    attended = 100 * 50 + 100 * (50 + 50)

    prompts, answers = 2.0 + 0.1 * 200 + 0.001 * attended, 8.0 + 0.5 * 3 + 0.01 * 1000
    assert 1000 * lines.seconds(200, attended, 3, 1000) == pytest.approx(prompts + answers)
    assert 1000 * lines.seconds(0, 0, 3, 1000) == pytest.approx(answers)


def test_negative_coefficient_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"prefill_base_ms": -1}, EngineLatency)
