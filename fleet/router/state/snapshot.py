"""Snapshots: what a router reports about itself at one instant, for `fleet status`, metrics and tests."""

from msgspec import Struct, structs

from fleet.core.errors import Reason
from fleet.core.ids import ModelName, StoreId, WorkerId
from fleet.core.roles import Role
from fleet.router.kv_index.prefix_index import CacheComparison, Knowledge
from fleet.router.placement.decision import DecisionExplanation, PlacementReason
from fleet.router.placement.wait_or_reject import RejectionCause


class RouterCounters(Struct, kw_only=True):
    """Counters since the start. Every ended request is in exactly one of completed, cancelled and refused."""

    completed: int = 0
    cancelled: int = 0
    refused: dict[Reason, int] = {}
    aggregated: int = 0  # decisions for one worker
    disaggregated: int = 0  # decisions for a pair
    placements: dict[PlacementReason, int] = {}
    impossible: dict[RejectionCause, int] = {}  # requests that no worker could serve, in more detail than `refused`
    policy_fallbacks: int = 0  # decisions that the default policy made because the configured policy failed
    retried: int = 0  # failed attempts that were tried again
    fallbacks: int = 0  # prompts that the decode worker computed because a prefill worker had failed
    continued: int = 0  # streams that continued on another worker after tokens had been sent
    workers_lost: int = 0
    late_messages: int = 0  # messages of attempts that were given up before
    kv_mismatches: int = 0  # attempts that workers rejected with KV_MISMATCH before any transfer

    def copy(self) -> "RouterCounters":
        """Return a copy of the current values."""
        return structs.replace(
            self, refused=dict(self.refused), placements=dict(self.placements), impossible=dict(self.impossible)
        )

    @property
    def ended(self) -> int:
        return self.completed + self.cancelled + sum(self.refused.values())


class WorkerSnapshot(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    state: str  # "serving" or "draining"
    engine: str
    address: str
    running: int  # requests that the worker reports as running
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    cached_blocks: int  # blocks of the engine's prefix cache in the index
    booked_requests: int
    booked_elsewhere: int  # requests that peer routers have reserved
    booked_blocks: int
    booked_prefill_tokens: int


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    model: ModelName
    role: Role
    workers: tuple[WorkerSnapshot, ...]


class StoreSnapshot(Struct, frozen=True, kw_only=True):
    store_id: StoreId
    fingerprint: str
    tier: str
    blocks: int  # blocks in the index


class KnowledgeSnapshot(Struct, frozen=True, kw_only=True):
    """How accurately the caches are known, for all workers whose caches are known in the same way."""

    knowledge: Knowledge
    workers: int
    drifting: int  # workers whose caches drift
    prompts: int  # prompts compared since the start
    total: CacheComparison  # comparisons since the start
    recent: CacheComparison  # the latest comparisons of each present worker


class RouterSnapshot(Struct, frozen=True, kw_only=True):
    pools: tuple[PoolSnapshot, ...]
    stores: tuple[StoreSnapshot, ...]
    active: int  # requests, including the queued ones
    queued: int  # requests in the admission queue and in prefill queues
    index_blocks: int  # number of distinct blocks in the prefix index
    index_overflowed: int  # blocks that were not added because their holder was full
    counters: RouterCounters
    knowledge: tuple[KnowledgeSnapshot, ...] = ()


class BreakEvenSnapshot(Struct, frozen=True, kw_only=True):
    """From how many uncached tokens a prefill worker should compute the prompt, for one answering worker."""

    worker_id: WorkerId
    requests: int  # requests on the worker now
    token_seconds: float  # seconds per prompt token; 0: unknown
    min_tokens: int | None  # None: too little was measured


class RemotePrefillSnapshot(Struct, frozen=True, kw_only=True):
    """The measurements of remote prefill (`fleet.router.placement.break_even`)."""

    learned: bool  # True if the measured value is used instead of the setting
    handoffs: int
    handoff_seconds: float
    workers: tuple[BreakEvenSnapshot, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """All decisions for one request, first to last."""

    placements: tuple[DecisionExplanation, ...]
