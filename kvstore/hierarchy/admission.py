"""Tier admission: decides which blocks are written to a tier that wears out, within a daily write budget.

`kvstore.hierarchy.machine` calls `admits` for each block that is written or used in the pool, unless the tier is
believed to have the block. Each such call is a sighting of the block.

Rules:

1. A block is admitted from its second sighting on, so blocks that are used once are not written. Sightings within
   `apart` after the first one do not count: they belong to the same request. Such a request writes a block, and reads
   it again when another worker continues the request. A block is admitted at its first sighting only if a predictor
   expects its reuse.
2. Old sightings are forgotten, half of them at a time. This limits the memory. A second sighting after the first one
   was forgotten counts as a first one.
3. Each admitted block is charged to a budget of bytes per day. The budget refills evenly and holds at most
   `burst_bytes`. Blocks for which the budget is too small are not written.
4. If the clock jumps back, nothing is refilled. `WriteBudget.level_bytes` returns the bytes that the budget holds now;
   another budget can start with this number.
"""

from collections.abc import Callable, Hashable
from typing import Generic

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policy import K

DAY = 86_400 * SECOND
APART = Nanos(5 * SECOND)
"""Minimum time between two sightings that count as separate. The uses of a block by one request follow each other in
less time. Two turns of a conversation are separated by more time: in the public conversation trace, 95 % of the gaps
between turns exceed 30 s."""

REMEMBERED = 1 << 20
LIKELY = 0.5  # a block is admitted at its first sighting if its predicted probability of another use is at least this


class BlockSightings(Generic[K]):
    """Remembers when blocks were first seen, for at least the last `remembered // 2` blocks."""

    def __init__(self, remembered: int = REMEMBERED, apart: Nanos = APART):
        assert remembered >= 2, remembered
        self._half = remembered // 2
        self._apart = apart
        self._recent: dict[Hashable, Nanos] = {}
        self._older: dict[Hashable, Nanos] = {}

    def again(self, key: K, now: Nanos) -> bool:
        """Record a sighting now; return whether the block was first seen at least `apart` earlier (rule 1)."""
        first = self._recent.get(key)
        if first is None:
            first = self._older.get(key, now)
            self._recent[key] = first
            if len(self._recent) >= self._half:
                self._older, self._recent = self._recent, {}
        return now - first >= self._apart

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)


class WriteBudget:
    """Budget of bytes that may be written to a tier per day."""

    def __init__(self, bytes_per_day: int, burst_bytes: int, *, now: Nanos, level_bytes: int | None = None):
        """Start with a full budget, or with `level_bytes`. A block larger than `burst_bytes` is never written."""
        assert bytes_per_day >= 0, bytes_per_day
        assert burst_bytes >= 0, burst_bytes
        self._per_day = bytes_per_day
        self._most = burst_bytes * DAY
        self._level = self._most if level_bytes is None else min(max(0, level_bytes) * DAY, self._most)
        self._filled_at = now

    def take(self, size_bytes: int, now: Nanos) -> bool:
        """Charge a write to the budget. If too little is left, charge nothing and return False."""
        self._fill(now)
        if self._level < size_bytes * DAY:
            return False
        self._level -= size_bytes * DAY
        return True

    def level_bytes(self, now: Nanos) -> int:
        """Return the number of bytes that may be written now."""
        self._fill(now)
        return self._level // DAY

    def _fill(self, now: Nanos) -> None:
        """Refill the budget for the time since the last call.

        `_level` is the number of bytes times `DAY`, an integer, so that refilling for a short time needs no rounding.
        """
        self._level = min(self._most, self._level + max(0, now - self._filled_at) * self._per_day)
        self._filled_at = now


class ReuseAdmission(Generic[K]):
    """Admission rule for tiers that wear out or are slow to write to: it admits blocks that are used again.

    The docstring of this module has the details.
    """

    def __init__(
        self,
        *,
        sightings: BlockSightings[K] | None = None,
        predict: Callable[[K], float] | None = None,
        likely: float = LIKELY,
        budget: WriteBudget | None = None,
    ):
        """Start without sightings.

        `predict` returns the probability that a block is used again. A block whose probability is at least `likely` is
        admitted at its first sighting; if `predict` is None, no block is. If `budget` is None, the number of written
        bytes is not limited.
        """
        self._sightings: BlockSightings[K] = sightings if sightings is not None else BlockSightings()
        self._predict = predict
        self._likely = likely
        self._budget = budget
        self.over_budget = 0  # number of blocks that were refused only because too little of the budget was left

    def admits(self, key: K, size_bytes: int, now: Nanos) -> bool:
        """Record that a block was written or used; return whether the tier should keep it.

        If the result is True, the block has been charged to the budget.
        """
        seen = self._sightings.again(key, now)
        if not seen and (self._predict is None or self._predict(key) < self._likely):
            return False
        if self._budget is not None and not self._budget.take(size_bytes, now):
            self.over_budget += 1
            return False
        return True
