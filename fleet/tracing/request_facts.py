"""Request facts: the data that a router notes of a traced request while it runs, and the spans that it makes of them.

A request has one span of its own. Below it are the spans "queue", "placement" with the reason and the costs of the
candidates, and "attempt …" for each attempt on a worker. The span of an attempt has a link to the attempt before it. The
link of a decode attempt to its prefill attempt is `handoff`. The link of an attempt that continues an answer is `migration`.
All other links are `retry`.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, KvReport
from fleet.core.roles import KvPath, Phase
from fleet.frontend.request_tracing import RequestEnd, TracedRequest
from fleet.router.placement.decision import CostTerms, Decision, DecisionExplanation
from kvstore.tracing.context import TraceContext
from kvstore.tracing.spans import Attributes, AttributeValue, SpanEvent, SpanIds, SpanLink, SpanRecord, SpanSide

# A placement span shows at most this number of candidates for each phase, the cheapest first. It also shows at most this number of
# workers that were not candidates.
MOST_CANDIDATES = 8
PROVIDER = "fleet"


class AttemptRelation(StrEnum):
    """The relation of an attempt to the attempt before it: it takes over the prefill, it is a further try, or it continues the answer."""

    HANDOFF = "handoff"
    RETRY = "retry"
    MIGRATION = "migration"


class QueueFacts(Struct, frozen=True):
    queue: str  # "admission" for the admission queue, or "prefill" for the prefill queue of one worker
    began: Nanos
    ended: Nanos


class PlacementFacts(Struct, kw_only=True):
    decision: Decision
    began: Nanos
    ended: Nanos
    explained: DecisionExplanation | None = None  # the reason and the candidates' costs; None until the trace is kept


class RoutedAttempt(Struct, kw_only=True):
    """The facts of one attempt, as the router sees it."""

    id: RequestId
    worker_id: WorkerId
    phase: Phase
    span_id: bytes
    began: Nanos
    prompt_tokens: int
    kv_path: KvPath | None = None
    relation: AttemptRelation | None = None
    first_token: Nanos | None = None
    ended: Nanos | None = None
    finish: str = ""
    error: str = ""
    kv: KvReport | None = None


class RequestFacts(Struct, kw_only=True):
    """The facts of one request, until its spans are made."""

    request: TracedRequest
    context: TraceContext
    span_id: bytes
    began: Nanos
    ended: Nanos = Nanos(0)
    unix_offset: int = 0  # nanoseconds to add to an instant of the clock to get Unix time
    end: RequestEnd | None = None
    message: str = ""  # message of the rejection, if the request was rejected
    waits_since: Nanos = Nanos(0)
    queues: list[QueueFacts] = []
    placements: list[PlacementFacts] = []
    attempts: list[RoutedAttempt] = []
    restarts: list[Nanos] = []  # instants at which the answer was begun again from its first token


def request_spans(facts: RequestFacts, ids: SpanIds) -> Iterator[SpanRecord]:
    """Yield the spans of a request that has ended."""
    yield _request_span(facts)
    for queued in facts.queues:
        yield _child(facts, ids.span_id(), "queue", queued.began, queued.ended, {"fleet.queue": queued.queue})
    for placed in facts.placements:
        yield _placement_span(facts, placed, ids.span_id())
    before: RoutedAttempt | None = None
    for attempt in facts.attempts:
        yield _attempt_span(facts, attempt, before)
        before = attempt


def _request_span(facts: RequestFacts) -> SpanRecord:
    request, end = facts.request, facts.end
    assert end is not None
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
        "gen_ai.response.id": request.id,
        "fleet.request.id": request.id,
    }
    if (sampling := request.sampling) is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if "temperature" not in request.unset:
            attributes["gen_ai.request.temperature"] = sampling.temperature
        if "top_p" not in request.unset:
            attributes["gen_ai.request.top_p"] = sampling.top_p
        if sampling.seed is not None:
            attributes["gen_ai.request.seed"] = sampling.seed
    if request.session:
        attributes["gen_ai.conversation.id"] = request.session
    if request.tenant:
        attributes["fleet.tenant"] = request.tenant
    if (usage := end.usage) is not None:  # OpenTelemetry's conventions include the cached tokens in the input tokens
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if end.first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = (end.first_token - facts.began) / SECOND
    error = ""
    if isinstance(end.outcome, Finish):
        if request.model:  # the name is empty if the request names no model, which is allowed if only one is served
            attributes["gen_ai.response.model"] = request.model
        attributes["gen_ai.response.finish_reasons"] = [end.outcome.value]
    elif end.outcome is not None:
        attributes["error.type"] = end.outcome.value
        if end.outcome is not Reason.CANCELLED:
            error = facts.message or end.outcome.value
    attributes |= {f"fleet.baggage.{key}": value for key, value in facts.context.baggage}
    return SpanRecord(
        name=f"{request.operation} {request.model}".rstrip(),
        trace_id=facts.context.trace_id,
        span_id=facts.span_id,
        parent_id=facts.context.parent_id,
        state=facts.context.state,
        side=SpanSide.SERVER,
        began=facts.began + facts.unix_offset,
        ended=facts.ended + facts.unix_offset,
        attributes=attributes,
        events=tuple(SpanEvent(name="answer started over", at=at + facts.unix_offset) for at in facts.restarts),
        error=error,
    )


def _placement_span(facts: RequestFacts, placed: PlacementFacts, span_id: bytes) -> SpanRecord:
    attributes: dict[str, AttributeValue] = {}
    events: list[SpanEvent] = []
    if (explained := placed.explained) is not None:
        attributes = {
            "fleet.placement.reason": explained.why.value,
            "fleet.placement.policy": explained.policy,
            "fleet.placement.decode": explained.decode,
            "fleet.placement.uncached_tokens": explained.uncached_tokens,
            "fleet.placement.min_tokens": explained.min_tokens,
            "fleet.placement.prefill_tokens": explained.prefill_tokens,
        }
        attributes |= _cost("fleet.placement.decode", explained.candidates, explained.decode)
        if explained.prefill is not None:
            attributes["fleet.placement.prefill"] = explained.prefill
            attributes |= _cost("fleet.placement.prefill", explained.prefill_candidates, explained.prefill)
        if explained.kv_path is not None:
            attributes["fleet.placement.kv_path"] = explained.kv_path.value
        if explained.unfit:
            attributes["fleet.placement.unfit"] = [f"{name}: {why}" for name, why in explained.unfit[:MOST_CANDIDATES]]
        at = placed.ended + facts.unix_offset
        for phase, candidates in (("decode", explained.candidates), ("prefill", explained.prefill_candidates)):
            cheapest = sorted(candidates, key=lambda each: each.cost)[:MOST_CANDIDATES]
            events += [SpanEvent(name=f"{phase} candidate", at=at, attributes=_candidate(each)) for each in cheapest]
    return _child(facts, span_id, "placement", placed.began, placed.ended, attributes, events)


def _cost(prefix: str, candidates: Sequence[CostTerms], chosen: WorkerId) -> Attributes:
    """Return, as attributes, the cost of the chosen candidate and the terms that add up to this cost.

    Return nothing if the explanation does not list the chosen worker.
    """
    for terms in candidates:
        if terms.worker_id == chosen:
            return {
                f"{prefix}.cost": terms.cost,
                **{f"{prefix}.cost.{name}": value for name, value in terms.parts.items()},
            }
    return {}


def _candidate(terms: CostTerms) -> Attributes:
    parts = {f"fleet.cost.{name}": value for name, value in terms.parts.items()}
    return {"fleet.worker.id": terms.worker_id, "fleet.cost": terms.cost, **parts}


def _attempt_span(facts: RequestFacts, attempt: RoutedAttempt, before: RoutedAttempt | None) -> SpanRecord:
    attributes: dict[str, AttributeValue] = {
        "fleet.attempt.id": attempt.id,
        "fleet.phase": attempt.phase.value,
        "fleet.worker.id": attempt.worker_id,
        "fleet.prompt_tokens": attempt.prompt_tokens,
    }
    if attempt.kv_path is not None:
        attributes["fleet.kv.path"] = attempt.kv_path.value
    if attempt.finish:
        attributes["fleet.finish"] = attempt.finish
    if attempt.error:
        attributes["error.type"] = attempt.error
    if attempt.kv is not None:
        attributes["fleet.prompt_blocks"] = attempt.kv.prompt_blocks
        attributes["fleet.cached_tokens"] = attempt.kv.cached_tokens
        for origin in attempt.kv.origins:
            name = f"fleet.blocks.{origin.source.value}"
            attributes[name] = origin.blocks + sum(
                each.blocks for each in attempt.kv.origins if each.source is origin.source and each is not origin
            )
    events: list[SpanEvent] = []
    if attempt.first_token is not None:
        events.append(SpanEvent(name="first token", at=attempt.first_token + facts.unix_offset))
    links: tuple[SpanLink, ...] = ()
    if before is not None and attempt.relation is not None:
        links = (SpanLink(span_id=before.span_id, attributes={"fleet.link": attempt.relation.value}),)
    return _child(
        facts,
        attempt.span_id,
        f"attempt {attempt.phase.value}",
        attempt.began,
        facts.ended if attempt.ended is None else attempt.ended,
        attributes,
        events,
        links=links,
        side=SpanSide.CLIENT,
        error=attempt.error if attempt.error != Reason.CANCELLED else "",
    )


def _child(
    facts: RequestFacts,
    span_id: bytes,
    name: str,
    began: Nanos,
    ended: Nanos,
    attributes: Attributes,
    events: Sequence[SpanEvent] = (),
    *,
    links: tuple[SpanLink, ...] = (),
    side: SpanSide = SpanSide.INTERNAL,
    error: str = "",
) -> SpanRecord:
    return SpanRecord(
        name=name,
        trace_id=facts.context.trace_id,
        span_id=span_id,
        parent_id=facts.span_id,
        state=facts.context.state,
        side=side,
        began=began + facts.unix_offset,
        ended=max(began, ended) + facts.unix_offset,
        attributes=attributes,
        events=tuple(events),
        links=links,
        error=error,
    )
