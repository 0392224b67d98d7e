"""Tier admission: which blocks are worth writing to a tier that wears out, within a daily write budget.

`kvstore.hierarchy.machine` applies it to each block that is written or used in the pool.

Rules:

1. A block is admitted when it is seen for the second time. Sightings within `apart` of the first belong to the same
   request, which writes a block and reads it again where another worker continues. A block is also admitted at its
   first sighting if a predictor expects its reuse. So blocks that are used once are not written.
2. Old sightings are forgotten, half of them at a time. This bounds the memory, and the time between two sightings that
   count.
3. Each admitted block is charged to a budget of bytes per day. The budget fills evenly and holds at most `burst_bytes`.
   Blocks that it does not cover are not written.
4. A clock that jumps back refills nothing. The level survives a restart as a number (`WriteBudget.level_bytes`).
"""

from collections.abc import Callable, Hashable
from typing import Generic

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policy import K

DAY = 86_400 * SECOND
APART = Nanos(5 * SECOND)
"""Least time between two sightings that count as separate. One request uses a block within a shorter time, and two turns
of a conversation are further apart: in the public conversation trace 95 % of the gaps between turns exceed 30 s.
"""

REMEMBERED = 1 << 20
LIKELY = 0.5  # least predicted probability of a use that admits a block at its first sighting


class BlockSightings(Generic[K]):
    """Times at which blocks were first seen, for at least `remembered // 2` other blocks."""

    def __init__(self, remembered: int = REMEMBERED, apart: Nanos = APART):
        assert remembered >= 2, remembered
        self._half = remembered // 2
        self._apart = apart
        self._recent: dict[Hashable, Nanos] = {}
        self._older: dict[Hashable, Nanos] = {}

    def again(self, key: K, now: Nanos) -> bool:
        """Note a sighting; return whether an earlier one counts (rule 1)."""
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
    """Budget of bytes that may be written per day."""

    def __init__(self, bytes_per_day: int, burst_bytes: int, *, now: Nanos, level_bytes: int | None = None):
        """Start with a full budget, or with `level_bytes`. A block above `burst_bytes` is never written."""
        assert bytes_per_day >= 0, bytes_per_day
        assert burst_bytes >= 0, burst_bytes
        self._per_day = bytes_per_day
        self._most = burst_bytes * DAY
        self._level = self._most if level_bytes is None else min(max(0, level_bytes) * DAY, self._most)
        self._filled_at = now

    def take(self, size_bytes: int, now: Nanos) -> bool:
        """Charge a write; return False and charge nothing when too little is left."""
        self._fill(now)
        if self._level < size_bytes * DAY:
            return False
        self._level -= size_bytes * DAY
        return True

    def level_bytes(self, now: Nanos) -> int:
        """Return the bytes that are left now."""
        self._fill(now)
        return self._level // DAY

    def _fill(self, now: Nanos) -> None:
        """Add what came in since the last call, in bytes × nanoseconds of a day, which avoids rounding."""
        self._level = min(self._most, self._level + max(0, now - self._filled_at) * self._per_day)
        self._filled_at = now


class ReuseAdmission(Generic[K]):
    """Tier admission for tiers that wear out or are slow to write to; the module lists the rules."""

    def __init__(
        self,
        *,
        sightings: BlockSightings[K] | None = None,
        predict: Callable[[K], float] | None = None,
        likely: float = LIKELY,
        budget: WriteBudget | None = None,
    ):
        """Start without sightings. A predicted probability of `likely` or more admits a block at its first sighting."""
        self._sightings: BlockSightings[K] = sightings if sightings is not None else BlockSightings()
        self._predict = predict
        self._likely = likely
        self._budget = budget
        self.over_budget = 0  # blocks that were admitted but exceeded the budget

    def admits(self, key: K, size_bytes: int, now: Nanos) -> bool:
        """Note that a block was written or used; return whether the tier should keep it."""
        seen = self._sightings.again(key, now)
        if not seen and (self._predict is None or self._predict(key) < self._likely):
            return False
        if self._budget is not None and not self._budget.take(size_bytes, now):
            self.over_budget += 1
            return False
        return True
