"""Tests of the traces of a router: a real router machine decides, and the spans show what it did."""

from collections.abc import Iterable
from random import Random

import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, Sampling, Usage
from fleet.core.roles import KvPath, Role
from fleet.core.work import Handoff, KeepTrace, Start
from fleet.frontend.request_tracing import RequestEnd, TracedRequest
from fleet.router.messages import Dispatch
from fleet.router.observer import ObservedMachine
from fleet.router.settings.router import RouterSettings
from fleet.tracing.request_traces import RequestTraces, TracedWorkers
from fleet.tracing.sampling import REFUSED_SHARE
from kvstore.tracing.context import TraceContext
from kvstore.tracing.settings import TracingSettings
from kvstore.tracing.spans import EndedSpans, SpanIds, SpanRecord
from tests.support.builders import FINGERPRINT, a_prompt, an_arrival
from tests.support.router.machine_driver import RouterMachineDriver, the

UNIX_OFFSET = 1_000 * SECOND
CALLER = TraceContext(trace_id=b"t" * 16, parent_id=b"p" * 8, sampled=True, state="a=1")
UNSAMPLED = TraceContext(trace_id=b"t" * 16, parent_id=b"p" * 8)


class Exports:
    """Fake of the exporter's queue, which makes the spans at once."""

    def __init__(self) -> None:
        self.exported = self.failed = self.overflowed = self.waiting = 0
        self.spans: list[SpanRecord] = []
        self.shares: list[float] = []
        self.is_full = False

    def put(self, ended: EndedSpans, share: float = 1.0) -> bool:
        self.shares.append(share)
        if not self.is_full:
            self.spans += ended()
        return not self.is_full


class SentAttempts:
    """Fake workers that note the attempts that are sent to them."""

    def __init__(self) -> None:
        self.started: list[tuple[WorkerId, Start]] = []

    def start(self, worker_id: WorkerId, start: Start) -> None:
        self.started.append((worker_id, start))

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None: ...


class DriverClock:
    """The clock of a driver."""

    def __init__(self, driver: RouterMachineDriver) -> None:
        self._driver = driver

    def now(self) -> Nanos:
        return self._driver.now


class TracedRouter(RouterMachineDriver):
    """Driver of a router machine whose events are traced; the clock of the traces is that of the driver."""

    def __init__(self, *workers, tracing: TracingSettings = TracingSettings(), **settings):  # noqa: B008 - immutable
        super().__init__()
        self.exports, self.sent, self.asked = Exports(), SentAttempts(), []
        clock = DriverClock(self)
        self.traces = RequestTraces(
            tracing,
            self.exports,
            clock,
            lambda: self.now + UNIX_OFFSET,
            SpanIds(1),
            lambda worker_id, request: self.asked.append((worker_id, request)),
        )
        routing = RouterSettings(**settings)
        self.machine = self.traces.machine = ObservedMachine(routing, Random(0), observer=self.traces)
        self.workers = TracedWorkers(self.sent, self.traces)
        for worker_id, role in workers:
            self.join(worker_id, role)

    def send(self, event):
        commands = super().send(event)
        for command in commands:
            if isinstance(command, Dispatch):
                self.workers.start(command.worker_id, command.start)
        return commands

    def pass_ms(self, milliseconds: int) -> None:
        self.now = Nanos(self.now + milliseconds * MILLISECOND)

    def begin(
        self,
        context: TraceContext | None = CALLER,
        request_id: str = "r1",
        unset: frozenset[str] = frozenset(),
        **fields,
    ):
        request = TracedRequest(
            id=RequestId(request_id),
            operation="chat",
            model="m",
            stream=True,
            context=context,
            sampling=Sampling(),
            unset=unset,
        )
        trace = self.traces.begin(request, self.now)
        trace.follow(request)
        return trace, self.send(an_arrival(request_id=request_id, **fields))

    def named(self, name: str) -> list[SpanRecord]:
        return [span for span in self.exports.spans if span.name == name]


def finished(*, outcome=Finish.STOP, first: Nanos | None = None) -> RequestEnd:
    return RequestEnd(
        outcome=outcome, usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=4), first_token=first
    )


