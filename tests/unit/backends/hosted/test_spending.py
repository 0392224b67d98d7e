"""Spending limit: what the requests of an hour may cost, and what is refunded when a request costs less than estimated."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.backends.hosted.spending import WINDOW_MINUTES, TokenPrices, minute_of, pruned, reserve, settle

LIMIT = 1000
requests = st.lists(
    st.tuples(
        st.integers(0, 40),  # minutes since the arrival of the request before
        st.integers(1, 600),  # estimated cost
        st.integers(0, 100),  # real cost in per cent of the estimate
        st.integers(0, 90),  # duration in minutes
    ),
    max_size=40,
)


@given(requests)
def test_no_hour_costs_more_than_the_limit(arriving):
    """Replay requests; the requests that begin within any 61 minutes never cost more than the limit together."""
    charges, minute, begun, ending = {}, 0, [], []
    for pause, estimate, share, duration in arriving:
        minute += pause
        charges = pruned(charges, minute)
        for end, began, reserved, cost in [each for each in ending if each[0] <= minute]:
            settle(charges, began, reserved, cost, minute)
            ending.remove((end, began, reserved, cost))
        if reserve(charges, estimate, LIMIT, minute):
            cost = estimate * share // 100
            begun.append((minute, cost))
            ending.append((minute + duration, minute, estimate, cost))
        assert sum(charges.values()) <= LIMIT
        assert min(charges.values(), default=0) >= 0
    for first, _ in begun:
        assert sum(cost for at, cost in begun if first <= at <= first + WINDOW_MINUTES) <= LIMIT


def test_refund_makes_room_at_once_and_an_hour_frees_the_rest():
    charges = {}
    assert reserve(charges, 900, LIMIT, 0)
    assert not reserve(charges, 200, LIMIT, 1)
    settle(charges, 0, 900, 100, 1)
    assert reserve(charges, 900, LIMIT, 1)
    assert not reserve(pruned(charges, WINDOW_MINUTES), 101, LIMIT, WINDOW_MINUTES)
    assert pruned(charges, WINDOW_MINUTES + 1) == {1: 900}
    assert pruned(charges, WINDOW_MINUTES + 2) == {}


def test_cost_above_the_estimate_is_charged():
    charges = {}
    reserve(charges, 100, LIMIT, 0)
    settle(charges, 0, 100, 150, 0)
    assert charges == {0: 150}


def test_refund_after_the_hour_gives_nothing_back():
    charges = {70: 300}
    settle(charges, 0, 900, 100, 70)
    assert charges == {70: 300}


def test_clock_that_went_back_keeps_charges_for_an_hour_at_most():
    charges = pruned({10_000: 700}, 50)
    assert charges == {50: 700}
    assert not reserve(charges, 400, LIMIT, 50)
    assert pruned(charges, 50 + WINDOW_MINUTES + 1) == {}


def test_prices_are_in_dollars_per_million_tokens():
    prices = TokenPrices(prompt=0.6, answer=2.4)
    assert prices.cost(1_000_000, 500_000) == 1_800_000_000  # 0.60 + 1.20 dollars
    assert prices.cost(1, 0) == 600
    assert minute_of(3599.9) == 59
