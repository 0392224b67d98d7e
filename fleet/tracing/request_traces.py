"""Request traces: observes the machine of one router, and notes what happens to the traced requests.

Rules:

1. The machine knows nothing of traces. The observer of this module sees the machine's events and commands
   (`fleet.router.observer`), and notes facts. Spans are made of the facts in the exporter's thread, and only if the
   trace is kept (`fleet.tracing.sampling`).
2. When an attempt is sent to a worker, `TracedWorkers` adds the trace id and the id of the attempt's span.
3. If a trace was not sampled but is kept at the end of the request, all workers of the request are told to export
   their spans of it. The command names the attempts of this request, because a client's trace may contain
   other requests, which are not kept. If the request may use only a part of the router's export queue, the command also tells
   the workers to leave room in their queues. If the router's queue has no room for the spans of the request, no command is
   sent, because these spans are the parents of the workers' spans.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from fleet.core.clock import Clock, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.work import KeepTrace, Start
from fleet.frontend.metrics.tracing import TracingCounts
from fleet.frontend.request_tracing import RequestEnd, TracedRequest
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    Arrived,
    AttemptRejected,
    CancelAttempt,
    Command,
    Dispatch,
    Emit,
    Reject,
    RouterEvent,
    StartedOver,
    Undelivered,
    WorkerJoined,
    WorkerLeft,
    WorkerStepped,
)
from fleet.router.ports import Workers
from fleet.router.state.live_requests import request_of
from fleet.tracing.request_facts import (
    AttemptRelation,
    PlacementFacts,
    QueueFacts,
    RequestFacts,
    RoutedAttempt,
    request_spans,
)
from fleet.tracing.sampling import KeepReason, export_share, is_sampled, keep_at_end
from kvstore.tracing.context import TraceContext, read_trace_context
from kvstore.tracing.exporter import TraceExporter
from kvstore.tracing.settings import TracingSettings
from kvstore.tracing.spans import SpanIds

KeepTraceAt = Callable[[WorkerId, KeepTrace], None]
"""A function that sends a worker the message to export its spans of a request."""


class RequestTraces:
    """Follows the traced requests of one router. Implements `Observer` of the router and `RequestTracing` of the frontends."""

    machine: RouterMachine
    """The observed machine. The caller has to set it before the first event."""

    def __init__(
        self,
        settings: TracingSettings,
        exporter: TraceExporter,
        clock: Clock,
        unix_nanoseconds: Callable[[], int],
        ids: SpanIds,
        keep_trace_at: KeepTraceAt,
    ) -> None:
        self.exporter = exporter
        self.kept = dict.fromkeys(KeepReason, 0)
        self.ignored_headers = 0  # number of `traceparent` headers that could not be read
        self._settings = settings
        self._keys = frozenset(settings.baggage)
        self._clock = clock
        self._unix_nanoseconds = unix_nanoseconds
        self._ids = ids
        self._keep_trace_at = keep_trace_at
        self._requests: dict[RequestId, RequestFacts] = {}
        self._attempts: dict[RequestId, RoutedAttempt] = {}  # attempts that have not ended

    @property
    def live(self) -> int:
        """The number of requests whose traces are followed now."""
        return len(self._requests)

    def counts(self) -> TracingCounts:
        """Return the number of kept traces by reason, and the number of unreadable trace headers, for metrics."""
        kept = {why.value: count for why, count in self.kept.items()}
        return TracingCounts(kept=kept, ignored_headers=self.ignored_headers)

    # Methods that the frontends call:

    def read(self, headers: Mapping[bytes, bytes]) -> TraceContext:
        """Return the trace context that a client has sent, or a new one if the client sent no readable context.

        The client's context also decides whether the request is sampled, if `TracingSettings.follow_clients` is on.
        """
        if (parent := headers.get(b"traceparent")) is not None:
            context = read_trace_context(
                parent.decode("latin-1"),
                headers.get(b"tracestate", b"").decode("latin-1"),
                headers.get(b"baggage", b"").decode("latin-1") if self._keys else "",
                self._keys,
            )
            if context is not None:
                if self._settings.follow_clients:
                    return context
                return structs.replace(context, sampled=is_sampled(context.trace_id, self._settings.sample_ratio))
            self.ignored_headers += 1
        return self._new_context()

    def begin(self, request: TracedRequest, began: Nanos) -> "FollowedRequest":
        """Begin the trace of a request that arrived at the instant `began`."""
        context = request.context or self._new_context()
        return FollowedRequest(
            self, RequestFacts(request=request, context=context, span_id=self._ids.span_id(), began=began)
        )

    def _new_context(self) -> TraceContext:
        trace_id = self._ids.trace_id()
        return TraceContext(trace_id=trace_id, sampled=is_sampled(trace_id, self._settings.sample_ratio))

    # Methods that `FollowedRequest` calls:

    def follow(self, facts: RequestFacts) -> None:
        self._requests[facts.request.id] = facts

    def end(self, facts: RequestFacts, end: RequestEnd) -> None:
        if self._requests.get(facts.request.id) is facts:
            del self._requests[facts.request.id]
            for attempt in facts.attempts:
                self._attempts.pop(attempt.id, None)
        facts.end, facts.ended = end, self._clock.now()
        context = facts.context
        first = None if end.first_token is None else Nanos(end.first_token - facts.began)
        ended = Nanos(facts.ended - facts.began)
        kept = KeepReason.SAMPLED
        if not context.sampled:
            why = keep_at_end(self._settings, end.outcome, first, ended)
            if why is None:
                return
            kept = why
        facts.unix_offset = self._unix_nanoseconds() - self._clock.now()
        for placed in facts.placements:
            placed.explained = placed.decision.explained()
        share = export_share(self._settings, end.outcome, first, ended)
        if not self.exporter.put(lambda: request_spans(facts, self._ids), share):
            return
        self.kept[kept] += 1
        if not context.sampled:
            self._ask_workers(facts, leave_room=share < 1)

    def _ask_workers(self, facts: RequestFacts, *, leave_room: bool) -> None:
        """Let the workers of a request export the spans of its attempts (rule 3)."""
        parents: dict[WorkerId, list[bytes]] = {}
        for attempt in facts.attempts:
            parents.setdefault(attempt.worker_id, []).append(attempt.span_id)
        for worker_id, span_ids in parents.items():
            message = KeepTrace(trace_id=facts.context.trace_id, parent_ids=tuple(span_ids), leave_room=leave_room)
            self._keep_trace_at(worker_id, message)

    # Method that `TracedWorkers` calls:

    def context_of(self, attempt_id: RequestId) -> TraceContext | None:
        """Return the trace context to send with an attempt; None if the attempt is not followed."""
        if (attempt := self._attempts.get(attempt_id)) is None:
            return None
        context = self._requests[request_of(attempt_id)].context
        return TraceContext(
            trace_id=context.trace_id, parent_id=attempt.span_id, sampled=context.sampled, state=context.state
        )

    # Method that is called after each event of the router machine (`fleet.router.observer`):

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        # Most events are `WorkerStepped`, and most commands are `Emit`, so these are handled first.
        if type(event) is WorkerStepped:
            attempts = self._attempts
            for progress in event.progress:
                if (attempt := attempts.get(progress.request_id)) is None or attempt.worker_id != event.worker_id:
                    continue
                if progress.token_ids and attempt.first_token is None:
                    attempt.first_token = now
                if progress.kv is not None:
                    attempt.kv = progress.kv
                if (finish := progress.finish) is not None:
                    self._ended(attempt, now, finish.value, Reason.WORKER_LOST if finish is Finish.CANCELLED else None)
        elif type(event) is Arrived:
            if (facts := self._requests.get(event.request_id)) is not None:
                facts.waits_since = now
                self._note_placement(facts, now)
        else:
            self._note_failures(event, now)
        for command in commands or ():
            if type(command) is not Emit:
                self._note_command(command, now)

    def _note_failures(self, event: RouterEvent, now: Nanos) -> None:
        """Record the end of all attempts that an event has ended without a result."""
        match event:
            case WorkerLeft(worker_id=worker_id):
                self._lost(worker_id, now)
            case WorkerJoined():
                self._lost(event.description.worker_id, now)  # the attempts of the worker's earlier process are lost
            case AttemptRejected(worker_id=worker_id, rejected=rejected):
                attempt = self._attempts.get(rejected.request_id)
                if attempt is not None and attempt.worker_id == worker_id:
                    self._ended(attempt, now, "", rejected.reason)
            case Undelivered(request_id=attempt_id):
                if (attempt := self._attempts.get(attempt_id)) is not None:
                    self._ended(attempt, now, "", Reason.WORKER_LOST)
            case _:
                pass

    def _lost(self, worker_id: WorkerId, now: Nanos) -> None:
        for attempt in [each for each in self._attempts.values() if each.worker_id == worker_id]:
            self._ended(attempt, now, "", Reason.WORKER_LOST)

    def _ended(self, attempt: RoutedAttempt, now: Nanos, finish: str, error: Reason | None) -> None:
        del self._attempts[attempt.id]
        attempt.ended, attempt.finish = now, finish
        if error is not None:
            attempt.error = error.value
        if (facts := self._requests.get(request_of(attempt.id))) is not None:
            facts.waits_since = now

    def _note_command(self, command: Command, now: Nanos) -> None:
        match command:
            case Dispatch(worker_id=worker_id, start=start):
                if (facts := self._requests.get(request_of(start.request_id))) is not None:
                    self._dispatched(facts, worker_id, start, now)
            case CancelAttempt(request_id=attempt_id):
                if (attempt := self._attempts.get(attempt_id)) is not None:
                    self._ended(attempt, now, "", Reason.CANCELLED)
            case StartedOver(request_id=request_id):
                if (facts := self._requests.get(request_id)) is not None:
                    facts.restarts.append(now)
            case Reject(request_id=request_id, message=message):
                if (facts := self._requests.get(request_id)) is not None:
                    facts.message = message
            case _:
                pass

    def _note_placement(self, facts: RequestFacts, now: Nanos) -> bool:
        """Record the latest decision for a request. Return False if there is none, or if it was recorded before.

        After the arrival, a decision is recorded only at a dispatch. So a request that waited first in the admission
        queue and then in a prefill queue has one queue span for both waits.
        """
        decision = self.machine.decision(facts.request.id)
        if decision is None or (facts.placements and facts.placements[-1].decision is decision):
            return False
        if facts.waits_since < now:
            facts.queues.append(QueueFacts("admission", facts.waits_since, now))
        facts.placements.append(PlacementFacts(decision=decision, began=now, ended=self._clock.now()))
        return True

    def _dispatched(self, facts: RequestFacts, worker_id: WorkerId, start: Start, now: Nanos) -> None:
        if not self._note_placement(facts, now) and start.handoff is None and facts.waits_since < now:
            facts.queues.append(QueueFacts("prefill", facts.waits_since, now))
        relation = None
        if start.handoff is not None:
            relation = AttemptRelation.HANDOFF
        elif facts.attempts:
            relation = AttemptRelation.MIGRATION if start.generated_tokens else AttemptRelation.RETRY
        attempt = RoutedAttempt(
            id=start.request_id,
            worker_id=worker_id,
            phase=start.phase,
            span_id=self._ids.span_id(),
            began=now,
            prompt_tokens=start.num_tokens,
            kv_path=start.kv_path if start.handoff is None else start.handoff.kv_path,
            relation=relation,
        )
        facts.attempts.append(attempt)
        self._attempts[attempt.id] = attempt


class FollowedRequest:
    """Follows the trace of one request. Implements `fleet.frontend.request_tracing.RequestTrace`."""

    def __init__(self, traces: RequestTraces, facts: RequestFacts) -> None:
        self._traces = traces
        self._facts = facts

    @property
    def trace_id(self) -> str:
        """Return the trace id in hexadecimal."""
        return self._facts.context.trace_id.hex()

    def follow(self, request: TracedRequest) -> None:
        """Follow the request from now on. `request` has its final id and tenant."""
        self._facts.request = request
        self._traces.follow(self._facts)

    def ended(self, end: RequestEnd) -> None:
        """Record the end of the request, and export its spans if the trace is kept."""
        self._traces.end(self._facts, end)


class TracedWorkers:
    """Passes attempts on to the wrapped workers, each followed attempt with its trace context. Implements `fleet.router.ports.Workers`."""

    def __init__(self, workers: Workers, traces: RequestTraces) -> None:
        self._workers = workers
        self._traces = traces

    def start(self, worker_id: WorkerId, start: Start) -> None:
        trace = self._traces.context_of(start.request_id)
        self._workers.start(worker_id, start if trace is None else structs.replace(start, trace=trace))

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._workers.cancel(worker_id, request_id)
