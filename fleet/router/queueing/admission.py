"""Admission: which requests may wait when no worker has room, in which position, for how long, and when they are tried again.

Rules:

1. A request that would wait longer than the settings or its deadline allow is rejected at once; that is better than a rejection after
   a wait. The predicted wait follows from the rate at which other requests have left the queue (`admission_queue`, rule 5).
2. If more requests wait than allowed, the last request of the tenant with the largest backlog is rejected. A request that was admitted
   before and lost its worker stays.
3. A request that is rejected for want of room gets a retry hint: about the time in which all queued requests will have left.
4. The queue hears of everything that may end a wait: released room, workers that come and go, changed limits, and sessions that have
   moved. The queue moves after the whole event was processed, until no request can be placed.
5. A request that waited only for a worker that has gone is rejected then. So after a worker has gone all requests are tried.
"""

from collections.abc import Callable, Mapping

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.router.messages import Arrived, ReservationTotals
from fleet.router.queueing.admission_queue import AdmissionQueue, QueuedRequest, QueueSearch, queue_position
from fleet.router.queueing.wait_groups import BusyWorkers
from fleet.router.sessions import SessionKey
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.worker_registry import WorkerRegistry
from fleet.router.state.worker_table import RegisteredWorker

MAX_RETRY_AFTER_MS = 60_000  # longest retry hint in milliseconds; today's load says little about later
MAX_FAILED_TRIES = 32  # most failed tries after an event; each try is a placement, which takes 35 us with 64 workers

TryPlace = Callable[[RequestId], BusyWorkers | None]
"""A function that places or rejects a queued request, or returns the workers that it still waits for."""


class QueueAdmission:
    """The admission queue of one router, and the rules for entering and leaving it."""

    def __init__(self, settings: RouterSettings, registry: WorkerRegistry):
        self.settings = settings
        self.queue = AdmissionQueue({name: tenant.weight for name, tenant in settings.tenants.items()})
        self._registry = registry

    def enqueue(self, live: LiveRequest, now: Nanos, busy: BusyWorkers) -> None:
        """Add a request to the queue. Its position depends on its arrival, so a request that returns goes before all newer ones.

        Args:
            live: The request.
            now: The instant.
            busy: The workers that it waits for, if they are known.
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
        """Return about how long a request would wait in the queue; None if too little was measured."""
        return self.queue.seconds_to_wait(live.arrived.model, live.arrived.tenant, now, self._rank(live))

    def too_long(self, live: LiveRequest, seconds: float | None, now: Nanos) -> str | None:
        """Return why a request with this predicted wait is rejected at once (rule 1); None: it may wait."""
        arrived = live.arrived
        if seconds is None:
            return None
        if arrived.most_wait is not None and seconds * SECOND > arrived.most_wait:
            return f"the request would wait about {seconds:.0f} s for a worker, longer than overflow.after_seconds of its model"
        if seconds > self.settings.max_queue_seconds:
            return f"the request would wait about {seconds:.0f} s for a worker, longer than max_queue_seconds of this router"
        if arrived.deadline is not None and now + seconds * SECOND > arrived.deadline:
            return f"the request would wait about {seconds:.0f} s for a worker, past its deadline"
        return None

    def too_many(self) -> RequestId | None:
        """Return the request to reject because too many wait (rule 2); None: no more wait than allowed, or all must stay."""
        return self.queue.request_to_drop() if len(self.queue) > self.settings.max_queued else None

    def retry_after_ms(self, arrived: Arrived, now: Nanos) -> int:
        """Return the retry hint for a request (rule 3)."""
        seconds = self.queue.seconds_to_wait(arrived.model, arrived.tenant, now)
        return self.settings.retry_after_ms if seconds is None else self.hint_ms(seconds)

    def hint_ms(self, seconds: float) -> int:
        """Return the retry hint for a predicted wait."""
        return round(min(max(self.settings.retry_after_ms, seconds * 1000), MAX_RETRY_AFTER_MS))

    def worker_joined(self, model: ModelName) -> None:
        """Record that a worker of this model takes requests from now on, or that it can form other pairs than before."""
        self.queue.set_sizes(model, self._registry.sizes(model))
        self.queue.all_changed(model)
        self.queue.may_move.setdefault(model, False)

    def worker_gone(self, worker: RegisteredWorker) -> None:
        """Record that a worker takes no more requests, or has left."""
        model = worker.description.model
        self.queue.set_sizes(model, self._registry.sizes(model))
        self.queue.gone(model, worker.description.worker_id)
        self.queue.may_move[model] = True

    def peer_reserved(self, peer: str, booked: Mapping[WorkerId, ReservationTotals]) -> None:
        """Replace the reservations of a peer router."""
        for worker in self._registry.set_peer_reservations(peer, booked):
            self.queue.changed(worker.description.model, worker.description.worker_id)
        self.queue.may_move.update(dict.fromkeys(self.queue.models(), False))

    def tune(self, settings: RouterSettings) -> None:
        """Apply changed settings; workers may have room now."""
        self.settings = settings
        self._registry.tune(settings)
        models = self.queue.models()
        self.queue.all_changed(*models)
        self.queue.may_move.update(dict.fromkeys(models, False))

    def session_moved(self, session: SessionKey) -> None:
        """Record that the requests of a session may go to another worker than before."""
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
        """Assert that the queue is consistent and has moved."""
        assert not self.queue.may_move
        self.queue.check()


def _move_next(search: QueueSearch, place: TryPlace) -> bool:
    """Place or reject the next request that need not wait longer; return True if there was one."""
    for request_id in search.candidates():
        if (busy := place(request_id)) is None:
            return True
        search.mark_rejected(busy)
    return False
