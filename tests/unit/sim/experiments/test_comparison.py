"""Comparison of scenarios: differences of pairs and their confidence intervals."""

from random import Random

import pytest
from msgspec import structs

from fleet.sim.experiments.comparison import compare, means
from fleet.sim.experiments.confidence_interval import confidence_interval
from fleet.sim.results.outcomes import RunOutcome
from tests.support.sim.worlds import a_plan, a_run


@pytest.fixture(scope="module")
def outcome() -> RunOutcome:
    return a_run(a_plan(), requests=20).outcome


def with_goodput(outcome: RunOutcome, *values: float) -> list[RunOutcome]:
    return [structs.replace(outcome, goodput_rps=value) for value in values]


def figure(compared, name: str):
    return next(each for each in compared.figures if each.name == name)


def test_interval_uses_student_t():
    # Two-sided 95 % with 4 degrees of freedom: 2.776 standard errors, each the square root of 0.5.
    known = confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert known.mean == 3.0
    assert (known.low, known.high) == pytest.approx((3 - 2.776 * 0.5**0.5, 3 + 2.776 * 0.5**0.5), abs=1e-3)


def test_single_value_has_no_limits():
    assert (confidence_interval([4.0]).low, confidence_interval([4.0]).high) == (None, None)


@pytest.mark.parametrize("count", [3, 10, 40])
def test_interval_contains_mean_in_95_percent(count):
    chance = Random(count)
    held = sum(
        known.low <= 0 <= known.high
        for known in (confidence_interval([chance.gauss(0, 1) for _ in range(count)]) for _ in range(2000))
    )
    assert held / 2000 == pytest.approx(0.95, abs=0.016)


def test_pairs_show_difference_below_spread(outcome):
    """Compare scenarios that differ by 1 while seeds differ by 10: only differences for equal seeds show this."""
    a = with_goodput(outcome, 10.0, 20.0, 30.0, 40.0)
    b = with_goodput(outcome, 11.0, 21.1, 30.9, 41.0)
    compared = compare(("a", "b"), (1, 2, 3, 4), list(zip(a, b, strict=True)), same_requests=True)
    difference = figure(compared, "goodput_rps")
    assert (difference.a, difference.b) == (25.0, 26.0)
    assert difference.difference.low > 0.8
    assert difference.verdict == "better"
    assert figure(compared, "attainment").verdict == ""


def test_no_verdict_if_interval_contains_zero(outcome):
    a, b = with_goodput(outcome, 10.0, 20.0, 30.0), with_goodput(outcome, 15.0, 14.0, 34.0)
    compared = compare(("a", "b"), (1, 2, 3), list(zip(a, b, strict=True)), same_requests=True)
    assert figure(compared, "goodput_rps").verdict == ""
    one = compare(("a", "b"), (1,), [(a[0], b[0])], same_requests=True)
    assert figure(one, "goodput_rps").verdict == ""


def test_lower_is_better_for_latencies(outcome):
    dearer = [structs.replace(outcome, cost_per_million_tokens=2 * outcome.cost_per_million_tokens)] * 3
    compared = compare(("a", "b"), (1, 2, 3), [(outcome, each) for each in dearer], same_requests=True)
    assert figure(compared, "cost_per_million_tokens").verdict == "worse"


def test_means_have_intervals(outcome):
    assert means(with_goodput(outcome, 1.0, 2.0, 3.0))["goodput_rps"].mean == 2.0
