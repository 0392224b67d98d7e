"""An engine that is not its profile is learnt while it runs, and an engine that changes is told."""

import random
from math import exp

import pytest

from fleet.hardware.latency.correction import SETTLED, Correction

WITHIN = 0.2
LEARNT = 100  # steps until predictions have to be within a fifth


def engine(seed, factor, added, noise=0.1):
    """Steps of an engine: what the profile says, and what it takes."""
    chance = random.Random(seed)
    while True:
        profile = chance.choice((0.004, 0.006, 0.01, 0.03, 0.08))
        yield profile, (added + factor * profile) * exp(chance.gauss(0.0, noise))


def run(correction, steps, count):
    """Whether there was an alarm at each step."""
    return [correction.observe(*next(steps)) for _ in range(count)]


def worst(correction, factor, added):
    """The largest error of a prediction, as a share."""
    return max(
        abs(correction.predict(profile) / (added + factor * profile) - 1.0) for profile in (0.004, 0.01, 0.03, 0.08)
    )


def test_a_profile_is_believed_until_something_was_seen():
    assert Correction().predict(0.01) == pytest.approx(0.01)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.0, 1.7, 3.0])
@pytest.mark.parametrize("added", [0.0, 0.002, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_after_a_hundred_steps_predictions_are_within_a_fifth(factor, added, seed):
    correction = Correction()

    run(correction, engine(seed, factor, added), LEARNT)

    assert worst(correction, factor, added) < WITHIN


def test_steps_that_are_all_alike_are_learnt_as_well():
    correction = Correction()

    for _ in range(LEARNT):
        correction.observe(0.01, 0.017)

    assert correction.predict(0.01) == pytest.approx(0.017, rel=0.05)


@pytest.mark.parametrize("change", [0.6, 1.5, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_becomes_another_one_is_told_and_learnt_anew(change, seed):
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


def test_a_slow_drift_is_followed_without_an_alarm():
    correction = Correction()
    chance = random.Random(3)

    alarms = [
        correction.observe(profile, profile * (1.0 + step / 10_000))
        for step in range(10_000)
        for profile in (chance.choice((0.004, 0.03)),)
    ]

    assert not any(alarms)
    assert correction.predict(0.03) == pytest.approx(0.06, rel=0.1)


def test_one_pause_of_a_host_is_neither_believed_nor_an_alarm():
    correction = Correction()
    run(correction, engine(1, 1.0, 0.0), 500)
    before = correction.predict(0.01)

    assert not correction.observe(0.01, 5.0)

    assert correction.predict(0.01) == pytest.approx(before, rel=0.1)


def test_nothing_is_told_before_enough_was_seen():
    correction = Correction()

    assert not any(run(correction, engine(1, 3.0, 0.0), SETTLED))


@pytest.mark.parametrize(
    ("profile", "seconds"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_what_is_no_time_is_refused_and_changes_nothing(profile, seconds):
    correction = Correction()

    with pytest.raises(ValueError, match="must be above 0"):
        correction.observe(profile, seconds)

    assert correction.learnt.samples == 0
