"""Router statistics: counters, explanations of recent decisions, the accuracy of the router's view of the caches, and demand.

Rules:

1. The decisions of the latest `explained_requests` requests are kept for explanations, whether the requests have ended or not. If a request
   reuses the id of an older one, the decisions of the older one are forgotten.
2. Predicted and reported cached tokens are compared once for each prompt, on the worker that computed it
   (`fleet.router.kv_index.prefix_index`, rule 10).

Rules of demand (`RouterDemand`). The planner learns from it what clients ask for and how well they are served.

3. Counting a request takes only a few increments and three look-ups in a table of bucket edges. Everything else is computed when a report
   is made.
4. TTFT and queue wait are measured from the request's arrival at the machine, which is after its prompt was tokenized.
5. TTFT and queue wait are counted at the first token, once for each request. A request that is placed again after a failure does not count
   as a new one.
6. At most one ended request in every `SAMPLE_EVERY` nanoseconds is sampled, so that a busy router has no noticeable cost. The latest
   `KEPT_REQUESTS` samples are kept. Each reader states up to which sample it has read.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
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

MOST_MODELS = 1000
"""The maximum number of models whose requests are counted; requests for further models are not counted. Model names
come from workers and settings, so only a fault can reach this limit."""

# This name exists because reading a module variable is three to ten times as fast as reading the enum attribute.
_PREFILL_LOST = PlacementReason.PREFILL_LOST


class CountersByModel(dict[ModelName, RouterCounters]):
    """The counters of each model by its name. The counters of a model are made when they are first read.

    If there are `MOST_MODELS` models already, the counters of further models are not kept.
    """

    def __missing__(self, model: ModelName) -> RouterCounters:
        counters = RouterCounters()
        if len(self) < MOST_MODELS:
            self[model] = counters
        return counters


class _ComparedPrompts(Struct):
    """Sums over all comparisons of predicted and reported cached tokens since the start of the router."""

    prompts: int = 0
    total: CacheComparison = CacheComparison()


class RouterStatistics:
    """Counts the decisions about requests of one router, and how the requests ended. It also keeps recent decisions."""

    def __init__(self, explained_requests: int) -> None:
        self.counters = CountersByModel()
        self.late_messages = 0
        self._most_explained = explained_requests
        # the decisions of the latest requests (rule 1), in an `OrderedDict`, because it finds and removes its first key fast
        self._explained: OrderedDict[RequestId, tuple[Decision, ...]] = OrderedDict()
        self._compared: dict[tuple[ModelName, Knowledge], _ComparedPrompts] = {}

    def arrived(self, request_id: RequestId) -> None:
        """Forget the decisions of an older request that had the same id."""
        self._explained.pop(request_id, None)

    def placed(self, live: LiveRequest, decision: Decision, policy: PlacementPolicy) -> None:
        """Count a decision, and keep it for explanations. If another policy than `policy`, the configured one, decided, count that too."""
        counters, why = self.counters[live.arrived.model], decision.why
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

    def impossible(self, model: ModelName, cause: RejectionCause) -> None:
        """Count a request that no worker could serve, or whose begun answer no worker could continue, by its cause."""
        causes = self.counters[model].impossible
        causes[cause] = causes.get(cause, 0) + 1

    def refused(self, model: ModelName, reason: Reason) -> None:
        """Count a rejected request by the reason."""
        refused = self.counters[model].refused
        refused[reason] = refused.get(reason, 0) + 1

    def compare(self, decision: Decision, worker: RegisteredWorker, reported_tokens: int) -> CacheDriftChanged | None:
        """Compare the cached tokens that a decision predicted with those that the worker reported, and keep the comparison.

        Returns:
            The command to return from the machine if the worker's cache begins to drift or no longer drifts; otherwise None.
        """
        accuracy, prompt = worker.accuracy, decision.request.prompt_tokens
        predicted = prompt - decision.prefill_tokens
        compared = compare(prompt, predicted, reported_tokens, worker.description.block_tokens)
        key = (worker.description.model, accuracy.knowledge)
        totals = self._compared.get(key)
        if totals is None:
            totals = self._compared[key] = _ComparedPrompts()
        totals.prompts += 1
        totals.total += compared
        if not accuracy.note(compared):
            return None
        return CacheDriftChanged(
            worker_id=worker.description.worker_id,
            knowledge=accuracy.knowledge,
            drifting=accuracy.drifting,
            precision=accuracy.recent.precision,
            recall=accuracy.recent.recall,
        )

    def decisions(self, request_id: RequestId) -> tuple[Decision, ...]:
        """Return the decisions for a request in their order; empty if it was never placed, or is not kept any more (rule 1)."""
        return self._explained.get(request_id, ())

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Return why a request was placed as it was; None if it was never placed, or is not kept any more (rule 1)."""
        placements = self._explained.get(request_id)
        return None if placements is None else Explanation(placements=tuple(each.explained() for each in placements))

    def total(self) -> RouterCounters:
        """Return the sums of the counters over all models."""
        total = RouterCounters(late_messages=self.late_messages)
        for each in self.counters.values():
            total.add(each)
        return total

    def knowledge(
        self, recent: Mapping[tuple[ModelName, Knowledge], tuple[int, int, CacheComparison]]
    ) -> tuple[KnowledgeSnapshot, ...]:
        """Return how accurately the router knows the caches of workers: a snapshot for each model and each kind of knowledge.

        Workers that have left still count in the sums since the start.

        Args:
            recent: For each model and kind of knowledge: the number of present workers, how many of their caches drift, and the sums of
                their latest comparisons.
        """
        found = []
        for key in sorted(self._compared.keys() | recent.keys()):
            model, knowledge = key
            workers, drifting, lately = recent.get(key, (0, 0, CacheComparison()))
            compared = self._compared.get(key, _ComparedPrompts())
            found.append(
                KnowledgeSnapshot(
                    model=model,
                    knowledge=knowledge,
                    workers=workers,
                    drifting=drifting,
                    prompts=compared.prompts,
                    total=compared.total,
                    recent=lately,
                )
            )
        return tuple(found)


