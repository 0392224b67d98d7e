"""Worker machine: tests of rules 1 to 9 of `workers.machine`."""

from collections.abc import Iterable
from itertools import count

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import AnyObject, Finish, Sampling
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import (
    AnswersWanted,
    Draining,
    KeptAnswer,
    KeptAnswers,
    Progress,
    Rejected,
    Step,
    WantedAnswer,
)
from tests.support.builders import FINGERPRINT, a_handoff, a_prompt, a_start, some_progress, token_bytes
from workers import machine as worker_machine
from workers.acceptance import TAKES
from workers.answer_keeper import AnswerKeeper
from workers.machine import (
    FETCHED_WITHIN,
    GRACE,
    NEXT,
    IllegalWorkerTransition,
    LifeEvent,
    LifePhase,
    WorkerMachine,
    advance,
)
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
    RouterConnected,
    RouterGone,
    StreamId,
    Submit,
    Tell,
    WarnOfSharedRouterId,
    WorkerCommand,
    WorkerTicked,
)
from workers.ports import EngineFacts

START = Nanos(5 * SECOND)
STREAM = StreamId(0)
FACTS = EngineFacts(
    name="fake 1",
    model=ModelName("tiny"),
    block_tokens=32,
    max_model_len=256,
    kv_blocks=64,
    max_running=2,
    fingerprint=FINGERPRINT,
    kv_paths=(KvPath.STORE,),
)


def a_machine(role: Role = Role.BOTH, capacity: int = 4, **fields) -> WorkerMachine:
    machine = WorkerMachine(role=role, facts=FACTS, capacity=capacity, **fields)
    machine.handle(EngineReady(), START)
    machine.handle(RouterConnected(stream=STREAM, router_id="router"), START)
    return machine


def asked(start, stream=STREAM) -> AttemptRequested:
    return AttemptRequested(stream=stream, start=start)


def rejection(commands) -> Rejected:
    (command,) = commands
    assert isinstance(command, Tell)
    assert isinstance(command.message, Rejected)
    return command.message


KEY = 77


def kept_by(machine: WorkerMachine, *wanted: WantedAnswer, stream: StreamId = STREAM) -> list[tuple[KeptAnswer, ...]]:
    """Ask a worker for kept answers, and return the answers in each message that the router gets."""
    event = AnswersRequested(stream=stream, wanted=AnswersWanted(answers=wanted))
    commands = machine.handle(event, START)
    assert all(isinstance(each, Tell) and each.stream == stream for each in commands)
    assert all(isinstance(each.message, KeptAnswers) for each in commands)
    return [each.message.answers for each in commands]


# Kept answers.


def test_tokens_of_a_dead_routers_attempt_are_kept_for_others():
    machine = a_machine(kept=AnswerKeeper(1 << 20, 60))
    start = a_start(tokens=token_bytes([1, 2, 30]), generated_tokens=1, answer_key=KEY)
    machine.handle(asked(start), START)
    machine.handle(EngineStepped(outputs=[some_progress(40, 50, request_id=start.request_id)]), START)
    machine.handle(RouterGone(stream=STREAM), START)
    machine.handle(EngineStepped(outputs=[some_progress(60, request_id=start.request_id)]), START)
    other = StreamId(1)
    machine.handle(RouterConnected(stream=other, router_id="other"), START)

    unknown = WantedAnswer(KEY + 1, 9)
    ((first, second),) = kept_by(machine, WantedAnswer(KEY, 9), unknown, stream=other)

    assert first == KeptAnswer(KEY, token_bytes([30, 40, 50]), 9), "the token after its router's end is not needed"
    assert second == KeptAnswer(KEY + 1, b"", 9)
    assert kept_by(machine, WantedAnswer(KEY, 2), stream=other) == [(KeptAnswer(KEY, token_bytes([30, 40]), 2),)]


def test_tokens_without_a_key_are_not_kept():
    keeper = AnswerKeeper(1 << 20, 60)
    machine = a_machine(kept=keeper)
    machine.handle(asked(a_start()), START)
    assert keeper.held_bytes == 0


