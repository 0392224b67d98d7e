"""The last step of a policy: one of several, by their costs."""

import math
from itertools import accumulate

from msgspec import Struct

from fleet.router.candidates import Candidates, Floats, PlacementRequest, RandomSource
from fleet.router.native import costs as native

_STEPS = 1 << 53  # as many as a float between 0 and 1 has


def lowest(costs: Floats, rng: RandomSource) -> int:
    """Place of the lowest cost; exact ties are drawn uniformly, so that equal workers get equal shares."""
    return drawn(native.lowest(costs), rng)


def drawn(places: list[int], rng: RandomSource) -> int:
    """One of them."""
    return places[0] if len(places) == 1 else places[rng.randrange(len(places))]


class Lowest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lowest cost; ties are drawn."""

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        return lowest(costs, rng)


class Softmax(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low costs more often: p ∝ exp(-(cost - lowest) / ((highest - lowest) · temperature)), the rule of NVIDIA Dynamo.

    Costs are normalised over the candidates, so that a temperature means the same whatever the unit; at 0 it is `Lowest`.
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
        if (scale := (high - low) * self.temperature) == 0:  # too low for a float
            return lowest(costs, rng)
        sums = list(accumulate(math.exp((low - value) / scale) for value in values))
        drawn = sums[-1] * rng.randrange(_STEPS) / _STEPS
        return next(place for place, bound in enumerate(sums) if drawn < bound)


class InTurn:
    """One after the other, whatever they cost: by who has waited longest for a turn.

    It remembers workers and not places, so that joining and leaving neither repeats nor skips anybody.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # when each was last chosen
        self._turn = 0

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        turns = self._turns
        if len(turns) > 2 * len(candidates) + 64:  # of workers that have left
            known = set(candidates.worker_ids)
            self._turns = turns = {name: turn for name, turn in turns.items() if name in known}
        names = candidates.worker_ids
        place = min(range(len(names)), key=lambda row: turns.get(names[row], 0))
        self._turn += 1
        turns[names[place]] = self._turn
        return place


class TwoChoices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cheaper of two drawn at random (Mitzenmacher, "The Power of Two Choices", IEEE TPDS 2001)."""

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        count = len(costs)
        if count == 1:
            return 0
        first = rng.randrange(count)
        second = rng.randrange(count - 1)
        second += second >= first
        return first if costs[first] <= costs[second] else second
