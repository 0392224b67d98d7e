"""History of the demand: when more requests are late than the goals allow, the share of cached tokens, and slowly rising rates."""

import random

import pytest

from fleet.core.duration_counts import EDGES, bucket_of, within
from fleet.planner.decisions import PlanGoals
from fleet.planner.demand import DemandWindow
from fleet.planner.forecasting.attainment import Attainment
from fleet.planner.forecasting.history import DemandHistory
from fleet.planner.rule_settings import PlannerRuleSettings
from tests.unit.planner.world import seconds

GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.05, percentile=0.95)
EARLY, LATE = 0.5, 3.0


def counts(*values: tuple[float, int]) -> tuple[int, ...]:
    found = [0] * (len(EDGES) + 1)
    for value, count in values:
        found[bucket_of(value)] += count
    return tuple(found)


class Minutes:
    """Gives the history windows of five seconds in which a share of the requests is late."""

    def __init__(self, field: str = "ttft", scale: float = 1.0) -> None:
        self.attainment = Attainment(GOALS)
        self.field, self.scale, self.now = field, scale, 0.0

    def run(self, minutes: float, late: float, each: int = 100, **fields: object) -> None:
        for _ in range(round(minutes * 12)):
            missed = round(each * late)
            durations = counts((EARLY * self.scale, each - missed), (LATE * self.scale, missed))
            began, self.now = self.now, self.now + 5.0
            self.attainment.absorb(
                DemandWindow(began=seconds(began), ended=seconds(self.now), **({self.field: durations} | fields))  # type: ignore[arg-type]
            )


def test_one_bad_minute_after_a_good_half_hour_is_no_miss() -> None:
    world = Minutes()
    world.run(25, 0.0)
    world.run(1, 0.2)
    assert not world.attainment.misses_ttft
    assert not world.attainment.overspent


def test_minute_of_eight_times_the_budget_is_a_miss_at_once() -> None:
    world = Minutes()
    world.run(25, 0.0)
    world.run(1, 0.5)
    assert world.attainment.misses_ttft
    assert not world.attainment.misses_tpot


def test_budget_that_is_overspent_for_long_is_a_miss() -> None:
    world = Minutes("tpot", scale=0.05)
    world.run(25, 0.08)
    assert world.attainment.misses_tpot
    assert world.attainment.overspent
    world.run(1, 0.0)
    assert not world.attainment.misses_tpot, "it is over"
    assert not world.attainment.overspent


def test_chance_around_the_allowed_share_is_no_miss() -> None:
    world = Minutes()
    world.run(25, 0.06, each=16)  # one of 16 requests is late in each window
    assert world.attainment.overspent
    assert not world.attainment.misses_ttft


def test_late_requests_that_wait_in_routers_count() -> None:
    world = Minutes()
    world.run(5, 0.0)
    world.run(5 / 60, 0.0, queued=2000, oldest_seconds=4.0)
    assert world.attainment.misses_ttft
    world.run(5 / 60, 0.0, queued=2000, oldest_seconds=0.9)
    assert not world.attainment.misses_ttft


def test_half_an_hour_later_nothing_is_left_of_a_miss() -> None:
    world = Minutes()
    world.run(5, 0.5)
    world.now += 1800.0
    world.run(1, 0.07)
    world.run(1, 0.0)
    assert not world.attainment.overspent


@pytest.mark.parametrize(("late", "unspent"), [(0.02, True), (0.03, False)])
def test_budget_is_unspent_until_half_of_it_is_late(late: float, unspent: bool) -> None:
    world = Minutes()
    prompt = counts((0.01, 100))
    world.run(25, 0.0, tpot=prompt)
    assert world.attainment.unspent
    world.run(1, late, tpot=prompt)
    assert world.attainment.unspent == unspent
    world.run(25, late, tpot=prompt)
    world.run(1, 0.0, tpot=prompt)
    assert world.attainment.unspent == unspent, "the last half hour counts, too"


def test_budget_without_enough_measured_requests_is_not_unspent() -> None:
    world = Minutes()
    world.run(5, 0.0)
    assert not world.attainment.unspent, "no TPOT was measured"
    few = Minutes()
    few.run(5 / 60, 0.0, each=19, tpot=counts((0.01, 19)))
    assert not few.attainment.unspent
    few.run(5 / 60, 0.0, each=19, tpot=counts((0.01, 19)))
    assert few.attainment.unspent


@pytest.mark.parametrize(("seconds_", "expected"), [(0.0001, 0.0), (EDGES[8], 4.0), (EDGES[9], 10.0), (1e9, 10.0)])
def test_values_within_a_duration_are_counted_by_bucket(seconds_: float, expected: float) -> None:
    durations = counts((EDGES[8], 4), (EDGES[9], 6))
    assert within(durations, seconds_) == pytest.approx(expected, abs=1e-3)
    middle = (EDGES[8] * EDGES[9]) ** 0.5
    assert within(durations, middle) == pytest.approx(7.0)
    assert within((), 1.0) == 0.0


def test_no_more_requests_are_late_than_there_were() -> None:
    durations = counts((0.0009, 4), (0.02, 6))
    assert within(durations, 0.0005) == 0.0
    assert within(durations, 0.00001) == 0.0
    assert 0.0 < within(durations, 0.0009) < 4.0


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


def poisson(chance: random.Random, mean: float) -> int:
    """Return a number of arrivals, drawn by the gaps between them."""
    count, left = 0, mean
    while (left := left - chance.expovariate(1.0)) > 0:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(12))
def test_step_of_the_load_is_not_learnt_as_bursts(seed: int) -> None:
    """Let Poisson arrivals step to eight times their rate within a window: their dispersion stays near 1."""
    chance = random.Random(seed)
    history, now = DemandHistory(PlannerRuleSettings()), 0.0
    dispersions = []
    within_window = chance.random()
    means = [2.5] * chance.randint(2, 8)
    means += [2.5 * within_window + 20.0 * (1.0 - within_window)] + [20.0] * 40
    for mean in means:
        arrivals = poisson(chance, mean)
        history.absorb(DemandWindow(began=seconds(now), ended=seconds(now + 5.0), arrivals=arrivals))
        now += 5.0
        dispersions.append(history.dispersion)
    assert max(dispersions) < 4.0
    assert dispersions[-1] < 2.5


def test_bursts_are_learnt_within_minutes() -> None:
    """Let requests come in batches of ten: their dispersion is learnt to be near 10."""
    chance = random.Random(1)
    history, now = DemandHistory(PlannerRuleSettings()), 0.0
    for window in range(360):
        arrivals = 10 * poisson(chance, 2.0)
        history.absorb(DemandWindow(began=seconds(now), ended=seconds(now + 5.0), arrivals=arrivals))
        now += 5.0
        if window == 60:
            assert history.dispersion > 5.0
    assert history.dispersion > 7.0