def test_long_answers_are_sent_in_several_messages(monkeypatch):
    monkeypatch.setattr(worker_machine, "KEPT_ANSWERS_BYTES", 8)
    machine = a_machine(kept=AnswerKeeper(1 << 20, 60))
    for number in range(3):
        start = a_start(
            request_id=f"r{number}", tokens=token_bytes([1, 2, 3]), generated_tokens=1, answer_key=KEY + number
        )
        machine.handle(asked(start), START)

    messages = kept_by(machine, *(WantedAnswer(KEY + number, 9) for number in range(3)))

    assert [len(answers) for answers in messages] == [2, 1]
    assert kept_by(machine, *(WantedAnswer(KEY, most) for most in range(10))) == [
        (KeptAnswer(KEY, token_bytes([3]), 9),)
    ], "repetitions cost nothing"


def test_closed_stream_gets_no_kept_answers():
    assert kept_by(a_machine(), WantedAnswer(KEY, 9), stream=StreamId(9)) == []


# Phases of the process.


def test_only_the_listed_transitions_exist():
    for phase in LifePhase:
        for event in LifeEvent:
            if (phase, event) in NEXT:
                assert advance(phase, event) is NEXT[phase, event]
            else:
                with pytest.raises(IllegalWorkerTransition):
                    advance(phase, event)
    assert not [event for (phase, event) in NEXT if phase is LifePhase.GONE]


def test_starting_worker_takes_no_work():
    machine = WorkerMachine(role=Role.BOTH, facts=FACTS, capacity=4)
    machine.handle(RouterConnected(stream=STREAM, router_id="router"), START)

    assert rejection(machine.handle(asked(a_start()), START)).reason is Reason.NO_WORKER


def test_hanging_engine_ends_a_starting_worker():
    machine = WorkerMachine(role=Role.BOTH, facts=FACTS, capacity=4)

    assert machine.handle(EngineStuck(), START) == [Abandon(lost=0)]
    assert machine.phase is LifePhase.GONE


def test_worker_drained_before_engine_start_stays_drained():
    machine = WorkerMachine(role=Role.BOTH, facts=FACTS, capacity=4)

    assert machine.handle(DrainRequested(deadline=Nanos(START + SECOND)), START) == [Drained(cancelled=0)]
    assert machine.handle(EngineReady(), START) == []
    assert machine.phase is LifePhase.GONE


def test_draining_worker_refuses_new_work_and_finishes_the_rest():
    machine = a_machine()
    machine.handle(asked(a_start()), START)

    assert machine.handle(DrainRequested(deadline=Nanos(START + SECOND)), START) == [
        Tell(stream=STREAM, message=Draining())
    ]
    assert rejection(machine.handle(asked(a_start(request_id="late")), START)).reason is Reason.DRAINING
    last = some_progress(7, finish=Finish.LENGTH)
    assert machine.handle(EngineStepped(outputs=[last]), START) == [
        Tell(stream=STREAM, message=Step(progress=(last,))),
        Drained(cancelled=0),
    ]
    assert machine.phase is LifePhase.GONE


def test_idle_worker_is_gone_as_soon_as_it_drains():
    machine = a_machine()

    assert Drained(cancelled=0) in machine.handle(DrainRequested(deadline=Nanos(START + SECOND)), START)


def test_drain_deadline_gives_up_and_counts_unfinished_work():
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    deadline = Nanos(START + SECOND)
    machine.handle(DrainRequested(deadline=deadline), START)

    cancel, told = machine.handle(WorkerTicked(), deadline)

    assert cancel == CancelInEngine(request_id=RequestId("r1#1"))
    assert told.message.reason is Reason.DRAINING
    assert machine.handle(EngineStepped(outputs=[some_progress(finish=Finish.CANCELLED)]), deadline) == [
        Drained(cancelled=1)
    ]


def test_stuck_engine_delays_drain_by_the_grace_only():
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    deadline = Nanos(START + SECOND)
    machine.handle(DrainRequested(deadline=deadline), START)
    machine.handle(WorkerTicked(), deadline)

    assert machine.handle(WorkerTicked(), Nanos(deadline + GRACE - 1)) == []
    assert machine.handle(WorkerTicked(), Nanos(deadline + GRACE)) == [Drained(cancelled=1)]
    assert machine.held == 0


