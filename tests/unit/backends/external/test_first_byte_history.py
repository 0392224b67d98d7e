"""First-byte history: what is expected of a server after what it has done."""

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
def test_of_few_times_none_is_a_surprise(times):
    past = FirstByteHistory()
    past.add(times[0], 1)
    past.expected(1, 1)  # what is far above from here on is not believed
    for each in times[1:]:
        past.add(min(each, 4 * times[0]), 1)

    assert past.expected(1, 1) >= max(min(each, 4 * times[0]) for each in times)


def test_expected_is_close_to_the_ninety_fifth_percentile():
    source = random.Random(7)
    times = sorted(int(source.lognormvariate(0, 0.5) * 100 * MILLISECOND) for _ in range(400))

    assert 0.9 * times[379] <= a_past(*times).expected(1, 1) <= 1.6 * times[379]


def test_a_longer_prompt_has_longer_by_its_size():
    past = a_past(*[100 * MILLISECOND] * 100, kib=10)

    assert past.expected(100, 100) == pytest.approx(10 * past.expected(10, 10), rel=0.5)
    assert past.expected(1, 1) >= 100 * MILLISECOND


def test_a_server_that_woke_up_again_teaches_no_minute():
    past = a_past(*[10 * MILLISECOND] * 100)
    before = past.expected(1, 1)
    for _ in range(8):
        past.add(60 * SECOND, 1)

    assert past.expected(1, 1) <= 6 * before


def test_a_server_that_stays_slow_teaches_it():
    past = a_past(*[10 * MILLISECOND] * 100)
    for _ in range(200):
        past.expected(1, 1)
        past.add(SECOND, 1)

    assert past.expected(1, 1) >= SECOND


def test_what_was_long_ago_is_forgotten():
    past = a_past(*[SECOND] * 100)
    for _ in range(4 * REMEMBERED):
        past.add(MILLISECOND, 1)
        past.expected(1, 1)

    assert past.expected(1, 1) < 2 * MILLISECOND
    assert past.count <= REMEMBERED
