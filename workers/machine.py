"""Worker machine: decides about the life of the worker process and of each attempt that it runs.

Rules:

1. The phases of the process are STARTING -> SERVING -> DRAINING -> GONE, in this order; some may be skipped (`NEXT`).
   The worker accepts new attempts only in SERVING. In DRAINING, running attempts may finish until a deadline. Attempts
   that still run then are aborted: their routers get a rejection, and the engine cancels them. The phase becomes GONE
   when the engine has no more work and no blocks that are needed (rule 7), or `GRACE` after the deadline. A drain
   begins with SIGTERM (`fleet.app.worker`), for which `drain_timeout_ms` (`workers.settings`) sets the deadline, or
   with a call at the control port, which states its deadline (`workers.connections.control_port`).
2. For each attempt that it started, a router gets exactly one message that ends it: a step with a finish, or a
   rejection. Later outputs of the engine for that attempt are dropped. A router whose stream has ended gets nothing.
3. Routers choose request ids, and two routers may choose the same one, but the engine needs unique ids. Routers know an
   attempt by its stream and its request id. The engine knows it by its engine id, which is the request id, with a
   suffix if another attempt has this id. A second start of an attempt that still runs on the same stream is refused.
4. An attempt is cancelled in the engine when its router cancels it, when the router's stream ends, or when its deadline or the
   drain's deadline has passed. It counts towards the capacity until the engine reports its end, because it uses blocks
   until then.
5. A router has one stream. When it connects again, the older stream is closed, because the router has lost its attempts
   anyway. If the streams of one router id replace each other more than `REPLACEMENTS` times within
   `REPLACEMENT_WINDOW`, probably two routers have this id, and the machine asks for a warning.
6. The worker holds at most `capacity` attempts, running and waiting together. The next one is refused with
   QUEUE_FULL.
7. After attempts have ended, other workers may still need their blocks. A drain therefore waits, at most until its
   deadline, for three conditions. The engine lends no more blocks to decode workers. If the store ends with this
   process, the time `FETCHED_WITHIN` has passed since the last handoff through the store. The evacuation of warm blocks
   has ended. If the server has an evacuator, an evacuation runs when a serving worker begins to drain. If any attempt
   ran then, another evacuation follows after the last attempt.
8. If the engine hangs, the process ends at once, also during a drain. All streams are closed, so that routers continue
   their requests on other workers, as if the process had been killed. The worker does not drain, because the engine
   would not respond.
   An engine that dies is no event of this machine: `Engine.outputs` raises `EngineDied`, and the process ends
   (`workers.server`).
9. The machine keeps the tokens of attempts with an answer key for routers that resume an answer (`workers.answer_keeper`).
   It sends them in messages of at most about `KEPT_ANSWERS_BYTES`.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import assert_never

import msgspec
from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.roles import KvPath, Role
from fleet.core.work import Draining, Handoff, KeptAnswer, KeptAnswers, Progress, Rejected, Start, Step
from workers.acceptance import refusal
from workers.answer_keeper import AnswerKeeper, KeptTokens
from workers.messages import (
    Abandon,
    AnswersRequested,
    AttemptRequested,
    CancelInEngine,
    CancelRequested,
    CutStream,
    Drained,
    DrainRequested,
    EngineReady,
    EngineStepped,
    EngineStuck,
    Evacuate,
    EvacuationEnded,
    FactsChanged,
    RouterConnected,
    RouterGone,
    StreamId,
    Submit,
    Tell,
    WarnOfSharedRouterId,
    WorkerCommand,
    WorkerEvent,
    WorkerTicked,
)
from workers.ports import EngineFacts

# After the drain's deadline, the engine has this time to end the cancelled attempts; a healthy engine needs one step.
# Then the process ends without waiting for them.
GRACE = Nanos(2 * SECOND)
FETCHED_WITHIN = Nanos(5 * SECOND)
"""Time for which a drain keeps a store that ends with this process, after the last handoff through that store. Routers pass
a handoff on within milliseconds, so decode workers usually begin to fetch its blocks within this time. If a decode attempt
waits longer in a queue, its worker computes the blocks."""

REPLACEMENTS = 3
REPLACEMENT_WINDOW = Nanos(10 * SECOND)
"""If the streams of one router id replace each other more than `REPLACEMENTS` times in this time, the machine asks for a
warning (rule 5). A router whose stream is closed connects again within two seconds by default, so two routers with one
id soon exceed the limit. A single router replaces its stream only after the network failed."""

KEPT_ANSWERS_BYTES = 1 << 20
"""When the tokens of a message with kept answers reach this number of bytes, the machine sends it and begins another one."""


class LifePhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


class LifeEvent(StrEnum):
    ENGINE_READY = "engine_ready"
    DRAIN_ASKED = "drain_asked"
    EMPTIED = "emptied"  # a drain has nothing more to wait for, or the time to wait is over (rules 1 and 7)
    ENGINE_STUCK = "engine_stuck"


NEXT: dict[tuple[LifePhase, LifeEvent], LifePhase] = {
    (LifePhase.STARTING, LifeEvent.ENGINE_READY): LifePhase.SERVING,
    (LifePhase.STARTING, LifeEvent.DRAIN_ASKED): LifePhase.DRAINING,
    (LifePhase.SERVING, LifeEvent.DRAIN_ASKED): LifePhase.DRAINING,
    # A second request to drain may set an earlier deadline.
    (LifePhase.DRAINING, LifeEvent.DRAIN_ASKED): LifePhase.DRAINING,
    (LifePhase.DRAINING, LifeEvent.EMPTIED): LifePhase.GONE,
    (LifePhase.STARTING, LifeEvent.ENGINE_STUCK): LifePhase.GONE,
    (LifePhase.SERVING, LifeEvent.ENGINE_STUCK): LifePhase.GONE,
    (LifePhase.DRAINING, LifeEvent.ENGINE_STUCK): LifePhase.GONE,
}


class IllegalWorkerTransition(Exception):
    def __init__(self, phase: LifePhase, event: LifeEvent):
        super().__init__(f"{event} in phase {phase}")


def advance(phase: LifePhase, event: LifeEvent) -> LifePhase:
    if (following := NEXT.get((phase, event))) is None:
        raise IllegalWorkerTransition(phase, event)
    return following


class PendingReport(StrEnum):
    """States which messages about an attempt the worker still sends to the router that has requested the attempt."""

    ALL = "all"
    # No message, because the router already got the message that ends the attempt, or because the router's stream has ended.
    NOTHING = "nothing"


class WorkerAttempt(Struct, kw_only=True):
    """Records one attempt that the engine runs or has queued."""

    engine_id: RequestId
    request_id: RequestId
    stream: StreamId
    deadline: Nanos | None
    report: PendingReport = PendingReport.ALL
    cancelled: bool = False
    kept: KeptTokens | None = None  # the answer's tokens that are kept for a resume (rule 9); None: none are kept


class WorkerMachine:
    """Decides about one worker process and its attempts: turns events into commands.

    `check()` asserts its invariants.
    """

    def __init__(
        self,
        *,
        role: Role,
        facts: EngineFacts,
        capacity: int,
        evacuates: bool = False,
        store_goes: bool = False,
        kept: AnswerKeeper | None = None,
    ) -> None:
        """Start in the phase STARTING.

        Args:
            role: The kinds of attempts that the worker takes.
            facts: Description of the engine.
            capacity: The maximum number of attempts that the worker holds (rule 6).
            evacuates: True if the server has an evacuator, which copies the warm blocks in a drain.
            store_goes: True if the engine uses an embedded store, whose memory ends with this process.
            kept: Keeps the tokens of answers for routers that resume them (rule 9); None: no tokens are kept.
        """
        assert capacity >= 1, capacity
        self.phase = LifePhase.STARTING
        self._role = role
        self._facts = facts
        self._capacity = capacity
        self._evacuates = evacuates
        self._store_goes = store_goes
        self._kept = kept or AnswerKeeper(0, 0)
        self._streams: dict[StreamId, str] = {}
        # The latest replacements of streams (rule 5), each as its instant and the router id. Those older than `REPLACEMENT_WINDOW`
        # are dropped at the next replacement.
        self._replacements: list[tuple[Nanos, str]] = []
        self._attempts: dict[RequestId, WorkerAttempt] = {}  # all attempts that have not ended, by engine id
        # Attempts whose router still gets messages about them (`PendingReport.ALL`), by stream and the router's request id.
        self._unreported: dict[tuple[StreamId, RequestId], WorkerAttempt] = {}
        self._drain_deadline: Nanos | None = None
        self._given_up = 0
        self._suffix = 0
        self._lent = 0
        # Until this instant, a drain keeps an embedded store, because decode workers may still fetch handoffs from it (rule 7).
        self._handoff_until = Nanos(0)
        self._evacuating = False
        self._evacuates_again = False

    def handle(self, event: WorkerEvent, now: Nanos) -> list[WorkerCommand]:
        match event:
            case EngineStepped():
                self._lent = event.lent
                return [*self._step(event.outputs, now), *self._leave_if_empty(now)]
            case AttemptRequested():
                return self._request(event.stream, event.start, now)
            case CancelRequested():
                attempt = self._unreported.get((event.stream, event.request_id))
                return list(self._cancel(attempt)) if attempt is not None else []
            case AnswersRequested():
                return list(self._find_answers(event, now))
            case WorkerTicked():
                self._lent = event.lent
                return [*self._expire(now), *self._leave_if_empty(now)]
            case RouterConnected():
                return self._connect(event.stream, event.router_id, now)
            case RouterGone():
                return [*self._disconnect(event.stream), *self._leave_if_empty(now)]
            case DrainRequested():
                return [*self._drain(event.deadline), *self._expire(now), *self._leave_if_empty(now)]
            case EvacuationEnded():
                self._evacuating = False
                return list(self._leave_if_empty(now))
            case FactsChanged():
                self._facts = event.facts
                return []
            case EngineStuck():
                return self._abandon()
            case EngineReady():
                # The phase is DRAINING already if a drain was requested before the engine was ready.
                if self.phase is LifePhase.STARTING:
                    self.phase = advance(self.phase, LifeEvent.ENGINE_READY)
                return []
            case _:
                assert_never(event)

    @property
    def held(self) -> int:
        """Number of attempts that were given to the engine and whose end it has not reported."""
        return len(self._attempts)

    def check(self) -> None:
        """Assert the invariants that hold between two events; for tests."""
        assert len(self._attempts) <= self._capacity, len(self._attempts)
        assert all(attempt.engine_id == engine_id for engine_id, attempt in self._attempts.items())
        reported = {id(attempt) for attempt in self._attempts.values() if attempt.report is PendingReport.ALL}
        assert reported == {id(attempt) for attempt in self._unreported.values()}
        for (stream, request_id), attempt in self._unreported.items():
            assert stream in self._streams, attempt
            assert (stream, request_id) == (attempt.stream, attempt.request_id), attempt
        assert all(attempt.cancelled for attempt in self._attempts.values() if attempt.report is PendingReport.NOTHING)
        assert self.phase is not LifePhase.DRAINING or self._drain_deadline is not None
        assert self.phase not in (LifePhase.STARTING, LifePhase.SERVING) or self._drain_deadline is None
        assert self.phase is not LifePhase.GONE or not self._attempts
        assert self._lent >= 0, self._lent
        assert self._evacuates or not self._evacuating
        self._kept.check()

    # Events about routers.

    def _connect(self, stream: StreamId, router_id: str, now: Nanos) -> list[WorkerCommand]:
        assert stream not in self._streams, stream
        older = [known for known, name in self._streams.items() if name == router_id]
        commands: list[WorkerCommand] = []
        for known in older:
            commands += self._disconnect(known)
            commands.append(CutStream(stream=known))
            commands += self._note_replacement(router_id, now)
        self._streams[stream] = router_id
        if self.phase in (LifePhase.DRAINING, LifePhase.GONE):
            commands.append(Tell(stream=stream, message=Draining()))
        return commands

    def _note_replacement(self, router_id: str, now: Nanos) -> Iterator[WarnOfSharedRouterId]:
        recent = [each for each in self._replacements if now - each[0] < REPLACEMENT_WINDOW]
        self._replacements = [*recent, (now, router_id)]
        others = [each for each in self._replacements if each[1] != router_id]
        if len(self._replacements) - len(others) > REPLACEMENTS:
            self._replacements = others  # the next warning needs as many replacements again
            yield WarnOfSharedRouterId(router_id=router_id)

    def _disconnect(self, stream: StreamId) -> Iterator[WorkerCommand]:
        if self._streams.pop(stream, None) is None:
            return
        for attempt in [attempt for attempt in self._unreported.values() if attempt.stream == stream]:
            self._silence(attempt)
            yield from self._cancel(attempt)

    # Events about attempts.
    def _request(self, stream: StreamId, start: Start, now: Nanos) -> list[WorkerCommand]:
        if stream not in self._streams:
            return []  # the stream was closed a moment ago
        if (rejected := self._refusal(stream, start)) is not None:
            return [Tell(stream=stream, message=rejected)]
        engine_id = self._engine_id(start.request_id)
        attempt = WorkerAttempt(
            engine_id=engine_id,
            request_id=start.request_id,
            stream=stream,
            deadline=Nanos(now + start.timeout_ms * MILLISECOND) if start.timeout_ms else None,
            kept=self._kept.begin(start.answer_key, start.tokens, start.generated_tokens, now),
        )
        self._attempts[engine_id] = attempt
        self._unreported[stream, start.request_id] = attempt
        if engine_id != start.request_id:
            start = msgspec.structs.replace(start, request_id=engine_id)
        return [Submit(start=start)]

    def _refusal(self, stream: StreamId, start: Start) -> Rejected | None:
        def rejected(reason: Reason, message: str, field: str = "") -> Rejected:
            return Rejected(request_id=start.request_id, reason=reason, message=message, field=field)

        if self.phase is LifePhase.STARTING:
            return rejected(Reason.NO_WORKER, "this worker is still starting")
        if self.phase is not LifePhase.SERVING:
            return rejected(Reason.DRAINING, "this worker is draining; send the work to another one")
        if (stream, start.request_id) in self._unreported:
            return rejected(
                Reason.INVALID_ARGUMENT, f"request_id: {start.request_id} already runs on this stream", "request_id"
            )
        if (unfit := refusal(start, self._role, self._facts)) is not None:
            return unfit
        if len(self._attempts) >= self._capacity:
            return rejected(Reason.QUEUE_FULL, f"this worker already holds {self._capacity} requests; try another")
        return None

    def _engine_id(self, request_id: RequestId) -> RequestId:
        engine_id = request_id
        while engine_id in self._attempts:
            self._suffix += 1
            engine_id = RequestId(f"{request_id}~{self._suffix}")
        return engine_id

    def _step(self, outputs: Sequence[Progress | Rejected], now: Nanos) -> list[WorkerCommand]:
        """Return the messages about one engine step.

        Each rejected attempt has a message of its own. Each stream gets one message with the progress of its attempts.
        """
        progress: dict[StreamId, list[Progress]] = {}
        commands: list[WorkerCommand] = []
        for output in outputs:
            attempt = self._attempts.get(output.request_id)
            if attempt is None:
                continue  # the attempt has ended already
            ended = isinstance(output, Rejected) or output.finish is not None
            if isinstance(output, Progress) and output.handoff is not None:
                self._note_handoff(output.handoff, now)
            if attempt.report is PendingReport.ALL:
                if attempt.engine_id != attempt.request_id:
                    output = msgspec.structs.replace(output, request_id=attempt.request_id)  # noqa: PLW2901 - the same output with the router's id
                if isinstance(output, Rejected):
                    commands.append(Tell(stream=attempt.stream, message=output))
                else:
                    if attempt.kept is not None:
                        self._kept.add(attempt.kept, output.token_ids, now)
                    progress.setdefault(attempt.stream, []).append(output)
            if ended:
                self._silence(attempt)
                if attempt.kept is not None:
                    self._kept.end(attempt.kept, now)
                del self._attempts[attempt.engine_id]
        commands += [
            Tell(stream=stream, message=Step(progress=tuple(of_stream))) for stream, of_stream in progress.items()
        ]
        return commands

    def _find_answers(self, event: AnswersRequested, now: Nanos) -> Iterator[WorkerCommand]:
        if event.stream not in self._streams:
            return  # the stream was closed a moment ago
        found: list[KeptAnswer] = []
        num_bytes = 0
        longest: dict[int, int] = {}  # by answer key: the largest number of first tokens that the router asks for
        for wanted in event.wanted.answers:
            longest[wanted.key] = max(wanted.tokens, longest.get(wanted.key, 0))
        for key, most in longest.items():
            tokens = self._kept.find(key, most, now)
            found.append(KeptAnswer(key, tokens, most))
            num_bytes += len(tokens)
            if num_bytes >= KEPT_ANSWERS_BYTES:
                yield Tell(stream=event.stream, message=KeptAnswers(answers=tuple(found)))
                found, num_bytes = [], 0
        if found:
            yield Tell(stream=event.stream, message=KeptAnswers(answers=tuple(found)))

    def _note_handoff(self, handoff: Handoff, now: Nanos) -> None:
        if handoff.kv_path is KvPath.STORE and self._store_goes:
            self._handoff_until = Nanos(now + FETCHED_WITHIN)

    def _cancel(self, attempt: WorkerAttempt) -> Iterator[CancelInEngine]:
        if not attempt.cancelled:
            attempt.cancelled = True
            yield CancelInEngine(request_id=attempt.engine_id)

    def _silence(self, attempt: WorkerAttempt) -> None:
        attempt.report = PendingReport.NOTHING
        self._unreported.pop((attempt.stream, attempt.request_id), None)

    def _give_up(self, attempt: WorkerAttempt, reason: Reason, message: str) -> Iterator[WorkerCommand]:
        """Report the end of an attempt to its router now, and cancel the attempt in the engine."""
        self._silence(attempt)
        yield from self._cancel(attempt)
        yield Tell(
            stream=attempt.stream, message=Rejected(request_id=attempt.request_id, reason=reason, message=message)
        )

    # Deadlines, drain, and the end of the process.
    def _expire(self, now: Nanos) -> Iterator[WorkerCommand]:
        if self._drain_deadline is not None and now >= self._drain_deadline:
            for attempt in list(self._unreported.values()):
                self._given_up += 1
                yield from self._give_up(attempt, Reason.DRAINING, "this worker drains and could not finish in time")
        for attempt in [
            attempt for attempt in self._unreported.values() if attempt.deadline is not None and now >= attempt.deadline
        ]:
            yield from self._give_up(
                attempt, Reason.DEADLINE_PASSED, "the deadline passed before the answer was complete"
            )

    def _drain(self, deadline: Nanos) -> Iterator[WorkerCommand]:
        if self.phase is LifePhase.GONE:
            return
        announced = self.phase is LifePhase.DRAINING
        serving = self.phase is LifePhase.SERVING
        self.phase = advance(self.phase, LifeEvent.DRAIN_ASKED)
        self._drain_deadline = deadline if self._drain_deadline is None else min(deadline, self._drain_deadline)
        if not announced:
            for stream in self._streams:
                yield Tell(stream=stream, message=Draining())
        if serving and self._evacuates:
            self._evacuates_again = bool(self._attempts)
            yield self._evacuate()

    def _leave_if_empty(self, now: Nanos) -> Iterator[WorkerCommand]:
        if self.phase is not LifePhase.DRAINING:
            return
        assert self._drain_deadline is not None
        stuck = not self._unreported and now >= self._drain_deadline + GRACE
        if self._attempts and not stuck:
            return
        if now < self._drain_deadline:
            if self._evacuates_again and not self._evacuating:
                self._evacuates_again = False
                yield self._evacuate()
            if self._is_needed(now):
                return
        self._attempts.clear()
        self.phase = advance(self.phase, LifeEvent.EMPTIED)
        yield Drained(cancelled=self._given_up, unfetched=self._lent)

    def _abandon(self) -> list[WorkerCommand]:
        """End all attempts and streams at once, because the engine hangs (rule 8)."""
        lost = len(self._unreported)
        self.phase = advance(self.phase, LifeEvent.ENGINE_STUCK)
        self._streams.clear()
        self._attempts.clear()
        self._unreported.clear()
        return [Abandon(lost=lost)]

    def _evacuate(self) -> Evacuate:
        assert self._drain_deadline is not None
        self._evacuating = True
        return Evacuate(deadline=self._drain_deadline)

    def _is_needed(self, now: Nanos) -> bool:
        """Return whether other workers may still need blocks of this worker (rule 7)."""
        return self._lent > 0 or now < self._handoff_until or self._evacuating