def test_drain_noticed_late_still_reports_every_end():
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    machine.handle(DrainRequested(deadline=Nanos(START + SECOND)), START)
    late = Nanos(START + SECOND + 2 * GRACE)

    assert machine.handle(EngineStepped(outputs=[some_progress(1)]), late) == [
        Tell(stream=STREAM, message=Step(progress=(some_progress(1),)))
    ]
    machine.check()

    _, told, gone = machine.handle(WorkerTicked(), late)
    assert told.message.reason is Reason.DRAINING
    assert gone == Drained(cancelled=1)


def test_router_that_connects_during_drain_is_told():
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    machine.handle(DrainRequested(deadline=Nanos(START + SECOND)), START)

    assert machine.handle(RouterConnected(stream=StreamId(1), router_id="other"), START) == [
        Tell(stream=StreamId(1), message=Draining())
    ]


# Blocks that ended attempts leave behind.

DEADLINE = Nanos(START + 20 * SECOND)


def a_hand_off(path: KvPath):
    last = some_progress(7, finish=Finish.LENGTH)
    return msgspec.structs.replace(last, handoff=a_handoff(kv_path=path))


def a_machine_that_handed_off(path: KvPath, lent: int, **fields) -> WorkerMachine:
    machine = a_machine(**fields)
    machine.handle(asked(a_start(phase=Phase.PREFILL, kv_path=KvPath.STORE)), START)
    assert machine.held == 1
    machine.handle(EngineStepped(outputs=[a_hand_off(path)], lent=lent), START)
    assert machine.held == 0
    return machine


def test_drain_waits_until_handed_off_blocks_are_fetched():
    machine = a_machine_that_handed_off(KvPath.DIRECT, lent=2)

    assert machine.handle(DrainRequested(deadline=DEADLINE), START) == [Tell(stream=STREAM, message=Draining())]
    assert machine.handle(WorkerTicked(lent=1), Nanos(START + SECOND)) == []
    assert machine.handle(RouterGone(stream=STREAM), Nanos(START + SECOND)) == []
    assert machine.handle(WorkerTicked(lent=0), Nanos(START + 2 * SECOND)) == [Drained(cancelled=0)]


def test_handoff_during_drain_keeps_worker_until_fetched():
    machine = a_machine()
    machine.handle(asked(a_start(phase=Phase.PREFILL, kv_path=KvPath.STORE)), START)
    machine.handle(DrainRequested(deadline=DEADLINE), START)

    (told,) = machine.handle(EngineStepped(outputs=[a_hand_off(KvPath.DIRECT)], lent=1), START)

    assert isinstance(told, Tell)
    assert machine.handle(WorkerTicked(lent=0), START) == [Drained(cancelled=0)]


def test_unfetched_blocks_keep_worker_until_deadline_and_count():
    machine = a_machine_that_handed_off(KvPath.DIRECT, lent=3)
    machine.handle(DrainRequested(deadline=DEADLINE), START)

    assert machine.handle(WorkerTicked(lent=3), Nanos(DEADLINE - 1)) == []
    assert machine.handle(WorkerTicked(lent=3), DEADLINE) == [Drained(cancelled=0, unfetched=3)]


@pytest.mark.parametrize("goes", [False, True])
def test_store_handoff_delays_only_worker_with_embedded_store(goes):
    machine = a_machine_that_handed_off(KvPath.STORE, lent=0, store_goes=goes)

    commands = machine.handle(DrainRequested(deadline=DEADLINE), START)

    assert (Drained(cancelled=0) in commands) is not goes
    if goes:
        assert machine.handle(WorkerTicked(), Nanos(START + FETCHED_WITHIN - 1)) == []
        assert machine.handle(WorkerTicked(), Nanos(START + FETCHED_WITHIN)) == [Drained(cancelled=0)]


def test_drain_evacuates_beside_running_work_and_waits():
    machine = a_machine(evacuates=True)
    machine.handle(asked(a_start()), START)

    _, evacuate = machine.handle(DrainRequested(deadline=DEADLINE), START)

    assert evacuate == Evacuate(deadline=DEADLINE)
    assert machine.handle(DrainRequested(deadline=DEADLINE), START) == []
    (told,) = machine.handle(EngineStepped(outputs=[some_progress(7, finish=Finish.LENGTH)]), START)
    assert isinstance(told, Tell), "the answer does not wait for it"
    # The attempt has added blocks since the evacuation began, so these are evacuated, too.
    assert machine.handle(EvacuationEnded(), Nanos(START + SECOND)) == [Evacuate(deadline=DEADLINE)]
    assert machine.handle(WorkerTicked(), Nanos(START + SECOND)) == []
    assert machine.handle(EvacuationEnded(), Nanos(START + 2 * SECOND)) == [Drained(cancelled=0)]


