"""Policies and their parts from other packages: found by entry point, and kept from doing harm.

Rules:

1. Entry points of the groups `fleet.policies`, `fleet.filters`, `fleet.scorers` and `fleet.pickers` name Structs whose fields are
   their parameters (`fleet.router.policy`). A name of ours keeps its meaning.
2. What is not ours decides in a thread of its own and on copies. When it has not decided within its budget, raises, or names
   nobody, the default policy decides, and that is counted; until a late one comes to an end, it is not asked again.
3. Asked what its costs are made of it has no more time, since the whole router waits for that too. Without an answer that is a
   number for each candidate, the explanation goes without terms.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Phase
from fleet.router.candidates import Candidates, Floats, PlacementRequest, RandomSource
from fleet.router.placement.policies.built_in import BUILT_IN, DEFAULT, parameters, policy
from fleet.router.placement.policies.composed import Composed, PolicyCatalog
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings

log = logging.getLogger(__name__)


def policy_catalogue() -> PolicyCatalog:
    """Our plug-ins and those of other packages.

    Raises:
        ConfigurationRefused: One of them cannot be loaded.
    """
    return PolicyCatalog(
        policies=_with_found("fleet.policies", BUILT_IN.policies),
        filters=_with_found("fleet.filters", BUILT_IN.filters),
        scorers=_with_found("fleet.scorers", BUILT_IN.scorers),
        pickers=_with_found("fleet.pickers", BUILT_IN.pickers),
    )


def _with_found(group: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entry_points(group=group):
        if entry.name in ours:
            continue
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            raise ConfigurationRefused(f"entry point {entry.name} of {group}: {error}") from error
        if not (isinstance(found[entry.name], type) and issubclass(found[entry.name], Struct)):
            raise ConfigurationRefused(f"entry point {entry.name} of {group}: {entry.value} is no msgspec.Struct")
    return {**ours, **found}


def open_policy(settings: RouterSettings, known: PolicyCatalog | None = None) -> PlacementPolicy:
    """The policy that settings name, guarded when any of it is not ours.

    Raises:
        ConfigurationRefused: There is none, or it does not take its parameters.
    """
    if known is None:
        known = policy_catalogue()
    chosen = policy(settings.policy, parameters(settings), known)
    if _is_ours(settings, known):
        return chosen
    plain = RouterSettings()
    return GuardedPolicy(chosen, policy(DEFAULT, parameters(plain)), settings.policy_budget_ms / 1000)


def _is_ours(settings: RouterSettings, known: PolicyCatalog) -> bool:
    kind = known.policies[settings.policy]
    if kind is not BUILT_IN.policies.get(settings.policy):
        return False
    if kind is not Composed:
        return True
    parts = msgspec.convert(settings.policies.get(settings.policy, {}), Composed)
    return (
        all(part.name in BUILT_IN.filters for part in parts.filters)
        and all(part.name in BUILT_IN.scorers for part in parts.scorers)
        and parts.picker.name in BUILT_IN.pickers
    )


class GuardedPolicy:
    """A policy that is not ours, and one of ours that decides when it does not."""

    def __init__(self, guarded: PlacementPolicy, fallback: PlacementPolicy, budget_seconds: float):
        """Wraps a policy.

        Args:
            guarded: The one from elsewhere.
            fallback: Decides in its place.
            budget_seconds: For one decision. Python gives the waiting thread its turn within some 5 ms of that.
        """
        self._guarded = guarded
        self._fallback = fallback
        self._budget = budget_seconds
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[Any, Exception | None]]]] = SimpleQueue()
        self._busy = threading.Event()
        self.fallbacks: dict[str, int] = {}  # by cause
        threading.Thread(target=self._work, name="policy", daemon=True).start()

    @property
    def name(self) -> str:
        return self._guarded.name

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> tuple[int, PlacementPolicy]:
        copied = candidates.copy()
        luck = Random(rng.randrange(1 << 63))  # a late one must not draw from ours
        chosen, cause = self._ask(lambda: self._guarded.choose(request, copied, phase, luck)[0], self._budget)
        if not cause and not (isinstance(chosen, (int, np.integer)) and 0 <= chosen < len(candidates)):
            cause = "nobody"
        if not cause:
            return int(chosen), self
        if cause not in self.fallbacks:
            log.warning("a policy did not decide; the default did", extra={"policy": self.name, "cause": cause})
        self.fallbacks[cause] = self.fallbacks.get(cause, 0) + 1
        return self._fallback.choose(request, candidates, phase, rng)

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        copied = candidates.copy()
        found, cause = self._ask(
            lambda: _numbers(self._guarded.costs(request, copied, phase), len(copied)), self._budget
        )
        return {} if cause else found

    def _ask(self, call: Callable[[], Any], seconds: float) -> tuple[Any, str]:
        """What a call returns, and why it does not: "busy", "late" or "raised"."""
        if self._busy.is_set():
            return None, "busy"
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._busy.set()
        self._calls.put((call, answers))
        try:
            answer, error = answers.get(timeout=seconds)
        except Empty:
            return None, "late"
        return answer, "" if error is None else "raised"

    def _work(self) -> None:
        while True:
            call, answers = self._calls.get()
            try:
                answer: tuple[Any, Exception | None] = call(), None
            except Exception as error:  # noqa: BLE001 - what is not ours may raise anything; it is counted
                answer = None, error
            self._busy.clear()
            answers.put(answer)


def _numbers(costs: Mapping[str, Floats], count: int) -> dict[str, Floats]:
    """Costs by name, of so many candidates.

    Raises:
        ValueError: They are not.
    """
    numbers = {str(name): np.array(each, dtype=np.float64) for name, each in costs.items()}
    if not all(each.shape == (count,) and np.isfinite(each).all() for each in numbers.values()):
        raise ValueError("costs: must be a finite number for each candidate")
    return numbers
