"""Latency predictions: latencies of workers, predicted by their profiles and corrected by measurements, and alarms when they drift.

Rules:

1. The predictions observe a router's machine (`fleet.router.observer`). Like the machine, they know on which worker each attempt is, how
   many tokens of each prompt are to be computed, and when tokens came. They need no other reports from the engines.
2. A worker computes prompts in the order in which they were sent. When a prompt is sent, its time to the first token is predicted: the
   remaining time of the earlier prompts on the worker, plus the time of the prompt itself. Prompts whose first tokens come in one message
   are counted as computed together. If the batch or the KV cache is full, a prompt has to wait until answers end. Its prediction is then
   not compared with the measurement.
3. The gap between two tokens is predicted from the requests that decode at that time. Gaps in which a prompt was computed are left
   out, because they last as long as that prompt's steps.
4. Each prediction is made twice: by the profile alone, and corrected by what was learned about this worker
   (`fleet.hardware.latency.correction`: a linear correction for prompts, and another one for gaps). Predictions are never changed later, and
   errors are counted for both.
5. For a new incarnation of a worker, learning begins from nothing. Nothing more is learned from an attempt that is cancelled, rejected or
   lost.
6. These are kept in memory: the current attempts, the last `REMEMBERED` errors of each worker, the results of the last `REMEMBERED` workers
   that have left, and the last `ALARMS` alarms.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import ceil
from statistics import median
from typing import Protocol

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish
from fleet.core.roles import Phase, Role
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
)
from fleet.router.placement.decision import Decision
from fleet.router.state.live_requests import request_of

CLOSE = 0.2
"""A prediction with at most this relative error counts as close."""

REMEMBERED = 1000
ALARMS = 100


class StepSeconds(Protocol):
    """Port that predicts the duration of an engine step; `fleet.hardware.latency.step_model.StepModel` implements it."""

    def seconds(
        self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float, /
    ) -> float: ...


class WorkerProfile(Struct, frozen=True, kw_only=True):
    """The profile of a worker: what is known about its step times before any measurement."""

    steps: StepSeconds
    step_tokens: int = 8192  # the maximum number of prompt tokens of one step


class DecisionSource(Protocol):
    """Port to the router machine: returns the decision for a live request; None if there is none."""

    def decision(self, request_id: RequestId, /) -> Decision | None: ...


class PredictionKind(StrEnum):
    """The quantity that is predicted. All predictions are in seconds."""

    TTFT = "ttft"  # from sending a prompt until its first token comes
    ITL = "itl"  # from one token of an answer to the next one


class LatencyDriftAlarm(Struct, frozen=True, kw_only=True):
    """Alarm: a worker's latencies no longer fit the correction that was learned about it."""

    at: Nanos
    worker_id: WorkerId
    kind: PredictionKind


class PredictionAccuracy(Struct, frozen=True, kw_only=True):
    """The accuracy of one kind of prediction for one worker.

    Errors are relative to the measured times. They are those of the last thousand predictions.
    """

    worker_id: WorkerId
    model: ModelName
    role: Role
    kind: PredictionKind
    predictions: int
    close: float  # share of predictions that are close (`CLOSE`)
    error: float  # median of the absolute relative errors
    profile_close: float  # as `close`, but for predictions by the profile alone
    profile_error: float
    factor: float  # learned correction: seconds = added_ms / 1000 + factor x seconds by the profile
    added_ms: float
    alarms: int


