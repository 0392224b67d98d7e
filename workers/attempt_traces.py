"""Attempt traces: makes the spans of the attempts on one worker from the events and commands of the worker's machine.

Rules:

1. Only attempts whose router sent a trace context are followed. The span of an attempt is a child of the router's span.
2. A sampled attempt is exported when it ends. An attempt that is not sampled is kept in memory after its end, because
   its request may still become slow or fail on another worker. The router then sends `KeepTrace` with the ids of its
   own spans of these attempts, and the attempts are exported too. Without such ids, all attempts of the trace are
   exported. At most `MOST_HELD` attempts are kept, the newest ones. With `KeepTrace.leave_room`, the attempts that the
   router names may fill only a part of the export queue, so that room is left for the attempts of failed requests.
3. Below the attempt's span there are "queue" (until the engine schedules the attempt), "kv_transfer" (blocks from the
   store or another worker), "prefill" (until the first token) and "decode" (until the last token). If the engine does
   not report one of these parts, the next part includes its time. An attempt that failed before its first token has no
   such parts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, structs

from fleet.core.clock import Clock, Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import Finish, KvReport, Source
from fleet.core.roles import Phase
from fleet.core.work import AttemptTimes, KeepTrace, Progress, Rejected
from fleet.tracing.sampling import REFUSED_SHARE
from kvstore.tracing.context import TraceContext
from kvstore.tracing.exporter import TraceExporter
from kvstore.tracing.spans import Attributes, AttributeValue, SpanEvent, SpanIds, SpanRecord, SpanSide
from workers.messages import (
    AttemptRequested,
    CancelInEngine,
    EngineStepped,
    EngineStuck,
    Submit,
    Tell,
    WorkerCommand,
    WorkerEvent,
)

MOST_HELD = 4096  # maximum number of ended attempts that wait for `KeepTrace` (rule 2); each takes about 1 KB of memory


class AttemptFacts(Struct, kw_only=True):
    """Notes the times and results of one traced attempt until it ends; its spans are made from them."""

    trace: TraceContext
    worker_id: WorkerId
    model: ModelName
    attempt_id: RequestId  # the request id that the router has chosen
    phase: Phase
    began: Nanos
    first_token: Nanos | None = None
    ended: Nanos = Nanos(0)
    unix_offset: int = 0  # what to add to a time of the host's monotonic clock to get Unix time, in nanoseconds
    prompt_tokens: int
    answer_tokens: int = 0
    finish: str = ""
    error: str = ""
    kv: KvReport | None = None
    times: AttemptTimes | None = None
    share: float = 1.0  # the spans are dropped if at least this share of the export queue is in use (rule 2)


class AttemptTraces:
    """Makes the spans of a worker's traced attempts from the events and commands that it sees as a `WorkerObserver`."""

    def __init__(
        self,
        worker_id: WorkerId,
        model: ModelName,
        exporter: TraceExporter,
        clock: Clock,
        unix_nanoseconds: Callable[[], int],
        ids: SpanIds,
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._exporter = exporter
        self._clock = clock
        self._unix_nanoseconds = unix_nanoseconds
        self._ids = ids
        # Traced attempts that have not ended, by the engine's request id.
        self._running: dict[RequestId, AttemptFacts] = {}
        # Ended attempts that were not exported, by trace id and the id of the router's span, in the order in which they ended.
        self._held: OrderedDict[tuple[bytes, bytes], AttemptFacts] = OrderedDict()

    def __call__(self, now: Nanos, event: WorkerEvent, commands: Sequence[WorkerCommand], /) -> None:
        if type(event) is EngineStepped:
            if self._running:
                for output in event.outputs:
                    if (facts := self._running.get(output.request_id)) is not None:
                        self._advance(facts, output, now)
        elif type(event) is AttemptRequested:
            self._requested(event, commands, now)
        elif type(event) is EngineStuck:
            for engine_id, facts in list(self._running.items()):
                facts.error = "engine_hung"
                self._end(engine_id, facts, now)
        else:
            for command in commands:
                if type(command) is CancelInEngine and (facts := self._running.get(command.request_id)) is not None:
                    facts.finish = Finish.CANCELLED.value

    def keep_trace(self, request: KeepTrace) -> None:
        """Export the ended attempts of a request now, and its running attempts when they end (rule 2).

        If `request.parent_ids` is empty, all attempts of the trace are exported.
        """
        trace_id, parents = request.trace_id, frozenset(request.parent_ids)
        share = REFUSED_SHARE if request.leave_room else 1.0
        keys = [(trace_id, each) for each in request.parent_ids] or [each for each in self._held if each[0] == trace_id]
        for key in keys:
            if (facts := self._held.pop(key, None)) is not None:
                facts.share = share
                self._export(facts)
        for facts in self._running.values():
            trace = facts.trace
            if trace.trace_id == trace_id and (not parents or trace.parent_id in parents):
                facts.trace, facts.share = structs.replace(trace, sampled=True), share

    @property
    def held(self) -> int:
        """The number of ended attempts that are kept in case a router requests their spans (rule 2)."""
        return len(self._held)

    def _requested(self, event: AttemptRequested, commands: Sequence[WorkerCommand], now: Nanos) -> None:
        start = event.start
        if start.trace is None:
            return
        for command in commands:
            if not isinstance(command, Submit | Tell):
                continue
            facts = AttemptFacts(
                trace=start.trace,
                worker_id=self._worker_id,
                model=self._model,
                attempt_id=start.request_id,
                phase=start.phase,
                began=now,
                prompt_tokens=start.num_tokens,
            )
            if isinstance(command, Submit):
                self._running[command.start.request_id] = facts
            elif isinstance(command.message, Rejected):
                facts.error = command.message.reason.value
                self._finish(facts, now)

    def _advance(self, facts: AttemptFacts, output: Progress | Rejected, now: Nanos) -> None:
        if isinstance(output, Rejected):
            facts.error = output.reason.value
            self._end(output.request_id, facts, now)
            return
        if output.token_ids:
            facts.answer_tokens += len(output.token_ids)
            if facts.first_token is None:
                facts.first_token = now
        if output.kv is not None:
            facts.kv, facts.times = output.kv, output.times
        if output.finish is not None:
            facts.finish = output.finish.value
            self._end(output.request_id, facts, now)

    def _end(self, engine_id: RequestId, facts: AttemptFacts, now: Nanos) -> None:
        del self._running[engine_id]
        self._finish(facts, now)

    def _finish(self, facts: AttemptFacts, now: Nanos) -> None:
        facts.ended = now
        facts.unix_offset = self._unix_nanoseconds() - self._clock.now()
        if facts.trace.sampled:
            self._export(facts)
            return
        self._held[facts.trace.trace_id, facts.trace.parent_id] = facts
        if len(self._held) > MOST_HELD:
            self._held.popitem(last=False)

    def _export(self, facts: AttemptFacts) -> None:
        self._exporter.put(lambda: attempt_spans(facts, self._ids), facts.share)


def attempt_spans(facts: AttemptFacts, ids: SpanIds) -> Iterator[SpanRecord]:
    """Yield the spans of an attempt that has ended (rule 3)."""
    span_id = ids.span_id()

    def child(name: str, began: Nanos, ended: Nanos, attributes: Attributes) -> SpanRecord:
        return SpanRecord(
            name=name,
            trace_id=facts.trace.trace_id,
            span_id=ids.span_id(),
            parent_id=span_id,
            state=facts.trace.state,
            began=began + facts.unix_offset,
            ended=max(began, ended) + facts.unix_offset,
            attributes=attributes,
        )

    attributes: dict[str, AttributeValue] = {
        "fleet.attempt.id": facts.attempt_id,
        "fleet.phase": facts.phase.value,
        "fleet.worker.id": facts.worker_id,
        "gen_ai.request.model": facts.model,
        "fleet.prompt_tokens": facts.prompt_tokens,
        "fleet.answer_tokens": facts.answer_tokens,
    }
    if facts.finish:
        attributes["fleet.finish"] = facts.finish
    if facts.error:
        attributes["error.type"] = facts.error
    times = facts.times or AttemptTimes()
    events: tuple[SpanEvent, ...] = ()
    moved = {} if facts.kv is None else transfer_attributes(facts.kv)
    if moved and times.transfer_ended is None:  # the engine reported which blocks were moved, but not at which time
        at = (facts.first_token or facts.ended) + facts.unix_offset
        events = (SpanEvent(name="kv_transfer", at=at, attributes=moved),)
    yield SpanRecord(
        name=f"worker {facts.phase.value}",
        trace_id=facts.trace.trace_id,
        span_id=span_id,
        parent_id=facts.trace.parent_id,
        state=facts.trace.state,
        side=SpanSide.SERVER,
        began=facts.began + facts.unix_offset,
        ended=facts.ended + facts.unix_offset,
        attributes=attributes,
        events=events,
        error=facts.error,
    )
    if facts.error and facts.first_token is None:
        return
    began = facts.began
    if times.scheduled is not None:
        yield child("queue", began, times.scheduled, {"fleet.queue": "engine"})
        began = times.scheduled
    if times.transfer_began is not None and times.transfer_ended is not None:
        yield child("kv_transfer", times.transfer_began, times.transfer_ended, moved or NOTHING_MOVED)
        began = times.transfer_ended
    computed = facts.prompt_tokens - (facts.kv.cached_tokens if facts.kv is not None else 0)
    yield child("prefill", began, facts.first_token or facts.ended, {"fleet.prefill_tokens": computed})
    if facts.first_token is not None and facts.phase is not Phase.PREFILL:
        yield child("decode", facts.first_token, facts.ended, {"fleet.answer_tokens": facts.answer_tokens})


NOTHING_MOVED: Attributes = {"fleet.kv.blocks": 0, "fleet.kv.bytes": 0}


def transfer_attributes(report: KvReport) -> dict[str, AttributeValue]:
    """Return span attributes for the blocks that a worker got from the store or another worker: their number, bytes and sources.

    The result is empty if the worker got none.
    """
    moved = [each for each in report.origins if each.source in (Source.STORE, Source.DIRECT)]
    if not moved:
        return {}
    attributes: dict[str, AttributeValue] = {
        "fleet.kv.blocks": sum(each.blocks for each in moved),
        "fleet.kv.bytes": sum(each.bytes for each in moved),
        "fleet.kv.sources": sorted({each.source.value for each in moved}),
        "fleet.kv.origins": sorted({each.origin for each in moved if each.origin}),
    }
    if tiers := sorted({each.tier for each in moved if each.tier}):
        attributes["fleet.kv.tiers"] = tiers
    return attributes
