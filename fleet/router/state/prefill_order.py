"""Order of a prefill queue: which of the prompts that wait there is sent to the worker next. Pure.

Rules:

1. Each prompt has a due instant (`due_at`). It is in time if the worker has computed it by then.
2. The prompts are divided in the order of their due instants. If one of them would be late, the prompt with the longest delay among those
   so far is deferred. The delay is the time by which length and priority move a queue position. If all priorities are equal, as few prompts
   as possible are deferred (J. M. Moore, Management Science 1968). Of prompts with equal delays, the one that is due last is deferred.
3. A prompt may go first if it makes no other one late that is in time and has at least its priority. Of the prompts in time that may go
   first, the one with the lowest queue position is sent.
4. A deferred prompt is sent when it has the lowest queue position of all prompts, and one of three conditions holds: it may go first by
   rule 3, its position is an instant in the past, or no prompt is in time. Without higher priorities, no prompt that arrives after this
   instant has a lower position, so no prompt waits for ever.

A prompt whose own prefill takes longer than the time until it is due is always deferred while others wait.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId

DUE_SHARE = 0.8
"""Share of the longest wait within which prompts should be computed. The rest is left for errors of predicted times."""

MOST_COMPARED = 32
"""Maximum number of prompts that are compared, so that a choice takes at most about 50 us. A prompt of 12,000 tokens takes about a second. So
with the default of `max_queue_seconds`, a queue of such prompts is shorter than this. In longer queues the prompts are shorter, and their order
matters less."""


class WaitingPrompt(Struct, frozen=True):
    """A prompt in the prefill queue of a worker."""

    request_id: RequestId
    tokens: int
    """Prompt tokens that the worker has to compute, so without cached ones."""

    rank: int
    """Queue position as an instant in nanoseconds (`fleet.router.state.live_requests.queue_position`)."""

    seq: int
    """Number in the order of arrival, for prompts with equal ranks."""

    due: Nanos
    delay: int = 0
    """Nanoseconds by which `rank` is after the arrival; negative if the priority makes it earlier."""

    priority: int = 0

    @property
    def position(self) -> tuple[int, int]:
        return self.rank, self.seq


class PrefillPace(Struct, frozen=True):
    """How fast a worker is expected to compute prompts."""

    begin_seconds: float
    """Seconds until the worker has computed what it was sent."""

    token_seconds: float
    """Seconds for each further token."""


def due_at(
    since: Nanos, max_queue_seconds: float, *, deadline: Nanos | None = None, most_wait: Nanos | None = None
) -> Nanos:
    """Return the instant at which a prompt is due: when the share `DUE_SHARE` of its longest wait has passed.

    Args:
        since: The beginning of the wait.
        max_queue_seconds: The longest wait in seconds (`RouterSettings.max_queue_seconds`).
        deadline: The deadline of the request; the wait is not longer than until then.
        most_wait: The wait after which a hosted endpoint would have taken the request (`Arrived.most_wait`); the wait is not longer.
    """
    wait = max_queue_seconds * SECOND
    if deadline is not None:
        wait = min(wait, deadline - since)
    if most_wait is not None:
        wait = min(wait, most_wait)
    return Nanos(since + round(DUE_SHARE * wait))


def next_prompt(
    lowest: WaitingPrompt, prompts: Sequence[WaitingPrompt], now: Nanos, pace: PrefillPace
) -> tuple[WaitingPrompt, list[WaitingPrompt]]:
    """Return the prompt that is sent next, and the prompts that are deferred in favour of prompts in time (rules 2 to 4).

    Args:
        lowest: The prompt with the lowest queue position of all that wait.
        prompts: The compared prompts, in the order of their due instants, all of which are after `now`. `lowest` may be one of them.
        now: The present instant.
        pace: The pace of the worker.
    """
    begin = now + pace.begin_seconds * SECOND
    token = pace.token_seconds * SECOND
    in_time, deferred = _divided(prompts, begin, token)
    if not in_time:
        return lowest, []
    chosen = lowest
    if (lowest.rank > now or lowest in in_time) and not _may_go_first(lowest, in_time, begin, token):
        by_position = sorted(in_time, key=lambda each: each.position)
        chosen = next(each for each in by_position if _may_go_first(each, in_time, begin, token))
    return chosen, [each for each in deferred if each is not chosen]


def _divided(
    prompts: Sequence[WaitingPrompt], begin: float, token: float
) -> tuple[list[WaitingPrompt], list[WaitingPrompt]]:
    """Return the prompts that can be in time and the deferred ones, each in the order of the due instants (rule 2)."""
    computed = begin
    # delay, tokens and index, all negated, of the prompts that are not deferred so far
    heap: list[tuple[int, int, int]] = []
    deferred: set[int] = set()
    for index, prompt in enumerate(prompts):
        heappush(heap, (-prompt.delay, -prompt.tokens, -index))
        computed += prompt.tokens * token
        while computed > prompt.due and heap:
            _, tokens, last = heappop(heap)
            computed += tokens * token
            deferred.add(-last)
    return (
        [prompt for index, prompt in enumerate(prompts) if index not in deferred],
        [prompt for index, prompt in enumerate(prompts) if index in deferred],
    )


def _may_go_first(candidate: WaitingPrompt, in_time: Sequence[WaitingPrompt], begin: float, token: float) -> bool:
    """Return whether no other prompt becomes late if the candidate is sent before all others (rule 3)."""
    computed = begin + candidate.tokens * token
    for prompt in in_time:
        if prompt is candidate:
            break  # the later ones are computed at the same time as without the change
        computed += prompt.tokens * token
        if computed > prompt.due and prompt.priority >= candidate.priority:
            return False
    return True
