"""Router machine: every decision about requests, without I/O.

Rules:

1. A request that arrives is placed at once, waits in the admission queue, or is rejected. It is rejected at once if its predicted wait is
   above a limit (`fleet.router.queueing.admission`, rule 1). Every request ends exactly once: by `Complete`, by `Reject`, or without a
   command to its client when the client has cancelled it.
2. Placement and reservation happen in one step, on both workers of a pair. The prefill worker's reservation ends with its attempt. On the
   worker that answers, the prefill share of the reservation is released at the first token, and the rest at the end of the request.
3. After a prefill attempt the request is over if the one token of this attempt ends the answer. Otherwise the decode worker gets the handoff.
   `LiveRequest.ends_with_prefill_token` and `emits_prefill_token` decide what happens with that token.
4. An attempt fails if its worker leaves, cannot be reached, cancels it, sends no usable handoff, or rejects it for a reason that is not
   the request's fault. Then the request is placed again on another worker, up to `max_attempts` placements in all. The tokens that were
   already sent to the client are appended to the prompt, and the next attempt states their number (`Start.generated_tokens`). If no other
   worker can continue the answer (`_hindrance`), the answer starts over, provided that the client has seen nothing of it
   (`Arrived.whole`). If the client has seen a part, the request is rejected with WORKER_LOST. An answer that another router has begun
   (`Arrived.answered`) is continued by the same rule.
5. Messages of attempts that were aborted are ignored, because each attempt has an id of its own (`fleet.router.state.live_requests`).
6. A deadline ends a request in any stage; the server sends `RouterTicked` when `next_deadline()` has come.
7. A request whose client has gone (`RequestCancelled`) ends at once, and its workers get `CancelAttempt`.
"""

from typing import NamedTuple, assert_never

from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import ModelDemand, WorkerLoad
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import Finish, ModelCard
from fleet.core.roles import Phase, Role
from fleet.core.work import Handoff, Progress, Rejected
from fleet.router.kv_index.peer_prompts import PlacedPrompt, PromptAnnouncements
from fleet.router.messages import (
    Arrived,
    AttemptRejected,
    CacheAged,
    CacheAssumed,
    CacheReported,
    Command,
    Complete,
    Emit,
    KvChanged,
    KvPathsChanged,
    LoadReported,
    PeerLeft,
    PeerPlaced,
    PeerReserved,
    Reject,
    RequestCancelled,
    ReservationTotals,
    RouterEvent,
    RouterTicked,
    SessionsBound,
    StartedOver,
    StoreChanged,
    ThresholdsChanged,
    Undelivered,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
    WorkerStepped,
)
from fleet.router.placement.decision import Decision
from fleet.router.placement.policies.built_in import parameters
from fleet.router.placement.policies.built_in import policy as built_in_policy
from fleet.router.placement.wait_or_reject import Rejection, RejectionCause, WaitForRoom
from fleet.router.placer import Placer
from fleet.router.policy import NEW_BLOCKS, PlacementPolicy, RandomSource
from fleet.router.queueing.admission import QueueAdmission
from fleet.router.queueing.wait_groups import UNKNOWN_WORKERS, BusyWorkers
from fleet.router.sessions import SessionTable
from fleet.router.settings.router import RouterSettings, Thresholds
from fleet.router.state.live_requests import (
    Attempt,
    Attempts,
    LiveRequest,
    OrderedRequests,
    PromptHasher,
    RequestStage,
    RequestTransition,
    advance,
    hash_prompt,
)
from fleet.router.state.snapshot import Explanation, ModelSnapshot, RemotePrefillSnapshot, RouterSnapshot
from fleet.router.state.worker_registry import WorkerRegistry
from fleet.router.state.worker_table import RegisteredWorker
from fleet.router.statistics import RouterDemand, RouterStatistics

_NOT_THE_REQUESTS_FAULT = frozenset(
    {
        Reason.NO_WORKER,
        Reason.QUEUE_FULL,
        Reason.DRAINING,
        Reason.WORKER_LOST,
        Reason.KV_MISMATCH,
        Reason.INTERNAL,  # the engine failed; if the next attempt fails too, the request may be the cause
    }
)
_WORTH_A_RETRY = frozenset({Reason.NO_WORKER, Reason.QUEUE_FULL, Reason.DRAINING, Reason.WORKER_LOST})

# A request that would wait too long on the chosen worker is placed again without this worker. Each try costs a placement, so at most this
# many workers are left out one by one. One last try then leaves out all full workers.
OTHER_WORKERS_TRIED = 2
# another worker (see above) is taken if the predicted wait there is at most this share of `max_queue_seconds`, or if none is predicted
SHORT_WAIT_SHARE = 0.25

