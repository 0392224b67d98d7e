"""Demand counters of a router: what its clients ask for, and how they are served, for the planner.

Rules:

1. A request costs a few increments and three look-ups in a table of bucket edges. Everything else is computed for a report.
2. Times run from the request's arrival at the machine, after its prompt was tokenized.
3. The first token ends TTFT and queue wait, once for each request: a request that is placed again after a failure is not a new one.
4. The sample takes at most one ended request in `SAMPLE_EVERY`, so that a busy router does not pay for it. The latest `KEPT_REQUESTS` are kept.
   Each reader names the last one that it has read.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct, field

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import RECENT_KEYS, RECENT_REQUESTS, ModelDemand, SampledRequest
from fleet.core.duration_counts import EDGES
from fleet.core.errors import Reason
from fleet.core.ids import ModelName
from fleet.router.state.live_requests import LiveRequest, RequestStage

KEPT_REQUESTS = 256
SAMPLE_EVERY = Nanos(SECOND // RECENT_REQUESTS)
MOST_MODELS = 1000
"""Most models that are counted; the names of models come from workers and settings, so this is a guard against a fault."""

_FOR_LOAD = frozenset({Reason.NO_WORKER, Reason.QUEUE_FULL, Reason.DEADLINE_PASSED})
_INVALID = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.MODEL_NOT_FOUND,
        Reason.REQUEST_NOT_FOUND,
        Reason.TOO_LARGE,
        Reason.UNAUTHENTICATED,
    }
)


_EDGES = tuple(edge * SECOND for edge in EDGES)


def _buckets() -> list[int]:
    return [0] * (len(EDGES) + 1)


class _ModelCounters(Struct):
    arrivals: int = 0
    waited: int = 0
    refused: int = 0
    abandoned: int = 0
    invalid: int = 0
    prompt_tokens: int = 0
    uncounted_tokens: int = 0
    prompt_squares: float = 0.0
    answer_squares: float = 0.0
    cached_tokens: int = 0
    finished: int = 0
    answer_tokens: int = 0
    ttft: list[int] = field(default_factory=_buckets)
    tpot: list[int] = field(default_factory=_buckets)
    queue_wait: list[int] = field(default_factory=_buckets)


class RouterDemand:
    """Counters of one router since its start."""

    def __init__(self) -> None:
        self._models: dict[ModelName, _ModelCounters] = {}
        self._recent: deque[SampledRequest] = deque(maxlen=KEPT_REQUESTS)
        self._sampled = 0
        self._sample_due = Nanos(0)

    def _new(self, model: ModelName) -> _ModelCounters:
        counters = _ModelCounters()
        if len(self._models) < MOST_MODELS:
            self._models[model] = counters
        return counters

    def arrived(self, live: LiveRequest) -> None:
        """Count a request that has arrived."""
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        tokens = live.own_tokens
        counters.arrivals += 1
        counters.prompt_tokens += tokens
        counters.prompt_squares += tokens * tokens

    def turned_away(self, model: ModelName) -> None:
        """Count a request that was refused before its prompt was read, because the model has no worker."""
        counters = self._models.get(model) or self._new(model)
        counters.arrivals += 1
        counters.refused += 1

    def queued(self, live: LiveRequest) -> None:
        """Count a new request that enters the admission queue."""
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        counters.waited += 1

    def first_token(self, live: LiveRequest, now: Nanos) -> None:
        """Note the first token of a request."""
        live.first_token_at = now
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        since = live.since
        counters.ttft[bisect_left(_EDGES, now - since)] += 1
        counters.queue_wait[bisect_left(_EDGES, live.sent_at - since)] += 1
        counters.cached_tokens += live.cached_tokens

    def ended(self, live: LiveRequest, now: Nanos) -> None:
        """Count a request that was completed or cancelled."""
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        if not live.first_token_at:
            counters.abandoned += 1
            counters.uncounted_tokens += live.own_tokens
            return
        tokens = len(live.sent)
        counters.finished += 1
        counters.answer_tokens += tokens
        counters.answer_squares += tokens * tokens
        if tokens > 1:
            counters.tpot[bisect_left(_EDGES, (now - live.first_token_at) / (tokens - 1))] += 1
        if now >= self._sample_due:
            self._sample(live, tokens, now)

    def _sample(self, live: LiveRequest, tokens: int, now: Nanos) -> None:
        self._sample_due = Nanos(now + SAMPLE_EVERY)
        block_tokens, keys = next(iter(live.chains.items()), (0, ()))
        if not block_tokens:
            block_tokens, keys = next(iter(live.arrived.keys.items()), (0, ()))
        self._sampled += 1
        self._recent.append(
            SampledRequest(
                model=live.arrived.model,
                arrived=live.since,
                prompt_tokens=live.own_tokens,
                answer_tokens=tokens,
                block_tokens=block_tokens,
                block_keys=keys[:RECENT_KEYS],
            )
        )

    def rejected(self, live: LiveRequest, reason: Reason) -> None:
        """Count a request that was rejected; what was answered of it before still counts as tokens."""
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        if live.first_token_at:
            counters.finished += 1
            counters.answer_tokens += len(live.sent)
        elif reason in _FOR_LOAD:
            counters.refused += 1
        elif reason in _INVALID:
            counters.invalid += 1
            counters.uncounted_tokens += live.own_tokens

    def models(self, live_requests: Iterable[LiveRequest], now: Nanos) -> tuple[ModelDemand, ...]:
        """Return the demand of all models; `live_requests` are those that have not ended."""
        queued: dict[ModelName, int] = {}
        oldest: dict[ModelName, Nanos] = {}
        for live in live_requests:
            if live.stage is RequestStage.QUEUED or not live.sent_at:
                model = live.arrived.model
                queued[model] = queued.get(model, 0) + 1
                oldest[model] = min(oldest.get(model, live.since), live.since)
        return tuple(
            ModelDemand(
                model=model,
                arrivals=each.arrivals,
                waited=each.waited,
                refused=each.refused,
                abandoned=each.abandoned,
                invalid=each.invalid,
                prompt_tokens=each.prompt_tokens,
                uncounted_tokens=each.uncounted_tokens,
                prompt_squares=each.prompt_squares,
                answer_squares=each.answer_squares,
                cached_tokens=each.cached_tokens,
                finished=each.finished,
                answer_tokens=each.answer_tokens,
                ttft=tuple(each.ttft),
                tpot=tuple(each.tpot),
                queue_wait=tuple(each.queue_wait),
                queued=queued.get(model, 0),
                oldest_seconds=max(0, now - oldest.get(model, now)) / SECOND,
            )
            for model, each in self._models.items()
        )

    def recent(self, after: int) -> tuple[int, tuple[SampledRequest, ...]]:
        """Return the requests of the sample that were taken after another one.

        Args:
            after: The number of the last request that the reader has read; 0 for none.

        Returns:
            The number of the last request, and at most the last `RECENT_REQUESTS` requests.
        """
        fresh = min(max(0, self._sampled - after), len(self._recent), RECENT_REQUESTS)
        return self._sampled, tuple(islice(self._recent, len(self._recent) - fresh, None))
