"""Selection service `fleet.v1.Selection`: places requests for proxies, which then send the requests themselves.

Rules:

1. The router handles a selected request like any other request: it is placed and reserved in one step, waits if all
   workers are busy, can be explained, and counts as load. The only difference is that its attempts are not sent to the
   workers, because the proxy sends the request itself: `SelectionAwareWorkers` keeps the attempts.
2. The reservation lasts as long as its lease. Each report renews the lease. If nobody renews it, the request ends as if
   its client had disconnected.
3. If one of the request's workers is lost, the lease ends, because only the proxy knows where the request really runs.
4. A lease belongs to the router that gave it. Several routers may share a port, so a call about a lease that this
   router does not know is passed on to the other routers.
5. Callers are trusted, but may have bugs. Therefore a lease lasts at most `SelectionSettings.max_lease_ms`, and the
   leases of one caller may occupy only a limited share of the places of a model's workers (`caller_share`). A call above
   that share, or above `max_leases` of all callers together, is rejected (RESOURCE_EXHAUSTED) and may be retried.
6. The field `uncached_tokens` of an answer reveals whether the tenant has sent the same prompt before. Therefore this
   service is only on the control port, which clients do not reach.
"""

import asyncio
import secrets
from collections import Counter

import grpc
from google.protobuf.message import Message

from fleet.core.clock import MILLISECOND, SECOND
from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, ModelCard, Sampling
from fleet.core.roles import Placement
from fleet.core.validation import check_hints
from fleet.frontend.generation import resolve_model
from fleet.frontend.peer_routers import PeerRoutersApi
from fleet.gateway.selected_requests import Holder, SelectedRequest, SelectionAwareWorkers
from fleet.net.control.access import caller_name
from fleet.net.grpc.calls import Context, parse_message, unary_context_handler, unary_handler
from fleet.net.grpc.port import GrpcServerApi
from fleet.router.api import RouterApi
from fleet.router.messages import Arrived
from fleet.router.placement.decision import Decision
from fleet.router.settings.router import SelectionSettings
from fleet.v1 import selection_pb2 as pb
from kvstore.block import tenant_salt

SERVICE = "fleet.v1.Selection"

DEFAULT_LEASE_MS = 30_000
DEFAULT_WAIT_MS = 10_000
MAX_REPORTED = 65_536  # maximum number of answer tokens in one report; a report with more is rejected
RETRY_AFTER_MS = 1000


class SelectionService:
    """Serves `fleet.v1.Selection` for one router, and keeps all selected requests, also the endpoint picker's."""

    def __init__(
        self, router: RouterApi, workers: SelectionAwareWorkers, settings: SelectionSettings, *, tenant_secret: bytes
    ) -> None:
        self._router = router
        self._settings = settings
        self.bookings = workers.bookings
        self._held: Counter[Holder] = Counter()
        self._tenant_secret = tenant_secret
        self.others: PeerRoutersApi | None = None  # the other routers of the cluster; None: no other routers

    def add(self, server: GrpcServerApi) -> None:
        methods = {
            "Select": unary_context_handler(self._select),
            "Report": unary_handler(self._report),
            "Release": unary_handler(self._release),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def drain(self) -> None:
        """End all leases of placed requests, because leases cannot outlive this process."""
        for booking in list(self.bookings.values()):
            # Requests that still wait for placement are skipped; they end together with the calls of their callers.
            if booking.placed.done():
                self.end(booking)

    async def book(
        self, arrived: Arrived, *, lease_seconds: float, wait_seconds: float, caller: str = ""
    ) -> tuple[SelectedRequest, Decision]:
        """Place a request and reserve capacity for it in one step. Return the request with its lease, and the decision.

        Args:
            arrived: The request, marked as external.
            lease_seconds: Time after which the lease ends unless it is renewed.
            wait_seconds: Maximum wait while all workers are busy.
            caller: The caller whose share of places the request uses (rule 5); empty: no share is counted.

        Raises:
            RequestRejected: No worker can serve the request, the chosen worker was lost at once, or too many leases exist.
            TimeoutError: No worker had room in time.
        """
        booking = self._opened(arrived, lease_seconds, (caller, arrived.model) if caller else None)
        try:
            async with asyncio.timeout(wait_seconds):
                await booking.placed
        except BaseException:  # the request was rejected, waited too long, or its caller has disconnected
            self.end(booking)
            raise
        return booking, self._begun(booking)

    def book_now(self, arrived: Arrived, *, lease_seconds: float) -> SelectedRequest:
        """Place a request and reserve capacity for it, without a wait. Return the request with its lease.

        Raises:
            RequestRejected: No worker can serve the request now, the chosen worker was lost at once, or too many leases exist.
        """
        booking = self._opened(arrived, lease_seconds)
        busy = RequestRejected(Reason.QUEUE_FULL, "all workers are busy", retry_after_ms=RETRY_AFTER_MS)
        if (refused := booking.placed.exception() if booking.placed.done() else busy) is not None:
            self.end(booking)
            raise refused
        self._begun(booking)
        return booking

    def _opened(self, arrived: Arrived, lease_seconds: float, holder: Holder | None = None) -> SelectedRequest:
        if len(self.bookings) >= self._settings.max_leases:
            raise RequestRejected(
                Reason.QUEUE_FULL, "too many requests are selected and not released", retry_after_ms=RETRY_AFTER_MS
            )
        if holder is not None:
            self._check_share(holder)
            self._held[holder] += 1
        booking = SelectedRequest(arrived.request_id, lease_seconds, self.end, holder)
        self.bookings[arrived.request_id] = booking
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
        """Report the progress of a selected request and so renew its lease; return False if the lease has ended.

        Args:
            booking: The selected request.
            prefilled: True if its prompt has been computed.
            answer_tokens: Number of answer tokens since the last report.
        """
        decision = self._router.decision(booking.request_id)
        if self.bookings.get(booking.request_id) is not booking or decision is None:
            return False
        booking.renew()
        if (prefilled or answer_tokens) and (done := booking.prefilled(decision)) is not None:
            self._router.hear(done)
        if answer_tokens:
            self._router.hear(booking.answered(answer_tokens))
        return True

    def end(self, booking: SelectedRequest) -> None:
        """End a lease and release its reservation. A second call for the same lease does nothing."""
        booking.stop_lease()
        self._router.close(booking.request_id, booking)
        ended = self.bookings.pop(booking.request_id, None)
        if ended is None or (holder := booking.holder) is None:
            return
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]

    def reported(self, report: pb.ReportRequest) -> pb.ReportResponse | None:
        """Handle a report about a lease. Return the response, or None if this router has no such lease or the lease has ended."""
        booking = self.bookings.get(RequestId(report.lease_id))
        if booking is None or not self.report(booking, prefilled=report.prefilled, answer_tokens=report.answer_tokens):
            return None
        return pb.ReportResponse(lease_ms=int(booking.lease_seconds * SECOND / MILLISECOND))

    def released(self, release: pb.ReleaseRequest) -> bool:
        """End a lease; return False if this router has no such lease."""
        if (booking := self.bookings.get(RequestId(release.lease_id))) is None:
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
            # The router needs no other sampling parameters, because no other worker can continue the answer (`LiveRequest.may_continue`).
            # With the seed, the router does not count the placeholder token of `SelectedRequest.prefilled` as a part of the answer
            # (`LiveRequest.emits_prefill_token`).
            sampling=Sampling(max_tokens=asked.max_tokens or room, seed=0),
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
