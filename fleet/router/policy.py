"""The parts of a policy: filters, then scorers, then a picker. Each is small, and each may come from an entry point.

Rules:

1. A plug-in is a `msgspec.Struct` whose fields are its parameters; an operator sets them by name. The entry-point groups are
   `fleet.policies`, `fleet.filters`, `fleet.scorers` and `fleet.pickers`.
2. Costs add up: a candidate's cost is the sum over the scorers of weight × cost, and lower is better.
3. A filter says whom it would keep; one that would keep nobody is passed over. Who *cannot* serve a request is not a
   policy's business and has gone before (`fleet.router.placement.eligibility`).
4. Same history, same choices: no clock, no luck but the `RandomSource` that is passed in.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from fleet.core.roles import Phase
from fleet.router.candidates import Candidates, Flags, Floats, PlacementRequest, RandomSource


class Filter(Protocol):
    def keep(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Flags | None:
        """Whom to keep, a flag for each candidate; None keeps all."""
        ...


class Scorer(Protocol):
    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        """A cost for each candidate, finite, in an array of its own; lower is better.

        Args:
            request: The request.
            candidates: At least one.
            phase: AGGREGATED where the worker would do everything, PREFILL where it would compute the prompt only.
        """
        ...


@runtime_checkable
class ItemizedScorer(Protocol):
    """A scorer that can say what its costs are made of."""

    def parts(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        """Arrays by name that add up to `costs`."""
        ...


@runtime_checkable
class RankingScorer(Protocol):
    """A scorer that can say whose cost is the lowest in less time than all costs take."""

    def lowest(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> list[int]:
        """Places of the lowest of `costs`, in order.

        Raises:
            ValueError: A cost is not finite.
        """
        ...


class Picker(Protocol):
    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:
        """The place of the chosen one."""
        ...


class PlacementPolicy(Protocol):
    """One router's way of choosing; it may remember what it chose."""

    @property
    def name(self) -> str: ...

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> "tuple[int, PlacementPolicy]":
        """The place of the chosen one, and the policy that chose: another than this one, where this one failed."""
        ...

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        """What each candidate's cost is made of, by name: for explanations, worked out when somebody asks."""
        ...


class PolicyPlugin(Protocol):
    """What an entry point of `fleet.policies` names: a Struct that makes a policy with its parameters."""

    def policy(self) -> PlacementPolicy: ...
