"""What is worth writing to a tier that wears out: what was seen before or is likely to be, within a budget. Pure.

Rules:

1. A block is admitted at its second sighting, and not at once: sightings within `apart` of the first belong to the same
   request, which writes a block, and reads it again where another worker continues. Or it is admitted because its
   reuse is predicted, where somebody predicts. So what is used once is not written at all.
2. Sightings are forgotten, the oldest half at a time; so there is a bound on memory, and on how far apart two may be.
3. Whatever is admitted is charged to a budget of bytes a day, which fills evenly and holds at most `burst_bytes`. What
   it does not cover is not written.
4. A clock that jumps back refills nothing. What is left survives a restart as a number (`WriteBudget.level_bytes`).
"""

from collections.abc import Callable, Hashable
from typing import Generic

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policy import K

DAY = 86_400 * SECOND
APART = Nanos(5 * SECOND)
"""A request's own uses of a block are closer together, two turns of a conversation are not: on the public conversation
trace 95 % of the spans between two turns are longer than 30 s."""

REMEMBERED = 1 << 20
LIKELY = 0.5  # probability of a use, from which on a first sighting is enough


class BlockSightings(Generic[K]):
    """When blocks were first seen, as far back as `remembered` others."""

    def __init__(self, remembered: int = REMEMBERED, apart: Nanos = APART):
        assert remembered >= 2, remembered
        self._half = remembered // 2
        self._apart = apart
        self._recent: dict[Hashable, Nanos] = {}
        self._older: dict[Hashable, Nanos] = {}

    def again(self, key: K, now: Nanos) -> bool:
        """Note a sighting; whether there was one before that counts (rule 1)."""
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
    """Bytes that may be written a day."""

    def __init__(self, bytes_per_day: int, burst_bytes: int, *, now: Nanos, level_bytes: int | None = None):
        """A budget that begins full, or with what was left.

        Args:
            bytes_per_day: That come in, evenly.
            burst_bytes: That can be saved up; a single block larger than this is never written.
            now: The present.
            level_bytes: What was left; None: all.
        """
        assert bytes_per_day >= 0, bytes_per_day
        assert burst_bytes >= 0, burst_bytes
        self._per_day = bytes_per_day
        self._most = burst_bytes * DAY
        self._level = self._most if level_bytes is None else min(max(0, level_bytes) * DAY, self._most)
        self._filled_at = now

    def take(self, size_bytes: int, now: Nanos) -> bool:
        """Charge a write; False, and nothing is charged, when there is not enough left."""
        self._fill(now)
        if self._level < size_bytes * DAY:
            return False
        self._level -= size_bytes * DAY
        return True

    def level_bytes(self, now: Nanos) -> int:
        """What is left now."""
        self._fill(now)
        return self._level // DAY

    def _fill(self, now: Nanos) -> None:
        """In bytes × nanoseconds of a day, so that nothing is lost to rounding."""
        self._level = min(self._most, self._level + max(0, now - self._filled_at) * self._per_day)
        self._filled_at = now


class ReuseAdmission(Generic[K]):
    """A `kvstore.hierarchy.tier_states.TierAdmission` for tiers that wear out or are slow to write to; see the module."""

    def __init__(
        self,
        *,
        sightings: BlockSightings[K] | None = None,
        predict: Callable[[K], float] | None = None,
        likely: float = LIKELY,
        budget: WriteBudget | None = None,
    ):
        """Has seen nothing yet.

        Args:
            sightings: Of its own by default.
            predict: Probability that a block is used again while the tier would hold it, as
                `kvstore.eviction.hazard.HazardEviction.probability` tells. None: nobody predicts.
            likely: Probability from which on a block is written at its first sighting.
            budget: None: no limit.
        """
        self._sightings: BlockSightings[K] = sightings if sightings is not None else BlockSightings()
        self._predict = predict
        self._likely = likely
        self._budget = budget
        self.over_budget = 0  # blocks that were worth it, and not written

    def admits(self, key: K, size_bytes: int, now: Nanos) -> bool:
        """Note that a block was written or used; says whether it is worth keeping in the tier."""
        seen = self._sightings.again(key, now)
        if not seen and (self._predict is None or self._predict(key) < self._likely):
            return False
        if self._budget is not None and not self._budget.take(size_bytes, now):
            self.over_budget += 1
            return False
        return True
