"""Correction of step times: it learns how an engine differs from its latency profile; a later change raises an alarm."""

import random
from math import exp

import pytest

from fleet.hardware.latency.correction import SETTLED, Correction

WITHIN = 0.2
LEARNT = 100  # number of steps after which errors of predictions must be below `WITHIN`


def engine(seed, factor, added, noise=0.1):
    """Yield the steps of an engine without end: the seconds that the profile predicts, and the measured seconds."""
    chance = random.Random(seed)
    while True:
        profile = chance.choice((0.004, 0.006, 0.01, 0.03, 0.08))
        yield profile, (added + factor * profile) * exp(chance.gauss(0.0, noise))


def run(correction, steps, count):
    """Return for each of `count` steps whether it raised an alarm."""
    return [correction.observe(*next(steps)) for _ in range(count)]


def worst(correction, factor, added):
    """Return the largest relative error of the predictions."""
    return max(
        abs(correction.predict(profile) / (added + factor * profile) - 1.0) for profile in (0.004, 0.01, 0.03, 0.08)
    )


def test_profile_is_used_before_first_sample():
    assert Correction().predict(0.01) == pytest.approx(0.01)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.0, 1.7, 3.0])
@pytest.mark.parametrize("added", [0.0, 0.002, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_within_a_fifth_after_100_steps(factor, added, seed):
    correction = Correction()

    run(correction, engine(seed, factor, added), LEARNT)

    assert worst(correction, factor, added) < WITHIN


def test_equal_steps_are_learned():
    correction = Correction()

    for _ in range(LEARNT):
        correction.observe(0.01, 0.017)

    assert correction.predict(0.01) == pytest.approx(0.017, rel=0.05)


@pytest.mark.parametrize("change", [0.6, 1.5, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_change_of_engine_raises_alarm_and_is_learned(change, seed):
    correction = Correction()
    run(correction, engine(seed, 1.2, 0.001), 2000)

    alarms = run(correction, engine(seed + 100, 1.2 * change, 0.001 * change), LEARNT)

    assert any(alarms[:40])
    run(correction, engine(seed + 200, 1.2 * change, 0.001 * change), LEARNT)
    assert worst(correction, 1.2 * change, 0.001 * change) < WITHIN
    assert correction.learnt.alarms == sum(alarms)


def test_noise_of_a_fifth_is_no_drift():
    correction = Correction()

    assert not any(run(correction, engine(7, 1.7, 0.002, noise=0.2), 50_000))
    assert correction.learnt.error == pytest.approx(0.17, abs=0.06)


def test_slow_drift_is_followed_without_alarm():
    correction = Correction()
    chance = random.Random(3)

    alarms = [
        correction.observe(profile, profile * (1.0 + step / 10_000))
        for step in range(10_000)
        for profile in (chance.choice((0.004, 0.03)),)
    ]

    assert not any(alarms)
    assert correction.predict(0.03) == pytest.approx(0.06, rel=0.1)


def test_single_pause_of_host_is_ignored():
    correction = Correction()
    run(correction, engine(1, 1.0, 0.0), 500)
    before = correction.predict(0.01)

    assert not correction.observe(0.01, 5.0)

    assert correction.predict(0.01) == pytest.approx(before, rel=0.1)


def test_no_alarm_before_enough_samples():
    correction = Correction()

    assert not any(run(correction, engine(1, 3.0, 0.0), SETTLED))


@pytest.mark.parametrize(
    ("profile", "seconds"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_invalid_time_is_refused_and_changes_nothing(profile, seconds):
    correction = Correction()

    with pytest.raises(ValueError, match="must be above 0"):
        correction.observe(profile, seconds)

    assert correction.learnt.samples == 0