def linked(span: SpanRecord, others: Iterable[SpanRecord]) -> list[tuple[str, str]]:
    names = {other.span_id: other.attributes["fleet.attempt.id"] for other in others}
    return [(names[link.span_id], link.attributes["fleet.link"]) for link in span.links]


def test_request_has_a_span_with_the_attributes_of_genai():
    router = TracedRouter(("d1", Role.BOTH))
    trace, commands = router.begin()
    work = the(Dispatch, commands)
    router.pass_ms(30)
    router.step(work, 5)
    first = router.now
    router.pass_ms(20)
    router.step(work, 6, finish=Finish.STOP)
    trace.ended(finished(first=first))

    (span,) = router.named("chat m")
    assert (span.trace_id, span.parent_id, span.state) == (CALLER.trace_id, CALLER.parent_id, "a=1")
    assert span.ended - span.began == 50 * MILLISECOND
    assert span.began == router.now - 50 * MILLISECOND + UNIX_OFFSET
    assert span.attributes["gen_ai.usage.input_tokens"] == 10
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert span.attributes["gen_ai.response.model"] == "m"
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert span.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.03)
    assert span.error == ""
    assert router.traces.live == 0


@pytest.mark.parametrize("left_out", ["temperature", "top_p"])
def test_span_leaves_out_parameters_that_the_client_left_out(left_out):
    router = TracedRouter(("d1", Role.BOTH))
    trace, commands = router.begin(unset=frozenset({left_out}))
    router.step(the(Dispatch, commands), 5, finish=Finish.STOP)
    trace.ended(finished())

    (span,) = router.named("chat m")
    names = {"gen_ai.request.temperature", "gen_ai.request.top_p"}
    assert names - span.attributes.keys() == {f"gen_ai.request.{left_out}"}


def test_attempt_goes_to_its_worker_with_the_span_of_the_router():
    router = TracedRouter(("d1", Role.BOTH))
    trace, commands = router.begin()
    router.step(the(Dispatch, commands), 5, finish=Finish.STOP)
    trace.ended(finished())

    ((worker_id, start),) = router.sent.started
    (attempt,) = router.named("attempt aggregated")
    assert worker_id == "d1"
    assert start.trace == TraceContext(trace_id=CALLER.trace_id, parent_id=attempt.span_id, sampled=True, state="a=1")


def test_placement_tells_its_reason_and_the_terms_of_its_costs():
    router = TracedRouter(("d1", Role.BOTH), ("d2", Role.BOTH))
    trace, commands = router.begin()
    router.step(the(Dispatch, commands), 5, finish=Finish.STOP)
    trace.ended(finished())

    (span,) = router.named("placement")
    (told,) = router.machine.explain(RequestId("r1")).placements
    chosen = next(each for each in told.candidates if each.worker_id == told.decode)
    assert span.attributes["fleet.placement.reason"] == told.why
    assert span.attributes["fleet.placement.decode.cost"] == chosen.cost
    for name, part in chosen.parts.items():
        assert span.attributes[f"fleet.placement.decode.cost.{name}"] == part
    assert {event.attributes["fleet.worker.id"] for event in span.events} == {"d1", "d2"}


def test_wait_for_a_worker_is_a_queue_span():
    router = TracedRouter(("d1", Role.BOTH), oversubscribe=0.01)
    first, commands = router.begin()
    work = the(Dispatch, commands)
    second, waits = router.begin(request_id="r2")
    assert waits == []
    router.pass_ms(70)
    router.step(work, 5, finish=Finish.STOP)
    first.ended(finished())
    assert router.named("queue") == []

    next_work = router.sent.started[-1]
    router.step(Dispatch(worker_id=next_work[0], start=next_work[1]), 5, finish=Finish.STOP)
    second.ended(finished())
    (queue,) = router.named("queue")
    assert queue.ended - queue.began == 70 * MILLISECOND
    assert queue.attributes == {"fleet.queue": "admission"}


