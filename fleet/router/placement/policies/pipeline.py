"""Policy pipeline: filters, then weighted scorers, then a picker. Most built-in policies have this form."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.native import costs as native
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

_STEPS = 1 << 53  # number of different random numbers from 0 to below 1 that `Softmax` can draw


class Pipeline:
    """Policy that applies filters, then weighted scorers, then a picker."""

    def __init__(
        self,
        name: str,
        *,
        filters: Sequence[Filter] = (),
        scorers: Sequence[tuple[str, float, Scorer]] = (),
        picker: Picker | None = None,
    ):
        """Combine the parts of a policy.

        Args:
            name: The policy's name in settings.
            filters: The filters in order. Each gets the candidates that the filter before it has kept.
            scorers: For each scorer its name, its weight and the scorer.
            picker: The picker; None: the lowest cost, where ties are drawn at random.
        """
        self.name = name
        self._filters = tuple(filters)
        self.scorers = tuple(scorers)
        self._picker: Picker = picker or Lowest()
        self._total = self._sum
        # The only scorer, if it has weight 1 and can find the lowest costs itself, and the picker is `Lowest`. None: `choose` computes all
        # costs.
        self._ranking: RankingScorer | None = None
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


def lowest(costs: Floats, rng: RandomSource) -> int:
    """Return the position of the lowest cost. Exact ties are drawn with equal chances, so that equal workers get equal shares."""
    return drawn(native.lowest(costs), rng)


def drawn(places: list[int], rng: RandomSource) -> int:
    """Draw one of the positions; all have the same chance."""
    return places[0] if len(places) == 1 else places[rng.randrange(len(places))]


class Lowest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that takes the lowest cost. Ties are drawn at random."""

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        return lowest(costs, rng)


class Softmax(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that prefers low costs, like NVIDIA Dynamo: p ∝ exp(-(cost - lowest) / ((highest - lowest) · temperature)).

    The costs are divided by their range over the candidates, so that a temperature has the same meaning for any unit of cost. With
    temperature 0 this is the same as `Lowest`.
    """

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError("temperature: must be 0 or more")

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        if self.temperature == 0:
            return lowest(costs, rng)
        values = costs.tolist()
        low, high = min(values), max(values)
        if low == high:
            return rng.randrange(len(values))
        if (scale := (high - low) * self.temperature) == 0:  # the product is too small for a float
            return lowest(costs, rng)
        sums = list(accumulate(math.exp((low - value) / scale) for value in values))
        drawn = sums[-1] * rng.randrange(_STEPS) / _STEPS
        return next(place for place, bound in enumerate(sums) if drawn < bound)


class InTurn:
    """Picker that takes workers in turn, whatever they cost: the worker that was not chosen for the longest time is next.

    It remembers the names of workers and not their positions, so that no worker is repeated or skipped when another one joins or leaves.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # for each worker, the number of the choice (`_turn`) that last took it
        self._turn = 0

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        turns = self._turns
        if len(turns) > 2 * len(candidates) + 64:  # forget workers that have left, but not at every choice
            known = set(candidates.worker_ids)
            self._turns = turns = {name: turn for name, turn in turns.items() if name in known}
        names = candidates.worker_ids
        place = min(range(len(names)), key=lambda row: turns.get(names[row], 0))
        self._turn += 1
        turns[names[place]] = self._turn
        return place


class TwoChoices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that draws two candidates at random and takes the cheaper one (Mitzenmacher, "The Power of Two Choices", IEEE TPDS 2001)."""

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        count = len(costs)
        if count == 1:
            return 0
        first = rng.randrange(count)
        second = rng.randrange(count - 1)
        second += second >= first
        return first if costs[first] <= costs[second] else second
