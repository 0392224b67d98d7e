"""Replay protection: a call is accepted only once, and remembered while its proof is valid.

Calls are refused while the memory of calls is full, and if they were made before this memory began.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.security.authentication import SKEW_SECONDS
from kvstore.security.call_replays import WINDOW, CallReplays

NOW = 1_000_000


def test_call_is_accepted_once():
    replays = CallReplays(NOW)
    assert replays.refusal(b"a", 7, NOW, NOW) == ""
    assert "accepted once" in replays.refusal(b"a", 7, NOW, NOW)
    assert replays.refusal(b"b", 7, NOW, NOW) == ""


def test_call_is_remembered_as_long_as_its_proof_is_valid():
    replays = CallReplays(NOW, callers=1)
    ahead = NOW + SKEW_SECONDS  # the time of a caller whose clock is ahead as far as is allowed
    assert replays.refusal(b"a", 0, ahead, NOW) == ""

    assert "can take no more" in replays.refusal(b"b", 0, ahead, ahead + SKEW_SECONDS)
    assert "accepted once" in replays.refusal(b"a", 0, ahead, ahead + SKEW_SECONDS)

    assert replays.refusal(b"b", 0, ahead + SKEW_SECONDS, ahead + SKEW_SECONDS + 1) == ""
    assert len(replays) == 1


def test_full_memory_refuses_new_callers_and_forgets_none():
    replays = CallReplays(NOW, callers=3)
    for name in (b"a", b"b", b"c"):
        assert replays.refusal(name, 0, NOW, NOW) == ""

    assert "can take no more" in replays.refusal(b"d", 0, NOW, NOW)

    assert len(replays) == 3
    assert replays.refusal(b"a", 1, NOW, NOW) == ""
    assert "accepted once" in replays.refusal(b"a", 0, NOW, NOW)


def test_call_of_before_the_port_opened_is_refused():
    replays = CallReplays(NOW)
    assert "call again later" in replays.refusal(b"a", 0, NOW - 2, NOW + 5)
    assert replays.refusal(b"a", 0, NOW - 1, NOW + 6)
    assert replays.refusal(b"a", 1, NOW, NOW + 5) == ""


def test_clock_that_was_set_back_refuses_no_calls():
    replays = CallReplays(NOW)
    assert replays.refusal(b"a", 0, NOW - 100, NOW - 100) == ""
    assert replays.refusal(b"a", 1, NOW - 99, NOW) == ""


def test_number_far_ahead_costs_no_memory():
    replays = CallReplays(NOW)
    assert replays.refusal(b"a", 0, NOW, NOW) == ""
    assert replays.refusal(b"a", (1 << 64) - 1, NOW, NOW) == ""
    assert "overtaken" in replays.refusal(b"a", 0, NOW, NOW)


def test_callers_with_expired_proofs_are_forgotten():
    replays = CallReplays(NOW)
    for second in range(20 * SKEW_SECONDS):
        assert replays.refusal(second.to_bytes(16), 0, NOW + second, NOW + second) == ""
    assert len(replays) <= 3 * SKEW_SECONDS


@given(st.lists(st.integers(0, 4 * WINDOW), max_size=200), st.integers())
def test_no_call_order_accepts_a_call_twice(numbers, seed):
    replays, accepted = CallReplays(NOW), []
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        refused = replays.refusal(b"a", number, NOW, NOW)
        assert refused or number not in accepted
        if refused and number not in accepted:
            assert number <= max(accepted) - WINDOW  # a new call is refused only if its number is below the window
        if not refused:
            accepted.append(number)
