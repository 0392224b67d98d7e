"""What no router can pass: every prefix cached everywhere, from its second use on, and all workers as one.

Rules:

1. A request has to compute what no request before it has had computed, a block at a time. Nothing is ever forgotten.
2. A prompt token costs its share of a full step; an answer's token what it adds to a full step. No engine does it for less.
3. A request whose first token would come late on an idle worker cannot be good, whatever a router does.
4. Workers together do a second of work each second. If that is not enough for all, those with the least work are served: that is
   the most requests that can be.

It is a bound and not a plan: it waits for nobody, and knows the future.
"""

from collections.abc import Sequence
from math import ceil

from msgspec import Struct

from fleet.core.clock import SECOND
from fleet.sim.engine.attempts import StepTimes
from fleet.sim.run import RunPlan
from kvstore.eviction.trace_replay import TraceRequest


class UpperBound(Struct, frozen=True, kw_only=True):
    """Of requests on the workers of a plan."""

    seconds: float  # over which the requests come
    workers: int
    work: list[float]  # seconds of one worker for each request that can be good at all, ascending
    all_work: float  # of all requests
    requests: int
    hit_rate: float  # of prompt tokens

    @property
    def load(self) -> float:
        """Work over what the workers can do while the requests come."""
        return self.all_work / (self.seconds * self.workers) if self.seconds else 0.0

    def attainment(self, speed: float = 1.0) -> float:
        """Share of the requests that can be good, if they come so many times as fast."""
        left, good = self.seconds / speed * self.workers, 0
        for each in self.work:
            left -= each
            if left < 0:
                break
            good += 1
        return good / self.requests


def bound_of(requests: Sequence[TraceRequest], plan: RunPlan) -> UpperBound:
    """The bound of a plan whose workers are alike; that some are for prompts only, it does not know."""
    pool = plan.pools[0]
    costs = _Costs(pool.times, pool.limits.step_tokens)
    seen: set[int] = set()
    work: list[float] = []
    total = hits = prompts = 0.0
    for request in requests:
        cached = 0
        for key in request.chain:
            if key not in seen:
                break
            cached += 1
        seen.update(request.chain[cached:])
        had = min(cached * plan.block_tokens, request.prompt_tokens - 1)
        hits += had
        prompts += request.prompt_tokens
        seconds = costs.prompt(request.prompt_tokens, had) + costs.answer(request.prompt_tokens, request.output_tokens)
        total += seconds
        if costs.alone(request.prompt_tokens, had) <= plan.slo.ttft_ms / 1000:
            work.append(seconds)
    return UpperBound(
        seconds=requests[-1].arrival / SECOND,
        workers=sum(each.workers for each in plan.pools),
        work=sorted(work),
        all_work=total,
        requests=len(requests),
        hit_rate=hits / prompts,
    )


class _Costs:
    """Of one worker, at its best."""

    def __init__(self, times: StepTimes, step_tokens: int):
        self._times, self._step = times, step_tokens
        full = times.seconds(step_tokens, 0.0, 0, 0.0)
        self._token = full / step_tokens
        self._pair = (times.seconds(step_tokens, 1e8, 0, 0.0) - full) / 1e8
        decodes = step_tokens // 32
        mixed = times.seconds(step_tokens, 0.0, decodes, 0.0)
        self._decode = (mixed - full) / decodes
        self._context = (times.seconds(step_tokens, 0.0, decodes, 1e6) - mixed) / 1e6

    def prompt(self, tokens: int, had: int) -> float:
        new = tokens - had
        return self._token * new + self._pair * new * (had + 0.5 * new)

    def answer(self, prompt: int, tokens: int) -> float:
        return tokens * (self._decode + self._context * (prompt + 0.5 * tokens))

    def alone(self, tokens: int, had: int) -> float:
        """To the first token, on an idle worker."""
        new, seconds = tokens - had, 0.0
        for step in range(ceil(new / self._step)):
            count = min(self._step, new - step * self._step)
            before = had + step * self._step
            seconds += self._times.seconds(count, count * (before + 0.5 * count), 0, 0.0)
        return seconds
