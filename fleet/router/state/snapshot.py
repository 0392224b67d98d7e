"""Snapshots: the values that a router reports about itself, for `fleet status`, metrics and tests."""

from msgspec import Struct, structs

from fleet.core.errors import Reason
from fleet.core.ids import ModelName, StoreId, WorkerId
from fleet.core.roles import Role
from fleet.core.work import NOTHING_PULLED, PulledBlocks
from fleet.router.kv_index.prefix_index import CacheComparison, Knowledge
from fleet.router.placement.decision import DecisionExplanation, PlacementReason
from fleet.router.placement.wait_or_reject import RejectionCause


class RouterCounters(Struct, kw_only=True):
    """Counters since the start of the router. Every request that has ended is in exactly one of `completed`, `cancelled` and `refused`."""

    completed: int = 0
    cancelled: int = 0
    refused: dict[Reason, int] = {}
    aggregated: int = 0  # number of decisions that chose one worker for prompt and answer
    disaggregated: int = 0  # number of decisions that chose a pair
    placements: dict[PlacementReason, int] = {}
    # Requests that no worker could serve, or whose answer no other worker could continue, by cause; they are also in `refused`.
    impossible: dict[RejectionCause, int] = {}
    policy_fallbacks: int = 0  # number of choices that the default policy made because the configured policy failed
    retried: int = 0  # number of failed attempts after which the router tried to place the request again
    # number of decisions that chose one worker, because an attempt of the request had failed on each remaining prefill worker
    fallbacks: int = 0
    continued: int = 0  # number of decisions for requests whose answer another worker or router had begun
    workers_lost: int = 0
    late_messages: int = 0  # number of messages of workers about attempts that had ended or been aborted before
    kv_mismatches: int = 0  # number of attempts that workers rejected with KV_MISMATCH, before any transfer of blocks

    def copy(self) -> "RouterCounters":
        """Return a copy of the current values."""
        return structs.replace(
            self, refused=dict(self.refused), placements=dict(self.placements), impossible=dict(self.impossible)
        )

    def add(self, other: "RouterCounters") -> None:
        """Add the values of `other` to these counters."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(theirs, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, mine + theirs)

    @property
    def ended(self) -> int:
        return self.completed + self.cancelled + sum(self.refused.values())


class ModelSnapshot(Struct, frozen=True, kw_only=True):
    """The numbers of requests for one model."""

    model: ModelName
    active: int  # requests that have not ended, including the queued ones
    queued: int  # requests in the admission queue and in prefill queues
    counters: RouterCounters  # all counters except `late_messages`, which cannot be counted by model


class WorkerSnapshot(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    state: str  # "serving" or "draining"
    engine: str
    address: str
    running: int  # number of requests that the worker reports as running in its engine, from all routers
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    cached_blocks: int  # number of blocks that the router knows or assumes to be in the worker's prefix cache
    booked_requests: int
    booked_elsewhere: int  # number of requests that peer routers have reserved on this worker
    booked_blocks: int
    booked_prefill_tokens: int
    protocol: int = 0  # protocol version between this worker and the router; 0: the worker is not one of Fleet's
    product: str = ""  # version of Fleet that the worker runs; empty: unknown, or the worker is not one of Fleet's
    pulled: PulledBlocks = NOTHING_PULLED


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    model: ModelName
    role: Role
    workers: tuple[WorkerSnapshot, ...]


class StoreSnapshot(Struct, frozen=True, kw_only=True):
    store_id: StoreId
    fingerprint: str
    tier: str
    blocks: int  # number of blocks with this fingerprint in this tier that the prefix index has


class KnowledgeSnapshot(Struct, frozen=True, kw_only=True):
    """How accurately the router knows the caches of all workers of one model for which it has the same kind of knowledge."""

    model: ModelName
    knowledge: Knowledge
    workers: int
    drifting: int  # number of workers whose caches drift (`fleet.router.kv_index.prefix_index`, rule 12)
    prompts: int  # number of prompts since the start whose predicted and reported cached tokens were compared
    total: CacheComparison  # sums over the comparisons of all these prompts
    recent: CacheComparison  # sums over the latest comparisons of each worker that is present now


class RouterSnapshot(Struct, frozen=True, kw_only=True):
    pools: tuple[PoolSnapshot, ...]
    stores: tuple[StoreSnapshot, ...]
    active: int  # requests that have not ended, including the queued ones
    queued: int  # requests in the admission queue and in prefill queues
    index_blocks: int  # number of distinct blocks that workers and stores are known or assumed to hold
    index_overflowed: int  # blocks that were not added to the prefix index, because their holder was at its capacity
    counters: RouterCounters  # sums over all models
    models: tuple[ModelSnapshot, ...] = ()
    knowledge: tuple[KnowledgeSnapshot, ...] = ()


class BreakEvenSnapshot(Struct, frozen=True, kw_only=True):
    """The number of uncached tokens from which on a prefill worker should compute the prompt for one answering worker.

    The other fields are the measurements from which the number follows.
    """

    worker_id: WorkerId
    requests: int  # number of requests that are reserved on the answering worker now
    token_seconds: float  # seconds per prompt token on the answering worker; 0: unknown
    min_tokens: int | None  # the number of uncached tokens that was learned; None if too little was measured


class RemotePrefillSnapshot(Struct, frozen=True, kw_only=True):
    """The measurements of remote prefill (`fleet.router.placement.break_even`)."""

    learned: bool  # True if decisions use the measured number instead of the setting
    handoffs: int
    handoff_seconds: float
    workers: tuple[BreakEvenSnapshot, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """Explanations of all decisions for one request, in their order."""

    placements: tuple[DecisionExplanation, ...]
