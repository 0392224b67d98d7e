"""What callers get: the collected answer, and the state of a cluster."""

from collections.abc import Iterable

from msgspec import Struct

from fleet.client.errors import ServerError
from fleet.core.requests import Admitted, Delta, Finish, Finished, KvPhase, Logprobs, Usage
from fleet.v1 import control_pb2, inference_pb2
from fleet.wire.inference import decode_event


class Result(Struct, frozen=True, kw_only=True):
    """A complete answer."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]  # one per token if asked for, else empty
    finish: Finish
    usage: Usage
    kv: tuple[KvPhase, ...]  # where the prompt's KV blocks came from, phase by phase


class Collected:
    """An answer while it comes in."""

    def __init__(self) -> None:
        self._admitted: Admitted | None = None
        self._deltas: list[Delta] = []
        self._result: Result | None = None

    @property
    def request_id(self) -> str:
        """Empty until the server has admitted the request."""
        return "" if self._admitted is None else self._admitted.request_id

    @property
    def result(self) -> Result:
        """The whole answer.

        Raises:
            RuntimeError: The stream has not ended.
        """
        if self._result is None:
            raise RuntimeError("the stream has not ended; iterate it first")
        return self._result

    def take(self, message: inference_pb2.GenerateResponse) -> Delta | None:
        """Note a message; returns what the caller is to see of it.

        Raises:
            ServerError: The server says what this client does not understand.
        """
        try:
            event = decode_event(message)
        except ValueError as error:
            raise ServerError(f"the server sent what this client does not understand: {error}") from error
        match event:
            case Delta():
                self._deltas.append(event)
                return event
            case Admitted():
                self._admitted = event
                return None
            case Finished():
                rest = Delta(text=event.text, token_ids=()) if event.text else None
                if rest is not None:
                    self._deltas.append(rest)
                self._result = self._complete(event)
                return rest
            case None:
                return None

    def end(self) -> None:
        """The stream has ended.

        Raises:
            ServerError: Without its last message.
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
        )


class WorkerStatus(Struct, frozen=True, kw_only=True):
    worker_id: str
    state: str  # "serving" or "draining"
    engine: str
    address: str
    running: int  # requests, as the worker reports
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    cached_blocks: int  # of the engine's prefix cache, that the router's index knows
    booked_requests: int  # as the router has booked
    booked_elsewhere: int  # as other routers have told it


class PoolStatus(Struct, frozen=True, kw_only=True):
    model: str
    role: str
    workers: tuple[WorkerStatus, ...]


class RouterStatus(Struct, frozen=True, kw_only=True):
    requests: int  # ended, since start
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


class ClusterStatus(Struct, frozen=True, kw_only=True):
    pools: tuple[PoolStatus, ...]
    router: RouterStatus
    store: StoreStatus | None


def decode_status(message: control_pb2.StatusResponse) -> ClusterStatus:
    """The state of a cluster, as its router tells it."""
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
    return ClusterStatus(pools=pools, router=RouterStatus(models=tuple(message.router.models), **counts), store=store)


class CandidateCost(Struct, frozen=True, kw_only=True):
    """A worker that a request could have gone to."""

    worker_id: str
    cost: float  # the lowest is preferred
    parts: dict[str, float]  # add up to the cost


class PlacementExplained(Struct, frozen=True, kw_only=True):
    """One decision where a request goes."""

    decode: str  # worker that answers
    prefill: str  # worker that computes the prompt; empty: the one that answers
    kv_path: str  # of the blocks between them
    why: str  # one worker or two
    policy: str  # that chose the worker that answers
    prefill_policy: str
    uncached_tokens: int  # of the prompt, that the worker that answers would have to compute
    prefill_tokens: int  # that whoever computes the prompt has to compute
    candidates: tuple[CandidateCost, ...]
    prefill_candidates: tuple[CandidateCost, ...]
    unfit: dict[str, str]  # why the others were no candidates, by worker


def thresholds_of(message: control_pb2.Thresholds) -> dict[str, float]:
    """All thresholds of a router, by name."""
    return {
        field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.message_type is None
    }


class BreakEven(Struct, frozen=True, kw_only=True):
    """Of one worker that answers."""

    worker_id: str
    requests: int  # there when it was asked, which computing a prompt there would hold up
    token_ms: float  # that a prompt token takes there; 0: not known yet
    min_tokens: int  # from which another worker had better compute a prompt; 0: not known yet


class RemotePrefill(Struct, frozen=True, kw_only=True):
    """What a router has measured of when another worker had better compute a prompt."""

    learned: bool  # whether that counts; else the threshold `remote_prefill_min_tokens` does
    handoffs: int  # measured
    handoffs_needed: int  # before anything is concluded
    handoff_ms: float  # that one takes
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
    """All decisions about a request, the first one first."""
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
