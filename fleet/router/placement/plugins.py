"""Policy plug-ins: policies and their parts from other packages, found by entry point and guarded against failures.

Rules:

1. Entry points of the groups `fleet.policies`, `fleet.filters`, `fleet.scorers` and `fleet.pickers` name Structs whose fields are
   their parameters (`fleet.router.policy`). An entry point with the name of a built-in plug-in is ignored.
2. A policy that comes from another package, or has a part from one, decides in a thread of its own, on a copy of the data. If it exceeds
   its time budget, raises an exception or names no candidate, the default policy decides instead. It uses the parameters that the
   settings give for the default policy. The failure is counted. While a call that has exceeded the budget is still running, the policy is not called again.
3. Such a policy has the same time budget for explaining its costs, because the whole router waits for the explanation too. If it does not
   give a finite number for each candidate, the explanation has no cost terms.
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
from msgspec import Struct, structs

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Phase
from fleet.router.placement.policies.built_in import BUILT_IN, DEFAULT, parameters, policy
from fleet.router.placement.policies.composed import Composed, PolicyCatalog
from fleet.router.policy import Candidates, Floats, PlacementPolicy, PlacementRequest, RandomSource
from fleet.router.settings.router import RouterSettings

log = logging.getLogger(__name__)


def policy_catalogue() -> PolicyCatalog:
    """Return the catalog of all plug-ins: the built-in ones and those of other packages.

    Raises:
        ConfigurationRefused: A plug-in cannot be loaded.
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
    """Return the policy that the settings name, guarded if the policy or a part of it comes from another package.

    Raises:
        ConfigurationRefused: There is no such policy, a plug-in cannot be loaded, or the policy does not accept its parameters in the
            settings. If the policy is guarded, this also holds for the parameters of the default policy.
    """
    if known is None:
        known = policy_catalogue()
    chosen = policy(settings.policy, parameters(settings), known)
    if _is_ours(settings, known):
        return chosen
    fallback = policy(DEFAULT, parameters(structs.replace(settings, policy=DEFAULT)))
    return GuardedPolicy(chosen, fallback, settings.policy_budget_ms / 1000)


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
    """Calls a policy of another package within a time budget. If this policy fails, a built-in policy decides (rule 2)."""

    def __init__(self, guarded: PlacementPolicy, fallback: PlacementPolicy, budget_seconds: float):
        """Start the thread in which the policy is called.

        Args:
            guarded: The policy of another package, or with parts from one.
            fallback: The policy that decides if `guarded` fails.
            budget_seconds: Seconds after which `fallback` decides. The router's thread waits for the policy, at most about 5 ms longer
                than this.
        """
        self._guarded = guarded
        self._fallback = fallback
        self._budget = budget_seconds
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[Any, Exception | None]]]] = SimpleQueue()
        self._busy = threading.Event()
        self.fallbacks: dict[str, int] = {}  # number of decisions that the fallback made, by cause
        threading.Thread(target=self._work, name="policy", daemon=True).start()

    @property
    def name(self) -> str:
        return self._guarded.name

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> tuple[int, PlacementPolicy]:
        copied = candidates.copy()
        # the plug-in gets its own random source, because a late plug-in must not draw numbers from the router's source
        own_rng = Random(rng.randrange(1 << 63))
        chosen, cause = self._ask(lambda: self._guarded.choose(request, copied, phase, own_rng)[0], self._budget)
        if not cause and not (isinstance(chosen, (int, np.integer)) and 0 <= chosen < len(candidates)):
            cause = "nobody"
        if not cause:
            return int(chosen), self
        if cause not in self.fallbacks:
            log.warning("policy plug-in failed, default policy decided", extra={"policy": self.name, "cause": cause})
        self.fallbacks[cause] = self.fallbacks.get(cause, 0) + 1
        return self._fallback.choose(request, candidates, phase, rng)

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        copied = candidates.copy()
        found, cause = self._ask(
            lambda: _numbers(self._guarded.costs(request, copied, phase), len(copied)), self._budget
        )
        return {} if cause else found

    def _ask(self, call: Callable[[], Any], seconds: float) -> tuple[Any, str]:
        """Return the result of a call and an empty text; or None and the cause of the failure: "busy", "late" or "raised"."""
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
            except Exception as error:  # noqa: BLE001 - a plug-in may raise any exception; the failure is counted
                answer = None, error
            self._busy.clear()
            answers.put(answer)


def _numbers(costs: Mapping[str, Floats], count: int) -> dict[str, Floats]:
    """Return the costs by name, as new arrays with one number for each of the `count` candidates.

    Raises:
        ValueError: An array has not one number for each candidate, or a number is not finite.
    """
    numbers = {str(name): np.array(each, dtype=np.float64) for name, each in costs.items()}
    if not all(each.shape == (count,) and np.isfinite(each).all() for each in numbers.values()):
        raise ValueError("costs: must be a finite number for each candidate")
    return numbers
