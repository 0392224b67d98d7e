"""Linear latency model compared with measurements, and its shape."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.hardware.latency.linear import EngineLatency

TINY = EngineLatency()
TOKENS = st.integers(0, 100_000)


@pytest.mark.parametrize(("batch", "measured_ms"), [(1, 2.4), (8, 3.8), (32, 8.75)])
def test_decode_steps_are_within_3_percent_of_measurements(batch, measured_ms):
    assert TINY.decode_ms(batch) == pytest.approx(measured_ms, rel=0.03)


def test_prefill_of_3000_tokens_is_within_5_percent():
    assert TINY.prefill_ms(3000) == pytest.approx(210, rel=0.05)


@given(TOKENS, TOKENS)
def test_more_tokens_never_take_less_time(tokens, more):
    costly = EngineLatency(prefill_ms_per_token_and_context=0.001, step_ms_per_context_token=0.001)

    assert costly.prefill_ms(tokens + more) >= costly.prefill_ms(tokens)
    assert costly.prefill_ms(tokens, more) >= costly.prefill_ms(tokens)
    assert costly.decode_ms(tokens + more) >= costly.decode_ms(tokens)
    assert costly.transfer_ms(tokens + more) >= costly.transfer_ms(tokens)


def test_empty_work_takes_no_time():
    assert TINY.prefill_ms(0) == TINY.decode_ms(0) == TINY.transfer_ms(0) == TINY.step_ms([], 0) == 0


def test_chunks_of_one_step_share_one_launch():
    apart = TINY.prefill_ms(100) + TINY.prefill_ms(200)

    assert TINY.step_ms([(100, 0), (200, 0)], 0) == pytest.approx(apart - TINY.prefill_base_ms)


def test_negative_coefficient_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"prefill_base_ms": -1}, EngineLatency)
