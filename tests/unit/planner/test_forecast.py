"""Forecasts of the demand, the back-test that chooses a method, and smoothed levels."""

import math
import random

import pytest

from fleet.planner.forecasting.forecast import (
    ChosenForecaster,
    Forecaster,
    LastValue,
    LocalTrend,
    Seasonal,
    WeightedMean,
)
from fleet.planner.forecasting.level import Level

STEP, HORIZON = 15.0, 120.0


def methods() -> dict[str, Forecaster]:
    return {
        "mean": WeightedMean(half_life_steps=4),
        "last": LastValue(STEP),
        "trend": LocalTrend(STEP),
        "seasonal": Seasonal(STEP, 100 * STEP),
    }


def chosen_after(values: list[float]) -> ChosenForecaster:
    chosen = ChosenForecaster(methods(), STEP, HORIZON)
    for each in values:
        chosen.update(each)
    return chosen


def noisy(mean: float, chance: random.Random) -> float:
    return max(0.0, chance.gauss(mean, mean**0.5))


def test_constant_load_is_forecast_by_a_mean() -> None:
    chance = random.Random(1)
    chosen = chosen_after([noisy(50.0, chance) for _ in range(400)])
    assert chosen.chosen in {"mean", "seasonal"}
    assert chosen.forecast(HORIZON).mean == pytest.approx(50.0, rel=0.2)
    assert chosen.error is not None
    assert chosen.error < 0.2


def test_ramp_is_forecast_by_its_trend() -> None:
    chance = random.Random(2)
    chosen = chosen_after([noisy(10.0 + 0.5 * step, chance) for step in range(300)])
    assert chosen.chosen == "trend"
    assert chosen.forecast(HORIZON).mean == pytest.approx(10.0 + 0.5 * 308, rel=0.1)


def test_season_is_forecast_after_its_first_round() -> None:
    def load(step: int) -> float:
        return 60.0 + 50.0 * math.sin(step / 100 * 2 * math.pi)

    chance = random.Random(3)
    chosen = chosen_after([noisy(load(step), chance) for step in range(700)])
    assert chosen.chosen == "seasonal"
    assert chosen.forecast(HORIZON).mean == pytest.approx(load(707), rel=0.2)


def test_every_method_reports_its_error() -> None:
    scores = {each.method: each for each in chosen_after([5.0] * 50).scores}
    assert set(scores) == set(methods())
    assert all(each.samples == 50 - 8 and each.relative < 0.05 for each in scores.values())


def test_upper_bound_covers_most_values() -> None:
    chance = random.Random(4)
    chosen, above = ChosenForecaster(methods(), STEP, STEP), 0
    for step in range(600):
        value = noisy(40.0, chance)
        above += step >= 100 and value > chosen.forecast(STEP).upper
        chosen.update(value)
    assert 0.05 < above / 500 < 0.3  # one standard error: about a sixth of the values is above


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_impossible_value_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="is not a number of at least 0"):
        chosen_after([1.0]).update(value)


def level() -> Level:
    return Level(lambda mean: mean, threshold=4.0)


def test_level_of_chance_arrivals_hardly_changes() -> None:
    chance, found = random.Random(5), level()
    changes = sum(found.add(5.0, sum(chance.random() < 0.01 for _ in range(5000))) for _ in range(2000))
    assert changes <= 1
    assert found.mean == pytest.approx(10.0, rel=0.1)


def test_level_follows_a_step_at_once() -> None:
    found = level()
    for _ in range(300):
        found.add(5.0, 20.0)
    assert found.add(5.0, 100.0)
    assert found.mean == pytest.approx(20.0)


def test_level_follows_the_end_of_load() -> None:
    found = level()
    for _ in range(300):
        found.add(5.0, 20.0)
    for _ in range(3):
        found.add(5.0, 0.0)
    assert found.mean == 0.0


def test_level_sees_five_times_the_arrivals_in_one_sample() -> None:
    found = level()
    for _ in range(100):
        found.add(5.0, 5.0)
    assert found.add(5.0, 25.0)
    assert found.mean == 5.0


def test_level_takes_one_sample_without_arrivals_for_chance() -> None:
    found = level()
    for _ in range(100):
        found.add(5.0, 5.0)
    assert not found.add(5.0, 0.0)
