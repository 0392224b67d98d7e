"""Beliefs about servers that tell nothing: bounded in number and time, the latest ones kept."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.adapters.assumed_cache import AssumedCache
from fleet.clock import SECOND

START = 1000 * SECOND


def test_what_was_sent_is_believed_to_be_there():
    cache = AssumedCache(100, 60.0, START)

    stored, removed = cache.sent((1, 2, 3), START)

    assert (tuple(stored), tuple(removed), len(cache)) == ((1, 2, 3), (), 3)


def test_the_least_recently_used_half_goes_first():
    cache = AssumedCache(8, 60.0, START)
    cache.sent((1, 2), START)
    cache.sent((3, 4), START)
    cache.sent((5, 6), START)  # 1 to 4 are the old ones
    cache.sent((1, 2), START)  # used again

    _, removed = cache.sent((7,), START)

    assert set(removed) == {3, 4}


def test_a_prompt_longer_than_half_the_cache_counts_with_its_beginning():
    cache = AssumedCache(8, 60.0, START)

    stored, _ = cache.sent(range(100), START)

    assert tuple(stored) == (0, 1, 2, 3)


def test_what_nobody_sent_for_the_time_is_gone():
    cache = AssumedCache(100, 60.0, START)
    cache.sent((1, 2), START)

    assert tuple(cache.expire(START + 29 * SECOND)) == ()
    assert tuple(cache.expire(START + 30 * SECOND)) == ()
    assert set(cache.expire(START + 60 * SECOND)) == {1, 2}
    assert len(cache) == 0


@given(
    capacity=st.integers(2, 20),
    prompts=st.lists(st.tuples(st.integers(0, 10), st.integers(1, 12), st.integers(0, 40)), max_size=30),
)
def test_what_it_says_adds_up_and_is_never_too_much(capacity, prompts):
    cache = AssumedCache(capacity, 60.0, START)
    believed: set[int] = set()
    now = START
    for start, length, seconds in prompts:
        now += seconds * SECOND
        stored, removed = cache.sent(tuple(range(start, start + length)), now)
        believed -= set(removed)
        believed |= set(stored)
        assert len(believed) == len(cache) <= capacity
