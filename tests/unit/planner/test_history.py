"""History of the demand: cached shares and rates that rise slowly."""

import random

import pytest

from fleet.planner.demand import DemandWindow
from fleet.planner.forecasting.history import DemandHistory
from fleet.planner.rule_settings import PlannerRuleSettings
from tests.unit.planner.world import seconds


def windows(count: int, arrivals: float, prompt: int, cached: float, began: float = 0.0, seed: int = 1):
    chance = random.Random(seed)
    for number in range(count):
        came = max(0, round(chance.gauss(arrivals, arrivals**0.5)))
        yield DemandWindow(
            began=seconds(began + 5.0 * number),
            ended=seconds(began + 5.0 * (number + 1)),
            arrivals=came,
            prompt_tokens=came * prompt,
            prompt_squares=float(came * prompt**2),
            cached_tokens=round(came * prompt * cached),
        )


def test_new_tokens_follow_the_cached_share_when_prompts_grow() -> None:
    history = DemandHistory(PlannerRuleSettings())
    for each in windows(60, 10, 50_000, 0.9):
        history.absorb(each)
    for each in windows(24, 10, 200_000, 0.9, began=300.0):
        history.absorb(each)

    shape = history.load.shape
    assert shape.prompt_tokens == pytest.approx(200_000, rel=0.05)
    assert shape.new_tokens == pytest.approx(20_000, rel=0.05)


def test_short_loss_of_caches_hardly_changes_the_cached_share() -> None:
    history = DemandHistory(PlannerRuleSettings())
    for each in windows(240, 10, 100_000, 0.9):
        history.absorb(each)
    for each in windows(4, 10, 100_000, 0.0, began=1200.0):
        history.absorb(each)
    assert 0.85 < history.cached_share < 0.9


def test_recent_rate_sees_a_rise_before_the_level_does() -> None:
    history = DemandHistory(PlannerRuleSettings())
    for each in windows(240, 10, 1000, 0.0):
        history.absorb(each)
    assert history.recent_rate == history.rate == pytest.approx(2.0, rel=0.1)
    for each in windows(6, 13, 1000, 0.0, began=1200.0):
        history.absorb(each)
    before = history.rate
    assert before < 2.2, "the level has not changed yet"
    assert history.recent_rate > before
