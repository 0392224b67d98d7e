"""Order of a prefill queue: as many prompts as possible are in time, and no prompt waits for ever."""

from itertools import permutations
from random import Random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.state.prefill_order import DUE_SHARE, PrefillPace, WaitingPrompt, due_at, next_prompt

NOW = Nanos(1_000_000 * SECOND)
PACE = PrefillPace(begin_seconds=0.0, token_seconds=1e-3)


def waiting(
    name: str, tokens: int, due: float, age: float = 0.0, delay: float | None = None, priority: int = 0
) -> WaitingPrompt:
    """Return a prompt that is due in `due` seconds and came `age` seconds ago; its delay is 10 s for each thousand tokens."""
    delay_nanos = round((tokens / 100 if delay is None else delay) * SECOND)
    return WaitingPrompt(
        request_id=RequestId(name),
        tokens=tokens,
        rank=NOW - round(age * SECOND) + delay_nanos,
        seq=int(name),
        due=Nanos(NOW + round(due * SECOND)),
        delay=delay_nanos,
        priority=priority,
    )


def choose(prompts: list[WaitingPrompt], now: Nanos = NOW) -> tuple[RequestId, set[RequestId]]:
    """Return the prompt that is sent next, and the deferred ones."""
    compared = sorted((each for each in prompts if each.due > now), key=lambda each: each.due)
    chosen, deferred = next_prompt(min(prompts, key=lambda each: each.position), compared, now, PACE)
    return chosen.request_id, {each.request_id for each in deferred}


def sent_in_order(prompts: list[WaitingPrompt]) -> list[WaitingPrompt]:
    """Send all prompts one after another, each when the one before it is computed, as if no further ones came."""
    left, sent, now = {each.request_id: each for each in prompts}, [], NOW
    while left:
        chosen, _ = choose(list(left.values()), now)
        sent.append(left.pop(chosen))
        now = Nanos(now + round(sent[-1].tokens * PACE.token_seconds * SECOND))
    return sent


def in_time(sent) -> set[RequestId]:
    """Return the prompts that are computed before they are due, if the worker computes them in this order."""
    kept, seconds = set(), 0.0
    for prompt in sent:
        seconds += prompt.tokens * PACE.token_seconds
        if NOW + seconds * SECOND <= prompt.due + 1:
            kept.add(prompt.request_id)
    return kept


@pytest.mark.parametrize("seed", range(60))
def test_as_many_prompts_as_possible_are_in_time(seed):
    chance = Random(seed)
    prompts = [
        waiting(str(number), tokens := chance.randint(100, 3000), chance.uniform(0.1, 6.0), delay=tokens)
        for number in range(chance.randint(2, 6))
    ]
    most = max(len(in_time(order)) for order in permutations(prompts))

    assert len(in_time(sent_in_order(prompts))) == most


@pytest.mark.parametrize("seed", range(40))
def test_clock_and_positions_in_the_past_lose_no_prompt(seed):
    """Let positions pass while prompts wait: each is sent once, and those that are in time are at least as many as in the order of arrival."""
    chance = Random(seed)
    prompts = [
        waiting(str(number), chance.randint(100, 2500), 8.0 - age, age=age)
        for number, age in enumerate(sorted((chance.uniform(0.0, 7.5) for _ in range(8)), reverse=True))
    ]
    sent = sent_in_order(prompts)

    assert sorted(each.request_id for each in sent) == sorted(each.request_id for each in prompts)
    assert len(in_time(sent)) >= len(in_time(prompts))


def test_short_prompts_go_first_while_the_long_one_is_in_time():
    prompts = [
        waiting("1", 2000, 4.5, age=3.5),
        waiting("2", 500, 7.0),
        waiting("3", 400, 8.0),
        waiting("4", 2000, 8.0),
    ]

    sent = sent_in_order(prompts)

    assert [each.tokens for each in sent] == [400, 500, 2000, 2000]
    assert len(in_time(sent)) == 4


def test_long_prompt_goes_first_before_it_is_late():
    prompts = [waiting("1", 2000, 2.3, age=5.7), waiting("2", 500, 7.0), waiting("3", 300, 8.0)]

    assert [each.tokens for each in sent_in_order(prompts)] == [300, 2000, 500]


def test_prompt_that_cannot_be_in_time_delays_no_other():
    prompts = [waiting("1", 2000, 1.5), waiting("2", 1000, 1.6), waiting("3", 500, 8.0)]

    assert choose(prompts) == ("3", {"1"})
    assert in_time(sent_in_order(prompts)) == {"2", "3"}


def test_of_equal_prompts_the_oldest_goes_first():
    prompts = [waiting(str(number), 1000, 1.0 + number / 10, age=7.0 - number / 10) for number in range(5)]

    assert choose(prompts)[0] == "0"
    assert [each.request_id for each in sent_in_order(prompts)] == ["0", "1", "2", "3", "4"]


def test_late_prompt_makes_no_other_one_late():
    """A late prompt whose position has passed goes first only if no prompt with a lower position is there."""
    late = waiting("1", 800, -0.5, age=8.5)
    others = [waiting("2", 300, 0.5, age=7.5), waiting("3", 100, 0.6, age=7.4)]

    sent = sent_in_order([late, *others])

    assert {"2", "3"} <= in_time(sent)


def test_late_prompt_goes_first_if_it_harms_nobody():
    prompts = [waiting("1", 3000, -1.0, age=9.0), waiting("2", 3500, 7.5, age=0.5)]

    assert choose(prompts) == ("1", set())


def test_deferred_prompt_goes_when_its_position_has_passed():
    long, short = waiting("1", 2000, -3.0, age=11.0), waiting("2", 1500, 1.6, age=1.0)
    new = waiting("3", 1500, 11.6, delay=25.0)

    assert choose([long, short])[0] == "2", "the long one would make it late"
    assert choose([long, new], Nanos(NOW + 10 * SECOND))[0] == "1", "its position has passed"


def test_lowest_position_goes_first_if_all_are_late():
    prompts = [waiting("1", 900, 0.2), waiting("2", 300, 0.25), waiting("3", 600, 0.3)]

    assert choose(prompts) == ("2", set())


@pytest.mark.parametrize("due", [2.0, 2.06])
def test_prompt_with_high_priority_is_not_deferred(due):
    prompts = [
        waiting("1", 2000, due, delay=-5.0, priority=1),
        waiting("2", 100, 2.05),
        waiting("3", 100, 2.05),
    ]

    assert choose(prompts) == ("1", {"2", "3"})


def test_low_priority_does_not_hold_up_a_higher_one():
    low, high = waiting("1", 2000, 2.5, age=5.5), waiting("2", 600, 8.0, delay=-4.0, priority=1)

    assert choose([low, high])[0] == "2"
    assert choose([low, waiting("2", 600, 8.0, delay=-4.0)])[0] == "1"


def test_prompt_is_due_when_most_of_its_longest_wait_has_passed():
    assert due_at(NOW, 10.0) == NOW + DUE_SHARE * 10 * SECOND
    assert due_at(NOW, 10.0, deadline=Nanos(NOW + 5 * SECOND)) == NOW + DUE_SHARE * 5 * SECOND
    assert due_at(NOW, 10.0, most_wait=Nanos(3 * SECOND)) == NOW + DUE_SHARE * 3 * SECOND
    assert (
        due_at(NOW, 2.0, deadline=Nanos(NOW + 5 * SECOND), most_wait=Nanos(3 * SECOND)) == NOW + DUE_SHARE * 2 * SECOND
    )
