"""Admission: which requests may wait when no worker has room, in which position, for how long, and when they are tried again.

Rules:

1. A request is rejected at once if its first token would come later than the settings, its deadline or the limit for overflow allow. An
   early rejection is better than one after a wait. The predicted wait is computed from the rate at which requests have left the queue
   (`admission_queue`, rule 5), and from the rate of first tokens of full workers (`fleet.router.state.worker_table`, rule 8). Before it is
   compared with the limit of the settings, a margin for errors of the prediction is added to it (`prediction_errors`).
2. If more requests wait than allowed, the last request of the tenant with the largest backlog is rejected. A request that was admitted
   before and lost its worker stays.
3. A request that is rejected because no worker has room gets a retry hint: the predicted wait of one more request of its tenant in the
   queue. If it is rejected because it would wait too long on the chosen worker, the hint is the predicted wait there.
4. The queue is notified of everything that may end a wait: released room, workers that come and go, changed limits, and sessions that have
   moved. After the whole event was processed, queued requests are placed until no more can be placed, or until `MAX_FAILED_TRIES` tries
   for one model have failed. First tries of a wait group are limited separately (`admission_queue.QueueSearch`).
5. A request that can be served only by a worker that has gone is rejected. So when a worker has gone, all requests that wait for it are
   tried.
"""

from collections.abc import Callable, Mapping

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.router.messages import Arrived, ReservationTotals
from fleet.router.queueing.admission_queue import AdmissionQueue, QueuedRequest, QueueSearch
from fleet.router.queueing.prediction_errors import PredictionErrors
from fleet.router.queueing.wait_groups import BusyWorkers
from fleet.router.sessions import SessionKey
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest, queue_position
from fleet.router.state.prefill_order import DUE_SHARE
from fleet.router.state.worker_registry import WorkerRegistry
from fleet.router.state.worker_table import RegisteredWorker

# Maximum retry hint in milliseconds; the present load says little about the load more than a minute later.
MAX_RETRY_AFTER_MS = 60_000
# Maximum margin for errors of a predicted wait, as a share of `max_queue_seconds`. However wrong the predictions were, the margin never
# causes the rejection of a request whose predicted wait is below half of `max_queue_seconds`.
MAX_MARGIN = 0.5
# Maximum number of failed tries to place queued requests of one model after an event, without first tries of wait groups (rule 4). Each try
# is a placement, which takes 35 us with 64 workers.
MAX_FAILED_TRIES = 32

TryPlace = Callable[[RequestId], BusyWorkers | None]
"""A function that tries to place a queued request. It returns None if the request was placed or rejected, or else the workers for which the
request waits."""


