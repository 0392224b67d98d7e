"""Results of clients: the collected answer, and the state of a cluster."""

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
    logprobs: tuple[Logprobs, ...]  # one per token if requested, else empty
    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]  # sources of the prompt's KV blocks, by phase
    reasoning: str = ""  # only with `parsing`
    tool_calls: tuple[ToolCall, ...] = ()  # only with `parsing`


class StreamedAnswer:
    """An answer whose messages are collected while it streams."""

    def __init__(self) -> None:
        self._admitted: Admitted | None = None
        self._deltas: list[Delta] = []
        self._result: Result | None = None
        self._resume_token = ""  # the latest one

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
        """Return what a router needs to go on with this answer; None if it has given no resume token."""
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
        """Add a message; return its delta for the caller, if any.

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
                self._admitted = self._admitted or event  # a resumed request has another id
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
    running: int  # requests, as the worker reports them
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    cached_blocks: int  # blocks of the prefix cache that the router's index knows
    booked_requests: int  # requests that this router has reserved
    booked_elsewhere: int  # requests that other routers have reserved
    cache_seconds: float = 0.0  # to compute its cache again, without what other workers hold


class PoolStatus(Struct, frozen=True, kw_only=True):
    model: str
    role: str
    workers: tuple[WorkerStatus, ...]


class RouterStatus(Struct, frozen=True, kw_only=True):
    requests: int  # ended since the start
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
    served: int  # since start
    not_taken: int  # the spending limit had no room, or the endpoint was closed
    failed: int  # no answer, or only a part of one
    spent_dollars: float  # in the last hour, including estimates of running requests
    limit_dollars: float  # of an hour
    trouble: str  # why it gets no requests now; empty if it does


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
    cost: float  # the lowest wins
    parts: dict[str, float]  # their sum is the cost


class PlacementExplained(Struct, frozen=True, kw_only=True):
    """One placement of a request."""

    decode: str  # worker that answers
    prefill: str  # worker that computes the prompt; empty: the one that answers
    kv_path: str  # KV path between them
    why: str  # why one worker or two
    policy: str  # policy that chose the answering worker
    prefill_policy: str
    uncached_tokens: int  # prompt tokens that the answering worker would compute
    prefill_tokens: int  # prompt tokens to compute on the chosen worker for the prompt
    candidates: tuple[CandidateCost, ...]
    prefill_candidates: tuple[CandidateCost, ...]
    unfit: dict[str, str]  # causes for the other workers, by worker


class OverflowExplained(Struct, frozen=True, kw_only=True):
    """The outcome of a request that the router refused, and that a hosted endpoint may take."""

    model: str
    url: str
    reason: str  # of the refusal
    message: str
    outcome: str  # served, limit_spent, closed, failed or broken
    estimated_dollars: float
    dollars: float
    prompt_tokens: int  # as the endpoint reports them; 0: unknown
    answer_tokens: int


def decode_overflow(message: control_pb2.ExplainResponse) -> OverflowExplained | None:
    """Decode what became of a refused request; None if it never could overflow."""
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
    requests: int  # running requests, which computing a prompt there would delay
    token_ms: float  # per prompt token on this worker; 0: unknown
    min_tokens: int  # prompt length from which a prefill worker is better; 0: unknown


class RemotePrefill(Struct, frozen=True, kw_only=True):
    """Measurements behind the decision between one worker and two."""

    learned: bool  # the measurements decide; else the threshold `remote_prefill_min_tokens` does
    handoffs: int  # number of measured handoffs
    handoffs_needed: int  # handoffs needed for a decision
    handoff_ms: float  # duration of a handoff
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