def test_blocks_of_late_work_are_evacuated_after_it_ended():
    machine = a_machine(evacuates=True)
    machine.handle(asked(a_start()), START)
    machine.handle(DrainRequested(deadline=DEADLINE), START)

    assert machine.handle(EvacuationEnded(), START) == []
    _, again = machine.handle(EngineStepped(outputs=[some_progress(7, finish=Finish.LENGTH)]), START)
    assert again == Evacuate(deadline=DEADLINE)
    assert machine.handle(EvacuationEnded(), START) == [Drained(cancelled=0)]


def test_hanging_evacuation_delays_drain_to_the_deadline_only():
    machine = a_machine(evacuates=True)
    machine.handle(DrainRequested(deadline=DEADLINE), START)

    assert machine.handle(WorkerTicked(), Nanos(DEADLINE - 1)) == []
    assert machine.handle(WorkerTicked(), DEADLINE) == [Drained(cancelled=0)]
    assert machine.handle(EvacuationEnded(), DEADLINE) == []


# Attempts.


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("phase", Phase)
def test_worker_takes_only_phases_of_its_role(role, phase):
    start = a_start(
        phase=phase,
        kv_path=KvPath.STORE if phase is Phase.PREFILL else None,
        handoff=a_handoff() if phase is Phase.DECODE else None,
    )

    commands = a_machine(role).handle(asked(start), START)

    if phase in TAKES[role]:
        assert commands == [Submit(start=start)]
    else:
        rejected = rejection(commands)
        assert (rejected.reason, rejected.field) == (Reason.INVALID_ARGUMENT, "phase")
        assert f"{role} worker" in rejected.message


@pytest.mark.parametrize(
    ("start", "reason", "field"),
    [
        (a_start(tokens=b""), Reason.INVALID_ARGUMENT, "tokens"),
        (a_start(tokens=b"123"), Reason.INVALID_ARGUMENT, "tokens"),
        (a_start(salt=b"short"), Reason.INVALID_ARGUMENT, "salt"),
        (a_start(sampling=Sampling(max_tokens=0)), Reason.INVALID_ARGUMENT, "sampling.max_tokens"),
        (a_start(sampling=Sampling(form=AnyObject())), Reason.INVALID_ARGUMENT, "sampling.form"),
        (a_start(tokens=250, sampling=Sampling(max_tokens=7)), Reason.TOO_LARGE, "tokens"),
        (a_start(phase=Phase.PREFILL, tokens=256, kv_path=KvPath.STORE), Reason.TOO_LARGE, "tokens"),
        (a_start(phase=Phase.PREFILL), Reason.INVALID_ARGUMENT, "kv_path"),
        (a_start(phase=Phase.PREFILL, kv_path=KvPath.DIRECT), Reason.KV_MISMATCH, "kv_path"),
        (a_start(phase=Phase.DECODE), Reason.INVALID_ARGUMENT, "handoff"),
        (
            a_start(phase=Phase.DECODE, handoff=a_handoff(fingerprint="0" * 32)),
            Reason.KV_MISMATCH,
            "handoff.fingerprint",
        ),
        (
            a_start(phase=Phase.DECODE, handoff=a_handoff(kv_path=KvPath.DIRECT)),
            Reason.KV_MISMATCH,
            "handoff.kv_path",
        ),
    ],
)
def test_invalid_work_is_refused_before_anything_starts(start, reason, field):
    machine = a_machine()

    rejected = rejection(machine.handle(asked(start), START))

    assert (rejected.request_id, rejected.reason, rejected.field) == (start.request_id, reason, field)
    assert machine.held == 0


def test_whole_model_length_can_be_used():
    whole = a_start(tokens=250, sampling=Sampling(max_tokens=6))
    prompt_only = a_start(
        request_id="p", phase=Phase.PREFILL, tokens=255, kv_path=KvPath.STORE, sampling=Sampling(max_tokens=200)
    )

    machine = a_machine()

    assert machine.handle(asked(whole), START) == [Submit(start=whole)]
    assert machine.handle(asked(prompt_only), START) == [Submit(start=prompt_only)]