class QueueAdmission:
    """Decides which requests may enter the admission queue of one router, and when they are tried again."""

    def __init__(self, settings: RouterSettings, registry: WorkerRegistry):
        self.settings = settings
        self.queue = AdmissionQueue({name: tenant.weight for name, tenant in settings.tenants.items()})
        self._registry = registry
        self._errors: dict[ModelName, PredictionErrors] = {}

    def enqueue(self, live: LiveRequest, now: Nanos, busy: BusyWorkers) -> None:
        """Add a request to the queue. Its position depends on its arrival, so a request that returns after a failure goes before newer ones.

        Args:
            live: The request.
            now: The present instant.
            busy: The workers for which the request waits; empty if they are not known.
        """
        arrived, prompt_tokens = live.arrived, live.prompt_tokens
        waiting = QueuedRequest(
            request_id=live.id,
            model=arrived.model,
            tenant=arrived.tenant,
            rank=self._rank(live),
            seq=live.seq,
            tokens=prompt_tokens,
            whole_tokens=prompt_tokens + live.remaining_tokens,
            wait_key=live.wait_key(),
            session=live.session_key if arrived.session and self.settings.session_affinity == "hard" else None,
            stays=live.failures > 0,
        )
        self.queue.add(waiting, now, busy)

    def _rank(self, live: LiveRequest) -> int:
        settings = self.settings
        return queue_position(
            live.since,
            live.arrived.priority,
            live.prompt_tokens,
            priority_seconds=settings.priority_seconds,
            size_seconds=settings.size_seconds,
        )

    def seconds_to_wait(self, live: LiveRequest, now: Nanos) -> float | None:
        """Estimate how many seconds a request would wait for its first token if it entered the queue; None if too little was measured."""
        model = live.arrived.model
        queued = self.queue.seconds_to_wait(model, live.arrived.tenant, now, self._rank(live))
        return None if queued is None else queued + self._registry.seconds_to_first_token(model, now)

    def first_token(self, live: LiveRequest, now: Nanos) -> None:
        """Learn how much later than expected a first token came, less the time of the request's own prefill (`PredictionErrors`).

        A deferred prompt (`fleet.router.state.prefill_order`) may wait much longer, so that others are in time. It shows that its predicted
        wait was too close to the limit, but not by how much. So it counts as late by at most the time that is left for errors.
        """
        if (errors := self._errors.get(live.arrived.model)) is None:
            errors = self._errors[live.arrived.model] = PredictionErrors()
        assert live.placed is not None
        worker = self._registry.get(live.placed.prefill or live.placed.decode)
        own = 0.0 if worker is None else live.placed.prefill_tokens * worker.reservations.token_seconds
        error = (now - live.expected_at) / SECOND - own
        if live.deferred:
            error = min(error, (1.0 - DUE_SHARE) * self.settings.max_queue_seconds)
        errors.note(error, now)

    def too_long(self, live: LiveRequest, seconds: float | None, now: Nanos) -> str | None:
        """Return the reason why a request with this predicted wait is rejected at once (rule 1); None if it may wait.

        If the request may wait and `seconds` is not None, record in `LiveRequest.expected_at` when its first token is expected.
        """
        if seconds is None:
            return None
        arrived, most = live.arrived, self.settings.max_queue_seconds
        if arrived.most_wait is not None and seconds * SECOND > arrived.most_wait:
            return f"the first token would come after about {seconds:.0f} s, later than overflow.after_seconds of its model"
        margin = min(self._margin(arrived.model, now), MAX_MARGIN * most)
        if seconds + margin > most:
            error = f" (predictions were up to {margin:.1f} s too low)" if margin >= 0.05 else ""
            return (
                f"the first token would come after about {seconds:.0f} s{error}, too late for max_queue_seconds of this router, "
                f"which is {most:g} s"
            )
        if arrived.deadline is not None and now + seconds * SECOND > arrived.deadline:
            return f"the first token would come after about {seconds:.0f} s, past the deadline of the request"
        live.expected_at = Nanos(now + round(seconds * SECOND))
        return None

    def _margin(self, model: ModelName, now: Nanos) -> float:
        return 0.0 if (errors := self._errors.get(model)) is None else errors.margin(now)

    def too_many(self) -> RequestId | None:
        """Return the request to reject if too many requests wait (rule 2); None if not too many wait, or if none may be rejected."""
        return self.queue.request_to_drop() if len(self.queue.waiting) > self.settings.max_queued else None

    def retry_after_ms(self, arrived: Arrived, now: Nanos) -> int:
        """Return the retry hint in milliseconds for a request that cannot enter the queue (rule 3).

        If no wait is predicted, the hint is the setting `retry_after_ms`.
        """
        seconds = self.queue.seconds_to_wait(arrived.model, arrived.tenant, now)
        return self.settings.retry_after_ms if seconds is None else self.hint_ms(seconds)

    def hint_ms(self, seconds: float) -> int:
        """Return the retry hint in milliseconds for a predicted wait in seconds.

        It is at least the setting `retry_after_ms`, and at most `MAX_RETRY_AFTER_MS`.
        """
        return round(min(max(self.settings.retry_after_ms, seconds * 1000), MAX_RETRY_AFTER_MS))

    def worker_joined(self, model: ModelName) -> None:
        """Record that a worker of this model takes requests from now on, or that it can form pairs with other workers than before.

        All queued requests of the model may then be tried again.
        """
        self.queue.set_sizes(model, self._registry.sizes(model))
        self.queue.all_changed(model)
        self.queue.may_move.setdefault(model, False)

    def worker_gone(self, worker: RegisteredWorker) -> None:
        """Record that a worker takes no more requests, or has left, so that the requests that wait for it are tried (rule 5)."""
        model = worker.description.model
        self.queue.set_sizes(model, self._registry.sizes(model))
        self.queue.gone(model, worker.description.worker_id)
        self.queue.may_move[model] = True

    def peer_reserved(self, peer: str, booked: Mapping[WorkerId, ReservationTotals]) -> None:
        """Replace the reservations of a peer router by `booked`. Queued requests may be placed where the peer has fewer than before."""
        for worker in self._registry.set_peer_reservations(peer, booked):
            self.queue.changed(worker.description.model, worker.description.worker_id)
        self.queue.may_move.update(dict.fromkeys(self.queue.models(), False))

    def tune(self, settings: RouterSettings) -> None:
        """Apply changed settings. Queued requests may be placed now, because limits have changed."""
        self.settings = settings
        self._registry.tune(settings)
        models = self.queue.models()
        self.queue.all_changed(*models)
        self.queue.may_move.update(dict.fromkeys(models, False))

    def session_moved(self, session: SessionKey) -> None:
        """Record that the requests of a session may go to another worker than before, so that the queued ones are tried again."""
        for model in self.queue.session_moved(session):
            self.queue.may_move.setdefault(model, False)

    def move(self, place: TryPlace) -> None:
        """Place or reject queued requests after the latest changes, until none can be placed or too many tries have failed.

        After a worker has gone, the number of failed tries is not limited (rule 5).
        """
        while self.queue.may_move:
            model = next(iter(self.queue.may_move))
            gone = self.queue.may_move.pop(model)
            if self.queue.first(model) is None:
                continue
            search = self.queue.search(model, None if gone else MAX_FAILED_TRIES, self._registry.has_room)
            while (gone or self._registry.worth_trying(model)) and _move_next(search, place):
                pass

    def check(self) -> None:
        """Assert that the queue is consistent, and that no change is left for `move`."""
        assert not self.queue.may_move
        self.queue.check()


def _move_next(search: QueueSearch, place: TryPlace) -> bool:
    """Try queued requests until one is placed or rejected. Return False if none was."""
    for request_id in search.candidates():
        if (busy := place(request_id)) is None:
            return True
        search.mark_rejected(busy)
    return False
