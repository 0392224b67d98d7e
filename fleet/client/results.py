"""Results: defines what client calls return, such as a complete answer and the state of a cluster."""

from collections.abc import Iterable

from msgspec import Struct

from fleet.client.errors import IncompatibleRouter, ServerError
from fleet.core.requests import (
    Admitted,
    Delta,
    Finish,
    Finished,
    KvPhase,
    Logprobs,
    Resume,
    ToolCall,
    Usage,
    join_calls,
)
from fleet.v1 import control_pb2, inference_pb2
from fleet.wire.inference import decode_event
from kvstore.protocol.range_messages import agree_with_server
from kvstore.protocol.versions import NoCommonProtocol


class Result(Struct, frozen=True, kw_only=True):
    """Holds a complete answer."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]  # log probabilities of each token; empty if they were not requested
    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]  # KV report of each phase: where the prompt's blocks came from
    reasoning: str = ""  # reasoning of the answer; empty unless the request has `parsing`
    tool_calls: tuple[ToolCall, ...] = ()  # tool calls of the answer; empty unless the request has `parsing`


class StreamedAnswer:
    """Base class of streamed answers: collects the messages of an answer as they arrive."""

    def __init__(self) -> None:
        self._admitted: Admitted | None = None
        self._deltas: list[Delta] = []
        self._result: Result | None = None
        self._resume_token = ""  # the latest resume token; empty before the first one

    @property
    def request_id(self) -> str:
        """The id of the request in logs and traces, or an empty text until the router has admitted the request."""
        return "" if self._admitted is None else self._admitted.request_id

    @property
    def result(self) -> Result:
        """The complete answer, which is available after the last part of the stream.

        Raises:
            RuntimeError: The stream has not ended.
        """
        if self._result is None:
            raise RuntimeError("the stream has not ended; iterate it first")
        return self._result

    @property
    def has_begun(self) -> bool:
        """True if a part of the answer has arrived."""
        return bool(self._deltas)

    def resume(self) -> Resume | None:
        """Return the data with which any router can continue this answer, or None if no resume token has arrived."""
        if not self._resume_token:
            return None
        token_ids = tuple(token_id for delta in self._deltas for token_id in delta.token_ids)
        return Resume(
            token=self._resume_token,
            token_ids=token_ids,
            position=len(token_ids),
            text="".join(delta.text for delta in self._deltas),
            reasoning="".join(delta.reasoning for delta in self._deltas),
            calls=tuple(call for delta in self._deltas for call in delta.calls),
        )

    def _take(self, message: inference_pb2.GenerateResponse) -> Delta | None:
        """Add a message of the stream. Return the part of the answer that the message contains, or None if it contains no part.

        Raises:
            ServerError: This client does not understand the message.
        """
        try:
            event = decode_event(message)
        except ValueError as error:
            raise ServerError(f"the server sent what this client does not understand: {error}") from error
        match event:
            case Delta():
                self._resume_token = event.resume_token or self._resume_token
                self._deltas.append(event)
                return event
            case Admitted():
                self._resume_token = event.resume_token or self._resume_token
                # The first `Admitted` is kept, because a resumption gives the request another id.
                self._admitted = self._admitted or event
                return None
            case Finished():
                rest = Delta(text=event.text, token_ids=()) if event.text else None
                if rest is not None:
                    self._deltas.append(rest)
                self._result = self._complete(event)
                return rest
            case None:
                return None

    def _end(self) -> None:
        """Record the end of the stream.

        Raises:
            ServerError: The last message is missing.
        """
        if self._result is None:
            raise ServerError("the server ended the stream without its last message")

    @property
    def vector(self) -> bytes:
        """The vector that has arrived, in 32-bit little-endian floats; empty if the answer consists of tokens."""
        return b"".join(delta.vector for delta in self._deltas)

    def _complete(self, finished: Finished) -> Result:
        return Result(
            request_id=self.request_id,
            model="" if self._admitted is None else self._admitted.model,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(token_id for delta in self._deltas for token_id in delta.token_ids),
            logprobs=tuple(logprobs for delta in self._deltas for logprobs in delta.logprobs),
            finish=finished.finish,
            usage=finished.usage,
            kv=finished.kv,
            reasoning="".join(delta.reasoning for delta in self._deltas),
            tool_calls=tuple(join_calls(call for delta in self._deltas for call in delta.calls)),
        )


class WorkerStatus(Struct, frozen=True, kw_only=True):
    worker_id: str
    state: str  # "serving" or "draining"
    engine: str
    address: str
    running: int  # number of running requests, as the worker reports it
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    cached_blocks: int  # number of blocks in the prefix cache, as far as the router knows
    booked_requests: int  # number of requests for which this router has reserved capacity on the worker
    booked_elsewhere: int  # number of requests for which other routers have reserved capacity on the worker
    # Seconds that it would take to compute again the cached blocks that no other worker holds. A block that a store holds counts only
    # in part, or not at all.
    cache_seconds: float = 0.0
    # Protocol version between worker and router; 0: the worker is an external server, or the router is older than this field.
    protocol: int = 0
    product: str = ""  # version of Fleet that the worker runs; empty if unknown


class PoolStatus(Struct, frozen=True, kw_only=True):
    model: str
    role: str
    workers: tuple[WorkerStatus, ...]


class RouterStatus(Struct, frozen=True, kw_only=True):
    requests: int  # number of requests that have ended since the router started
    aggregated: int
    disaggregated: int
    refused: int
    active: int
    queued: int
    index_blocks: int
    models: tuple[str, ...]


class StoreStatus(Struct, frozen=True, kw_only=True):
    store_id: str
    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    corrupt: int


class OverflowStatus(Struct, frozen=True, kw_only=True):
    """Describes the state of a hosted endpoint, which takes requests that the workers of its model cannot serve."""

    model: str
    url: str
    running: int
    served: int  # number of requests that the endpoint has answered since the router started
    # Number of requests that were not sent to the endpoint, because of its spending limit, an earlier failure, or too many running requests.
    not_taken: int
    failed: int  # number of requests that were sent to the endpoint and got no answer or an incomplete one
    spent_dollars: float  # dollars spent in the last hour, including estimates of running requests
    limit_dollars: float  # spending limit in dollars per hour
    trouble: str  # why the endpoint gets no requests now; empty if it gets requests


class RefusedPeer(Struct, frozen=True, kw_only=True):
    """Names a process that the router refused in the last minute, because both processes have no protocol version in common."""

    link: str  # kind of the connection: worker, registry, peer or store
    name: str
    cause: str  # the versions of both sides, and which side to upgrade


class ClusterStatus(Struct, frozen=True, kw_only=True):
    pools: tuple[PoolStatus, ...]
    router: RouterStatus
    store: StoreStatus | None
    overflow: tuple[OverflowStatus, ...] = ()
    incompatible: tuple[RefusedPeer, ...] = ()


def decode_status(message: control_pb2.StatusResponse) -> ClusterStatus:
    """Decode the state of a cluster.

    Raises:
        IncompatibleRouter: Router and client have no protocol version in common.
    """
    try:
        agree_with_server(message, "the router")
    except NoCommonProtocol as error:
        raise IncompatibleRouter(str(error)) from error
    pools = tuple(
        PoolStatus(
            model=pool.model,
            role=pool.role,
            workers=tuple(
                WorkerStatus(**{name: getattr(worker, name) for name in WorkerStatus.__struct_fields__})
                for worker in pool.workers
            ),
        )
        for pool in message.pools
    )
    counts = {name: getattr(message.router, name) for name in RouterStatus.__struct_fields__ if name != "models"}
    store = None
    if message.HasField("store"):
        store = StoreStatus(**{name: getattr(message.store, name) for name in StoreStatus.__struct_fields__})
    router = RouterStatus(models=tuple(message.router.models), **counts)
    overflow = tuple(
        OverflowStatus(**{name: getattr(each, name) for name in OverflowStatus.__struct_fields__})
        for each in message.overflow
    )
    incompatible = tuple(RefusedPeer(link=each.link, name=each.name, cause=each.cause) for each in message.incompatible)
    return ClusterStatus(pools=pools, router=router, store=store, overflow=overflow, incompatible=incompatible)


class CandidateCost(Struct, frozen=True, kw_only=True):
    """Holds the cost of one worker that was a candidate for a request."""

    worker_id: str
    cost: float  # less is better
    parts: dict[str, float]  # parts of the cost by name; their sum is the cost


class PlacementExplained(Struct, frozen=True, kw_only=True):
    """Describes one placement of a request, with the data from which it was decided."""

    decode: str  # id of the worker that answers
    prefill: str  # id of the worker that computes the prompt; empty if the answering worker computes it
    kv_path: str  # KV path from the prefill to the decode worker; empty if one worker does both
    why: str  # why the request was placed on one worker or on two
    policy: str  # policy that chose the answering worker
    prefill_policy: str
    uncached_tokens: int  # prompt tokens that the answering worker would have to compute without a prefill worker
    # Prompt tokens to compute on the prefill worker, or on the answering worker if there is no prefill worker.
    prefill_tokens: int
    candidates: tuple[CandidateCost, ...]
    prefill_candidates: tuple[CandidateCost, ...]
    unfit: dict[str, str]  # for each worker that was not a candidate, the reason


class OverflowExplained(Struct, frozen=True, kw_only=True):
    """Describes the outcome of the overflow of one request: the router rejected it, and a hosted endpoint could take it."""

    model: str
    url: str
    reason: str  # reason of the rejection, such as `queue_full`
    message: str
    # "served"; "limit_spent" (the spending limit was too low); "closed" (the endpoint had failed lately, or was at its limit of
    # requests); "failed" (the endpoint gave no answer); "broken" (the answer broke off, the client left, or the deadline passed).
    outcome: str
    estimated_dollars: float
    dollars: float
    prompt_tokens: int  # number of prompt tokens that the endpoint reported; 0 if unknown
    answer_tokens: int


def decode_overflow(message: control_pb2.ExplainResponse) -> OverflowExplained | None:
    """Decode the outcome of the overflow of a request that the router had rejected; return None if the request could not overflow."""
    if not message.HasField("overflow"):
        return None
    return OverflowExplained(**{name: getattr(message.overflow, name) for name in OverflowExplained.__struct_fields__})


def thresholds_of(message: control_pb2.Thresholds) -> dict[str, float]:
    """Return all thresholds of a router by name."""
    return {
        field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.message_type is None
    }


class BreakEven(Struct, frozen=True, kw_only=True):
    """Holds the prefill break-even of one answering worker."""

    worker_id: str
    requests: int  # number of requests on this worker now; a prefill on it would delay all of them
    token_ms: float  # milliseconds to compute one prompt token on this worker; 0 if unknown
    min_tokens: int  # smallest number of uncached prompt tokens for which another worker should compute the prompt; 0 if unknown


class RemotePrefill(Struct, frozen=True, kw_only=True):
    """Holds the measurements by which the router decides whether a pair of workers serves a request, instead of one."""

    learned: bool  # True: the measurements decide; False: the threshold `remote_prefill_min_tokens` decides
    handoffs: int  # number of handoffs that were measured since the router started
    handoffs_needed: int  # number of handoffs that must be measured before the measurements decide
    handoff_ms: float  # moving average of the durations of handoffs in milliseconds; mostly the last ten handoffs count
    workers: tuple[BreakEven, ...]


def remote_prefill_of(message: control_pb2.RemotePrefill) -> RemotePrefill:
    return RemotePrefill(
        learned=message.learned,
        handoffs=message.handoffs,
        handoffs_needed=message.handoffs_needed,
        handoff_ms=message.handoff_ms,
        workers=tuple(
            BreakEven(**{name: getattr(worker, name) for name in BreakEven.__struct_fields__})
            for worker in message.workers
        ),
    )


def decode_explanation(message: control_pb2.ExplainResponse) -> tuple[PlacementExplained, ...]:
    """Decode all placements of a request, the earliest one first."""
    return tuple(
        PlacementExplained(
            candidates=_costs(placed.candidates),
            prefill_candidates=_costs(placed.prefill_candidates),
            unfit=dict(placed.unfit),
            **{
                name: getattr(placed, name)
                for name in PlacementExplained.__struct_fields__
                if name not in ("candidates", "prefill_candidates", "unfit")
            },
        )
        for placed in message.placements
    )


def _costs(costs: Iterable[control_pb2.CandidateCost]) -> tuple[CandidateCost, ...]:
    return tuple(
        CandidateCost(worker_id=cost.worker_id, cost=cost.cost, parts={part.name: part.value for part in cost.parts})
        for cost in costs
    )
