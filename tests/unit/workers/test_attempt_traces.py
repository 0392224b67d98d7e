"""Tests of the traces of a worker: which attempts are exported, and what their spans contain."""

import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import Finish, KvOrigin, KvReport, Source
from fleet.core.roles import Phase
from fleet.core.work import AttemptTimes, KeepTrace, Progress, Rejected
from fleet.tracing.sampling import REFUSED_SHARE
from kvstore.tracing.context import TraceContext
from kvstore.tracing.spans import EndedSpans, SpanIds, SpanRecord, SpanSide
from tests.support.builders import a_start
from workers.attempt_traces import MOST_HELD, AttemptTraces
from workers.messages import (
    AttemptRequested,
    CancelInEngine,
    EngineStepped,
    EngineStuck,
    StreamId,
    Submit,
    Tell,
    WorkerTicked,
)

STREAM = StreamId(1)
UNIX_OFFSET = 5_000 * SECOND


class Exports:
    """Fake of the exporter's queue, which makes the spans at once."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self.shares: list[float] = []

    def put(self, ended: EndedSpans, share: float) -> None:
        self.shares.append(share)
        self.spans += ended()


class TracedWorker:
    """The traces of a worker, with short methods for the events of the worker's machine."""

    def __init__(self) -> None:
        self.time = Nanos(SECOND)
        self.exports = Exports()
        self.traces = AttemptTraces(
            WorkerId("w1"), ModelName("m"), self.exports, self, lambda: self.time + UNIX_OFFSET, SpanIds(3)
        )

    def now(self) -> Nanos:
        return self.time

    def begin(self, attempt_id: str = "r1#1", *, trace: TraceContext | None, engine_id: str = "", **fields) -> None:
        start = a_start(request_id=attempt_id, trace=trace, **fields)
        given = a_start(request_id=engine_id or attempt_id, trace=trace, **fields)
        self.traces(self.time, AttemptRequested(stream=STREAM, start=start), [Submit(start=given)])

    def step(self, *outputs: Progress | Rejected, after_ms: int = 10) -> None:
        self.time = Nanos(self.time + after_ms * MILLISECOND)
        self.traces(self.time, EngineStepped(outputs=outputs), [])

    def names(self) -> list[str]:
        return [span.name for span in self.exports.spans]

    def named(self, name: str) -> SpanRecord:
        (found,) = [span for span in self.exports.spans if span.name == name]
        return found


def a_trace(number: int = 1, *, sampled: bool = True, parent_id: bytes = b"p" * 8) -> TraceContext:
    return TraceContext(trace_id=number.to_bytes(16), parent_id=parent_id, sampled=sampled, state="a=1")


def tokens(*ids: int, attempt_id: str = "r1#1", **fields) -> Progress:
    return Progress(request_id=RequestId(attempt_id), token_ids=ids, **fields)


MOVED = KvReport(
    prompt_blocks=4,
    origins=(
        KvOrigin(source=Source.STORE, origin="s1", blocks=2, bytes=2048, tier="ssd"),
        KvOrigin(source=Source.STORE, origin="s1", blocks=1, bytes=1024, tier="cpu"),
        KvOrigin(source=Source.COMPUTED, blocks=1),
    ),
    cached_tokens=48,
)