def test_request_over_capacity_is_refused_until_another_ends():
    machine = a_machine(capacity=1)
    machine.handle(asked(a_start()), START)

    assert rejection(machine.handle(asked(a_start(request_id="r2")), START)).reason is Reason.QUEUE_FULL

    machine.handle(EngineStepped(outputs=[some_progress(1, finish=Finish.STOP)]), START)
    assert isinstance(machine.handle(asked(a_start(request_id="r2")), START)[0], Submit)


def test_a_second_start_of_running_work_is_refused():
    machine = a_machine()
    machine.handle(asked(a_start()), START)

    rejected = rejection(machine.handle(asked(a_start()), START))

    assert (rejected.reason, rejected.field) == (Reason.INVALID_ARGUMENT, "request_id")
    assert machine.held == 1


def test_two_routers_may_choose_the_same_request_id():
    machine = a_machine()
    other = StreamId(1)
    machine.handle(RouterConnected(stream=other, router_id="other"), START)
    machine.handle(asked(a_start()), START)

    (submit,) = machine.handle(asked(a_start(), stream=other), START)

    assert submit.start.request_id != "r1#1"
    commands = machine.handle(
        EngineStepped(outputs=[some_progress(1), some_progress(2, request_id=submit.start.request_id)]), START
    )
    assert commands == [
        Tell(stream=STREAM, message=Step(progress=(some_progress(1),))),
        Tell(stream=other, message=Step(progress=(some_progress(2),))),
    ]


def test_one_step_is_one_message_for_each_router():
    machine = a_machine()
    machine.handle(asked(a_start(request_id="a")), START)
    machine.handle(asked(a_start(request_id="b")), START)
    step = [some_progress(1, request_id="a"), some_progress(2, request_id="b")]

    assert machine.handle(EngineStepped(outputs=step), START) == [
        Tell(stream=STREAM, message=Step(progress=tuple(step)))
    ]


def test_cancel_stops_the_engine_and_reports_the_end():
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    cancel = CancelRequested(stream=STREAM, request_id=RequestId("r1#1"))

    assert machine.handle(cancel, START) == [CancelInEngine(request_id=RequestId("r1#1"))]
    assert machine.handle(cancel, START) == []
    end = some_progress(finish=Finish.CANCELLED)
    assert machine.handle(EngineStepped(outputs=[end]), START) == [Tell(stream=STREAM, message=Step(progress=(end,)))]
    assert machine.held == 0


def test_broken_stream_cancels_only_its_own_work():
    machine = a_machine()
    machine.handle(RouterConnected(stream=StreamId(1), router_id="other"), START)
    machine.handle(asked(a_start(request_id="a")), START)
    machine.handle(asked(a_start(request_id="b"), stream=StreamId(1)), START)

    assert machine.handle(RouterGone(stream=STREAM), START) == [CancelInEngine(request_id=RequestId("a"))]
    assert machine.handle(EngineStepped(outputs=[some_progress(1, request_id="a")]), START) == []
    assert machine.held == 2


def test_a_router_that_connects_again_replaces_its_older_stream():
    machine = a_machine()
    machine.handle(asked(a_start()), START)

    assert machine.handle(RouterConnected(stream=StreamId(1), router_id="router"), START) == [
        CancelInEngine(request_id=RequestId("r1#1")),
        CutStream(stream=STREAM),
    ]
    (submit,) = machine.handle(asked(a_start(), stream=StreamId(1)), START)
    assert submit.start.request_id != "r1#1", "the engine still ends the first one"


def warnings(machine: WorkerMachine, seconds: Iterable[int]) -> list[WarnOfSharedRouterId]:
    """Connect a router again at each of these seconds after the start, and return the warnings of a shared router id."""
    commands: list[WorkerCommand] = []
    for stream, after in zip(count(1), seconds, strict=False):
        again = RouterConnected(stream=StreamId(stream), router_id="router")
        commands += machine.handle(again, Nanos(START + after * SECOND))
    return [each for each in commands if isinstance(each, WarnOfSharedRouterId)]


