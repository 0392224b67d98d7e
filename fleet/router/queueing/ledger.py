"""Reservation ledger: what live requests hold on workers, and which queued requests may move when something is released.

Rules:

1. A placement reserves on each of its workers (`fleet.router.state.reservations`) and is released there. The reservations on a
   worker that has left are gone with it.
2. The admission queue hears of everything that may end a wait: released room, workers that come and go, changed limits, and sessions
   that have moved. The queues move after the whole event was processed, until no request can be placed.
3. A request that waited only for a worker that has gone is then rejected. So after a worker has gone all requests are tried.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.router.messages import ReservationTotals
from fleet.router.queueing.admission_queue import AdmissionQueue, QueueSearch
from fleet.router.queueing.wait_groups import BusyWorkers
from fleet.router.sessions import SessionKey
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.worker_registry import WorkerRegistry
from fleet.router.state.worker_table import RegisteredWorker

MAX_FAILED_TRIES = 32  # failed tries after an event; each try is a placement, which takes 35 us with 64 workers

TryPlace = Callable[[RequestId], BusyWorkers | None]
"""A function that places or rejects a queued request, or returns the workers that it still waits for."""


class ReservationLedger:
    """The reservations of all requests of one router."""

    def __init__(self, registry: WorkerRegistry, queue: AdmissionQueue) -> None:
        self._registry = registry
        self._workers = registry.workers
        self._queue = queue
        self.freed: dict[ModelName, bool] = {}
        """Models whose queues may move; True if a worker has gone."""

    def reserve(self, live: LiveRequest, worker_id: WorkerId, prefill_tokens: int, now: Nanos) -> RegisteredWorker:
        worker = self._workers[worker_id]
        keys = live.keys(worker.description.block_tokens)
        expected = live.arrived.expected_tokens
        if expected:
            expected = max(0, expected - len(live.sent))
        worker.reservations.reserve(live.id, keys, live.prompt_tokens, prefill_tokens, now, expected_tokens=expected)
        if live.arrived.adapter is not None:
            worker.book_adapter(live.arrived.adapter.name)
        live.reserved_on.append(worker_id)
        return worker

    def release(self, live: LiveRequest, worker_id: WorkerId) -> None:
        worker, model = self._workers[worker_id], live.arrived.model
        worker.reservations.release(live.id)
        if live.arrived.adapter is not None:
            worker.release_adapter(live.arrived.adapter.name)
        live.reserved_on.remove(worker_id)
        self._queue.changed(model, worker_id)
        self.freed.setdefault(model, False)

    def release_all(self, live: LiveRequest) -> None:
        for worker_id in live.reserved_on[:]:
            self.release(live, worker_id)

    def joined(self, model: ModelName) -> None:
        """Note that a worker of this model takes requests from now on."""
        self._queue.sized(model, self._registry.sizes(model))
        self._queue.all_changed(model)
        self.freed.setdefault(model, False)

    def gone(self, worker: RegisteredWorker) -> None:
        """Note that a worker takes no more requests, or has left."""
        model = worker.description.model
        self._queue.sized(model, self._registry.sizes(model))
        self._queue.gone(model, worker.description.worker_id)
        self.freed[model] = True

    def shared(self, replica: str, booked: Mapping[WorkerId, ReservationTotals]) -> None:
        """Replace the reservations of a peer router."""
        for worker in self._registry.share(replica, booked):
            self._queue.changed(worker.description.model, worker.description.worker_id)
        self.freed.update(dict.fromkeys(self._queue.models(), False))

    def tuned(self, settings: RouterSettings) -> None:
        """Apply changed settings; there may be room now."""
        self._registry.tune(settings)
        models = self._queue.models()
        self._queue.all_changed(*models)
        self.freed.update(dict.fromkeys(models, False))

    def session_moved(self, session: SessionKey) -> None:
        """Note that the requests of a session may go to another worker than before."""
        for model in self._queue.moved(session):
            self.freed.setdefault(model, False)

    def move(self, place: TryPlace) -> None:
        """Place the queued requests that can be placed since something has changed."""
        while self.freed:
            model = next(iter(self.freed))
            gone = self.freed.pop(model)
            if self._queue.first(model) is None:
                continue
            search = self._queue.search(model, None if gone else MAX_FAILED_TRIES, self._registry.has_room)
            while (gone or self._registry.worth_trying(model)) and _move_next(search, place):
                pass

    def check(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        """Assert that requests and workers agree, and that the queues have moved."""
        assert not self.freed
        booked: dict[RequestId, list[WorkerId]] = {}
        for worker in self._registry:
            adapters = [requests[request_id].arrived.adapter for request_id in worker.reservations]
            assert worker.adapters_booked == Counter(adapter.name for adapter in adapters if adapter is not None)
            for request_id in worker.reservations:
                booked.setdefault(request_id, []).append(worker.description.worker_id)
        for live in requests.values():
            assert sorted(live.reserved_on) == sorted(booked.pop(live.id, [])), live
        assert not booked, booked


def _move_next(search: QueueSearch, place: TryPlace) -> bool:
    """Place or reject the next request that need not wait; return whether there was one."""
    for request_id in search.candidates():
        if (busy := place(request_id)) is None:
            return True
        search.mark_rejected(busy)
    return False
