"""Service `fleet.v1.Cluster`: status, explanations and thresholds of a running router."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
import msgspec
from google.protobuf.message import Message
from msgspec import structs

from fleet.core.errors import Reason, RequestRejected, invalid, split_validation_error
from fleet.core.ids import RequestId, WorkerId
from fleet.frontend.overflow import OverflowOutcome, OverflowReports, OverflowState
from fleet.frontend.peer_routers import PeerRoutersApi
from fleet.membership.compatibility import IncompatiblePeers
from fleet.net.grpc.calls import Context, parse_message, unary_context_handler, unary_handler
from fleet.net.grpc.versions import agree_with_caller
from fleet.router.api import RouterApi
from fleet.router.placement.break_even import MIN_SAMPLES
from fleet.router.placement.decision import CostTerms, DecisionExplanation
from fleet.router.settings.router import Thresholds
from fleet.router.state.snapshot import PoolSnapshot, RemotePrefillSnapshot
from fleet.v1 import control_pb2 as pb
from kvstore.protocol.range_messages import range_message
from kvstore.v1 import blocks_pb2, blocks_pb2_grpc

log = logging.getLogger(__name__)

STORE_SECONDS = 1.0  # time limit for the call to the store node; without an answer, the status shows no store

FetchStoreStatus = Callable[[], Awaitable[blocks_pb2.StatsResponse | None]]


class ClusterService:
    """Serves status, explanations and thresholds of one router process; changed thresholds also go to the peer routers."""

    def __init__(
        self,
        router: RouterApi,
        ask_store: FetchStoreStatus | None,
        others: PeerRoutersApi | None = None,
        overflow: OverflowReports | None = None,
        incompatible: IncompatiblePeers | None = None,
    ) -> None:
        self._router = router
        self._incompatible = incompatible
        self._overflow = overflow
        self._ask_store = ask_store
        self._others = others

    def methods(self) -> dict[str, Any]:
        return {
            "Status": unary_context_handler(self._status),
            "Explain": unary_handler(self._explain),
            "Tune": unary_handler(self._tune),
        }

    async def _status(self, content: bytes, context: Context) -> Message:
        await agree_with_caller(parse_message(pb.StatusRequest, content), "this router", context)
        snapshot = self._router.status()
        counters, worth = snapshot.counters, self._router.cache_seconds()
        response = pb.StatusResponse(
            pools=[_encode_pool(pool, worth) for pool in snapshot.pools],
            router=pb.RouterStatus(
                requests=counters.ended,
                aggregated=counters.aggregated,
                disaggregated=counters.disaggregated,
                refused=sum(counters.refused.values()),
                active=snapshot.active,
                queued=snapshot.queued,
                index_blocks=snapshot.index_blocks,
                models=[card.name for card in self._router.models()],
            ),
            overflow=[] if self._overflow is None else map(_encode_overflow, self._overflow.status()),
            protocols=range_message(),
            incompatible=[
                pb.IncompatiblePeer(link=each.link, name=each.name, cause=each.cause)
                for each in (() if self._incompatible is None else self._incompatible.present())
            ],
        )
        if self._ask_store is not None and (stats := await self._ask_store()) is not None:
            response.store.CopyFrom(
                pb.StoreStatus(
                    store_id=stats.store_id,
                    blocks=stats.blocks,
                    bytes=stats.bytes,
                    capacity_bytes=stats.capacity_bytes,
                    hits=stats.hits,
                    misses=stats.misses,
                    corrupt=stats.corrupt,
                )
            )
        return response

    async def _explain(self, content: bytes) -> Message:
        request_id = RequestId(parse_message(pb.ExplainRequest, content).request_id)
        if (explained := explain_request(self._router, self._overflow, request_id)) is not None:
            return explained
        if self._others is not None and (explained := await self._others.explained(request_id)) is not None:
            return explained
        message = f"request_id: {request_id[:100]!r} was not placed by this router and did not overflow, or its explanation has been dropped for later ones"
        raise RequestRejected(Reason.REQUEST_NOT_FOUND, message, field="request_id")

    async def _tune(self, content: bytes) -> Message:
        asked = parse_message(pb.TuneRequest, content)
        changes = {field.name: value for field, value in asked.ListFields()}
        if changes:
            thresholds = parse_thresholds(structs.asdict(self._router.thresholds()) | changes)
            self._router.tune(thresholds)
            if self._others is not None:
                self._others.tuned(thresholds)
        return pb.Thresholds(
            **structs.asdict(self._router.thresholds()),
            remote_prefill=_encode_remote_prefill(self._router.remote_prefill()),
        )


def store_status_call(stub: "blocks_pb2_grpc.BlockStoreAsyncStub") -> FetchStoreStatus:
    """Return an async function that queries a store node for its usage. That function returns None if the node does not answer."""

    async def ask() -> blocks_pb2.StatsResponse | None:
        try:
            return await stub.Stats(blocks_pb2.StatsRequest(), timeout=STORE_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("store node unreachable", extra={"code": error.code().name})
            return None

    return ask


def parse_thresholds(values: dict[str, Any]) -> Thresholds:
    """Convert thresholds, given by name, to `Thresholds`.

    Raises:
        RequestRejected: INVALID_ARGUMENT; a threshold is out of range.
    """
    try:
        return msgspec.convert(values, Thresholds)
    except msgspec.ValidationError as error:
        cause, path = split_validation_error(error)
        raise invalid(path.removeprefix("."), cause[0].lower() + cause[1:]) from error


def _encode_pool(pool: PoolSnapshot, worth: Mapping[WorkerId, float]) -> pb.PoolStatus:
    return pb.PoolStatus(
        model=pool.model,
        role=pool.role,
        workers=[
            pb.WorkerStatus(
                worker_id=worker.worker_id,
                state=worker.state,
                engine=worker.engine,
                address=worker.address,
                running=worker.running,
                waiting=worker.waiting,
                kv_blocks_used=worker.kv_blocks_used,
                kv_blocks=worker.kv_blocks,
                cached_blocks=worker.cached_blocks,
                booked_requests=worker.booked_requests,
                booked_elsewhere=worker.booked_elsewhere,
                cache_seconds=worth.get(WorkerId(worker.worker_id), 0.0),
                protocol=worker.protocol,
                product=worker.product,
            )
            for worker in pool.workers
        ],
    )


def _encode_remote_prefill(measured: RemotePrefillSnapshot) -> pb.RemotePrefill:
    return pb.RemotePrefill(
        learned=measured.learned,
        handoffs=measured.handoffs,
        handoffs_needed=MIN_SAMPLES,
        handoff_ms=1000 * measured.handoff_seconds,
        workers=[
            pb.BreakEven(
                worker_id=worker.worker_id,
                requests=worker.requests,
                token_ms=1000 * worker.token_seconds,
                min_tokens=worker.min_tokens or 0,
            )
            for worker in measured.workers
        ],
    )


def explain_request(
    router: RouterApi, overflow: OverflowReports | None, request_id: RequestId
) -> pb.ExplainResponse | None:
    """Return a request's placement decisions and the outcome of its overflow; None if this process knows neither."""
    explanation = router.explain(request_id)
    record = None if overflow is None else overflow.explained(request_id)
    if explanation is None and record is None:
        return None
    response = pb.ExplainResponse()
    if explanation is not None:
        response.placements.extend(_encode_placed(placed) for placed in explanation.placements)
    if record is not None:
        response.overflow.CopyFrom(pb.OverflowExplained(**structs.asdict(record)))
    return response


