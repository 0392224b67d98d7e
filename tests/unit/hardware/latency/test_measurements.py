"""Measurements: held-out curves, duplicates, and errors."""

import msgspec
import pytest

from fleet.hardware.latency.measurements import accuracy, cells, distinct
from tests.unit.hardware.latency.measured import a_measurement


def test_points_of_one_curve_are_held_out_together():
    changes = [{"concurrency": 4}, {"version": "0.1"}, {"ttft_ms": 3.0}, {"client": "another"}]
    for prompt_tokens in range(1000, 1050):
        one = a_measurement(prompt_tokens=prompt_tokens)
        others = [msgspec.structs.replace(one, **change) for change in changes]
        assert {each.held_out for each in others} == {one.held_out}


def test_about_a_fifth_of_curves_is_held_out():
    held_out = sum(a_measurement(prompt_tokens=tokens).held_out for tokens in range(1, 1001))

    assert 150 < held_out < 250


def test_split_is_the_same_everywhere():
    """Compare the split with a fixed one, because the published errors are valid only for this split."""
    chosen = [tokens for tokens in range(1, 31) if a_measurement(prompt_tokens=tokens).held_out]

    assert chosen == [2, 9, 14, 21, 23, 25]


def test_same_figures_under_two_names_are_one_measurement():
    one = a_measurement()

    assert distinct([one, msgspec.structs.replace(one, model="another")]) == [one]
    assert len(distinct([one, msgspec.structs.replace(one, ttft_ms=101.0)])) == 2


def test_errors_are_relative_to_measurement():
    measured = [a_measurement(ttft_ms=100.0, tpot_ms=10.0), a_measurement(ttft_ms=200.0, tpot_ms=10.0)]

    found = accuracy(measured, lambda _: (150.0, 11.0))

    assert found.rows == 2
    assert found.ttft_mape == pytest.approx((0.5 + 0.25) / 2)
    assert found.ttft_median == pytest.approx(0.375)
    assert found.tpot_mape == found.tpot_median == pytest.approx(0.1)


def test_cells_cover_all_and_each_engine_gpu_and_model():
    measured = [a_measurement(), a_measurement(gpu="b200", model="another"), a_measurement(backend="sglang")]

    found = {(cell.system, cell.backend, cell.model): sum(map(cell.holds, measured)) for cell in cells(measured)}

    assert found == {
        ("all", "all", "all"): 3,
        ("all", "vllm", "all"): 2,
        ("all", "sglang", "all"): 1,
        ("h100", "vllm", "all"): 1,
        ("b200", "vllm", "all"): 1,
        ("h100", "sglang", "all"): 1,
        ("all", "all", "llama-3.1-70b"): 2,
        ("all", "all", "another"): 1,
    }


def test_no_measurements_have_no_accuracy():
    assert accuracy([], lambda _: (1.0, 1.0)) is None
