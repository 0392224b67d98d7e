"""The interface of placement policies: filters, then scorers, then a picker. Each of them may come from an entry point.

Rules:

1. A plug-in is a `msgspec.Struct` whose fields are its parameters; an operator sets them by name. The entry-point groups are
   `fleet.policies`, `fleet.filters`, `fleet.scorers` and `fleet.pickers`.
2. Costs add up: the cost of a candidate is the sum of weight × cost over the scorers, and lower is better.
3. A filter names the candidates to keep; a filter that would keep none is skipped. Workers that *cannot* serve a request are removed
   before, and not by the policy (`fleet.router.placement.eligibility`).
4. The same history leads to the same choices: a policy uses no clock, and no randomness but the `RandomSource` that it is given.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from fleet.core.roles import Phase
from fleet.router.candidates import Candidates, Flags, Floats, PlacementRequest, RandomSource


class Filter(Protocol):
    def keep(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Flags | None:
        """Return a flag for each candidate to keep; None keeps all."""
        ...


class Scorer(Protocol):
    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        """Return a finite cost for each candidate in a new array; lower is better.

        Args:
            request: The request.
            candidates: At least one candidate.
            phase: AGGREGATED if the worker would do everything, PREFILL if it would only compute the prompt.
        """
        ...


@runtime_checkable
class ItemizedScorer(Protocol):
    """A scorer that can return the parts of its costs."""

    def parts(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        """Return named arrays that add up to `costs`."""
        ...


@runtime_checkable
class RankingScorer(Protocol):
    """A scorer that finds the lowest cost faster than it computes all costs."""

    def lowest(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> list[int]:
        """Return the places of the lowest of `costs`, in order.

        Raises:
            ValueError: A cost is not finite.
        """
        ...


class Picker(Protocol):
    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:
        """Return the place of the chosen candidate."""
        ...


class PlacementPolicy(Protocol):
    """The way in which one router chooses workers; it may remember what it chose."""

    @property
    def name(self) -> str: ...

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> "tuple[int, PlacementPolicy]":
        """Return the place of the chosen candidate, and the policy that chose it: another one if this policy failed."""
        ...

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        """Return the parts of each candidate's cost by name. They are computed for an explanation, when somebody asks for one."""
        ...


class PolicyPlugin(Protocol):
    """A Struct that an entry point of `fleet.policies` names; it makes a policy from its parameters."""

    def policy(self) -> PlacementPolicy: ...
