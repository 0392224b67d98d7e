"""AMD Infera's cost (AMD-AGI/Infera v0.1), with its weight for aggregated workers.

    cost = weight × (prompt blocks - hits)  +  distinct blocks of requests in flight  +  recent

*recent* is the sum of the blocks that a worker had to compute for the requests that it got, at least one block for each request. The sum is
multiplied with 0.97 whenever any worker gets a request. So a worker that has just got much work is avoided even before its load shows this
work. Infera's weight is 20 for prefill workers and 2 for decode workers. This policy uses 20 for prefill workers and its parameter `weight`
for all other workers.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import lowest
from fleet.router.policy import Candidates, Floats, PlacementPolicy, PlacementRequest, RandomSource

FADES = 0.97  # factor by which *recent* shrinks at each choice; after 23 choices half of it is left
PREFILL_WEIGHT = 20.0
NOTHING = 1e-3  # a worker's value of *recent*, in blocks, is forgotten if it is not above this


class RecentMisses:
    """Policy that follows the formula of this module. It is no scorer, because it has to remember each choice."""

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
    """AMD Infera's policy: its cost counts blocks to compute, blocks of running requests, and blocks that were to be computed lately."""

    weight: float = 1.0

    def policy(self) -> RecentMisses:
        return RecentMisses(self.weight)