def test_routers_with_one_id_cause_a_warning():
    warning = WarnOfSharedRouterId(router_id="router")
    assert warnings(a_machine(), [2, 4, 6]) == []
    assert warnings(a_machine(), [2, 4, 6, 8]) == [warning]
    assert warnings(a_machine(), [2, 4, 6, 8, 10, 12, 14, 16]) == [warning, warning]


def test_rarely_replaced_stream_of_a_router_causes_no_warning():
    assert warnings(a_machine(), range(0, 100, 4)) == []


def test_router_whose_streams_ended_before_causes_no_warning():
    machine = a_machine()
    for each in range(10):
        machine.handle(RouterGone(stream=StreamId(each)), START)
        connected = RouterConnected(stream=StreamId(each + 1), router_id="router")
        assert machine.handle(connected, START) == []


def test_work_past_its_deadline_is_cancelled_and_refused():
    machine = a_machine()
    machine.handle(asked(a_start(timeout_ms=100)), START)
    late = Nanos(START + 100 * MILLISECOND)

    assert machine.handle(WorkerTicked(), Nanos(late - 1)) == []
    cancel, told = machine.handle(WorkerTicked(), late)

    assert cancel == CancelInEngine(request_id=RequestId("r1#1"))
    assert told.message.reason is Reason.DEADLINE_PASSED
    assert machine.handle(EngineStepped(outputs=[some_progress(finish=Finish.CANCELLED)]), late) == []


def test_work_that_the_engine_rejects_ends_too():
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    given_up = Rejected(request_id=RequestId("r1#1"), reason=Reason.INTERNAL, message="no")

    assert machine.handle(EngineStepped(outputs=[given_up]), START) == [Tell(stream=STREAM, message=given_up)]
    assert machine.held == 0


# Any interleaving.


@pytest.mark.parametrize("draining", [False, True])
def test_hanging_engine_ends_everything_at_once(draining):
    machine = a_machine()
    machine.handle(asked(a_start()), START)
    if draining:
        machine.handle(DrainRequested(deadline=Nanos(START + SECOND)), START)

    commands = machine.handle(EngineStuck(), START)

    assert commands == [Abandon(lost=1)]
    assert machine.phase is LifePhase.GONE
    assert machine.held == 0
    assert machine.handle(RouterGone(stream=STREAM), START) == [], (
        "nothing is left to cancel in an engine that is killed"
    )
    assert machine.handle(asked(a_start()), START) == []


