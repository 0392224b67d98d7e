"""Attainment: when late requests are more than the goals allow."""

import pytest

from fleet.core.duration_counts import EDGES, bucket_of, within
from fleet.planner.decisions import PlanGoals
from fleet.planner.demand import DemandWindow
from fleet.planner.forecasting.attainment import Attainment
from tests.unit.planner.world import seconds

GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.05, percentile=0.95)
EARLY, LATE = 0.5, 3.0


def counts(*values: tuple[float, int]) -> tuple[int, ...]:
    found = [0] * (len(EDGES) + 1)
    for value, count in values:
        found[bucket_of(value)] += count
    return tuple(found)


class Minutes:
    """Windows of five seconds, in which a share of the requests is late."""

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
    world.run(25, 0.06, each=16)  # one of 16 in each window
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


@pytest.mark.parametrize(("seconds_", "expected"), [(0.0001, 0.0), (EDGES[8], 4.0), (EDGES[9], 10.0), (1e9, 10.0)])
def test_values_within_a_duration_are_counted_by_bucket(seconds_: float, expected: float) -> None:
    durations = counts((EDGES[8], 4), (EDGES[9], 6))
    assert within(durations, seconds_) == pytest.approx(expected, abs=1e-3)
    middle = (EDGES[8] * EDGES[9]) ** 0.5
    assert within(durations, middle) == pytest.approx(7.0)
    assert within((), 1.0) == 0.0
