"""Upper bound for routers: every block is cached on all workers from its second use on, and the workers share all work perfectly.

Rules:

1. A request computes only the blocks that no earlier request had. Nothing is ever evicted.
2. A prompt token costs its share of a full step, and an answer token the time that it adds to a full step. No engine is faster.
3. A request is good if it keeps its latency goals. If its first token would be late on an idle worker, no router can make it good.
4. Each worker does a second of work per second. If that is not enough for all requests, the requests with the least work are served.
This gives the largest number of good requests.

The bound cannot be reached: it ignores waiting and knows the future.
"""

from collections.abc import Sequence
from math import ceil

from msgspec import Struct

from fleet.batching.attempts import StepTimes
from fleet.core.clock import SECOND
from fleet.sim.run import RunPlan
from kvstore.eviction.trace_replay import TraceRequest


class UpperBound(Struct, frozen=True, kw_only=True):
    """Upper bound on the good requests that the workers of a plan can serve."""

    seconds: float  # seconds from the beginning to the last arrival
    workers: int
    work: list[float]  # worker seconds of each request that can be good, sorted
    all_work: float  # worker seconds of all requests
    requests: int
    hit_rate: float  # share of prompt tokens that are cached

    @property
    def load(self) -> float:
        """Work of all requests, divided by the work that the workers can do from the beginning to the last arrival."""
        return self.all_work / (self.seconds * self.workers) if self.seconds else 0.0

    def attainment(self, speed: float = 1.0) -> float:
        """Return the share of the requests that can be good if they come `speed` times as fast."""
        left, good = self.seconds / speed * self.workers, 0
        for each in self.work:
            left -= each
            if left < 0:
                break
            good += 1
        return good / self.requests


def bound_of(requests: Sequence[TraceRequest], plan: RunPlan) -> UpperBound:
    """Return the bound of a plan. All workers are taken as workers of the first pool that serve whole requests."""
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
    """Computes the least worker seconds that prompts and answers can cost (rule 2)."""

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
        """Return the TTFT in seconds of a prompt on an idle worker, if `had` of its tokens are cached."""
        new, seconds = tokens - had, 0.0
        for step in range(ceil(new / self._step)):
            count = min(self._step, new - step * self._step)
            before = had + step * self._step
            seconds += self._times.seconds(count, count * (before + 0.5 * count), 0, 0.0)
        return seconds
