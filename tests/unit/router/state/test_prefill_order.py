"""Order of a prefill queue: as many prompts as possible are in time, and no prompt waits for ever."""

from itertools import permutations
from random import Random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.state.prefill_order import DUE_SHARE, WaitingPrompt, due_at, next_prompt

NOW = Nanos(1_000_000 * SECOND)
TOKEN_SECONDS = 1e-3


def waiting(name: str, tokens: int, due: float, age: float = 0.0, delay: float | None = None) -> WaitingPrompt:
    """Return a prompt that is due in `due` seconds and came `age` seconds ago; its delay is 10 s for each thousand tokens."""
    delay_nanos = round((tokens / 100 if delay is None else delay) * SECOND)
    return WaitingPrompt(
        request_id=RequestId(name),
        tokens=tokens,
        rank=NOW - round(age * SECOND) + delay_nanos,
        seq=int(name),
        due=Nanos(NOW + round(due * SECOND)),
        delay=delay_nanos,
    )


def sent_in_order(prompts: list[WaitingPrompt], now: Nanos = NOW) -> list[WaitingPrompt]:
    """Send all prompts one after another, as if no further ones came."""
    left, sent, begin = list(prompts), [], 0.0
    while left:
        left.sort(key=lambda each: each.due)
        prompt, _ = next_prompt(left, now, begin, TOKEN_SECONDS)
        left.remove(prompt)
        sent.append(prompt)
        begin += prompt.tokens * TOKEN_SECONDS
    return sent


def in_time(sent) -> set[RequestId]:
    """Return the prompts that are computed before they are due, if the worker computes them in this order."""
    kept, seconds = set(), 0.0
    for prompt in sent:
        seconds += prompt.tokens * TOKEN_SECONDS
        if NOW + seconds * SECOND <= prompt.due + 1:
            kept.add(prompt.request_id)
    return kept


@pytest.mark.parametrize("seed", range(60))
def test_as_many_prompts_as_possible_are_in_time(seed):
    chance = Random(seed)
    prompts = [
        waiting(str(number), chance.randint(100, 3000), chance.uniform(0.0, 6.0))
        for number in range(chance.randint(2, 6))
    ]
    most = max(len(in_time(order)) for order in permutations(prompts))

    assert len(in_time(sent_in_order(prompts))) == most


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

    chosen, aside = next_prompt(prompts, NOW, 0.0, TOKEN_SECONDS)

    assert [each.request_id for each in aside] == ["1"]
    assert chosen.request_id != "1"
    assert in_time(sent_in_order(prompts)) == {"2", "3"}


@pytest.mark.parametrize("due", [2.0, 2.06])
def test_prompt_with_high_priority_is_not_put_aside(due):
    prompts = [waiting("1", 2000, due, delay=-5.0), waiting("2", 100, 2.05), waiting("3", 100, 2.05)]

    chosen, aside = next_prompt(sorted(prompts, key=lambda each: each.due), NOW, 0.0, TOKEN_SECONDS)

    assert chosen.request_id == "1"
    assert {each.request_id for each in aside} == {"2", "3"}


def test_prompt_put_aside_goes_when_its_position_has_passed():
    long, short = waiting("1", 2000, -3.0, age=11.0), waiting("2", 500, 20.0)

    later, _ = next_prompt([long, short], Nanos(NOW + 10 * SECOND), 0.0, TOKEN_SECONDS)
    before, _ = next_prompt([long, short], NOW, 0.0, TOKEN_SECONDS)

    assert (before.request_id, later.request_id) == ("2", "1")


def test_lowest_position_goes_first_if_all_are_late():
    prompts = [waiting("1", 900, -5.0), waiting("2", 300, -4.0), waiting("3", 600, -3.0)]

    assert [each.tokens for each in sent_in_order(prompts)] == [300, 600, 900]


def test_prompt_is_due_before_the_limit_and_at_its_deadline():
    assert due_at(NOW, None, 10.0) == NOW + DUE_SHARE * 10 * SECOND
    assert due_at(NOW, Nanos(NOW + SECOND), 10.0) == NOW + SECOND