class LatencyPredictions:
    """Predicts latencies of all workers of a router, and learns from measurements. It is an observer (`fleet.router.observer.Observer`)."""

    def __init__(self, profile_of: Callable[[WorkerDescription], WorkerProfile | None]):
        """Start without workers. The caller has to set the attribute `machine` to the router machine before the first event.

        Args:
            profile_of: Returns the profile of a worker, or None if nothing can be predicted for this worker.
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
        """Return the accuracy for each present worker with measurements; if `departed` is true, also for the workers that have left."""
        found = [each for worker in self._workers.values() for each in worker.expected()]
        if departed:
            found += [each for left, known in self._left.items() if left not in self._workers for each in known]
        return found

    def speeds(self) -> dict[WorkerId, float]:
        """Return the speed of each worker relative to its profile: 1 divided by the mean of its learned factors; above 1 is faster.

        Workers without predictions are left out.
        """
        factors: dict[WorkerId, list[float]] = {}
        for each in self.expected():
            if each.predictions and each.factor > 0:
                factors.setdefault(each.worker_id, []).append(each.factor)
        return {worker_id: len(found) / sum(found) for worker_id, found in factors.items()}

    def _join(self, description: WorkerDescription) -> None:
        self._leave(description.worker_id)
        if (profile := self._profile_of(description)) is not None:
            self._workers[description.worker_id] = _PredictedWorker(profile, description)

    def _leave(self, worker_id: WorkerId) -> None:
        if (worker := self._workers.pop(worker_id, None)) is not None:
            self._left[worker_id] = worker.expected()
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
    """A prompt that was sent to a worker and is not computed yet."""

    tokens: int
    to_compute: int
    sent: Nanos
    queued: bool  # True if the worker had other prompts to compute when this one was sent
    finds_room: bool
    profile: float  # predicted seconds of this prompt's prefill steps, by the profile alone
    expected: float  # predicted seconds from sending this prompt to its first token, with the correction
    expected_by_profile: float


class _PredictedStream(Struct):
    """An answer that a worker is generating."""

    context: int  # number of tokens of the prompt and of the answer so far, which are in the KV cache
    last_tokens_at: Nanos  # instant of the last report with tokens of the answer


class _PredictedWorker:
    """Predicts and measures the attempts of one worker, and keeps the corrections that were learned about it."""

    def __init__(self, profile: WorkerProfile, description: WorkerDescription):
        self.errors = {kind: _PredictionErrors() for kind in PredictionKind}
        # Number of prompt tokens of each decode attempt that has no token yet, by the attempt's id.
        self.fetching: dict[RequestId, int] = {}
        self._profile = profile
        self._description = description
        self._most_running = description.max_running
        self._most_tokens = description.kv_blocks * description.block_tokens
        self._prompts: dict[RequestId, _PredictedPrompt] = {}  # prompts in the order in which they were sent
        self._streams: dict[RequestId, _PredictedStream] = {}
        self._since = Nanos(0)  # instant since which the worker can have computed the first prompt in `_prompts`
        self._computed = Nanos(-1)  # instant at which a prompt was last computed or dropped

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
        """Forget an attempt that was cancelled, rejected or lost."""
        self._streams.pop(work_id, None)
        self.fetching.pop(work_id, None)
        if work_id in self._prompts:
            if next(iter(self._prompts)) == work_id:
                self._since = now
            del self._prompts[work_id]
            # Until now, the worker may have computed a part of this prompt, which delayed all answers. So gaps that have begun are not
            # compared with predictions (rule 3).
            self._computed = now

    def expected(self) -> list[PredictionAccuracy]:
        return [errors.expected(self._description, kind) for kind, errors in self.errors.items() if errors.predictions]

    def stepped(self, now: Nanos, progress: Sequence[Progress]) -> list[PredictionKind]:
        """Process the progress of one step. Return the kinds of predictions for which a drift alarm begins."""
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
                if not self._prompts and not begun and self._computed <= stream.last_tokens_at:
                    gaps.append((now - stream.last_tokens_at) / SECOND / len(each.token_ids))
                stream.last_tokens_at = now
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
        """Return whether one more prompt fits beside the prompts and answers on the worker."""
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
        """Predict, by the profile, the seconds of all prefill steps of a prompt.

        Each step also computes a token of each answer that decodes now.

        If the prompt is queued behind other prompts (`queued`), it shares a step with another prompt. So the number of its steps may be a
        fraction. Otherwise the number is rounded up, because the last step is a whole step even if the prompt does not fill it.
        """
        most = self._profile.step_tokens
        steps = to_compute / most if queued else ceil(to_compute / most)
        chunk = to_compute / steps
        streams, context = len(self._streams), sum(stream.context for stream in self._streams.values())
        # The chunks of a prompt differ only in the number of earlier tokens that they attend to. This number grows evenly from chunk to
        # chunk, so its mean is used.
        attended = pairs(to_compute, cached) / steps
        return steps * self._profile.steps.seconds(chunk, attended, streams, context)


class _PredictionErrors:
    """Keeps the errors and the learned correction of one kind of prediction for one worker."""

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
        """Learn from one measurement, and return True if an alarm begins.

        Values that are not between 0 and `LONGEST` are ignored. A change of the clock can cause them.
        """
        return 0 < seconds < LONGEST and 0 < profile < LONGEST and self.correction.observe(profile, seconds)

    def expected(self, worker: WorkerDescription, kind: PredictionKind) -> PredictionAccuracy:
        learnt = self.correction.learnt
        return PredictionAccuracy(
            worker_id=worker.worker_id,
            model=worker.model,
            role=worker.role,
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
