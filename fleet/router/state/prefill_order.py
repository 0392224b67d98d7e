"""Order of a prefill queue: which of the prompts that wait for one worker is sent next. Pure.

Rules:

1. A prompt is *due* when the share `DUE_SHARE` of `max_queue_seconds` has passed since its arrival, or at the deadline of its request if
   that is earlier. It is in time if the worker has computed it by then.
2. The prompts are compared in the order in which they are due. If one of them would be late, the prompt with the longest delay among those
   compared so far is put aside. The delay is the time by which length and priority move a queue position. If all priorities are equal, as
   few prompts as possible are put aside (J. M. Moore, Management Science 1968).
3. Of the other prompts, the one with the lowest queue position is sent that makes no other one late.
4. If all prompts are put aside, the one with the lowest queue position is sent. A prompt that was put aside is also sent when its queue
   position is an instant in the past: no prompt that arrives later can then have a lower one, so no prompt waits for ever.

At most `MOST_COMPARED` prompts are compared, so that a choice takes about 15 us.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId

DUE_SHARE = 0.8
"""Share of `max_queue_seconds` within which prompts should be computed. The rest is left for errors of predicted times."""

MOST_COMPARED = 32
"""Maximum number of prompts that are compared. A prompt of 12,000 tokens takes about a second, so the queues of such prompts are shorter than
this. In longer queues, prompts are short, and their order hardly matters."""


class WaitingPrompt(Struct):
    """A prompt in the prefill queue of a worker."""

    request_id: RequestId
    tokens: int
    """Prompt tokens that the worker has to compute, so without cached ones."""

    rank: int
    """Queue position as an instant in nanoseconds (`fleet.router.state.live_requests.queue_position`)."""

    seq: int
    """Number in the order of arrival, for prompts with equal ranks."""

    due: Nanos
    delay: int
    """Nanoseconds by which `rank` is after the arrival; negative if the priority makes it earlier."""


def due_at(since: Nanos, deadline: Nanos | None, max_queue_seconds: float) -> Nanos:
    """Return the instant at which a prompt is due (rule 1), from the arrival and the deadline of its request."""
    due = Nanos(since + round(DUE_SHARE * max_queue_seconds * SECOND))
    return due if deadline is None else min(due, deadline)


def next_prompt(
    prompts: Sequence[WaitingPrompt], now: Nanos, begin_seconds: float, token_seconds: float
) -> tuple[WaitingPrompt, list[WaitingPrompt]]:
    """Return the prompt that is sent next (rules 2 to 4), and the prompts that are put aside for the moment.

    Args:
        prompts: At least one waiting prompt, in the order in which they are due.
        now: The present instant.
        begin_seconds: Seconds until the worker has computed what it was sent.
        token_seconds: Seconds in which the worker computes one prompt token.
    """
    begin = now + begin_seconds * SECOND
    each_token = token_seconds * SECOND
    in_time, aside = _divided(prompts, begin, each_token)
    overdue = min(aside, key=_position, default=None)
    if overdue is not None and (overdue.rank <= now or not in_time):
        return overdue, aside
    return _lowest_without_harm(in_time, begin, each_token), aside


def _divided(
    prompts: Sequence[WaitingPrompt], begin: float, each_token: float
) -> tuple[list[WaitingPrompt], list[WaitingPrompt]]:
    """Return the prompts that can be in time, in the order in which they are due, and those that are put aside (rule 2)."""
    computed = begin
    longest: list[tuple[int, int, int]] = []  # a heap: delay and tokens, both negated, and index
    aside: set[int] = set()
    for index, prompt in enumerate(prompts):
        heappush(longest, (-prompt.delay, -prompt.tokens, index))
        computed += prompt.tokens * each_token
        while computed > prompt.due and longest:
            _, tokens, late = heappop(longest)
            computed += tokens * each_token
            aside.add(late)
    return (
        [prompt for index, prompt in enumerate(prompts) if index not in aside],
        [prompts[index] for index in sorted(aside)],
    )


def _lowest_without_harm(in_time: Sequence[WaitingPrompt], begin: float, each_token: float) -> WaitingPrompt:
    """Return the prompt with the lowest queue position among those that can go first without making another one late (rule 3)."""
    chosen, computed, slack = in_time[0], begin, inf
    for prompt in in_time:
        seconds = prompt.tokens * each_token
        if seconds <= slack and _position(prompt) < _position(chosen):
            chosen = prompt
        computed += seconds
        slack = min(slack, prompt.due - computed)
    return chosen


def _position(prompt: WaitingPrompt) -> tuple[int, int]:
    return prompt.rank, prompt.seq