def _encode_overflow(status: OverflowState) -> pb.OverflowStatus:
    outcomes = status.outcomes
    return pb.OverflowStatus(
        model=status.model,
        url=status.url,
        running=status.running,
        served=outcomes[OverflowOutcome.SERVED],
        not_taken=outcomes[OverflowOutcome.LIMIT_SPENT] + outcomes[OverflowOutcome.CLOSED],
        failed=outcomes[OverflowOutcome.FAILED] + outcomes[OverflowOutcome.BROKEN],
        spent_dollars=status.spent_dollars,
        limit_dollars=status.limit_dollars,
        trouble=status.trouble,
    )


def _encode_placed(placed: DecisionExplanation) -> pb.PlacementExplained:
    return pb.PlacementExplained(
        decode=placed.decode,
        prefill=placed.prefill or "",
        kv_path=placed.kv_path or "",
        why=placed.why,
        policy=placed.policy,
        prefill_policy=placed.prefill_policy,
        uncached_tokens=placed.uncached_tokens,
        prefill_tokens=placed.prefill_tokens,
        candidates=_encode_terms(placed.candidates),
        prefill_candidates=_encode_terms(placed.prefill_candidates),
        unfit=dict(placed.unfit),
    )


def _encode_terms(terms: Iterable[CostTerms]) -> list[pb.CandidateCost]:
    return [
        pb.CandidateCost(
            worker_id=term.worker_id,
            cost=term.cost,
            parts=[pb.CostPart(name=name, value=value) for name, value in term.parts.items()],
        )
        for term in terms
    ]
