"""What profiles say that workers will do, beside what they do: predictions, corrected while a router runs, and alarms.

Rules:

1. It looks on at a router's machine (`fleet.router.observer`) and knows what that knows: which work is where, how much of each
   prompt is to be computed, when tokens came. Engines tell it nothing more.
2. A worker computes prompts in the order in which they were sent. What is left of those before, and its own, is the time to a
   prompt's first token; it is predicted when the prompt is sent. Those whose first tokens come together were computed together.
   Where a prompt has to wait for answers to end (no place in the batch, no room for its KV), nothing is predicted.
3. The gap between two tokens is predicted for what decodes there at the time. Gaps in which a prompt was computed are left out:
   they are as long as that prompt's steps.
4. Each prediction is made twice: by the profile alone, and corrected by what was learnt of this worker
   (`fleet.hardware.latency.correction`: one line for prompts, one for gaps). None is changed afterwards, and errors are counted of both.
5. A worker that begins anew is learnt anew. Work that is cancelled, rejected or lost teaches nothing.
6. Memory: what is under way, and the last `REMEMBERED` errors of a worker; what came of as many workers that have left, and
   `ALARMS` alarms.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import ceil
from statistics import median
from typing import Protocol

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish
from fleet.core.roles import Phase
from fleet.core.work import Progress, WorkerDescription
from fleet.hardware.latency.correction import LONGEST, Correction
from fleet.hardware.latency.step_model import pairs
from fleet.router.messages import (
    AttemptRejected,
    CancelAttempt,
    Command,
    Dispatch,
    RouterEvent,
    Undelivered,
    WorkerJoined,
    WorkerLeft,
    WorkerStepped,
    request_of,
)
from fleet.router.placement.decision import Decision

CLOSE = 0.2
"""Relative error up to which a prediction was good."""

REMEMBERED = 1000
ALARMS = 100


class StepSeconds(Protocol):
    """How long a step takes; `fleet.hardware.latency.step_model.StepModel` is one."""

    def seconds(
        self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float, /
    ) -> float: ...


class WorkerProfile(Struct, frozen=True, kw_only=True):
    """What is known of a worker beforehand."""

    steps: StepSeconds
    step_tokens: int = 8192  # prompt tokens of one step, at most


class DecisionSource(Protocol):
    """What is asked of the machine."""

    def decision(self, request_id: RequestId, /) -> Decision | None: ...


class PredictionKind(StrEnum):
    """What is predicted."""

    TTFT = "ttft"  # from sending a prompt to its first token
    ITL = "itl"  # from one token to the next


class LatencyDriftAlarm(Struct, frozen=True, kw_only=True):
    """A worker has become another one."""

    at: Nanos
    worker_id: WorkerId
    kind: PredictionKind


class PredictionAccuracy(Struct, frozen=True, kw_only=True):
    """How well one kind of prediction does for one worker. Errors are relative, of the last thousand predictions."""

    worker_id: WorkerId
    kind: PredictionKind
    predictions: int
    close: float  # share within a fifth
    error: float  # median
    profile_close: float  # the same of the profile alone
    profile_error: float
    factor: float  # learnt: seconds = added + factor x profile
    added_ms: float
    alarms: int


class LatencyPredictions:
    """Of all workers of a router; implements `fleet.router.observer.Observer`."""

    def __init__(self, profile_of: Callable[[WorkerDescription], WorkerProfile | None]):
        """Nothing is known yet; set `machine` before the first event.

        Args:
            profile_of: A worker's; None: nothing is expected of it.
        """
        self.machine: DecisionSource | None = None
        self.alarms: deque[LatencyDriftAlarm] = deque(maxlen=ALARMS)
        self._profile_of = profile_of
        self._workers: dict[WorkerId, _PredictedWorker] = {}
        self._left: dict[WorkerId, list[PredictionAccuracy]] = {}

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        match event:
            case WorkerStepped():
                if (worker := self._workers.get(event.worker_id)) is not None:
                    for kind in worker.stepped(now, event.progress):
                        self.alarms.append(LatencyDriftAlarm(at=now, worker_id=event.worker_id, kind=kind))
            case WorkerJoined():
                self._join(event.description)
            case WorkerLeft():
                self._leave(event.worker_id)
            case AttemptRejected():
                self._drop(now, event.worker_id, event.rejected.request_id)
            case Undelivered():
                self._drop(now, event.worker_id, event.request_id)
            case _:
                pass
        for command in commands or ():
            match command:
                case Dispatch():
                    self._sent(now, command)
                case CancelAttempt():
                    self._drop(now, command.worker_id, command.request_id)
                case _:
                    pass

    def expected(self, *, departed: bool = False) -> list[PredictionAccuracy]:
        """Of all workers that are there and have done something; of those that have left as well, if that is wanted."""
        found = [each for worker_id, worker in self._workers.items() for each in worker.expected(worker_id)]
        if departed:
            found += [each for left, known in self._left.items() if left not in self._workers for each in known]
        return found

    def _join(self, description: WorkerDescription) -> None:
        self._leave(description.worker_id)
        if (profile := self._profile_of(description)) is not None:
            self._workers[description.worker_id] = _PredictedWorker(profile, description)

    def _leave(self, worker_id: WorkerId) -> None:
        if (worker := self._workers.pop(worker_id, None)) is not None:
            self._left[worker_id] = worker.expected(worker_id)
            if len(self._left) > REMEMBERED:
                del self._left[next(iter(self._left))]

    def _drop(self, now: Nanos, worker_id: WorkerId, work_id: RequestId) -> None:
        if (worker := self._workers.get(worker_id)) is not None:
            worker.drop(now, work_id)

    def _sent(self, now: Nanos, command: Dispatch) -> None:
        start, worker = command.start, self._workers.get(command.worker_id)
        if worker is None:
            return
        tokens = len(start.tokens) // TOKEN_BYTES
        if start.phase is Phase.DECODE:
            worker.fetching[start.request_id] = tokens
            return
        assert self.machine is not None, "set `machine` first"
        decision = self.machine.decision(request_of(start.request_id))
        if decision is not None:
            worker.send(now, start.request_id, tokens, max(1, min(tokens, decision.prefill_tokens)))


class _PredictedPrompt(Struct):
    """One that is not computed yet."""

    tokens: int
    to_compute: int
    sent: Nanos
    queued: bool  # behind others
    finds_room: bool
    profile: float  # seconds of its own, by the profile alone
    expected: float  # seconds from sending it to its first token
    expected_by_profile: float


class _PredictedStream(Struct):
    """An answer that is under way."""

    context: int  # tokens
    heard: Nanos


class _PredictedWorker:
    """What is under way on one worker, and what was learnt of it."""

    def __init__(self, profile: WorkerProfile, description: WorkerDescription):
        self.errors = {kind: _PredictionErrors() for kind in PredictionKind}
        self.fetching: dict[RequestId, int] = {}  # tokens of prompts that were computed elsewhere
        self._profile = profile
        self._most_running = description.max_running
        self._most_tokens = description.kv_blocks * description.block_tokens
        self._prompts: dict[RequestId, _PredictedPrompt] = {}  # in the order of sending
        self._streams: dict[RequestId, _PredictedStream] = {}
        self._since = Nanos(0)  # when the first of the prompts could begin
        self._computed = Nanos(-1)  # when the last prompt was computed

    def send(self, now: Nanos, work_id: RequestId, tokens: int, to_compute: int) -> None:
        if not self._prompts:
            self._since = now
        correction = self.errors[PredictionKind.TTFT].correction
        queued = bool(self._prompts)
        own = self._seconds(to_compute, tokens - to_compute, queued=queued)
        spent = (now - self._since) / SECOND
        wait = wait_by_profile = 0.0
        for place, prompt in enumerate(self._prompts.values()):
            gone = 0.0 if place else spent
            wait += max(0.0, correction.predict(prompt.profile) - gone)
            wait_by_profile += max(0.0, prompt.profile - gone)
        self._prompts[work_id] = _PredictedPrompt(
            tokens=tokens,
            to_compute=to_compute,
            sent=now,
            queued=queued,
            finds_room=self._has_room(tokens),
            profile=own,
            expected=wait + correction.predict(own),
            expected_by_profile=wait_by_profile + own,
        )

    def drop(self, now: Nanos, work_id: RequestId) -> None:
        """It is not done any more."""
        self._streams.pop(work_id, None)
        self.fetching.pop(work_id, None)
        if work_id in self._prompts:
            if next(iter(self._prompts)) == work_id:
                self._since = now
            del self._prompts[work_id]
            self._computed = now  # as much of it as was

    def expected(self, worker_id: WorkerId) -> list[PredictionAccuracy]:
        return [errors.expected(worker_id, kind) for kind, errors in self.errors.items() if errors.predictions]

    def stepped(self, now: Nanos, progress: Sequence[Progress]) -> list[PredictionKind]:
        """Take in what a step brought; returns what has become other than it was."""
        begun: list[_PredictedPrompt] = []
        gaps: list[float] = []
        for each in progress:
            work_id = each.request_id
            if each.finish is Finish.CANCELLED:
                self.drop(now, work_id)
                continue
            if (prompt := self._prompts.pop(work_id, None)) is not None:
                begun.append(prompt)
                self._streams[work_id] = _PredictedStream(prompt.tokens, now)
            elif (tokens := self.fetching.pop(work_id, None)) is not None:
                self._streams[work_id] = _PredictedStream(tokens, now)
            elif each.token_ids and (stream := self._streams.get(work_id)) is not None:
                if not self._prompts and not begun and self._computed <= stream.heard:
                    gaps.append((now - stream.heard) / SECOND / len(each.token_ids))
                stream.heard = now
                stream.context += len(each.token_ids)
        alarms = []
        if gaps and self._gap(sum(gaps) / len(gaps)):
            alarms.append(PredictionKind.ITL)
        if begun and self._first_tokens(now, begun):
            alarms.append(PredictionKind.TTFT)
        for each in progress:
            if each.finish is not None:
                self._streams.pop(each.request_id, None)
        return alarms

    def _first_tokens(self, now: Nanos, begun: Sequence[_PredictedPrompt]) -> bool:
        errors = self.errors[PredictionKind.TTFT]
        for each in begun:
            if each.finds_room:
                errors.add((now - each.sent) / SECOND, each.expected, each.expected_by_profile)
        seconds = (now - max(self._since, min(each.sent for each in begun))) / SECOND
        self._since = self._computed = now
        if not all(each.finds_room for each in begun):
            return False
        computed = sum(each.to_compute for each in begun)
        cached = max(each.tokens - each.to_compute for each in begun)
        return errors.learn(self._seconds(computed, cached, queued=begun[0].queued), seconds)

    def _has_room(self, tokens: int) -> bool:
        """For one more prompt, beside all that is there."""
        held = sum(each.tokens for each in self._prompts.values()) + sum(
            each.context for each in self._streams.values()
        )
        here = len(self._prompts) + len(self._streams)
        return here < self._most_running and held + tokens <= self._most_tokens

    def _gap(self, seconds: float) -> bool:
        errors = self.errors[PredictionKind.ITL]
        context = sum(stream.context for stream in self._streams.values())
        profile = self._profile.steps.seconds(0.0, 0.0, len(self._streams), context)
        errors.add(seconds, errors.correction.predict(profile), profile)
        return errors.learn(profile, seconds)

    def _seconds(self, to_compute: int, cached: int, *, queued: bool) -> float:
        """Of all steps of a prompt, by the profile, along with what decodes now; those of a queue fill steps together."""
        most = self._profile.step_tokens
        steps = to_compute / most if queued else ceil(to_compute / most)
        chunk = to_compute / steps
        streams, context = len(self._streams), sum(stream.context for stream in self._streams.values())
        # Chunks are alike but for what they attend to, which grows evenly: the mean chunk has the mean of it.
        attended = pairs(to_compute, cached) / steps
        return steps * self._profile.steps.seconds(chunk, attended, streams, context)


class _PredictionErrors:
    """One kind of prediction, for one worker."""

    def __init__(self) -> None:
        self.correction = Correction()
        self.predictions = 0
        self._corrected: deque[float] = deque(maxlen=REMEMBERED)
        self._by_profile: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float, expected: float, by_profile: float) -> None:
        if seconds > 0:
            self.predictions += 1
            self._corrected.append(abs(expected - seconds) / seconds)
            self._by_profile.append(abs(by_profile - seconds) / seconds)

    def learn(self, profile: float, seconds: float) -> bool:
        """Whether that was the one too many. A clock that was put forward by weeks teaches nothing."""
        return 0 < seconds < LONGEST and 0 < profile < LONGEST and self.correction.observe(profile, seconds)

    def expected(self, worker_id: WorkerId, kind: PredictionKind) -> PredictionAccuracy:
        learnt = self.correction.learnt
        return PredictionAccuracy(
            worker_id=worker_id,
            kind=kind,
            predictions=self.predictions,
            close=_close(self._corrected),
            error=round(median(self._corrected), 4),
            profile_close=_close(self._by_profile),
            profile_error=round(median(self._by_profile), 4),
            factor=round(learnt.factor, 4),
            added_ms=round(1000 * learnt.added, 3),
            alarms=learnt.alarms,
        )


def _close(errors: Sequence[float]) -> float:
    return round(sum(error <= CLOSE for error in errors) / len(errors), 4)