def test_wait_for_the_prefill_queue_of_a_worker_is_a_queue_span():
    router = TracedRouter(("d1", Role.BOTH), prefill_window_tokens=10)
    first, commands = router.begin(tokens=a_prompt(100))
    work = the(Dispatch, commands)
    second, waits = router.begin(request_id="r2", tokens=a_prompt(100, first=500))
    assert waits == []
    router.pass_ms(40)
    router.step(work, 5)
    second_work = router.sent.started[-1]
    router.step(Dispatch(worker_id=second_work[0], start=second_work[1]), 5, finish=Finish.STOP)
    second.ended(finished())

    (queue,) = router.named("queue")
    assert queue.ended - queue.began == 40 * MILLISECOND
    assert queue.attributes == {"fleet.queue": "prefill"}
    (placed,) = router.named("placement")
    assert placed.began == queue.began
    first.ended(finished())


def test_attempts_link_to_the_prefill_and_to_the_lost_attempt():
    router = TracedRouter(("p1", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE), remote_prefill_min_tokens=1)
    trace, commands = router.begin(tokens=a_prompt(100), sampling=Sampling(temperature=0.0, max_tokens=9))
    prefill = the(Dispatch, commands)
    handoff = Handoff(kv_path=KvPath.STORE, prefill_worker=WorkerId("p1"), fingerprint=FINGERPRINT, num_tokens=96)
    decode = the(Dispatch, router.step(prefill, 5, finish=Finish.LENGTH, handoff=handoff))
    router.step(decode, 6)
    again = the(Dispatch, router.leave(decode.worker_id))
    router.step(again, 7, finish=Finish.STOP)
    trace.ended(finished())

    attempts = [span for span in router.exports.spans if span.name.startswith("attempt ")]
    assert [linked(span, attempts) for span in attempts[:3]] == [
        [],
        [("r1#1", "handoff")],
        [("r1#2", "migration")],
    ]
    assert attempts[1].error == "worker_lost"
    assert len(router.named("placement")) == 2
    assert len({span.span_id for span in router.exports.spans}) == len(router.exports.spans)


def test_attempt_that_a_worker_refuses_is_retried_with_a_link():
    router = TracedRouter(("d1", Role.BOTH), ("d2", Role.BOTH))
    trace, commands = router.begin()
    again = the(Dispatch, router.reject(the(Dispatch, commands), Reason.QUEUE_FULL))
    router.step(again, 5, finish=Finish.STOP)
    trace.ended(finished())

    attempts = router.named("attempt aggregated")
    assert [span.error for span in attempts] == ["queue_full", ""]
    assert linked(attempts[1], attempts) == [("r1#1", "retry")]


def test_attempt_that_cannot_be_delivered_is_retried_with_a_link():
    router = TracedRouter(("d1", Role.BOTH), ("d2", Role.BOTH))
    trace, commands = router.begin()
    again = the(Dispatch, router.fail_to_deliver(the(Dispatch, commands)))
    router.step(again, 5, finish=Finish.STOP)
    trace.ended(finished())
    assert [span.error for span in router.named("attempt aggregated")] == ["worker_lost", ""]


def test_refused_request_has_the_cause_as_its_error():
    router = TracedRouter()
    trace, _ = router.begin(UNSAMPLED)
    trace.ended(RequestEnd(outcome=Reason.NO_WORKER))
    (span,) = router.named("chat m")
    assert "no worker" in span.error
    assert span.attributes["error.type"] == "no_worker"


def test_unsampled_request_is_exported_only_if_it_fails():
    router = TracedRouter(("d1", Role.BOTH))
    trace, commands = router.begin(UNSAMPLED)
    router.step(the(Dispatch, commands), 5, finish=Finish.STOP)
    trace.ended(finished())
    assert (router.exports.spans, router.asked) == ([], [])

    trace, commands = router.begin(UNSAMPLED, request_id="r2")
    assert router.sent.started[-1][1].trace.sampled is False
    router.leave("d1")
    trace.ended(RequestEnd(outcome=Reason.NO_WORKER))
    assert router.named("chat m") != []
    (attempt,) = router.named("attempt aggregated")
    assert router.asked == [("d1", KeepTrace(trace_id=UNSAMPLED.trace_id, parent_ids=(attempt.span_id,)))]


