"""What a node knows of the tiers below its pool: how each is treated, what it has, how fast and how well it is. Pure.

Rules:

1. What a tier was given is not offered to it again, until it says that it has let it go. A tier that cannot say so (a
   server that restarts, or is short of memory) is taken to have lost what it does not find, and what it does not deliver.
2. Watchers are told whatever becomes known to be in a tier, and whatever ceases to be. Those that come later are told the
   same by `TierState.known`, where the tier itself does not know, as far as it is remembered.
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
"""A tier's measured speed counts for this long; then it is tried again, however slow it was."""


class TierAdmission(Protocol):
    """Which blocks a tier should have."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:
        """Note that a block was written or used; says whether it is worth keeping in the tier."""
        ...


class AdmitEverything:
    """Writes through: each block goes down as soon as it is there."""

    def admits(self, key: BlockKey, size_bytes: int, now: Nanos) -> bool:  # noqa: ARG002 - as it says
        return True


class TierRule(Struct, frozen=True, kw_only=True):
    """How the hierarchy treats one tier."""

    name: str
    admission: TierAdmission | None  # None: nothing goes down
    queue_blocks: int = 4096  # that may wait to go down
    remember_blocks: int = 1 << 20  # that are known to be there, so that they are not offered again
    finds_in_memory: bool = False  # so that what it finds does not say whether it can be read


class TierState:
    """What is known of one of them, and what waits for it."""

    def __init__(self, index: int, rule: TierRule):
        self.index = index
        self.rule = rule
        self.reading = CircuitBreaker()
        self.writing = CircuitBreaker()  # apart: a full disk can still be read
        self.pace = TierSpeed()
        self.counters = TierCounters()
        self.queue: OrderedDict[BlockKey, int] = OrderedDict()  # to go down, with the bytes of each
        self.known: RecentMap[BlockKey, None] = RecentMap(rule.remember_blocks)  # there, as far as we know
        self.demoting = 0  # batches on their way down

    @property
    def room(self) -> int:
        """For how many more blocks there is room in its queue."""
        return max(0, self.rule.queue_blocks - len(self.queue))

    def enqueue(self, key: BlockKey, size_bytes: int) -> None:
        if key in self.queue:
            return
        if not self.room:
            self.counters.dropped += 1
            return
        self.queue[key] = size_bytes

    def failed(self, breaker: CircuitBreaker, started: Nanos, now: Nanos) -> None:
        """What began then, of those that this breaker counts, has failed."""
        self.counters.failures += 1
        self.counters.fenced += breaker.closed
        breaker.failed(started, now)


class TierStates:
    """All of them, in the order in which they are asked; and what watchers have to learn of them."""

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
        """A tier has these blocks."""
        new = [key for key in keys if key not in tier.known]
        for key in keys:
            tier.known.note(key, None)
        self._tell(tier, stored=new)

    def forget(self, tier: TierState, keys: Sequence[BlockKey]) -> None:
        """A tier does not have those of these blocks that it was known to have."""
        lost = [key for key in keys if key in tier.known]
        for key in lost:
            tier.known.forget(key)
        self._tell(tier, removed=lost)

    def gone(self, tier: TierState, keys: Sequence[BlockKey]) -> None:
        """A tier has let blocks go by itself."""
        if not tier.rule.finds_in_memory:
            self.forget(tier, keys)
            return
        for key in keys:  # among them blocks from before the node started, which the tier alone knew
            tier.known.forget(key)
        self._tell(tier, removed=keys)

    def changes(self) -> list[BlockChanges]:
        """Each is handed out once."""
        changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        """Asserts what always holds; for tests."""
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
    """How fast a tier has been of late: nanoseconds a byte over the last batches, what they waited included."""

    SHARE = 0.25  # of the newest batch in the average

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
        """What that many bytes will take, as far as we know; 0 where nothing is known (any more)."""
        return num_bytes * self._nanos_a_byte / SECOND if self._is_fresh(now) else 0.0

    def latest(self, num_bytes: int) -> float | None:
        """What that many bytes took when it was last measured, in seconds, however long ago; None before that."""
        return num_bytes * self._nanos_a_byte / SECOND if self._measured_at is not None else None

    def _is_fresh(self, now: Nanos) -> bool:
        return self._measured_at is not None and now - self._measured_at < SPEED_LASTS
