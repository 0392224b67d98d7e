"""`fleet.v1.Selection`: the router's brain for other proxies, which send the requests themselves.

Rules:

1. To the router a selected request is one like any other: it is placed and booked in one step, waits when it must, is
   explained, and counts as load. Only the work is never sent: `SelectionAwareWorkers` keeps it back.
2. A booking is held by a lease. Whoever reports renews it; one that is not renewed ends as if its client had gone.
3. When a worker of it is lost the booking ends: where the request really runs, only its proxy knows.
4. A lease is of the router that gave it. Several of them are behind one port, so what is said here of another one's is passed on to them.
5. Callers are trusted, but not to be without faults: leases last no longer than `SelectionSettings.max_lease_ms`, and all those of one
   caller hold no more than its share of the workers' places. Beyond that it is refused (RESOURCE_EXHAUSTED) and may try again.
6. `uncached_tokens` tells whether somebody has sent the same prompt in the tenant's name. So this service is on the control port only.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import grpc
from google.protobuf.message import Message

from fleet.core.clock import MILLISECOND, SECOND
from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, ModelCard, Sampling
from fleet.core.roles import Phase, Placement
from fleet.core.validation import check_hints
from fleet.core.work import Handoff, Progress, Start
from fleet.net.control.access import caller_name
from fleet.net.grpc.calls import Context, parse_message, unary_context_handler, unary_handler
from fleet.net.grpc.port import GrpcServerApi
from fleet.router.messages import Arrived, Complete, Emit, StartedOver, WorkerEvent, WorkerStepped, request_of
from fleet.router.placement.decision import Decision
from fleet.router.ports import Workers
from fleet.router.server import RequestListener
from fleet.router.settings.selection import SelectionSettings
from fleet.router.state.lora import resolve_model
from fleet.v1 import selection_pb2 as pb
from kvstore.block import tenant_salt

SERVICE = "fleet.v1.Selection"

DEFAULT_LEASE_MS = 30_000
DEFAULT_WAIT_MS = 10_000
MAX_REPORTED = 65_536  # tokens at once
RETRY_AFTER_MS = 1000
TOKEN = 0  # stands for each of an answer, which only the proxy knows


class RouterApi(Protocol):
    """What is needed of `fleet.router.server.RouterServer`."""

    def open(self, arrived: Arrived, stream: RequestListener) -> None: ...

    def close(self, request_id: RequestId, stream: RequestListener) -> None: ...

    def hear(self, event: WorkerEvent) -> None: ...

    def models(self) -> tuple[ModelCard, ...]: ...

    def decision(self, request_id: RequestId) -> Decision | None: ...

    def address(self, worker_id: WorkerId) -> str: ...

    def places(self, model: ModelName) -> int: ...


class PeerRoutersApi(Protocol):
    """What is needed of `fleet.peers.routers.PeerRouters`."""

    async def reported(self, report: pb.ReportRequest) -> pb.ReportResponse | None: ...

    async def released(self, release: pb.ReleaseRequest) -> None: ...


Holder = tuple[str, ModelName]
"""The caller that holds leases, and the model of the workers that they are of."""


class SelectedRequest:
    """One selected request. Implements `fleet.router.server.RequestListener`."""

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
        self.decode = WorkerId("")  # that the caller was told of
        self._end = end
        self._handed_over = False
        self._answered = 0  # tokens
        self._lease: asyncio.TimerHandle | None = None

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        if isinstance(item, RequestRejected) and not self.placed.done():
            self.placed.set_exception(item)
        elif not isinstance(item, Emit):
            self._end(self)

    def begun(self, worker_id: WorkerId, start: Start) -> None:
        """The router has placed it, or goes on with it."""
        as_told = self._handed_over and worker_id == self.decode  # else the decode worker was lost meanwhile
        lost = self.work is not None and not as_told
        self.work, self._handed_over = (worker_id, start), False
        if lost:
            asyncio.get_running_loop().call_soon(self._end, self)  # the machine is in the middle of a decision
        elif not self.placed.done():
            self.placed.set_result(None)

    def renew(self) -> None:
        self.stop_lease()
        self._lease = asyncio.get_running_loop().call_later(self.lease_seconds, self._end, self)

    def stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    def prefilled(self, decision: Decision) -> WorkerStepped | None:
        """What its prefill worker would have told at the end, had the router sent it there; None if it has none, or had."""
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
        """What the worker that answers would have told; of more tokens than were asked for, all that were."""
        assert self.work is not None
        worker_id, start = self.work
        told = min(tokens, start.sampling.max_tokens - self._answered)
        self._answered += told
        progress = Progress(request_id=start.request_id, token_ids=(TOKEN,) * told)
        return WorkerStepped(worker_id=worker_id, progress=(progress,))


class SelectionAwareWorkers:
    """Workers, except that what was only selected is not sent. Implements `fleet.router.ports.Workers`."""

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


class SelectionService:
    """The service over one router."""

    def __init__(
        self, router: RouterApi, workers: SelectionAwareWorkers, settings: SelectionSettings, *, tenant_secret: bytes
    ) -> None:
        self._router = router
        self._settings = settings
        self._bookings = workers.bookings
        self._held: Counter[Holder] = Counter()
        self._tenant_secret = tenant_secret
        self.others: PeerRoutersApi | None = None  # routers of the cluster

    def add(self, server: GrpcServerApi) -> None:
        methods = {
            "Select": unary_context_handler(self._select),
            "Report": unary_handler(self._report),
            "Release": unary_handler(self._release),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def drain(self) -> None:
        """End all leases: they end with this process anyway, and nobody waits here for what they are about."""
        for booking in list(self._bookings.values()):
            if booking.placed.done():  # else its caller waits here
                self.end(booking)

    async def book(
        self, arrived: Arrived, *, lease_seconds: float, wait_seconds: float, caller: str = ""
    ) -> tuple[SelectedRequest, Decision]:
        """Place a request and book it, in one step.

        Args:
            arrived: With `second_hand`.
            lease_seconds: After which the booking ends that nobody renews.
            wait_seconds: At most, while all workers are busy.
            caller: Whose share of the workers' places it counts against; empty: nobody's.

        Raises:
            Refused: Nobody can serve it.
            TimeoutError: Nobody has had room for it in time.
        """
        booking = self._opened(arrived, lease_seconds, (caller, arrived.model) if caller else None)
        try:
            async with asyncio.timeout(wait_seconds):
                await booking.placed
        except BaseException:  # refused, or too late, or the caller has gone
            self.end(booking)
            raise
        return booking, self._begun(booking)

    def book_now(self, arrived: Arrived, *, lease_seconds: float) -> SelectedRequest:
        """The same where there is room at this moment.

        Raises:
            Refused: Nobody can serve it now.
        """
        booking = self._opened(arrived, lease_seconds)
        busy = RequestRejected(Reason.QUEUE_FULL, "all workers are busy", retry_after_ms=RETRY_AFTER_MS)
        if (refused := booking.placed.exception() if booking.placed.done() else busy) is not None:
            self.end(booking)
            raise refused
        self._begun(booking)
        return booking

    def _opened(self, arrived: Arrived, lease_seconds: float, holder: Holder | None = None) -> SelectedRequest:
        if len(self._bookings) >= self._settings.max_leases:
            raise RequestRejected(
                Reason.QUEUE_FULL, "too many requests are selected and not released", retry_after_ms=RETRY_AFTER_MS
            )
        if holder is not None:
            self._check_share(holder)
            self._held[holder] += 1
        booking = SelectedRequest(arrived.request_id, lease_seconds, self.end, holder)
        self._bookings[arrived.request_id] = booking
        try:
            self._router.open(arrived, booking)
        except RequestRejected:
            self.end(booking)
            raise
        return booking

    def _check_share(self, holder: Holder) -> None:
        caller, model = holder
        allowed = max(1, int(self._router.places(model) * self._settings.caller_share))
        if self._held[holder] >= allowed:
            message = (
                f"{caller} holds {self._held[holder]} leases, its share of the places that workers of {model} have;"
                " release some, or set the router's selection.caller_share"
            )
            raise RequestRejected(Reason.QUEUE_FULL, message, retry_after_ms=RETRY_AFTER_MS)

    def _begun(self, booking: SelectedRequest) -> Decision:
        decision = self._router.decision(booking.request_id)
        if decision is None:
            self.end(booking)
            message = "the worker was lost as soon as it was selected; select again"
            raise RequestRejected(Reason.WORKER_LOST, message, retry_after_ms=RETRY_AFTER_MS)
        booking.renew()
        booking.decode = decision.decode
        return decision

    def report(self, booking: SelectedRequest, *, prefilled: bool, answer_tokens: int) -> bool:
        """Tell how a booked request goes on, which renews its lease; False: the booking has ended.

        Args:
            booking: Of the request.
            prefilled: Whether its prompt is computed.
            answer_tokens: That have come since the last report.
        """
        decision = self._router.decision(booking.request_id)
        if self._bookings.get(booking.request_id) is not booking or decision is None:
            return False
        booking.renew()
        if (prefilled or answer_tokens) and (done := booking.prefilled(decision)) is not None:
            self._router.hear(done)
        if answer_tokens:
            self._router.hear(booking.answered(answer_tokens))
        return True

    def end(self, booking: SelectedRequest) -> None:
        """Give back what is booked; once more is no error."""
        booking.stop_lease()
        self._router.close(booking.request_id, booking)
        ended = self._bookings.pop(booking.request_id, None)
        if ended is None or (holder := booking.holder) is None:
            return
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]

    def reported(self, report: pb.ReportRequest) -> pb.ReportResponse | None:
        """What is answered to a report; None where this router has no such lease, or it has ended."""
        booking = self._bookings.get(RequestId(report.lease_id))
        if booking is None or not self.report(booking, prefilled=report.prefilled, answer_tokens=report.answer_tokens):
            return None
        return pb.ReportResponse(lease_ms=int(booking.lease_seconds * SECOND / MILLISECOND))

    def released(self, release: pb.ReleaseRequest) -> bool:
        """End a lease; False where this router has no such."""
        if (booking := self._bookings.get(RequestId(release.lease_id))) is None:
            return False
        self.end(booking)
        return True

    async def _select(self, content: bytes, context: Context) -> Message:
        asked = parse_message(pb.SelectRequest, content)
        arrived = self._arrived(asked)
        limits = self._settings
        lease_ms = asked.lease_ms or min(DEFAULT_LEASE_MS, limits.max_lease_ms)
        if lease_ms > limits.max_lease_ms:
            raise invalid(
                "lease_ms", f"must be at most {limits.max_lease_ms}, not {lease_ms}; each report renews the lease"
            )
        wait_ms = asked.timeout_ms or min(DEFAULT_WAIT_MS, limits.max_wait_ms)
        if wait_ms > limits.max_wait_ms:
            raise invalid("timeout_ms", f"must be at most {limits.max_wait_ms}, not {wait_ms}")
        wait_seconds = wait_ms * MILLISECOND / SECOND
        try:
            _, decision = await self.book(
                arrived,
                lease_seconds=lease_ms * MILLISECOND / SECOND,
                wait_seconds=wait_seconds,
                caller=caller_name(context),
            )
        except TimeoutError:
            message = "timeout_ms: all workers have been busy for so long"
            raise RequestRejected(
                Reason.DEADLINE_PASSED, message, field="timeout_ms", retry_after_ms=RETRY_AFTER_MS
            ) from None
        response = pb.SelectResponse(
            lease_id=arrived.request_id,
            decode=self._worker(decision.decode),
            kv_path=decision.kv_path or "",
            why=decision.why,
            uncached_tokens=decision.uncached_tokens,
            lease_ms=lease_ms,
        )
        if decision.prefill is not None:
            response.prefill.CopyFrom(self._worker(decision.prefill))
        return response

    async def _report(self, content: bytes) -> Message:
        report = parse_message(pb.ReportRequest, content)
        if report.answer_tokens > MAX_REPORTED:
            raise invalid("answer_tokens", f"must be at most {MAX_REPORTED} since the last report")
        response = self.reported(report)
        if response is None and self.others is not None:
            response = await self.others.reported(report)
        if response is None:
            message = f"lease_id: {report.lease_id[:100]!r} has ended, or a worker of it was lost; select again"
            raise RequestRejected(Reason.REQUEST_NOT_FOUND, message, field="lease_id")
        return response

    async def _release(self, content: bytes) -> Message:
        release = parse_message(pb.ReleaseRequest, content)
        if not self.released(release) and self.others is not None:
            await self.others.released(release)
        return pb.ReleaseResponse()

    def _arrived(self, asked: pb.SelectRequest) -> Arrived:
        tokens = len(asked.tokens) // TOKEN_BYTES
        if not tokens or len(asked.tokens) % TOKEN_BYTES:
            raise invalid("tokens", f"must be token ids of {TOKEN_BYTES} bytes each, and at least one")
        check_hints(asked)
        if asked.placement not in ("", *Placement):
            raise invalid("placement", f"must be one of {', '.join(Placement)}")
        card = self._card(asked.model)
        room = max(1, card.max_model_len - tokens)
        meant = resolve_model(card, tenant_salt(self._tenant_secret, asked.tenant))
        return Arrived(
            request_id=RequestId(f"select-{secrets.token_hex(8)}"),
            model=meant.model,
            adapter=meant.adapter,
            tokens=asked.tokens,
            salt=meant.salt,
            tenant=asked.tenant,
            sampling=Sampling(max_tokens=asked.max_tokens or room, seed=0),  # nobody else could go on with it
            external=True,
            priority=asked.priority,
            session=asked.session,
            expected_tokens=asked.expected_tokens,
            pin=WorkerId(asked.pin) if asked.pin else None,
            labels=tuple(asked.labels),
            placement=Placement(asked.placement) if asked.placement else Placement.AUTO,
        )

    def _card(self, name: str) -> ModelCard:
        cards = {card.name: card for card in self._router.models()}
        if card := cards.get(ModelName(name)):
            return card
        models = [card for card in cards.values() if not card.parent]
        if name or len(models) != 1:
            raise RequestRejected(
                Reason.MODEL_NOT_FOUND,
                f"model: {name[:100]!r} is not served now; served: {', '.join(cards) or 'none'}",
                field="model",
            )
        return models[0]

    def _worker(self, worker_id: WorkerId) -> pb.SelectedWorker:
        return pb.SelectedWorker(worker_id=worker_id, address=self._router.address(worker_id))