def test_each_worker_is_asked_for_the_failed_requests_attempts():
    router = TracedRouter(("d1", Role.BOTH), ("d2", Role.BOTH))
    others, commands = router.begin(UNSAMPLED)
    router.step(the(Dispatch, commands), 5, finish=Finish.STOP)
    trace, commands = router.begin(UNSAMPLED, request_id="r2")
    router.leave(the(Dispatch, commands).worker_id)
    others.ended(finished())
    trace.ended(RequestEnd(outcome=Reason.INTERNAL))

    attempts = router.named("attempt aggregated")
    assert len({span.attributes["fleet.worker.id"] for span in attempts}) == 2
    assert router.asked == [
        (
            span.attributes["fleet.worker.id"],
            KeepTrace(trace_id=UNSAMPLED.trace_id, parent_ids=(span.span_id,)),
        )
        for span in attempts
    ]


def test_refused_requests_get_a_share_of_the_export_queue():
    router = TracedRouter()
    for outcome, context in (
        (Reason.UNAUTHENTICATED, CALLER),
        (Reason.INTERNAL, CALLER),
        (Reason.DEADLINE_PASSED, UNSAMPLED),
        (Reason.RATE_LIMITED, UNSAMPLED),
    ):
        trace, _ = router.begin(context)
        trace.ended(RequestEnd(outcome=outcome))
    assert router.exports.shares == [REFUSED_SHARE, 1.0, REFUSED_SHARE]


@pytest.mark.parametrize(
    ("outcome", "after_ms", "leave_room"),
    [(Reason.DEADLINE_PASSED, 50, True), (Reason.DEADLINE_PASSED, 60_000, False), (Reason.INTERNAL, 50, False)],
)
def test_workers_leave_room_for_failures_as_the_router_does(outcome, after_ms, leave_room):
    router = TracedRouter(("d1", Role.BOTH))
    trace, _ = router.begin(UNSAMPLED)
    router.pass_ms(after_ms)
    trace.ended(RequestEnd(outcome=outcome))
    assert [(worker_id, asked.leave_room) for worker_id, asked in router.asked] == [("d1", leave_room)]


@pytest.mark.parametrize("context", [CALLER, UNSAMPLED])
def test_full_queue_asks_no_worker_for_spans_without_a_parent(context):
    router = TracedRouter(("d1", Role.BOTH))
    router.exports.is_full = True
    trace, _ = router.begin(context)
    trace.ended(RequestEnd(outcome=Reason.DEADLINE_PASSED))
    assert (router.asked, router.exports.spans) == ([], [])
    assert sum(router.traces.counts().kept.values()) == 0

    router.exports.is_full = False
    trace, _ = router.begin(context, request_id="r2")
    trace.ended(RequestEnd(outcome=Reason.DEADLINE_PASSED))
    assert [worker_id for worker_id, _ in router.asked] == ([] if context.sampled else ["d1"])
    assert sum(router.traces.counts().kept.values()) == 1


def test_cancelled_request_is_no_error():
    router = TracedRouter(("d1", Role.BOTH))
    trace, _ = router.begin()
    router.cancel()
    trace.ended(RequestEnd(outcome=Reason.CANCELLED))
    (attempt,) = router.named("attempt aggregated")
    assert (attempt.error, attempt.attributes["error.type"]) == ("", "cancelled")
    assert router.named("chat m")[0].error == ""


def test_request_that_is_not_followed_costs_no_memory():
    router = TracedRouter(("d1", Role.BOTH))
    work = the(Dispatch, router.send(an_arrival(request_id="other")))
    assert work.start.trace is None
    router.step(work, 5, finish=Finish.STOP)
    assert router.traces.live == 0
    assert router.exports.spans == []


@pytest.mark.parametrize(("follows", "sampled"), [(True, True), (False, False)])
def test_setting_says_whether_clients_decide(follows, sampled):
    router = TracedRouter(tracing=TracingSettings(sample_ratio=0, follow_clients=follows))
    headers = {b"traceparent": b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    context = router.traces.read(headers)
    assert (context.trace_id.hex(), context.sampled) == ("4bf92f3577b34da6a3ce929d0e0e4736", sampled)


def test_unreadable_header_is_counted_and_begins_a_new_trace():
    router = TracedRouter(tracing=TracingSettings(sample_ratio=1))
    context = router.traces.read({b"traceparent": b"\xff" * 65_536})
    assert (context.parent_id, context.sampled) == (b"", True)
    assert router.traces.counts().ignored_headers == 1
