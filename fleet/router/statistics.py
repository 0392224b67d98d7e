"""Router statistics: counters, explanations of recent decisions, the accuracy of the router's view of the caches, and demand.

Rules:

1. The explanations of the latest `explained_requests` requests are kept, whether these have ended or not. A request that reuses
   an id replaces the older request.
2. Predicted and reported cached tokens are compared once for each prompt, on the worker that computed it
   (`fleet.router.kv_index.prefix_index`, rule 5).

Rules of demand (`RouterDemand`), which is what clients ask for and how they are served, for the planner:

3. A request costs a few increments and three look-ups in a table of bucket edges. Everything else is computed for a report.
4. Times run from the request's arrival at the machine, after its prompt was tokenized.
5. The first token ends TTFT and queue wait, once for each request: a request that is placed again after a failure is not a new one.
6. The sample takes at most one ended request in `SAMPLE_EVERY`, so that a busy router does not pay for it. The latest `KEPT_REQUESTS` are kept.
   Each reader names the last one that it has read.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice

from msgspec import Struct, field

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import RECENT_KEYS, RECENT_REQUESTS, ModelDemand, SampledRequest
from fleet.core.duration_counts import EDGES
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId
from fleet.router.kv_index.prefix_index import CacheComparison, Knowledge, compare
from fleet.router.messages import CacheDriftChanged
from fleet.router.placement.decision import Decision, PlacementReason
from fleet.router.placement.wait_or_reject import RejectionCause
from fleet.router.policy import PlacementPolicy
from fleet.router.state.live_requests import LiveRequest, RequestStage
from fleet.router.state.snapshot import Explanation, KnowledgeSnapshot, RouterCounters
from fleet.router.state.worker_table import RegisteredWorker

_PREFILL_LOST = PlacementReason.PREFILL_LOST  # a module variable is ten times as fast as the enum attribute


class RouterStatistics:
    """Counts the decisions and ends of one router's requests since its start, and keeps recent explanations."""

    def __init__(self, explained_requests: int) -> None:
        self.counters = RouterCounters()
        self._most_explained = explained_requests
        # `OrderedDict`, because it finds its first key fast
        self._explained: OrderedDict[RequestId, tuple[Decision, ...]] = OrderedDict()
        self._compared = dict.fromkeys(Knowledge, CacheComparison())
        self._prompts_compared = dict.fromkeys(Knowledge, 0)

    def arrived(self, request_id: RequestId) -> None:
        """Forget an older request with the same id."""
        self._explained.pop(request_id, None)

    def placed(self, live: LiveRequest, decision: Decision, policy: PlacementPolicy) -> None:
        """Count and keep a decision; `policy` is the one that should have made it."""
        counters, why = self.counters, decision.why
        placements = counters.placements
        placements[why] = placements.get(why, 0) + 1
        counters.policy_fallbacks += decision.policy is not policy
        if decision.prefill is None:
            counters.aggregated += 1
        else:
            counters.disaggregated += 1
            counters.policy_fallbacks += decision.prefill_policy is not policy
        if why is _PREFILL_LOST:
            counters.fallbacks += 1
        if live.sent:
            counters.continued += 1
        explained = self._explained
        earlier = explained.get(live.id)
        explained[live.id] = (decision,) if earlier is None else (*earlier, decision)
        if len(explained) > self._most_explained:
            explained.popitem(last=False)

    def impossible(self, cause: RejectionCause) -> None:
        """Count a request that no worker could serve."""
        causes = self.counters.impossible
        causes[cause] = causes.get(cause, 0) + 1

    def refused(self, reason: Reason) -> None:
        """Count a rejected request."""
        refused = self.counters.refused
        refused[reason] = refused.get(reason, 0) + 1

    def compare(self, decision: Decision, worker: RegisteredWorker, reported_tokens: int) -> CacheDriftChanged | None:
        """Compare the cached tokens that a decision predicted with those that the worker reported.

        Returns:
            The command to give if the worker's cache begins to drift, or no longer drifts.
        """
        accuracy, prompt = worker.accuracy, decision.request.prompt_tokens
        predicted = prompt - decision.prefill_tokens
        compared = compare(prompt, predicted, reported_tokens, worker.description.block_tokens)
        self._compared[accuracy.knowledge] += compared
        self._prompts_compared[accuracy.knowledge] += 1
        if not accuracy.note(compared):
            return None
        return CacheDriftChanged(
            worker_id=worker.description.worker_id,
            knowledge=accuracy.knowledge,
            drifting=accuracy.drifting,
            precision=accuracy.recent.precision,
            recall=accuracy.recent.recall,
        )

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Return why a request was placed as it was; None if that is too long ago or it was never placed."""
        placements = self._explained.get(request_id)
        return None if placements is None else Explanation(placements=tuple(each.explained() for each in placements))

    def knowledge(
        self, recent: Callable[[Knowledge], tuple[int, int, CacheComparison]]
    ) -> tuple[KnowledgeSnapshot, ...]:
        """Return how accurately the caches of workers are known.

        Args:
            recent: Returns, for one kind of knowledge, the number of workers, how many of them drift, and their latest comparisons.
        """
        found = []
        for knowledge in Knowledge:
            workers, drifting, lately = recent(knowledge)
            found.append(
                KnowledgeSnapshot(
                    knowledge=knowledge,
                    workers=workers,
                    drifting=drifting,
                    prompts=self._prompts_compared[knowledge],
                    total=self._compared[knowledge],
                    recent=lately,
                )
            )
        return tuple(found)


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
    """Counts the demand of each model since the start of one router (rules 3 to 6)."""

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
        waited = live.sent_at - since
        counters.queue_wait[bisect_left(_EDGES, waited) if waited else 0] += 1
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
