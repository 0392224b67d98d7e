"""Prefill speed: it is learned from the instants at which an engine's steps were planned."""

import pytest

from workers.engines.vllm.store_planner import SAMPLES, UNKNOWN_SECONDS_A_TOKEN, PrefillSpeed


def paced(*plans: tuple[float, int]) -> PrefillSpeed:
    pace = PrefillSpeed()
    for now, tokens in plans:
        pace.planned(tokens, now)
    return pace


def test_speed_is_a_default_before_any_measurement():
    assert paced().seconds(100) == pytest.approx(100 * UNKNOWN_SECONDS_A_TOKEN)


def test_a_step_lasts_until_the_second_plan_after_it():
    assert paced((0, 1000), (0.01, 1), (0.5, 1)).seconds(2000) == pytest.approx(1.0)


@pytest.mark.parametrize("plans", [[(0, 10), (1, 1), (2, 1)], [(0, 1000), (1, 0), (2, 1)], [(0, 1000), (1, 1), (9, 0)]])
def test_small_and_idle_steps_do_not_count(plans):
    assert paced(*plans).seconds(1) == UNKNOWN_SECONDS_A_TOKEN


def test_best_recent_sample_counts():
    slow = paced((0, 100), (1, 1), (2, 1), (10, 100), (11, 1), (11.5, 1))
    assert slow.seconds(100) == pytest.approx(1.5)
    for index in range(SAMPLES):
        for offset, tokens in ((0, 100), (2, 1), (4, 1)):
            slow.planned(tokens, 100 + 10 * index + offset)
    assert slow.seconds(100) == pytest.approx(4.0)
