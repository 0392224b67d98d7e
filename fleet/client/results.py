"""Results of client calls: the collected answer, and the state of a cluster."""

from collections.abc import Iterable

from msgspec import Struct

from fleet.client.errors import ServerError
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


class Result(Struct, frozen=True, kw_only=True):
    """A complete answer."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]  # log probabilities of each token if they were requested; otherwise empty
    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]  # sources of the prompt's KV blocks, by phase
    reasoning: str = ""  # reasoning of the answer; empty unless the request has `parsing`
    tool_calls: tuple[ToolCall, ...] = ()  # tool calls of the answer; empty unless the request has `parsing`


class StreamedAnswer:
    """An answer whose messages are collected while it streams."""

    def __init__(self) -> None:
        self._admitted: Admitted | None = None
        self._deltas: list[Delta] = []
        self._result: Result | None = None
        self._resume_token = ""  # the resume token that came last

    @property
    def request_id(self) -> str:
        """Id of the request in logs and traces; empty until the server has admitted the request."""
        return "" if self._admitted is None else self._admitted.request_id

    @property
    def result(self) -> Result:
        """The complete answer, available after the last delta.

        Raises:
            RuntimeError: The stream has not ended.
        """
        if self._result is None:
            raise RuntimeError("the stream has not ended; iterate it first")
        return self._result

    @property
    def has_begun(self) -> bool:
        """True once a part of the answer has arrived."""
        return bool(self._deltas)

    def resume(self) -> Resume | None:
        """Return the data that a router needs to continue this answer; None if no router has sent a resume token."""
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
        """Add a message of the stream; return its delta for the caller, or None if it has none.

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
                self._admitted = self._admitted or event  # the first one, because a resumed request has another id
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
    cached_blocks: int  # number of blocks in the prefix cache, as the router's index knows them
    booked_requests: int  # number of requests with a reservation by this router
    booked_elsewhere: int  # number of requests with a reservation by other routers
    cache_seconds: float = 0.0  # seconds to compute the cached blocks again, except those that other workers hold too


class PoolStatus(Struct, frozen=True, kw_only=True):
    model: str
    role: str
    workers: tuple[WorkerStatus, ...]


class RouterStatus(Struct, frozen=True, kw_only=True):
    requests: int  # number of requests that have ended since the start
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
    """A hosted endpoint that takes requests which the workers of its model cannot."""

    model: str
    url: str
    running: int
    served: int  # number of requests that the endpoint has answered since the start
    not_taken: int  # number of requests that were not sent: the spending limit was reached, or the endpoint was closed
    failed: int  # number of requests that got no answer, or only a part of one
    spent_dollars: float  # dollars spent in the last hour, including estimates of running requests
    limit_dollars: float  # spending limit in dollars per hour
    trouble: str  # why the endpoint gets no requests now; empty if it gets requests


class ClusterStatus(Struct, frozen=True, kw_only=True):
    pools: tuple[PoolStatus, ...]
    router: RouterStatus
    store: StoreStatus | None
    overflow: tuple[OverflowStatus, ...] = ()


def decode_status(message: control_pb2.StatusResponse) -> ClusterStatus:
    """Decode the state of a cluster."""
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
    return ClusterStatus(pools=pools, router=router, store=store, overflow=overflow)


class CandidateCost(Struct, frozen=True, kw_only=True):
    """A worker that could have served a request."""

    worker_id: str
    cost: float  # the worker with the lowest cost is chosen
    parts: dict[str, float]  # parts of the cost by scorer; their sum is the cost


class PlacementExplained(Struct, frozen=True, kw_only=True):
    """One placement of a request."""

    decode: str  # id of the worker that answers
    prefill: str  # id of the worker that computes the prompt; empty: the worker that answers
    kv_path: str  # KV path between these two workers
    why: str  # why the request was placed on one worker or on two
    policy: str  # policy that chose the answering worker
    prefill_policy: str
    uncached_tokens: int  # number of prompt tokens that the answering worker would have to compute
    prefill_tokens: int  # number of prompt tokens that the worker chosen for the prompt has to compute
    candidates: tuple[CandidateCost, ...]
    prefill_candidates: tuple[CandidateCost, ...]
    unfit: dict[str, str]  # why the other workers could not be chosen, as a cause by worker id


class OverflowExplained(Struct, frozen=True, kw_only=True):
    """The outcome of a request that the router refused, and that a hosted endpoint may take."""

    model: str
    url: str
    reason: str  # reason of the refusal, such as `queue_full`
    message: str
    outcome: str  # "served", "limit_spent", "closed", "failed" or "broken"
    estimated_dollars: float
    dollars: float
    prompt_tokens: int  # as the endpoint reports them; 0: unknown
    answer_tokens: int


def decode_overflow(message: control_pb2.ExplainResponse) -> OverflowExplained | None:
    """Decode the outcome of a refused request; None if the request could not overflow."""
    if not message.HasField("overflow"):
        return None
    return OverflowExplained(**{name: getattr(message.overflow, name) for name in OverflowExplained.__struct_fields__})


def thresholds_of(message: control_pb2.Thresholds) -> dict[str, float]:
    """Return all thresholds of a router by name."""
    return {
        field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.message_type is None
    }


class BreakEven(Struct, frozen=True, kw_only=True):
    """Prefill break-even of one answering worker."""

    worker_id: str
    requests: int  # number of running requests, which would be delayed by computing a prompt on this worker
    token_ms: float  # milliseconds per prompt token on this worker; 0: unknown
    min_tokens: int  # prompt length from which a prefill worker is better; 0: unknown


class RemotePrefill(Struct, frozen=True, kw_only=True):
    """Measurements on which the router decides whether one worker or two serve a request."""

    learned: bool  # True: the measurements decide; False: the threshold `remote_prefill_min_tokens` decides
    handoffs: int  # number of measured handoffs
    handoffs_needed: int  # number of handoffs that must be measured before the measurements decide
    handoff_ms: float  # duration of a handoff in milliseconds
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
    """Decode all placements of a request, the first one first."""
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