# The code reads about ten of these names for each request. Reading an attribute of an enum takes 65 ns, and a module variable 5 ns.
_AGGREGATED, _PREFILL, _DECODE = Phase.AGGREGATED, Phase.PREFILL, Phase.DECODE
_QUEUED, _HANDED_OVER, _DECODING = RequestStage.QUEUED, RequestStage.HANDED_OVER, RequestStage.DECODING
_DISPATCHED, _FIRST_TOKEN = RequestTransition.DISPATCHED, RequestTransition.FIRST_TOKEN
_GIVEN_UP = Finish.CANCELLED


class _Hindrance(NamedTuple):
    """The reason why no other worker can continue an answer."""

    cause: RejectionCause
    message: str


class _Wait(NamedTuple):
    """The predicted wait for a first token on one worker."""

    worker_id: WorkerId
    seconds: float


class RouterMachine:
    """Makes all decisions about the requests of one router: takes events, and returns commands (rules 1 to 7)."""

    def __init__(
        self,
        settings: RouterSettings,
        rng: RandomSource,
        policy: PlacementPolicy | None = None,
        hasher: PromptHasher = hash_prompt,
    ):
        """Start without workers.

        Args:
            settings: The router's settings.
            rng: The source of randomness for ties.
            policy: The placement policy; None: the built-in policy that the settings name.
            hasher: Computes the block keys of prompts whose frontend does not provide them.

        Raises:
            ConfigurationRefused: The settings name an unknown policy, or parameters that the policy does not accept.
        """
        self.settings = settings
        self.policy = policy or built_in_policy(settings.policy, parameters(settings))
        self._hasher = hasher
        self.placer = Placer(settings, self.policy, rng)
        self.registry = WorkerRegistry(settings)
        self._workers = self.registry.workers
        self.live_requests: dict[RequestId, LiveRequest] = {}
        self.attempts = Attempts(settings)
        self._admission = QueueAdmission(settings, self.registry)
        self.queue = self._admission.queue
        self._deadlines = OrderedRequests()
        self._seq = 0
        self._statistics = RouterStatistics(settings.explained_requests)
        self._counters = self._statistics.counters
        self.demand = RouterDemand()

    def handle(self, event: RouterEvent, now: Nanos) -> list[Command]:
        """Process an event and return the commands to perform, in order."""
        out: list[Command] = []
        # Most events are `WorkerStepped` or `Arrived`. Each class pattern below takes 70 ns, whether it matches or not.
        if type(event) is WorkerStepped:
            self._stepped(event, now, out)
        elif type(event) is Arrived:
            self._arrived(event, now, out)
        else:
            match event:
                case KvChanged():
                    if self.registry.get(event.worker_id) is not None:
                        self.registry.cache_changed(event.worker_id, event.events)
                case CacheAssumed():
                    if self.registry.get(event.worker_id) is not None:
                        self.registry.cache_assumed(event.worker_id, event.stored, event.removed)
                case CacheAged():
                    if (worker := self.registry.get(event.worker_id)) is not None:
                        worker.assumed.expire(now)
                case CacheReported():
                    self._cache_reported(event, out)
                case StoreChanged():
                    self.registry.store_changed(event)
                case LoadReported():
                    if (worker := self.registry.get(event.worker_id)) is not None:
                        worker.load = event.load
                case RequestCancelled():
                    self._cancelled(event.request_id, now, out)
                case RouterTicked():
                    self._ticked(now, out)
                case ThresholdsChanged():
                    self._tuned(event.thresholds)
                case PeerReserved():
                    self._admission.peer_reserved(event.replica, event.booked)
                case PeerPlaced():
                    self.registry.note_peer_prompts(event.replica, event.placed, event.over, now)
                case PeerLeft():
                    self.registry.forget_peer_prompts(event.replica)
                    self._admission.peer_reserved(event.replica, {})
                case SessionsBound():
                    self.placer.sessions.advance_clock(event.clock, now)
                    for binding in event.bindings:
                        self.placer.sessions.apply(binding, now)
                        self._admission.session_moved(binding.key)
                    self._sessions_dropped()
                case WorkerJoined():
                    self._joined(event, now, out)
                case WorkerLeft():
                    self._left(event.worker_id, now, out)
                case WorkerDraining():
                    if (worker := self.registry.get(event.worker_id)) is not None:
                        self.registry.drain(event.worker_id)
                        self._admission.worker_gone(worker)
                case KvPathsChanged():
                    if (worker := self.registry.get(event.worker_id)) is not None:
                        self.registry.paths_changed(event.worker_id, event.kv_paths, event.store_id)
                        self._admission.worker_joined(worker.description.model)
                case WorkerResumed():
                    if (worker := self.registry.get(event.worker_id)) is not None:
                        self.registry.resume(event.worker_id)
                        self._admission.worker_joined(worker.description.model)
                case AttemptRejected():
                    self._attempt_rejected(event, now, out)
                case Undelivered():
                    self._undelivered(event, now, out)
                case _:
                    assert_never(event)
        if may_move := self.queue.may_move:
            if self.queue.waiting:
                self._move_queues(now, out)
            else:
                may_move.clear()
        if self.attempts.opened:
            self.attempts.move(self.live_requests, now, out)
        return out

    def next_deadline(self) -> Nanos | None:
        """Return the instant at which the next `RouterTicked` is due; None if no live request has a deadline."""
        lowest = self._deadlines.lowest
        return None if lowest is None else Nanos(lowest)

    # Methods for the arrival and admission of requests:

    def _arrived(self, event: Arrived, now: Nanos, out: list[Command]) -> None:
        assert event.request_id not in self.live_requests, event.request_id
        self._statistics.arrived(event.request_id)
        self._seq += 1
        live = LiveRequest(event, self._seq, now, self._hasher)
        self.live_requests[live.id] = live
        self.demand.arrived(live)
        if event.deadline is not None:
            self._deadlines.add(event.deadline, live.seq, live.id)
            if event.deadline <= now:
                self._reject(live, Reason.DEADLINE_PASSED, "the deadline had passed on arrival", now, out)
                return
        if event.answered and (hindrance := self._hindrance(live)):
            self._end_begun(live, hindrance.cause, f"the answer cannot be resumed: {hindrance.message};", now, out)
            return
        # If a worker has room although requests are queued, the queued requests are waiting for other workers. So the new request may be
        # placed before them.
        busy = UNKNOWN_WORKERS
        queue = self.queue
        if not queue.waiting or queue.first(event.model) is None or self.registry.worth_trying(event.model):
            outcome = self._place(live, now, out, new=True)
            if not isinstance(outcome, WaitForRoom):
                return
            busy = outcome.busy
        admission = self._admission
        if (cause := admission.too_long(live, admission.seconds_to_wait(live, now), now)) is not None:
            self._reject(live, Reason.QUEUE_FULL, cause, now, out, retry_after_ms=admission.retry_after_ms(event, now))
            return
        admission.enqueue(live, now, busy)
        self.demand.queued(live)
        if (last := admission.too_many()) is not None:
            message = "all workers are busy and the queue is full; retry later"
            retry_after_ms = admission.retry_after_ms(self.live_requests[last].arrived, now)
            self._reject(self.live_requests[last], Reason.QUEUE_FULL, message, now, out, retry_after_ms=retry_after_ms)

    def _move_queues(self, now: Nanos, out: list[Command]) -> None:
        """Place the queued requests that can be placed after the latest changes."""

        def place(request_id: RequestId) -> BusyWorkers | None:
            outcome = self._place(self.live_requests[request_id], now, out)
            return outcome.busy if isinstance(outcome, WaitForRoom) else None

        self._admission.move(place)

    # Methods that place requests:

    def _place(
        self, live: LiveRequest, now: Nanos, out: list[Command], *, new: bool = False
    ) -> Decision | WaitForRoom | Rejection:
        """Choose the workers of a request, and dispatch or reject it. If the result is `WaitForRoom`, nothing was done.

        A request that has just arrived (`new`) is also rejected if its predicted wait in a prefill queue or an engine is too long, and no
        other workers with a short wait are found. The result is then the decision that was not carried out.
        """
        outcome = self.placer.choose(live, self.registry.candidate_table(live), now)
        if (
            new
            and not live.arrived.only_end
            and isinstance(outcome, Decision)
            and (wait := self._longest_wait(live, outcome, now)) is not None
            and (cause := self._admission.too_long(live, wait.seconds, now)) is not None
        ):
            if (other := self._shorter_wait(live, outcome, wait, now)) is None:
                hint = self._admission.hint_ms(wait.seconds)
                self._reject(live, Reason.QUEUE_FULL, cause, now, out, retry_after_ms=hint)
                self._sessions_dropped()
                return outcome
            outcome = other
        match outcome:
            case Decision():
                if self.queue.waiting:
                    self.queue.served(live.id, live.arrived.model, live.prompt_tokens, outcome.prefill_tokens, now)
                self._dispatch(live, outcome, now, out)
            case Rejection():
                self._statistics.impossible(live.arrived.model, outcome.cause)
                if live.arrived.session:
                    # The rejection may have ended the session's binding, so the session's other requests may go to other workers.
                    self._admission.session_moved(live.session_key)
                self._reject(live, outcome.reason, outcome.message, now, out, field=outcome.field, cause=outcome.cause)
            case WaitForRoom():
                pass
            case _:
                assert_never(outcome)
        self._sessions_dropped()
        return outcome

    def _longest_wait(self, live: LiveRequest, placed: Decision, now: Nanos) -> _Wait | None:
        """Estimate on which of the chosen workers a request would wait longest, and how long.

        The result is None if the request need not wait, or if too little was measured.

        A request waits in the prefill queue of the worker that computes its prompt, in the engine of the worker that answers, or in both at
        the same time.
        """
        prompt = self.attempts.seconds_to_wait(live, placed, now)
        table = placed.candidate_table
        new_blocks = int(table.columns[NEW_BLOCKS, table.topology.rows[placed.decode]])
        answer = self._workers[placed.decode].seconds_to_first_token(new_blocks, now)
        if answer is not None and (prompt is None or answer > prompt):
            return _Wait(placed.decode, answer)
        return None if prompt is None else _Wait(placed.prefill or placed.decode, prompt)

    def _shorter_wait(self, live: LiveRequest, placed: Decision, wait: _Wait, now: Nanos) -> Decision | None:
        """Return a decision for other workers on which the request would wait only a short time.

        Return None if no such worker is found, or if the request must stay on one worker.

        The worker with the lowest cost may be slow, or busy because it holds most of the prompt. Then a worker with a higher cost may give
        the first token sooner. Several full workers may hold most of the prompt, so the last try leaves out all full workers.

        Args:
            live: The request.
            placed: The decision with the wait that is too long.
            wait: The wait that is too long, with its worker.
            now: The present instant.
        """
        arrived = live.arrived
        if arrived.pin is not None or (arrived.session and self.settings.session_affinity == "hard"):
            return None
        table = placed.candidate_table
        passed_over: list[WorkerId] = []
        for tried in range(OTHER_WORKERS_TRIED + 1):
            passed_over.append(wait.worker_id)
            if tried == OTHER_WORKERS_TRIED:
                passed_over += table.full_workers() + self.attempts.full_prefill_queues()
            outcome = self.placer.choose(live, table.without(passed_over), now)
            if not isinstance(outcome, Decision):
                return None
            other = self._longest_wait(live, outcome, now)
            if other is None or other.seconds <= SHORT_WAIT_SHARE * self.settings.max_queue_seconds:
                return outcome
            wait = other
        return None

    def _sessions_dropped(self) -> None:
        if (sessions := self.placer.sessions).dropped:
            for session in sessions.take_dropped():
                self._admission.session_moved(session)

    def _dispatch(self, live: LiveRequest, placed: Decision, now: Nanos, out: list[Command]) -> None:
        self._statistics.placed(live, placed, self.policy)
        live.placed = placed
        live.stage = advance(live.stage, _DISPATCHED)
        self.placer.taken(live, placed, now)
        if live.arrived.session:
            self._admission.session_moved(live.session_key)
        if placed.prefill is None:
            self.registry.reserve(live, placed.decode, placed.prefill_tokens, now).assume(live, now)
            self.attempts.begin(live, placed.decode, _AGGREGATED, now, out)
        else:
            self.registry.reserve(live, placed.decode, 0, now)
            self.registry.reserve(live, placed.prefill, placed.prefill_tokens, now)
            self.attempts.begin(live, placed.prefill, _PREFILL, now, out)

    def _tuned(self, thresholds: Thresholds) -> None:
        self.settings = structs.replace(self.settings, **structs.asdict(thresholds))
        self.attempts.settings = self.placer.settings = self.settings
        self._admission.tune(self.settings)

    # Methods for the progress of attempts:

    def _stepped(self, event: WorkerStepped, now: Nanos, out: list[Command]) -> None:
        for progress in event.progress:
            attempt = self.attempts.get(progress.request_id)
            if attempt is None or attempt.worker_id != event.worker_id:
                self._statistics.late_messages += 1
                continue
            live = self.live_requests[attempt.request_id]
            if progress.kv is not None:
                if attempt.id not in live.kv_reports and attempt.phase is not _DECODE:
                    self._compare(live, attempt, progress.kv.cached_tokens, out)
                live.note_kv_report(attempt, progress.kv)
            if (
                progress.finish is _GIVEN_UP
                # The worker itself has cancelled the attempt; attempts that the router cancels are not in `attempts` any more.
            ):
                self._failed(live, Reason.WORKER_LOST, "the worker cancelled the request", now, out)
            elif attempt.phase is _PREFILL:
                self._prefilled(live, attempt, progress, now, out)
            else:
                self._answered(live, attempt, progress, now, out)

    def _cache_reported(self, event: CacheReported, out: list[Command]) -> None:
        attempt = self.attempts.get(event.request_id)
        if attempt is None or attempt.worker_id != event.worker_id or not event.prompt_tokens:
            return
        live = self.live_requests[attempt.request_id]
        # The external server may count prompt tokens differently. So its share of cached tokens is applied to the router's own count.
        share = event.cached_tokens / event.prompt_tokens
        self._compare(live, attempt, round(share * live.prompt_tokens), out)

    def _compare(self, live: LiveRequest, attempt: Attempt, reported_tokens: int, out: list[Command]) -> None:
        if live.placed is None or live.arrived.external:
            return
        drifts = self._statistics.compare(live.placed, self.registry[attempt.worker_id], reported_tokens)
        if drifts is not None:
            out.append(drifts)

    def _answered(
        self, live: LiveRequest, attempt: Attempt, progress: Progress, now: Nanos, out: list[Command]
    ) -> None:
        if progress.token_ids or progress.parsed is not None or progress.vector:
            if live.stage is not _DECODING:
                if live.stage is _HANDED_OVER:
                    self.placer.handed_over(live, now)
                live.stage = advance(live.stage, _FIRST_TOKEN)
                worker = self._workers[attempt.worker_id]
                worker.reservations.computed(live.id, None if live.arrived.external else now)
                worker.first_tokens.answered(live.id, now)
                self.attempts.computed(live, now)
            # A listener that gets only the end of the answer does not need the last tokens. The request's reservation need not grow by
            # them either, because it ends now.
            if progress.finish is None or not live.arrived.only_end:
                self._emit(live, attempt.worker_id, progress, now, out)
            else:
                if not live.first_token_at:
                    self.demand.first_token(live, now)
                live.sent.extend(progress.token_ids)
        if progress.finish is not None:
            self._complete(live, progress.finish, now, out)

    def _prefilled(
        self, live: LiveRequest, attempt: Attempt, progress: Progress, now: Nanos, out: list[Command]
    ) -> None:
        if progress.finish is None:
            return  # the prefill worker sends the token of this progress once more, together with `finish`
        self.registry[attempt.worker_id].reservations.computed(live.id, None if live.arrived.external else now)
        self.attempts.computed(live, now)
        assert live.placed is not None
        assert live.placed.kv_path is not None
        stopped = progress.finish is Finish.STOP and live.ends_with_prefill_token(live.placed.kv_path)
        if stopped or live.remaining_tokens == 1:
            self._emit(live, attempt.worker_id, progress, now, out)
            self._complete(live, progress.finish, now, out)
            return
        if progress.handoff is None or not progress.token_ids:
            self._failed(live, Reason.INTERNAL, "the prefill worker sent no handoff", now, out)
            return
        decode_id = self._decode_worker(live, self.registry[attempt.worker_id], progress.handoff, now)
        if decode_id is None:
            # The chosen decode worker has left or drains. The next attempt must avoid only that worker (`blamed`), because the prefill
            # worker may still serve the request alone.
            message = "no remaining decode worker can read the handoff"
            self._failed(live, Reason.KV_MISMATCH, message, now, out, blamed=live.placed.decode)
            return
        self._release(live, attempt.worker_id, now)
        self.attempts.end(live)
        if live.emits_prefill_token(progress.handoff.kv_path):
            self._emit(live, decode_id, progress, now, out)
        live.stage = advance(live.stage, RequestTransition.HANDED_OVER)
        live.handed_over_at = now
        self.attempts.begin(live, decode_id, Phase.DECODE, now, out, handoff=progress.handoff)

    def _decode_worker(
        self, live: LiveRequest, prefill: RegisteredWorker, handoff: Handoff, now: Nanos
    ) -> WorkerId | None:
        """Return the decode worker that was chosen with the prefill worker.

        If this decode worker drains or has left, choose another one, reserve the request there, and return it; None if there is none.
        """
        for worker_id in live.reserved_on:
            worker = self.registry[worker_id]
            if worker is not prefill and not worker.draining:
                return worker_id
        candidate_table = self.registry.candidate_table(live)
        chosen = self.placer.choose_decode(live, candidate_table, prefill.description, handoff.kv_path, now)
        if chosen is not None:
            for worker_id in [other for other in live.reserved_on if self.registry[other] is not prefill]:
                self._release(live, worker_id, now)
            self.registry.reserve(live, chosen, 0, now)
        return chosen

    def _emit(self, live: LiveRequest, worker_id: WorkerId, progress: Progress, now: Nanos, out: list[Command]) -> None:
        """Send new tokens to the client, and add their blocks to the reservation on the worker.

        If the listener wants only the end of the answer (`Arrived.only_end`), the tokens are counted and not sent.
        """
        if not progress.token_ids and progress.parsed is None and not progress.vector:
            return
        if not live.first_token_at:
            if live.expected_at and not live.failures:
                self._admission.first_token(live, now)
            self.demand.first_token(live, now)
        worker = self._workers[worker_id]
        if not (live.sent or live.arrived.only_end):
            live.fingerprint = worker.description.fingerprint
        live.sent.extend(progress.token_ids)
        worker.reservations.grown(live.id, len(progress.token_ids))
        if live.arrived.only_end:
            return
        client_progress = Progress(
            request_id=live.id,
            token_ids=progress.token_ids,
            logprobs=progress.logprobs,
            prompt_logprobs=progress.prompt_logprobs,
            parsed=progress.parsed,
            vector=progress.vector,
        )
        out.append(Emit(request_id=live.id, progress=client_progress, kv=live.kv, cached_tokens=live.cached_tokens))

    # Methods for workers that join or leave, and for attempts that fail:

    def _joined(self, event: WorkerJoined, now: Nanos, out: list[Command]) -> None:
        # a new incarnation replaces the one that the router knows
        if self.registry.get(event.description.worker_id) is not None:
            self._left(event.description.worker_id, now, out)
        self.registry.join(event.description, event.address, event.knowledge, event.believed_for)
        self.registry.meet_early_prompts(event.description.worker_id, now)
        self._admission.worker_joined(event.description.model)

    def _left(self, worker_id: WorkerId, now: Nanos, out: list[Command]) -> None:
        worker = self.registry.get(worker_id)
        if worker is None:
            return
        self._counters[worker.description.model].workers_lost += 1
        self.attempts.forget(worker_id)
        booked = [self.live_requests[request_id] for request_id in worker.reservations]
        self.registry.leave(worker_id)
        self._admission.worker_gone(worker)
        for live in booked:
            live.reserved_on.remove(worker_id)
        for live in booked:
            if live.attempt is not None and live.attempt.worker_id == worker_id:
                self._failed(live, Reason.WORKER_LOST, f"worker {worker_id} was lost", now, out)

    def _attempt_rejected(self, event: AttemptRejected, now: Nanos, out: list[Command]) -> None:
        rejected = event.rejected
        attempt = self.attempts.get(rejected.request_id)
        if attempt is None or attempt.worker_id != event.worker_id:
            self._statistics.late_messages += 1
            return
        live = self.live_requests[attempt.request_id]
        self._counters[live.arrived.model].kv_mismatches += rejected.reason is Reason.KV_MISMATCH
        if rejected.reason in _NOT_THE_REQUESTS_FAULT:
            self._failed(
                live, rejected.reason, rejected.message, now, out, blamed=self._to_blame(live, attempt, rejected)
            )
        else:
            self._reject(live, rejected.reason, rejected.message, now, out, field=rejected.field)

    def _to_blame(self, live: LiveRequest, attempt: Attempt, rejected: Rejected) -> WorkerId:
        """Return the worker that the next attempt must avoid.

        If a decode worker cannot read a handoff, this is the prefill worker, because the decode worker can still serve the whole request
        alone.
        """
        if rejected.reason is Reason.KV_MISMATCH and attempt.phase is Phase.DECODE:
            assert live.placed is not None
            return live.placed.prefill or attempt.worker_id
        return attempt.worker_id

    def _undelivered(self, event: Undelivered, now: Nanos, out: list[Command]) -> None:
        attempt = self.attempts.get(event.request_id)
        if attempt is None or attempt.worker_id != event.worker_id:
            return  # the attempt has ended: its worker has left, so all attempts on this worker were already treated as lost
        self._failed(
            self.live_requests[attempt.request_id],
            Reason.WORKER_LOST,
            f"worker {attempt.worker_id} cannot be reached",
            now,
            out,
        )

    def _failed(
        self,
        live: LiveRequest,
        reason: Reason,
        message: str,
        now: Nanos,
        out: list[Command],
        *,
        blamed: WorkerId | None = None,
    ) -> None:
        """Place a request again, or end it, after its attempt has ended without a result."""
        assert live.attempt is not None
        worker = self.registry.get(blamed or live.attempt.worker_id)
        # A worker that has left needs no entry in `failed_on`: it gets no requests any more, and its next incarnation counts as another one.
        if worker is not None:
            live.failed_on[worker.description.worker_id, worker.description.incarnation] = None
        live.failures += 1
        hindrance = self._hindrance(live)
        if live.sent and live.remaining_tokens <= 0 and not live.arrived.only_end:
            # The client has as many tokens as the request allows; only the worker's last message is missing.
            self._complete(live, Finish.LENGTH, now, out)
        elif hindrance and not live.arrived.whole:
            self._end_begun(live, hindrance.cause, f"{message}; {hindrance.message},", now, out)
        elif live.failures >= self.settings.max_attempts:
            self._reject(live, reason, message, now, out)
        else:
            self._counters[live.arrived.model].retried += 1
            self._withdraw(live, now)
            if hindrance:
                live.start_over()
                out.append(StartedOver(request_id=live.id))
            live.stage = advance(live.stage, RequestTransition.LOST)
            live.placed = None
            live.forget_chains()
            outcome = self._place(live, now, out)
            if isinstance(outcome, WaitForRoom):
                # The limit of the queue does not apply, because the request was admitted before.
                self._admission.enqueue(live, now, outcome.busy)

    def _hindrance(self, live: LiveRequest) -> _Hindrance | None:
        """Return why no other worker can continue the answer; None if another worker can, or if the answer has not begun yet."""
        if not live.sent:
            return None
        if not live.may_continue:
            message = "a part of its answer was passed on, and another server cannot continue it"
            return _Hindrance(RejectionCause.PASSED_ON, message)
        others = self.registry.candidate_table(live).topology.descriptions
        alike = [each for each in others if not live.fingerprint or each.fingerprint == live.fingerprint]
        if live.fingerprint and not others:
            return _Hindrance(RejectionCause.NO_WORKER, "no other worker of its model is left")
        if live.fingerprint and not alike:
            return _Hindrance(RejectionCause.OTHER_WEIGHTS, "no other worker has the weights that began the answer")
        fields = live.continued_fields
        if fields and not any(
            set(fields) <= set(each.continued_fields)
            and each.role is not Role.PREFILL
            and (each.worker_id, each.incarnation) not in live.failed_on
            for each in alike
        ):
            message = f"no other worker can continue an answer with {', '.join(fields)}"
            return _Hindrance(RejectionCause.LOSES_STATE, message)
        return None

    def _end_begun(
        self, live: LiveRequest, cause: RejectionCause, message: str, now: Nanos, out: list[Command]
    ) -> None:
        """Reject a request whose answer has begun and cannot be continued."""
        self._statistics.impossible(live.arrived.model, cause)
        self._reject(live, Reason.WORKER_LOST, f"{message} send the request again", now, out, cause=cause)

    # Methods that end requests:

    def _cancelled(self, request_id: RequestId, now: Nanos, out: list[Command]) -> None:
        live = self.live_requests.get(request_id)
        if live is None:
            return  # the request ended just before its client cancelled it
        self.attempts.stop(live, out)
        self.demand.ended(live, now)
        self._end(live, now)
        self._counters[live.arrived.model].cancelled += 1

    def _ticked(self, now: Nanos, out: list[Command]) -> None:
        while (due := self._deadlines.lowest) is not None and due <= now:
            first = self._deadlines.first
            assert first is not None
            live = self.live_requests[first]
            self.attempts.stop(live, out)
            self._reject(live, Reason.DEADLINE_PASSED, "the deadline passed before the answer was complete", now, out)

    def _complete(self, live: LiveRequest, finish: Finish, now: Nanos, out: list[Command]) -> None:
        self.demand.ended(live, now)
        self._end(live, now)
        self._counters[live.arrived.model].completed += 1
        out.append(Complete(request_id=live.id, finish=finish, kv=live.kv, cached_tokens=live.cached_tokens))

    def _reject(
        self,
        live: LiveRequest,
        reason: Reason,
        message: str,
        now: Nanos,
        out: list[Command],
        *,
        field: str = "",
        retry_after_ms: int = 0,
        cause: str = "",
    ) -> None:
        self.demand.rejected(live, reason)
        self._end(live, now)
        self._statistics.refused(live.arrived.model, reason)
        if not retry_after_ms and reason in _WORTH_A_RETRY:
            retry_after_ms = self.settings.retry_after_ms
        out.append(
            Reject(
                request_id=live.id,
                reason=reason,
                message=message,
                field=field,
                retry_after_ms=retry_after_ms,
                cause=cause,
            )
        )

    def _end(self, live: LiveRequest, now: Nanos) -> None:
        if live.stage is _QUEUED:
            self.queue.discard(live.id)
        self._withdraw(live, now)
        if live.arrived.deadline is not None:
            self._deadlines.discard(live.arrived.deadline, live.seq, live.id)
        del self.live_requests[live.id]

    def _withdraw(self, live: LiveRequest, now: Nanos) -> None:
        """Release everything that a request holds on workers, and end its attempt in this router."""
        for worker_id in live.reserved_on[:]:
            self._release(live, worker_id, now)
        self.attempts.end(live)

    def _release(self, live: LiveRequest, worker_id: WorkerId, now: Nanos) -> None:
        """Release what a request holds on a worker, so that queued requests can use it."""
        self.registry.release(live, worker_id, now)
        if self.queue.waiting:
            self.queue.room_released(live.arrived.model, worker_id)

    # Methods that only return what the machine knows:

    def models(self) -> tuple[ModelCard, ...]:
        return self.registry.cards()

    def thresholds(self) -> Thresholds:
        """Return the thresholds that are in use now."""
        return Thresholds(**{name: getattr(self.settings, name) for name in Thresholds.__struct_fields__})

    def remote_prefill(self) -> RemotePrefillSnapshot:
        """Return what was measured about remote prefill. The router measures it even if the setting `learn_remote_prefill` is off."""
        return self.placer.remote_prefill(self.registry.paces())

    def booked(self) -> dict[WorkerId, ReservationTotals]:
        """Return, for each worker, the sums of the reservations of this router's own requests, as they are sent to its peers."""
        return self.registry.booked()

    @property
    def sessions(self) -> SessionTable:
        """The worker of each session, for the sessions that this router and its peers have served."""
        return self.placer.sessions

    @property
    def prompts(self) -> PromptAnnouncements:
        """The prompts that this router has to announce to its peers."""
        return self.registry.prompts

    def assumed_prompts(self, now: Nanos) -> list[PlacedPrompt]:
        """Return the latest prompts that workers without KV events are assumed to have cached, the latest one last."""
        return self.registry.assumed_prompts(now)

    def decision(self, request_id: RequestId) -> Decision | None:
        """Return the decision for a live request; None if the request has ended or is not placed."""
        live = self.live_requests.get(request_id)
        return None if live is None else live.placed

    def decisions(self, request_id: RequestId) -> tuple[Decision, ...]:
        """Return the decisions for a request in their order; empty if it was never placed, or is not among the latest ones that are kept."""
        return self._statistics.decisions(request_id)

    def queue_seconds(self, request_id: RequestId) -> float | None:
        """Return how many seconds a live request waited until it was first sent to a worker; None if it was not sent, or has ended."""
        live = self.live_requests.get(request_id)
        return None if live is None or not live.sent_at else (live.sent_at - live.since) / SECOND

    def fingerprint(self, request_id: RequestId) -> str:
        """Return the fingerprint of the worker that began an answer; empty if the answer has not begun, or the request has ended."""
        live = self.live_requests.get(request_id)
        return "" if live is None else live.fingerprint

    def address(self, worker_id: WorkerId) -> str:
        """Return the address of a worker; empty if it has left."""
        worker = self.registry.get(worker_id)
        return "" if worker is None else worker.address

    def places(self, model: ModelName) -> int:
        """Return how many requests a model may have at once: the sum of the limits of its workers that decode and do not drain."""
        return sum(
            worker.request_limit for worker in self.registry.serving(model) if worker.decodes and not worker.draining
        )

    def addresses(self) -> dict[WorkerId, str]:
        """Return the addresses of all workers."""
        return {worker.description.worker_id: worker.address for worker in self.registry}

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Return why a request was placed as it was; None if it was never placed, or is not among the latest ones that are kept."""
        return self._statistics.explain(request_id)

    def demand_by_model(self, now: Nanos) -> tuple[ModelDemand, ...]:
        """Return the demand of all models, for the planner."""
        return self.demand.models(self.live_requests.values(), now)

    def worker_loads(self) -> tuple[WorkerLoad, ...]:
        """Return the loads of all workers except draining ones, for the planner."""
        return tuple(
            WorkerLoad(
                worker_id=worker.description.worker_id,
                model=worker.description.model,
                role=worker.description.role,
                running=worker.load.running,
                waiting=worker.load.waiting,
                kv_used=min(1.0, worker.load.kv_blocks_used / max(1, worker.description.kv_blocks)),
                start_seconds=worker.description.start_seconds,
            )
            for worker in self.registry
            if not worker.draining
        )

    def cache_seconds(self) -> dict[WorkerId, float]:
        """Return for each worker the seconds that computing its cached blocks again would take (`WorkerRegistry.cache_seconds`)."""
        return self.registry.cache_seconds()

    def _models(self) -> tuple[ModelSnapshot, ...]:
        """Return the counts of requests for each model that has, or had, a worker or a request."""
        active: dict[ModelName, int] = {}
        queued: dict[ModelName, int] = {}
        for live in self.live_requests.values():
            model = live.arrived.model
            active[model] = active.get(model, 0) + 1
            if live.stage is RequestStage.QUEUED or self.attempts.is_waiting(live):
                queued[model] = queued.get(model, 0) + 1
        served = dict.fromkeys(worker.description.model for worker in self.registry)
        return tuple(
            ModelSnapshot(
                model=model,
                active=active.get(model, 0),
                queued=queued.get(model, 0),
                counters=self._counters[model].copy(),
            )
            for model in served | active | dict.fromkeys(self._counters)
        )

    def snapshot(self) -> RouterSnapshot:
        return RouterSnapshot(
            pools=self.registry.pools(),
            stores=self.registry.stores(),
            active=len(self.live_requests),
            queued=len(self.queue.waiting) + self.attempts.waiting,
            index_blocks=self.registry.known_blocks(),
            index_overflowed=self.registry.index.overflowed,
            counters=self._statistics.total(),
            models=self._models(),
            knowledge=self._statistics.knowledge(self.registry.recent()),
        )

    def check(self) -> None:
        """Assert that requests, attempts, reservations, queues and deadlines agree. Tests and the simulator call this."""
        self.registry.check(self.live_requests)
        self._admission.check()
        self.attempts.check(self.live_requests)
        queued = self.queue.waiting.keys()
        for live in self.live_requests.values():
            assert (live.stage is RequestStage.QUEUED) == (live.id in queued) == (live.attempt is None), live
            if live.attempt is not None:
                assert live.attempt.worker_id in live.reserved_on, live
        due = sorted(live.id for live in self.live_requests.values() if live.arrived.deadline is not None)
        assert due == sorted(self._deadlines.ids())
