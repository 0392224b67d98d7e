"""AMD Infera's cost (AMD-AGI/Infera v0.1), with its weight for aggregated workers.

    cost = weight × (prompt blocks - hits)  +  distinct blocks of requests in flight  +  recent

*recent* is the sum of the blocks that a worker did not hold when it was picked, times 0.97 for every later pick of any worker. So a
worker that has just been given much is spared before its load shows it. The weight is 20 for prefill workers and 2 for decode workers.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import lowest
from fleet.router.policy import Candidates, Floats, PlacementPolicy, PlacementRequest, RandomSource

FADES = 0.97  # factor for each pick; half is left after 23 picks
PREFILL_WEIGHT = 20.0
NOTHING = 1e-3  # blocks; smaller values are forgotten


class RecentMisses:
    """The rule with its memory. A policy of its own, since it changes with every choice."""

    name = "infera"

    def __init__(self, weight: float):
        self._weight = weight
        self.recent: dict[str, float] = {}

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> tuple[int, PlacementPolicy]:
        parts = self.costs(request, candidates, phase)
        place = lowest(sum(parts.values(), start=np.zeros(len(candidates))), rng)
        faded = {worker_id: left * FADES for worker_id, left in self.recent.items() if left * FADES > NOTHING}
        worker_id = candidates.worker_ids[place]
        missed = float(self._missed(request, candidates)[place])
        faded[worker_id] = faded.get(worker_id, 0.0) + max(1.0, missed)
        self.recent = faded
        return place, self

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        weight = PREFILL_WEIGHT if phase is Phase.PREFILL else self._weight
        return {
            "missed": weight * self._missed(request, candidates),
            "active": candidates.active_blocks.copy(),
            "recent": np.array([self.recent.get(worker_id, 0.0) for worker_id in candidates.worker_ids]),
        }

    def _missed(self, request: PlacementRequest, candidates: Candidates) -> Floats:
        blocks = np.ceil(request.prompt_tokens / candidates.block_tokens)
        missed: Floats = np.maximum(0.0, blocks - candidates.engine_blocks)
        return missed


class Infera(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AMD Infera's cost: missed blocks, blocks in flight, and what was missed lately."""

    weight: float = 1.0

    def policy(self) -> RecentMisses:
        return RecentMisses(self.weight)
