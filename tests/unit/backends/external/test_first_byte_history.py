"""First-byte history: the time to the first byte that is expected of a server after its past times."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.backends.external.first_byte_history import REMEMBERED, FirstByteHistory
from fleet.core.clock import MILLISECOND, SECOND


def a_past(*waited, kib=1):
    past = FirstByteHistory()
    for each in waited:
        past.add(each, kib)
    return past


@given(st.lists(st.integers(MILLISECOND, 100 * SECOND), min_size=1, max_size=19))
def test_few_times_allow_much_more(times):
    past = FirstByteHistory()
    past.add(times[0], 1)
    past.expected(1, 1)  # from now on, outliers are cut off
    for each in times[1:]:
        past.add(min(each, 4 * times[0]), 1)

    assert past.expected(1, 1) >= max(min(each, 4 * times[0]) for each in times)


def test_expected_time_is_near_the_95th_percentile():
    source = random.Random(7)
    times = sorted(int(source.lognormvariate(0, 0.5) * 100 * MILLISECOND) for _ in range(400))

    assert 0.9 * times[379] <= a_past(*times).expected(1, 1) <= 1.6 * times[379]


def test_longer_prompt_is_expected_to_take_longer():
    past = a_past(*[100 * MILLISECOND] * 100, kib=10)

    assert past.expected(100, 100) == pytest.approx(10 * past.expected(10, 10), rel=0.5)
    assert past.expected(1, 1) >= 100 * MILLISECOND


def test_single_outlier_teaches_little():
    past = a_past(*[10 * MILLISECOND] * 100)
    before = past.expected(1, 1)
    for _ in range(8):
        past.add(60 * SECOND, 1)

    assert past.expected(1, 1) <= 6 * before


def test_permanently_slow_server_is_learned():
    past = a_past(*[10 * MILLISECOND] * 100)
    for _ in range(200):
        past.expected(1, 1)
        past.add(SECOND, 1)

    assert past.expected(1, 1) >= SECOND


def test_old_times_are_forgotten():
    past = a_past(*[SECOND] * 100)
    for _ in range(4 * REMEMBERED):
        past.add(MILLISECOND, 1)
        past.expected(1, 1)

    assert past.expected(1, 1) < 2 * MILLISECOND
    assert past.count <= REMEMBERED
