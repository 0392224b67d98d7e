"""Latency predictions: what profiles predict about workers, corrected by measurements while a router runs, and drift alarms.

Rules:

1. The predictions observe a router's machine (`fleet.router.observer`) and know what it knows: which attempt is where, how much of
   each prompt is to be computed, and when tokens came. Engines report nothing more.
2. A worker computes prompts in the order in which they were sent. The remaining time of the earlier prompts and its own time
   predict a prompt's first token when the prompt is sent. Prompts whose first tokens come together were computed together.
   Nothing is predicted for a prompt that has to wait for answers to end, because the batch or the KV cache is full.
3. The gap between two tokens is predicted from the requests that decode at that time. Gaps in which a prompt was computed are left
   out, because they last as long as that prompt's steps.
4. Each prediction is made twice: by the profile alone, and corrected by what was learned about this worker
   (`fleet.hardware.latency.correction`: one line for prompts, one for gaps). Predictions are never changed later, and errors are counted for both.
5. A new incarnation of a worker is learned anew. Attempts that are cancelled, rejected or lost teach nothing.
6. Memory: the current attempts, the last `REMEMBERED` errors of a worker, the results of as many workers that have left, and
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
)
from fleet.router.placement.decision import Decision
from fleet.router.state.live_requests import request_of

CLOSE = 0.2
"""The relative error up to which a prediction is close."""

REMEMBERED = 1000
ALARMS = 100


class StepSeconds(Protocol):
    """The duration of a step; `fleet.hardware.latency.step_model.StepModel` is one."""

    def seconds(
        self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float, /
    ) -> float: ...


class WorkerProfile(Struct, frozen=True, kw_only=True):
    """The profile of a worker: its step times, known before any measurement."""

    steps: StepSeconds
    step_tokens: int = 8192  # the most prompt tokens of one step


class DecisionSource(Protocol):
    """Port to the router machine: returns the decision for a request."""

    def decision(self, request_id: RequestId, /) -> Decision | None: ...


class PredictionKind(StrEnum):
    """The quantity that is predicted."""

    TTFT = "ttft"  # from sending a prompt to its first token
    ITL = "itl"  # from one token to the next


class LatencyDriftAlarm(Struct, frozen=True, kw_only=True):
    """The alarm that a worker's latencies no longer fit what was learned."""

    at: Nanos
    worker_id: WorkerId
    kind: PredictionKind


class PredictionAccuracy(Struct, frozen=True, kw_only=True):
    """The accuracy of one kind of prediction for one worker. Errors are relative, and cover the last thousand predictions."""

    worker_id: WorkerId
    kind: PredictionKind
    predictions: int
    close: float  # share of predictions with an error of at most a fifth
    error: float  # median error
    profile_close: float  # the same share for predictions by the profile alone
    profile_error: float
    factor: float  # learned correction: seconds = added + factor x seconds by the profile
    added_ms: float
    alarms: int


class LatencyPredictions:
    """Predicts latencies of all workers of a router, and learns from measurements. Implements `fleet.router.observer.Observer`."""

    def __init__(self, profile_of: Callable[[WorkerDescription], WorkerProfile | None]):
        """Start without workers; set `machine` before the first event.

        Args:
            profile_of: Returns the profile of a worker; None: nothing is predicted for it.
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
        """Return the accuracy for all present workers that have done something, and for departed workers if `departed` is set."""
        found = [each for worker_id, worker in self._workers.items() for each in worker.expected(worker_id)]
        if departed:
            found += [each for left, known in self._left.items() if left not in self._workers for each in known]
        return found

    def speeds(self) -> dict[WorkerId, float]:
        """Return the learnt speed of workers relative to their profiles: above 1 is faster. Workers without predictions are left out."""
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
    """A prompt that is not computed yet."""

    tokens: int
    to_compute: int
    sent: Nanos
    queued: bool  # True if the prompt was sent while others were waiting
    finds_room: bool
    profile: float  # seconds for this prompt alone, by the profile
    expected: float  # seconds from sending it to its first token
    expected_by_profile: float


class _PredictedStream(Struct):
    """An answer in progress."""

    context: int  # tokens in the KV cache
    heard: Nanos


class _PredictedWorker:
    """The current attempts of one worker, and the corrections that were learned about it."""

    def __init__(self, profile: WorkerProfile, description: WorkerDescription):
        self.errors = {kind: _PredictionErrors() for kind in PredictionKind}
        self.fetching: dict[RequestId, int] = {}  # tokens of handed-over prompts by attempt
        self._profile = profile
        self._most_running = description.max_running
        self._most_tokens = description.kv_blocks * description.block_tokens
        self._prompts: dict[RequestId, _PredictedPrompt] = {}  # prompts in the order in which they were sent
        self._streams: dict[RequestId, _PredictedStream] = {}
        self._since = Nanos(0)  # instant from which the first prompt could be computed
        self._computed = Nanos(-1)  # instant at which the last prompt was computed

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
        """Forget an attempt that was given up."""
        self._streams.pop(work_id, None)
        self.fetching.pop(work_id, None)
        if work_id in self._prompts:
            if next(iter(self._prompts)) == work_id:
                self._since = now
            del self._prompts[work_id]
            self._computed = now  # the worker has computed a part of the dropped prompt until now

    def expected(self, worker_id: WorkerId) -> list[PredictionAccuracy]:
        return [errors.expected(worker_id, kind) for kind, errors in self.errors.items() if errors.predictions]

    def stepped(self, now: Nanos, progress: Sequence[Progress]) -> list[PredictionKind]:
        """Process the progress of a step; return the kinds of predictions that have begun to drift."""
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
        """Return whether one more prompt fits beside everything that is there."""
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
        """Return the predicted seconds of all prefill steps of a prompt, by the profile. Each step also computes the current decodes.

        Queued prompts share steps, so their steps are full.
        """
        most = self._profile.step_tokens
        steps = to_compute / most if queued else ceil(to_compute / most)
        chunk = to_compute / steps
        streams, context = len(self._streams), sum(stream.context for stream in self._streams.values())
        # Chunks differ only in their attended tokens, which grow evenly, so the mean chunk attends to the mean number.
        attended = pairs(to_compute, cached) / steps
        return steps * self._profile.steps.seconds(chunk, attended, streams, context)


class _PredictionErrors:
    """The errors of one kind of prediction for one worker."""

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
        """Learn a measurement; return whether it raises the alarm. Measurements above `LONGEST`, as after a clock change, are ignored."""
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