def test_parts_of_an_attempt_are_spans_below_it():
    worker = TracedWorker()
    worker.begin(trace=a_trace(), phase=Phase.AGGREGATED)
    began = worker.time
    times = AttemptTimes(
        scheduled=Nanos(began + 2 * MILLISECOND),
        transfer_began=Nanos(began + 2 * MILLISECOND),
        transfer_ended=Nanos(began + 5 * MILLISECOND),
    )
    worker.step(tokens(1, kv=MOVED, times=times))
    worker.step(tokens(2, 3, finish=Finish.LENGTH, kv=MOVED, times=times), after_ms=30)

    attempt = worker.named("worker aggregated")
    assert (attempt.parent_id, attempt.side, attempt.state) == (b"p" * 8, SpanSide.SERVER, "a=1")
    assert attempt.began == began + UNIX_OFFSET
    assert attempt.attributes["fleet.answer_tokens"] == 3
    parts = {name: worker.named(name) for name in ("queue", "kv_transfer", "prefill", "decode")}
    assert {span.parent_id for span in parts.values()} == {attempt.span_id}
    lengths = {name: (span.ended - span.began) // MILLISECOND for name, span in parts.items()}
    assert lengths == {"queue": 2, "kv_transfer": 3, "prefill": 5, "decode": 30}
    assert parts["kv_transfer"].attributes == {
        "fleet.kv.blocks": 3,
        "fleet.kv.bytes": 3072,
        "fleet.kv.sources": ["store"],
        "fleet.kv.origins": ["s1"],
        "fleet.kv.tiers": ["cpu", "ssd"],
    }


def test_transfer_without_times_is_an_event():
    worker = TracedWorker()
    worker.begin(trace=a_trace())
    worker.step(tokens(1, kv=MOVED))
    worker.step(tokens(2, finish=Finish.STOP, kv=MOVED))
    (event,) = worker.named("worker aggregated").events
    assert (event.name, event.attributes["fleet.kv.blocks"]) == ("kv_transfer", 3)
    assert worker.names() == ["worker aggregated", "prefill", "decode"]


def test_attempt_without_a_trace_is_not_followed():
    worker = TracedWorker()
    worker.begin(trace=None)
    worker.step(tokens(1, finish=Finish.STOP))
    assert (worker.exports.spans, worker.traces.held) == ([], 0)


def test_unsampled_attempt_is_exported_when_its_router_asks():
    worker = TracedWorker()
    worker.begin(trace=a_trace(1, sampled=False))
    worker.begin("r2#1", trace=a_trace(2, sampled=False))
    worker.step(tokens(1, finish=Finish.STOP), tokens(1, attempt_id="r2#1", finish=Finish.STOP))
    assert (worker.exports.spans, worker.traces.held) == ([], 2)

    worker.traces.keep_trace(KeepTrace(trace_id=a_trace(2).trace_id))
    assert worker.named("worker aggregated").attributes["fleet.attempt.id"] == "r2#1"
    assert worker.traces.held == 1
    worker.traces.keep_trace(KeepTrace(trace_id=b"unknown"))


def test_running_attempt_is_exported_at_its_end_when_asked_for():
    worker = TracedWorker()
    worker.begin(trace=a_trace(sampled=False))
    worker.traces.keep_trace(KeepTrace(trace_id=a_trace().trace_id))
    assert worker.exports.spans == []
    worker.step(tokens(1, finish=Finish.STOP))
    assert "worker aggregated" in worker.names()


def test_only_the_attempts_of_the_requested_request_are_exported():
    worker = TracedWorker()
    for number in range(1, 5):
        worker.begin(f"r{number}#1", trace=a_trace(sampled=False, parent_id=number.to_bytes(8)))
    worker.step(*(tokens(1, attempt_id=f"r{number}#1", finish=Finish.STOP) for number in (1, 2)))

    parent_ids = tuple(number.to_bytes(8) for number in (1, 3))
    worker.traces.keep_trace(KeepTrace(trace_id=a_trace().trace_id, parent_ids=parent_ids))
    assert [span.parent_id for span in worker.exports.spans if span.side is SpanSide.SERVER] == [parent_ids[0]]
    worker.step(*(tokens(1, attempt_id=f"r{number}#1", finish=Finish.STOP) for number in (3, 4)))

    exported = [span.parent_id for span in worker.exports.spans if span.side is SpanSide.SERVER]
    assert (exported, worker.traces.held) == ([*parent_ids], 2)


@pytest.mark.parametrize(("leave_room", "share"), [(True, REFUSED_SHARE), (False, 1.0)])
def test_requested_attempts_leave_room_if_the_router_says_so(leave_room, share):
    worker = TracedWorker()
    worker.begin("r1#1", trace=a_trace(sampled=False))
    worker.begin("r1#2", trace=a_trace(sampled=False, parent_id=b"q" * 8))
    worker.begin("r2#1", trace=a_trace(2))
    worker.step(tokens(1, finish=Finish.STOP))
    worker.traces.keep_trace(
        KeepTrace(trace_id=a_trace().trace_id, parent_ids=(b"p" * 8, b"q" * 8), leave_room=leave_room)
    )
    assert worker.exports.shares == [share]
    worker.step(*(tokens(1, attempt_id=attempt_id, finish=Finish.STOP) for attempt_id in ("r1#2", "r2#1")))
    assert worker.exports.shares == [share, share, 1.0]


def test_held_attempts_are_bounded():
    worker = TracedWorker()
    for number in range(1, MOST_HELD + 3):
        worker.begin(f"r{number}#1", trace=a_trace(number, sampled=False))
        worker.step(tokens(1, attempt_id=f"r{number}#1", finish=Finish.STOP))
    assert worker.traces.held == MOST_HELD
    worker.traces.keep_trace(KeepTrace(trace_id=a_trace(1).trace_id))
    assert worker.exports.spans == []
    worker.traces.keep_trace(KeepTrace(trace_id=a_trace(3).trace_id))
    assert worker.exports.spans != []


def test_newest_attempts_of_one_long_trace_are_held():
    worker = TracedWorker()
    for number in range(1, MOST_HELD + 3):
        worker.begin(f"r{number}#1", trace=a_trace(sampled=False, parent_id=number.to_bytes(8)))
        worker.step(tokens(1, attempt_id=f"r{number}#1", finish=Finish.STOP))
    assert worker.traces.held == MOST_HELD
    worker.traces.keep_trace(KeepTrace(trace_id=a_trace().trace_id))
    parents = [span.parent_id for span in worker.exports.spans if span.name == "worker aggregated"]
    assert parents == [number.to_bytes(8) for number in range(3, MOST_HELD + 3)]


def test_refused_and_rejected_attempts_have_an_error():
    worker = TracedWorker()
    rejected = Rejected(request_id=RequestId("r1#1"), reason=Reason.QUEUE_FULL, message="full")
    start = a_start(request_id="r1#1", trace=a_trace())
    worker.traces(worker.time, AttemptRequested(stream=STREAM, start=start), [Tell(stream=STREAM, message=rejected)])
    assert worker.named("worker aggregated").error == "queue_full"

    worker.exports.spans.clear()
    worker.begin("r2#1", trace=a_trace())
    worker.step(Rejected(request_id=RequestId("r2#1"), reason=Reason.INTERNAL, message="no"))
    assert worker.named("worker aggregated").error == "internal"
    assert worker.names() == ["worker aggregated"]


def test_cancelled_attempt_tells_so():
    worker = TracedWorker()
    worker.begin(trace=a_trace())
    worker.traces(worker.time, WorkerTicked(), [CancelInEngine(request_id=RequestId("r1#1"))])
    worker.step(tokens(finish=Finish.CANCELLED))
    assert worker.named("worker aggregated").attributes["fleet.finish"] == "cancelled"


def test_attempts_of_a_hung_engine_are_errors():
    worker = TracedWorker()
    worker.begin(trace=a_trace())
    worker.traces(worker.time, EngineStuck(), [])
    assert worker.named("worker aggregated").error == "engine_hung"


def test_attempt_keeps_the_id_of_its_router():
    worker = TracedWorker()
    worker.begin(trace=a_trace(), engine_id="r1#1~7")
    worker.step(tokens(1, attempt_id="r1#1~7", finish=Finish.STOP))
    assert worker.named("worker aggregated").attributes["fleet.attempt.id"] == "r1#1"


@pytest.mark.parametrize("phase", list(Phase))
def test_only_answering_phases_have_a_decode_span(phase):
    worker = TracedWorker()
    worker.begin(trace=a_trace(), phase=phase)
    worker.step(tokens(1))
    worker.step(tokens(2, finish=Finish.STOP))
    assert ("decode" in worker.names()) is (phase is not Phase.PREFILL)
