"""Tier states: the rule, contents, speed and health of each backing tier, as far as the node knows them.

Rules:

1. A block that a tier has is not offered to it again until the tier reports that it removed the block. Some tiers
   cannot report a removal, for example because their server has restarted or is short of memory. Blocks that such a
   tier does not find or deliver count as lost.
2. Watchers are informed when the node learns that a tier has a block, or no longer has it. A watcher that connects
   later receives all blocks of `TierState.known`, which remembers a limited number of blocks. If the tier has its own
   index of blocks (`finds_in_memory`), the watcher receives the blocks of that index instead.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from kvstore.circuit_breaker import CircuitBreaker
from kvstore.clock import SECOND, Nanos
from kvstore.hierarchy.transfers import TierCounters
from kvstore.messages import BlockChanges, BlockKey
from kvstore.recent_map import RecentMap

SPEED_LASTS = Nanos(30 * SECOND)
"""Time for which a measured speed of a tier is used to refuse promotions that would take too long. After this time the
tier is tried again, even if it was slow."""


class TierAdmission(Protocol):
    """Rule that decides which blocks a tier should keep."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:
        """Record that a block was written or used; return whether the tier should keep it."""


class AdmitEverything:
    """Rule that admits every block, so that every block is demoted as soon as it is in the pool (write-through)."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:  # noqa: ARG002 - every block is admitted
        return True


class TierRule(Struct, frozen=True, kw_only=True):
    """Options of the hierarchy for one tier: which blocks are demoted to it, and how many are queued and remembered."""

    name: str
    admission: TierAdmission | None  # None: no block is demoted to this tier
    queue_blocks: int = 4096  # maximum number of blocks that wait for a demotion; further blocks are dropped
    # Maximum number of blocks that the node remembers as stored in the tier. These blocks are not offered to it again.
    # If there are more, the node forgets the oldest ones.
    remember_blocks: int = 1 << 20
    finds_in_memory: bool = (
        # True if the tier's `find` reads an index in memory. A successful `find` then does not show that the tier's
        # disk works.
        False
    )


class TierState:
    """State of one tier, with the queue of blocks that will be demoted to it."""

    def __init__(self, index: int, rule: TierRule):
        self.index = index
        self.rule = rule
        self.reading = CircuitBreaker()
        self.writing = CircuitBreaker()  # separate from reading, because a full disk can still be read
        self.speed = TierSpeed()
        self.counters = TierCounters()
        self.queue: OrderedDict[BlockKey, int] = OrderedDict()  # key and size of each block that waits for a demotion
        # blocks that are believed to be in the tier
        self.known: RecentMap[BlockKey, None] = RecentMap(rule.remember_blocks)
        self.demoting = 0  # number of batches that are being demoted now

    @property
    def room(self) -> int:
        """Number of blocks for which the queue still has room."""
        return max(0, self.rule.queue_blocks - len(self.queue))

    def enqueue(self, key: BlockKey, size_bytes: int) -> None:
        if key in self.queue:
            return
        if not self.room:
            self.counters.dropped += 1
            return
        self.queue[key] = size_bytes

    def failed(self, breaker: CircuitBreaker, started: Nanos, now: Nanos) -> None:
        """Record the failure of an operation that began at `started`; `breaker` is `self.reading` or `self.writing`."""
        self.counters.failures += 1
        self.counters.fenced += breaker.closed
        breaker.failed(started, now)


class TierStates:
    """Holds the states of all tiers, in the order in which promotions ask them.

    It also collects the changes of the tiers' contents that watchers must receive.
    """

    def __init__(self, rules: Sequence[TierRule]):
        self._tiers = [TierState(index, rule) for index, rule in enumerate(rules)]
        self._changes: list[BlockChanges] = []

    def __getitem__(self, index: int) -> TierState:
        return self._tiers[index]

    def __iter__(self) -> Iterator[TierState]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def from_index(self, index: int) -> Sequence[TierState]:
        return self._tiers[index:]

    def know(self, tier: TierState, keys: Sequence[BlockKey]) -> None:
        """Record that a tier has these blocks."""
        new = [key for key in keys if key not in tier.known]
        for key in keys:
            tier.known.note(key, None)
        self._tell(tier, stored=new)

    def forget(self, tier: TierState, keys: Sequence[BlockKey]) -> None:
        """Record that a tier does not have these blocks any more."""
        lost = [key for key in keys if key in tier.known]
        for key in lost:
            tier.known.forget(key)
        self._tell(tier, removed=lost)

    def gone(self, tier: TierState, keys: Sequence[BlockKey]) -> None:
        """Record that a tier removed blocks without a command of this node."""
        if not tier.rule.finds_in_memory:
            self.forget(tier, keys)
            return
        # blocks that are not known here are reported too, because the tier may have got them before this node started
        for key in keys:
            tier.known.forget(key)
        self._tell(tier, removed=keys)

    def changes(self) -> list[BlockChanges]:
        """Return the changes of the tiers' contents that watchers must receive. Each change is returned only once."""
        changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        """Assert that no tier exceeds its limits of queued and of remembered blocks; for tests."""
        for tier in self._tiers:
            assert len(tier.queue) <= tier.rule.queue_blocks
            assert len(tier.known) <= tier.rule.remember_blocks

    def _tell(self, tier: TierState, *, stored: Sequence[BlockKey] = (), removed: Sequence[BlockKey] = ()) -> None:
        for digest in dict.fromkeys(key.digest for key in (*stored, *removed)):
            self._changes.append(
                BlockChanges(
                    digest=digest,
                    stored=tuple(key.name for key in stored if key.digest == digest),
                    removed=tuple(key.name for key in removed if key.digest == digest),
                    tier=tier.rule.name,
                )
            )


class TierSpeed:
    """Measures the recent speed of a tier: a weighted average of the nanoseconds per byte of its batches (`SHARE`).

    The time of a batch includes the time that the batch waits in queues. If nothing was measured for `SPEED_LASTS`,
    the next batch begins a new average.
    """

    SHARE = 0.25  # weight of the newest batch in the average; the average of the batches before it has the rest

    def __init__(self) -> None:
        self._nanos_a_byte = 0.0
        self._measured_at: Nanos | None = None

    def measured(self, num_bytes: int, took: int, now: Nanos) -> None:
        if not num_bytes:
            return
        newest = took / num_bytes
        old = self._nanos_a_byte if self._is_fresh(now) else newest
        self._nanos_a_byte = old + self.SHARE * (newest - old)
        self._measured_at = now

    def seconds(self, num_bytes: int, now: Nanos) -> float:
        """Return the predicted seconds to load `num_bytes` bytes.

        Return 0 if nothing was measured within the last `SPEED_LASTS`.
        """
        return num_bytes * self._nanos_a_byte / SECOND if self._is_fresh(now) else 0.0

    def latest(self, num_bytes: int) -> float | None:
        """Return the predicted seconds to load `num_bytes` bytes, even if the last measurement is old.

        Return None if nothing was measured yet.
        """
        return num_bytes * self._nanos_a_byte / SECOND if self._measured_at is not None else None

    def _is_fresh(self, now: Nanos) -> bool:
        return self._measured_at is not None and now - self._measured_at < SPEED_LASTS
