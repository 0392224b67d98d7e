"""Who takes part in a contest of policies, with which parameters: the published ones, or those that a search has found.

Parameters that were found are in `tuned.toml`, by workload and policy; `loadtests.studies.tuning` finds them, with the same number of
trials for everybody.
"""

import tomllib
from typing import Any

from msgspec import Struct

from fleet.sim.run import RunPlan
from loadtests.studies.runs import FOLDER

NEVER = 1e9
"""Mooncake's instances fetch prefixes from each other where one has much more than another. These engines have no way to, so its rule
must not count on it."""

POLICIES = (
    "fleet",
    "dynamo",
    "mooncake",
    "llm_d",
    "smg",
    "aibrix",
    "infera",
    "preble",
    "least_loaded",
    "round_robin",
)
PEERS = ("dynamo", "mooncake")
"""Those that a target names."""

LANES = ("prefill_window_tokens", "prefill_size_seconds")
"""Settings of the router, and not of a policy, that say in which order prompts are computed."""

AS_THEY_COME = {"prefill_window_tokens": 0, "prefill_size_seconds": 0.0}
"""What routers without lanes do."""


class Contestant(Struct, frozen=True, kw_only=True):
    name: str
    policy: str
    parameters: dict[str, Any] = {}  # of the policy
    settings: dict[str, Any] = {}  # of the router

    def changes(self) -> dict[str, Any]:
        """Of a scenario, so that it is routed like this."""
        return {
            "router.policy": self.policy,
            "router.policies": {self.policy: self.parameters},
            **{f"router.{name}": value for name, value in self.settings.items()},
        }


def published(policy: str, plan: RunPlan) -> Contestant:
    """With its defaults, and prompts computed as they come; ours as it is when nothing is set."""
    return Contestant(
        name=policy,
        policy=policy,
        parameters=fitted(policy, plan),
        settings={} if policy == "fleet" else AS_THEY_COME,
    )


def tuned(policy: str, workload: str, plan: RunPlan) -> Contestant:
    """With what was found for a workload, if anything was."""
    found = tomllib.loads((FOLDER / "tuned.toml").read_text()).get(workload, {}).get(policy)
    return published(policy, plan) if found is None else chosen(policy, found, plan)


def chosen(policy: str, values: dict[str, Any], plan: RunPlan, name: str = "") -> Contestant:
    """With some parameters of the policy, and some of the lanes."""
    parameters = {key: value for key, value in values.items() if key not in LANES}
    fit = fitted(policy, plan)
    for key, factor in parameters.items():
        if key in fit:  # what is known of the engine is given as a factor of the true one
            fit[key] = fit[key] * factor
    settings = {key: values[key] for key in LANES if key in values}
    if policy != "fleet":
        settings = {**AS_THEY_COME, **settings}
    return Contestant(name=name or policy, policy=policy, parameters={**parameters, **fit}, settings=settings)


def fitted(policy: str, plan: RunPlan) -> dict[str, Any]:
    """Parameters that a rule takes from an engine measured beforehand: it gets the true ones."""
    if policy not in ("mooncake", "preble"):
        return {}
    pool = plan.pools[0]
    step = pool.limits.step_tokens
    full = pool.times.seconds(step, 0.0, 0, 0.0)
    pair = (pool.times.seconds(step, 1e8, 0, 0.0) - full) / 1e8
    prefill = {"prefill_seconds_per_token": full / step, "quadratic_seconds": pair / 2}
    if policy == "preble":
        return {**prefill, "decode_seconds_per_token": pool.times.seconds(0.0, 0.0, 1, 0.0)}
    return {**prefill, "balancing_threshold": NEVER}
