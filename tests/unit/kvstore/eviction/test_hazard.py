"""Hazard eviction: what the policy learns, and how it chooses."""

import random

import numpy as np
import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.hazard import HazardEviction
from kvstore.eviction.policy import SAME_USE
from kvstore.eviction.reuse_times import BUCKETS, SUREST, ReuseTimes, prospects
from tests.support.kvstore.builders import a_chain


def use(rule, chain, seconds):
    for block in reversed(chain):
        rule.admit(block, 1, Nanos(round(seconds * SECOND)))


def uses_of(rule, block):
    assert block in rule
    return rule.held[block].uses


def evict(rule):
    victim = rule.choose()
    rule.withdraw(victim)
    return victim


def lives(rng, seconds):
    """Return a policy after `seconds` with two kinds of chains: some are used three times, a minute apart, and most only once."""
    rule = HazardEviction()
    events = []
    for index in range(seconds):
        events.append((index, a_chain(2, f"o{index}")))
        if index % 4 == 0:
            events += [(index + turn * 60 + rng.random(), a_chain(2, f"f{index}")) for turn in range(3)]
    for at, chain in sorted(events):
        use(rule, chain, at)
        while len(rule) > 400:
            evict(rule)
    return rule


def test_hazards_match_traffic_with_few_reuses():
    times = ReuseTimes(1)
    rng = random.Random(1)
    ends = []
    for second in range(4000):
        cohort = times.used(0, 10, Nanos(second * SECOND))
        if rng.random() < 0.4:  # four of ten uses are followed by another one after 30 to 90 seconds
            ends.append((second + rng.uniform(30, 90), cohort))
        for end in [end for end in ends if end[0] <= second]:
            ends.remove(end)
            times.reused(end[1], 10, Nanos(second * SECOND))
        if second % 20 == 0:
            times.learn(Nanos(second * SECOND))

    assert times.probability(0, 0, 25 * SECOND) < 0.02
    assert times.probability(0, 0, 120 * SECOND) == pytest.approx(0.4, abs=0.04)
    assert times.probability(0, 120 * SECOND, 600 * SECOND) < 0.03


def believed(runs, blocks):
    """Return the learned probability of a use within 100 s, after `runs` runs of blocks were all used again after a minute."""
    times = ReuseTimes(1)
    for _ in range(runs):
        times.reused(times.used(0, blocks, Nanos(0)), blocks, Nanos(60 * SECOND))
    times.learn(Nanos(60 * SECOND))
    return times.probability(0, 0, 100 * SECOND)


def test_prior_weighs_runs_and_not_blocks():
    before = ReuseTimes(1).probability(0, 0, 100 * SECOND)

    assert before < believed(1, 1000) < before + 0.1
    assert believed(100, 10) == pytest.approx(believed(1000, 1), abs=0.001)
    assert believed(1000, 1) > 0.9


def test_value_falls_after_the_usual_reuse_time():
    times = ReuseTimes(1)
    cohorts = []
    for second in range(2000):
        cohorts.append(times.used(0, 1, Nanos(second * SECOND)))
        if second >= 60:
            times.reused(cohorts[second - 60], 1, Nanos(second * SECOND))
    times.learn(Nanos(2000 * SECOND))

    just_used, about_to_be_used, long_unused = (times.value(0, age * SECOND) for age in (0, 50, 500))
    assert about_to_be_used > just_used > long_unused


def test_values_are_finite_when_all_blocks_are_reused():
    surviving, values = prospects(np.full((1, BUCKETS), SUREST))

    assert np.isfinite(surviving).all()
    assert np.isfinite(values).all()
    assert (values >= 0).all()


def test_reused_block_outlives_younger_blocks():
    rule = lives(random.Random(2), 2000)
    use(rule, a_chain(2, "again"), 2200)
    use(rule, a_chain(2, "again"), 2260)
    for index in range(300):
        use(rule, a_chain(2, f"new{index}"), 2261 + index / 10)
        while len(rule) > 400:
            evict(rule)

    assert a_chain(1, "again")[0] in rule
    assert len(rule) == 400


def test_chain_with_larger_savings_outlives_others():
    rule = HazardEviction(lambda key, size: 2.0 if key.strip().startswith(b"dear") else 1.0)
    use(rule, a_chain(3, "dear"), 0)
    use(rule, a_chain(3, "cheap"), 1)

    assert [evict(rule) for _ in range(6)] == [*a_chain(3, "cheap")[::-1], *a_chain(3, "dear")[::-1]]


def test_recent_continuation_goes_before_its_prefix():
    rule = HazardEviction()
    use(rule, a_chain(2), 0)
    use(rule, a_chain(6), 100)
    use(rule, a_chain(2), 200)  # another request with the same beginning
    gone = [evict(rule) for _ in range(6)]

    assert gone == a_chain(6)[::-1]


def test_valuable_continuation_goes_before_its_prefix():
    rule = lives(random.Random(4), 2000)
    use(rule, a_chain(6), 3000)
    use(rule, a_chain(2), 3058)  # just used, so its next use is later than that of its continuation
    assert rule.times.value(0, 58 * SECOND) > rule.times.value(rule.times.class_of(2, 1), 0)

    gone = [victim for victim in (evict(rule) for _ in range(406)) if victim in a_chain(6)]

    assert gone == a_chain(6)[::-1]


def test_uses_of_one_request_are_one_use():
    once, thrice = HazardEviction(), HazardEviction()
    use(once, a_chain(2), 0)
    for within in (0, SAME_USE / SECOND / 2, SAME_USE / SECOND):
        use(thrice, a_chain(2), within)

    assert uses_of(thrice, a_chain(1)[0]) == uses_of(once, a_chain(1)[0]) == 1


def test_evicted_blocks_are_remembered_for_a_while():
    rule = HazardEviction(remembered=10)
    use(rule, a_chain(1, "old"), 0)
    evict(rule)
    use(rule, a_chain(1, "old"), 60)
    assert uses_of(rule, a_chain(1, "old")[0]) == 2

    evict(rule)
    for index in range(40):
        use(rule, a_chain(1, f"other{index}"), 100 + index)
        evict(rule)
    use(rule, a_chain(1, "old"), 200)

    assert uses_of(rule, a_chain(1, "old")[0]) == 1
    assert len(rule.gone) <= 10


def test_memory_stays_bounded_under_endless_new_blocks():
    rule = HazardEviction(remembered=100)
    for second in range(3000):
        use(rule, a_chain(3, f"{second}"), second)
        while len(rule) > 60:
            evict(rule)

    assert len(rule.gone) <= 100
    assert sum(map(len, rule.rows.values())) <= 60
    cohorts = [cohort for row in rule.times.ageing for ageing in row for cohort in ageing]
    assert len(cohorts) <= 3000 + BUCKETS
    assert sum(cohort.alive for cohort in cohorts) == 160, "forgotten blocks are not at risk any more"


def test_equal_histories_give_equal_choices():
    one, other = lives(random.Random(3), 500), lives(random.Random(3), 500)

    assert [evict(one) for _ in range(400)] == [evict(other) for _ in range(400)]
