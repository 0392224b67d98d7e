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


def test_the_least_recently_used_quarter_goes_first():
    cache = AssumedCache(8, 60.0, START)
    for prompt in ((1, 2), (3, 4), (5, 1), (6, 7)):  # a generation each; 1 was used again
        cache.sent(prompt, START)

    _, removed = cache.sent((8,), START)

    assert set(removed) == {2}


def test_what_is_sent_again_just_then_is_not_forgotten():
    cache = AssumedCache(4, 60.0, START)
    for key in (1, 2, 3, 4):
        cache.sent((key,), START)

    stored, removed = cache.sent((1,), START)

    assert (tuple(stored), set(removed), len(cache)) == ((1,), set(), 4)


def test_a_prompt_longer_than_a_quarter_of_the_cache_counts_with_its_beginning():
    cache = AssumedCache(16, 60.0, START)

    stored, _ = cache.sent(range(100), START)

    assert tuple(stored) == (0, 1, 2, 3)


def test_what_nobody_sent_for_the_time_is_gone():
    cache = AssumedCache(100, 60.0, START)
    cache.sent((1, 2), START)

    for seconds in (14, 15, 30, 45):
        assert set(cache.expire(START + seconds * SECOND)) == set()
    assert set(cache.expire(START + 60 * SECOND)) == {1, 2}
    assert len(cache) == 0


@given(
    capacity=st.integers(1, 20),
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
