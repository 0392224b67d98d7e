"""Tier states: the rule, contents, speed and health of each backing tier, as far as the node knows them.

Rules:

1. A block that a tier has is not offered to it again until the tier reports that it removed the block. Some tiers
   cannot report a removal, such as a server that restarts or is short of memory. Blocks that such a tier does not find
   or deliver count as lost.
2. Watchers are informed of each block that becomes known to be in a tier, or stops being known. A watcher that connects
   later receives the same knowledge from `TierState.known`, as far as it is remembered. For a tier with its own index
   of blocks, that index is used instead.
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
"""Time for which a measured speed is used to refuse promotions. Afterwards the tier is tried again, however slow it
was."""


class TierAdmission(Protocol):
    """Rule that decides which blocks a tier should keep."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:
        """Record that a block was written or used; return whether the tier should keep it."""


class AdmitEverything:
    """Admits every block, so every block is demoted as soon as it is in the pool (write-through)."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:  # noqa: ARG002 - every block is admitted
        return True


class TierRule(Struct, frozen=True, kw_only=True):
    """Options by which the hierarchy treats one tier."""

    name: str
    admission: TierAdmission | None  # None: no block is demoted to this tier
    queue_blocks: int = 4096  # largest number of blocks that wait for a demotion
    # Largest number of blocks that are remembered to be in the tier. Remembered blocks are not offered to it again.
    remember_blocks: int = 1 << 20
    finds_in_memory: bool = (
        # True if the tier's `find` reads an index in memory. Its success then does not show that the tier can be read.
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
        """Number of further blocks that fit into the queue."""
        return max(0, self.rule.queue_blocks - len(self.queue))

    def enqueue(self, key: BlockKey, size_bytes: int) -> None:
        if key in self.queue:
            return
        if not self.room:
            self.counters.dropped += 1
            return
        self.queue[key] = size_bytes

    def failed(self, breaker: CircuitBreaker, started: Nanos, now: Nanos) -> None:
        """Record the failure of an operation that began at `started`."""
        self.counters.failures += 1
        self.counters.fenced += breaker.closed
        breaker.failed(started, now)


class TierStates:
    """States of all tiers in the order in which they are asked; collects the changes for the watchers."""

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
        # report also unknown blocks, because the tier may have had blocks since before this node started
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
    """Recent speed of a tier: nanoseconds per byte, averaged over the last batches, with their time in queues."""

    SHARE = 0.25  # weight of the newest batch in the average

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
        """Return the predicted seconds for `num_bytes` bytes; 0 if the speed is unknown or outdated."""
        return num_bytes * self._nanos_a_byte / SECOND if self._is_fresh(now) else 0.0

    def latest(self, num_bytes: int) -> float | None:
        """Return the predicted seconds by the last measurement, however old it is; None if nothing was measured yet."""
        return num_bytes * self._nanos_a_byte / SECOND if self._measured_at is not None else None

    def _is_fresh(self, now: Nanos) -> bool:
        return self._measured_at is not None and now - self._measured_at < SPEED_LASTS
