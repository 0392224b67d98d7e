"""Outcomes of a run: quantiles from bins, and which requests count as good."""

from random import Random

import pytest
from msgspec import structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.sim.results.outcomes import EndedRequest, RequestSums, Slo
from fleet.sim.results.quantiles import RESOLUTION, Quantiles


def ended(ttft_ms: float, tpot_ms: float, tokens: int = 11) -> EndedRequest:
    first = Nanos(round(ttft_ms * MILLISECOND))
    end = Nanos(first + round(tpot_ms * (tokens - 1) * MILLISECOND))
    return EndedRequest(
        request_id="1",
        arrival=Nanos(0),
        prompt_tokens=100,
        output_tokens=tokens,
        cached_tokens=25,
        first_token=first,
        end=end,
    )


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_quantile_is_within_resolution(share):
    chance = Random(1)
    values = sorted(chance.lognormvariate(3, 2) for _ in range(5000))
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    assert quantiles.quantile(share) == pytest.approx(values[round(share * 5000) - 1], rel=RESOLUTION)


def test_zeros_are_counted():
    quantiles = Quantiles()
    for value in (0.0, 0.0, 0.0, 8.0):
        quantiles.add(value)
    assert quantiles.quantile(0.5) == 0.0
    assert quantiles.quantile(0.99) == pytest.approx(8.0, rel=RESOLUTION)
    assert quantiles.curve()[0] == (0.0, 0.75)


def test_empty_distribution_has_quantile_zero():
    assert Quantiles().summary() == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p95": 0.0, "p99": 0.0}


def test_good_request_keeps_all_targets():
    tally = RequestSums(Slo(ttft_ms=100.0, tpot_ms=20.0))
    for each in (ended(100, 20), ended(101, 20), ended(100, 20.1), ended(1, 1)):
        tally.add(each)
    assert tally.good == 2
    assert tally.attainment == 0.5
    assert tally.hit_rate == 0.25


def test_rejected_request_is_not_good():
    tally = RequestSums(Slo())
    refusal = EndedRequest(
        request_id="1",
        arrival=Nanos(0),
        prompt_tokens=100,
        output_tokens=0,
        cached_tokens=0,
        first_token=None,
        end=Nanos(5),
        refused="queue_full",
    )
    tally.add(refusal)
    tally.add(ended(1, 1))
    assert tally.refused == {"queue_full": 1}
    assert tally.attainment == 0.5
    assert tally.ttft.count == 1


def test_hits_are_counted_by_tier():
    tally = RequestSums(Slo())
    tally.add(ended(1, 1))
    tally.add(structs.replace(ended(1, 1), tier_tokens={"cpu": 15, "ssd": 5}))
    assert tally.hit_rate_by_tier == {"gpu": 0.15, "cpu": 0.075, "ssd": 0.025}
    assert sum(tally.hit_rate_by_tier.values()) == pytest.approx(tally.hit_rate)


def test_count_adds_many_equal_values():
    quantiles = Quantiles()
    quantiles.add(10.0, 99)
    quantiles.add(1000.0)
    assert quantiles.quantile(0.99) == pytest.approx(10.0, rel=RESOLUTION)
    assert quantiles.quantile(1.0) == pytest.approx(1000.0, rel=RESOLUTION)
    assert quantiles.summary()["mean"] == pytest.approx(19.9)