class AnyInterleaving(RuleBasedStateMachine):
    """Random histories of routers, engine and time: the state stays consistent, and every request has exactly one end."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = WorkerMachine(role=Role.BOTH, facts=FACTS, capacity=3, evacuates=True)
        self.lent = 0  # number of handoffs whose blocks the engine holds
        self.evacuating = False
        self.deadline: Nanos | None = None  # of the drain
        self.now = START
        self.streams: dict[StreamId, str] = {}
        self.next_stream = 0
        self.engine: dict[RequestId, bool] = {}  # by request in the engine: whether it was cancelled
        self.waiting: dict[tuple[StreamId, RequestId], int] = {}  # number of ends that a router has yet to get
        self.gone = False
        self.machine.handle(EngineReady(), START)

    def feed(self, event) -> None:
        for command in self.machine.handle(event, self.now):
            match command:
                case Submit(start=start):
                    assert not self.gone
                    assert start.request_id not in self.engine
                    self.engine[start.request_id] = False
                case CancelInEngine(request_id=request_id):
                    assert self.engine[request_id] is False, "cancelled once, and only while held"
                    self.engine[request_id] = True
                case Tell(stream=stream, message=Step(progress=progress)):
                    assert stream in self.streams
                    for one in progress:
                        self.told(stream, one.request_id, ended=one.finish is not None)
                case Tell(stream=stream, message=Rejected(request_id=request_id)):
                    assert stream in self.streams
                    self.told(stream, request_id, ended=True)
                case Tell(message=Draining()):
                    pass
                case CutStream(stream=stream):
                    self.lose(stream)
                case WarnOfSharedRouterId(router_id=router_id):
                    assert router_id in self.streams.values()
                case Evacuate():
                    assert not self.evacuating, "one at a time"
                    self.evacuating = True
                case Drained(unfetched=unfetched):
                    self.gone = True
                    assert unfetched == self.lent
                    assert self.now >= self.deadline or not (self.lent or self.evacuating)
                case Abandon(lost=lost):
                    assert lost == sum(self.waiting.values())
                    self.gone = True
                    self.engine.clear()
                    for stream in list(self.streams):
                        self.lose(stream)

    def told(self, stream, request_id, *, ended) -> None:
        assert self.waiting.get((stream, request_id), 0) >= 1, "nobody waits for this"
        if ended:
            self.waiting[stream, request_id] -= 1

    def lose(self, stream) -> None:
        self.streams.pop(stream)
        self.waiting = {key: owed for key, owed in self.waiting.items() if key[0] != stream}

    @rule(name=st.sampled_from(["x", "y"]))
    def connect(self, name):
        stream = StreamId(self.next_stream)
        self.next_stream += 1
        self.streams[stream] = name
        self.feed(RouterConnected(stream=stream, router_id=name))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def disconnect(self, data):
        stream = data.draw(st.sampled_from(sorted(self.streams)))
        self.lose(stream)
        self.feed(RouterGone(stream=stream))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), name=st.sampled_from("abc"), timeout_ms=st.sampled_from([0, 5, 50]), bad=st.booleans())
    def request(self, data, name, timeout_ms, bad):
        stream = data.draw(st.sampled_from(sorted(self.streams)))
        key = (stream, RequestId(name))
        self.waiting[key] = self.waiting.get(key, 0) + 1
        tokens = b"" if bad else a_prompt(3)
        self.feed(asked(a_start(request_id=name, timeout_ms=timeout_ms, tokens=tokens), stream=stream))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), name=st.sampled_from("abc"))
    def cancel(self, data, name):
        stream = data.draw(st.sampled_from(sorted(self.streams)))
        self.feed(CancelRequested(stream=stream, request_id=RequestId(name)))

    @precondition(lambda self: self.engine)
    @rule(data=st.data(), end=st.booleans())
    def step(self, data, end):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.engine)), min_size=1))
        outputs = []
        for request_id in sorted(chosen):
            stopped = self.engine[request_id]
            finish = Finish.CANCELLED if stopped else Finish.STOP if end else None
            outputs.append(Progress(request_id=request_id, token_ids=(1,), finish=finish))
            if finish is not None:
                del self.engine[request_id]
        self.feed(EngineStepped(outputs=outputs, lent=self.lent))

    @rule(lent=st.integers(0, 2))
    def hand_off_or_fetch(self, lent):
        if not self.gone:
            self.lent = lent
            self.feed(WorkerTicked(lent=lent))

    @precondition(lambda self: self.evacuating)
    @rule()
    def bring_away(self):
        self.evacuating = False
        self.feed(EvacuationEnded())

    @rule(pause_ms=st.sampled_from([1, 10, 3000]))
    def tick(self, pause_ms):
        self.now = Nanos(self.now + pause_ms * MILLISECOND)
        self.feed(WorkerTicked(lent=self.lent))

    @rule(pause_ms=st.sampled_from([10, 3000]))
    def stall(self, pause_ms):
        """Let time pass without an event for the machine."""
        self.now = Nanos(self.now + pause_ms * MILLISECOND)

    @precondition(lambda self: not self.gone)
    @rule()
    def hang(self):
        self.feed(EngineStuck())

    @rule(timeout_ms=st.sampled_from([0, 20, 5000]))
    def drain(self, timeout_ms):
        deadline = Nanos(self.now + timeout_ms * MILLISECOND)
        if not self.gone:
            self.deadline = min(self.deadline or deadline, deadline)
        self.feed(DrainRequested(deadline=deadline))

    @invariant()
    def the_books_are_in_order(self):
        self.machine.check()
        assert self.gone == (self.machine.phase is LifePhase.GONE)
        if not self.gone:
            assert self.machine.held == len(self.engine)

    def teardown(self):
        """Drain the worker, and let the engine end all requests; then check that no router waits, and nothing is held."""
        self.drain(0)
        self.now = Nanos(self.now + 2 * GRACE)
        self.feed(WorkerTicked(lent=self.lent))
        for request_id in list(self.engine):
            self.feed(EngineStepped(outputs=[Progress(request_id=request_id, finish=Finish.CANCELLED)]))
        assert self.machine.held == 0
        assert not any(self.waiting.values()), self.waiting
        assert self.gone


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = hypothesis_settings(deadline=None, stateful_step_count=40)
