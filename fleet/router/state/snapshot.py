"""What a router can say of itself at an instant: for `fleet status`, metrics and tests."""

from msgspec import Struct, structs

from fleet.core.errors import Reason
from fleet.core.ids import ModelName, StoreId, WorkerId
from fleet.core.roles import Role
from fleet.router.kv_index.cache_accuracy import CacheComparison, Knowledge
from fleet.router.placement.decision import Decision, DecisionExplanation, PlacementReason
from fleet.router.placement.rejection import RejectionCause
from fleet.router.policy import PlacementPolicy


class RouterCounters(Struct, kw_only=True):
    """Since start. Every request that ended is in exactly one of completed, cancelled and refused."""

    completed: int = 0
    cancelled: int = 0
    refused: dict[Reason, int] = {}
    aggregated: int = 0  # placements on one worker
    disaggregated: int = 0  # placements on a pair
    placements: dict[PlacementReason, int] = {}
    impossible: dict[RejectionCause, int] = {}  # requests that nobody could serve, finer than `refused`
    policy_fallbacks: int = 0  # decisions that the default policy made because the chosen one did not
    retried: int = 0  # attempts that failed and were followed by another
    fallbacks: int = 0  # prompts computed by the decode worker because a prefill worker had failed
    continued: int = 0  # streams that went on, on another worker, after tokens had been sent
    workers_lost: int = 0
    late_messages: int = 0  # of work that was given up before
    kv_mismatches: int = 0  # pieces of work that workers refused with KV_MISMATCH, before a byte moved

    def placed(self, decision: Decision, policy: PlacementPolicy) -> None:
        """A request was.

        Args:
            decision: How.
            policy: That should have decided.
        """
        why = decision.why
        self.placements[why] = self.placements.get(why, 0) + 1
        self.policy_fallbacks += decision.policy is not policy
        if decision.prefill is None:
            self.aggregated += 1
        else:
            self.disaggregated += 1
            self.policy_fallbacks += decision.prefill_policy is not policy
        if why is PlacementReason.PREFILL_LOST:
            self.fallbacks += 1

    def copy(self) -> "RouterCounters":
        """As they are now."""
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
    running: int  # requests, as the worker reports
    waiting: int
    kv_blocks_used: int
    kv_blocks: int
    cached_blocks: int  # of the engine's prefix cache, that the index knows
    booked_requests: int
    booked_elsewhere: int  # requests, by other routers
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
    blocks: int  # that the index knows


class KnowledgeSnapshot(Struct, frozen=True, kw_only=True):
    """How well it is known what workers have cached, of those where that is known in the same way."""

    knowledge: Knowledge
    workers: int
    drifting: int  # of them
    prompts: int  # compared since start
    total: CacheComparison  # since start
    recent: CacheComparison  # of the latest of each worker that is here


class RouterSnapshot(Struct, frozen=True, kw_only=True):
    pools: tuple[PoolSnapshot, ...]
    stores: tuple[StoreSnapshot, ...]
    active: int  # requests, waiting ones included
    queued: int  # for a worker with room, or in the lane of one
    index_blocks: int  # distinct
    index_overflowed: int  # blocks that were not noted because their holder was full
    counters: RouterCounters
    knowledge: tuple[KnowledgeSnapshot, ...] = ()


class BreakEvenSnapshot(Struct, frozen=True, kw_only=True):
    """For one worker that answers: from how many tokens on another one had better compute a prompt."""

    worker_id: WorkerId
    requests: int  # there now
    token_seconds: float  # that a prompt token takes; 0: not known
    min_tokens: int | None  # None: too little was measured


class RemotePrefillSnapshot(Struct, frozen=True, kw_only=True):
    """What was measured of `remote_prefill_min_tokens`; see `fleet.router.placement.break_even`."""

    learned: bool  # whether that counts, and not the setting
    handoffs: int
    handoff_seconds: float
    workers: tuple[BreakEvenSnapshot, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """All placements of one request, first to last."""

    placements: tuple[DecisionExplanation, ...]
