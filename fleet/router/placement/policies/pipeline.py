"""Policy pipeline: filters, then weighted scorers, then a picker. All policies have this shape."""

from collections.abc import Mapping, Sequence

import numpy as np

from fleet.core.roles import Phase
from fleet.router.placement.policies.pickers import Lowest, drawn
from fleet.router.policy import (
    Candidates,
    Filter,
    Floats,
    ItemizedScorer,
    Picker,
    PlacementPolicy,
    PlacementRequest,
    RandomSource,
    RankingScorer,
    Rows,
    Scorer,
)


class Pipeline:
    """A policy made of parts."""

    def __init__(
        self,
        name: str,
        *,
        filters: Sequence[Filter] = (),
        scorers: Sequence[tuple[str, float, Scorer]] = (),
        picker: Picker | None = None,
    ):
        """Combine the parts.

        Args:
            name: The policy's name in settings.
            filters: Filters in order; each gets the candidates that the one before has kept.
            scorers: Name, weight and scorer of each.
            picker: The picker; by default the lowest cost, with ties drawn.
        """
        self.name = name
        self._filters = tuple(filters)
        self.scorers = tuple(scorers)
        self._picker: Picker = picker or Lowest()
        self._total = self._sum
        self._ranking: RankingScorer | None = (
            None  # a scorer that finds the lowest cost directly, if nothing else is needed
        )
        if len(self.scorers) == 1 and self.scorers[0][1] == 1:
            scorer = self.scorers[0][2]
            self._total = scorer.costs
            if isinstance(self._picker, Lowest) and isinstance(scorer, RankingScorer):
                self._ranking = scorer

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> tuple[int, PlacementPolicy]:
        rows: Rows | None = None
        for each in self._filters:
            if (flags := each.keep(request, candidates, phase)) is None:
                continue
            keep = flags.nonzero()[0]
            if 0 < len(keep) < len(candidates):
                rows, candidates = keep if rows is None else rows[keep], candidates.only(keep)
        if self._ranking is None:
            picked = self._picker.pick(self._total(request, candidates, phase), request, candidates, rng)
        else:
            picked = drawn(self._ranking.lowest(request, candidates, phase), rng)
        return picked if rows is None else int(rows[picked]), self

    def _sum(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        total = np.zeros(len(candidates))
        for _, weight, scorer in self.scorers:
            total += weight * scorer.costs(request, candidates, phase)
        return total

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        parts: dict[str, Floats] = {}
        for name, weight, scorer in self.scorers:
            if isinstance(scorer, ItemizedScorer):
                found = scorer.parts(request, candidates, phase)
            else:
                found = {name: scorer.costs(request, candidates, phase)}
            for part, costs in found.items():
                parts[part] = parts.get(part, 0.0) + weight * costs
        return parts
