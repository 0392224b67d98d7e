"""Selected requests: the router places them and reserves capacity for them, but proxies send them to the workers.

Rule 2 of `fleet.gateway.selection` says how long a selected request lasts without a report (its selection lease).
"""

import asyncio
from collections.abc import Callable

from fleet.core.errors import RequestRejected
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Phase
from fleet.core.work import Handoff, Progress, Start
from fleet.router.messages import Complete, Emit, StartedOver, WorkerStepped
from fleet.router.placement.decision import Decision
from fleet.router.ports import Workers
from fleet.router.state.live_requests import request_of

TOKEN = 0  # placeholder for each token of an answer; only the proxy knows the real tokens

Holder = tuple[str, ModelName]
"""The name of a caller that has selection leases, and the model of the selected requests."""


class SelectedRequest:
    """Keeps one selected request and its selection lease. Implements `fleet.router.server.RequestListener`."""

    def __init__(
        self,
        request_id: RequestId,
        lease_seconds: float,
        end: Callable[["SelectedRequest"], None],
        holder: "Holder | None",
    ) -> None:
        self.request_id = request_id
        self.holder = holder
        self.lease_seconds = lease_seconds
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.work: tuple[WorkerId, Start] | None = None
        self.decode = WorkerId("")  # the decode worker that was named to the caller; empty before the placement
        self._end = end
        self._handed_over = False
        self._answered = 0  # number of answer tokens that were reported
        self._lease: asyncio.TimerHandle | None = None

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        if isinstance(item, RequestRejected) and not self.placed.done():
            self.placed.set_exception(item)
        elif not isinstance(item, Emit):
            self._end(self)

    def begun(self, worker_id: WorkerId, start: Start) -> None:
        """Record that the router starts an attempt. End the lease if the caller was not told the worker of this attempt.

        The answer to the caller names the workers of the first placement. So the caller knows the worker of the first
        attempt and, if that worker is a prefill worker, the decode worker of the same placement.
        """
        # True if this is the decode attempt after the prefill, on the decode worker that was named to the caller.
        as_named = self._handed_over and worker_id == self.decode
        lost = self.work is not None and not as_named
        self.work, self._handed_over = (worker_id, start), False
        if lost:
            # End the lease later, because the router server is still performing the commands of an event.
            asyncio.get_running_loop().call_soon(self._end, self)
        elif not self.placed.done():
            self.placed.set_result(None)

    def renew(self) -> None:
        self.stop_lease()
        self._lease = asyncio.get_running_loop().call_later(self.lease_seconds, self._end, self)

    def stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    def prefilled(self, decision: Decision) -> WorkerStepped | None:
        """Return the event that the prefill worker would send at the end of its phase.

        Return None if the request has no prefill worker, or if the event was returned before.
        """
        assert self.work is not None
        worker_id, start = self.work
        if start.phase is not Phase.PREFILL:
            return None
        self._handed_over = True
        assert decision.kv_path is not None, "there is a way between the workers of a pair"
        handoff = Handoff(kv_path=decision.kv_path, prefill_worker=worker_id, fingerprint="", num_tokens=0)
        done = Progress(request_id=start.request_id, token_ids=(TOKEN,), finish=Finish.LENGTH, handoff=handoff)
        return WorkerStepped(worker_id=worker_id, progress=(done,))

    def answered(self, tokens: int) -> WorkerStepped:
        """Return the event that a worker would send for this many answer tokens, up to the request's `max_tokens`."""
        assert self.work is not None
        worker_id, start = self.work
        new_tokens = min(tokens, start.sampling.max_tokens - self._answered)
        self._answered += new_tokens
        progress = Progress(request_id=start.request_id, token_ids=(TOKEN,) * new_tokens)
        return WorkerStepped(worker_id=worker_id, progress=(progress,))


class SelectionAwareWorkers:
    """Passes attempts on to the workers, except those of selected requests. Implements `fleet.router.ports.Workers`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.bookings: dict[RequestId, SelectedRequest] = {}

    def start(self, worker_id: WorkerId, start: Start) -> None:
        booking = self.bookings.get(request_of(start.request_id)) if self.bookings else None
        if booking is None:
            self._workers.start(worker_id, start)
        else:
            booking.begun(worker_id, start)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        if request_of(request_id) not in self.bookings:
            self._workers.cancel(worker_id, request_id)