KEPT_REQUESTS = 256
SAMPLE_EVERY = Nanos(SECOND // RECENT_REQUESTS)
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
        """Count a request that has arrived, and its prompt tokens."""
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        tokens = live.own_tokens
        counters.arrivals += 1
        counters.prompt_tokens += tokens
        counters.prompt_squares += tokens * tokens

    def turned_away(self, model: ModelName) -> None:
        """Count a request that was refused before its prompt was read, because its model has no worker."""
        counters = self._models.get(model) or self._new(model)
        counters.arrivals += 1
        counters.refused += 1

    def queued(self, live: LiveRequest) -> None:
        """Count a new request that enters the admission queue."""
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        counters.waited += 1

    def first_token(self, live: LiveRequest, now: Nanos) -> None:
        """Record when the first token of a request came, and count its TTFT, its queue wait and its cached tokens."""
        live.first_token_at = now
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        since = live.since
        counters.ttft[bisect_left(_EDGES, now - since)] += 1
        waited = live.sent_at - since
        counters.queue_wait[bisect_left(_EDGES, waited) if waited else 0] += 1
        counters.cached_tokens += live.cached_tokens

    def ended(self, live: LiveRequest, now: Nanos) -> None:
        """Count a request that was completed or cancelled: as finished if it has had a first token, or else as abandoned.

        A finished request may become a sample (rule 6).
        """
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
        """Count a request that was rejected. If its answer had begun, it counts as finished, with the tokens of the answer.

        Otherwise it counts as refused if the reason is the load (`_FOR_LOAD`), or as invalid if the reason is the request (`_INVALID`). For
        any other reason, only its arrival counts.
        """
        counters = self._models.get(model := live.arrived.model) or self._new(model)
        if live.first_token_at:
            tokens = len(live.sent)
            counters.finished += 1
            counters.answer_tokens += tokens
            counters.answer_squares += tokens * tokens
        elif reason in _FOR_LOAD:
            counters.refused += 1
        elif reason in _INVALID:
            counters.invalid += 1
            counters.uncounted_tokens += live.own_tokens

    def models(self, live_requests: Iterable[LiveRequest], now: Nanos) -> tuple[ModelDemand, ...]:
        """Return the demand of all models. `live_requests` are the requests that have not ended."""
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
        """Return the sampled requests with numbers above `after`.

        Args:
            after: The number of the last sample that the reader has read; 0: none.

        Returns:
            The number of the latest sample, and at most the latest `RECENT_REQUESTS` samples.
        """
        fresh = min(max(0, self._sampled - after), len(self._recent), RECENT_REQUESTS)
        return self._sampled, tuple(islice(self._recent, len(self._recent) - fresh, None))
