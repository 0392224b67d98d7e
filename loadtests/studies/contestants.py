"""Contestants of a comparison of policies: each is a policy with published or tuned parameters.

Tuned parameters are in `tuned.toml`, by workload and policy; `loadtests.studies.tuning` finds them with the same number of trials for
each policy.
"""

import tomllib
from typing import Any

from msgspec import Struct

from fleet.sim.run import RunPlan
from loadtests.studies.runs import FOLDER

NEVER = 1e9
"""Balancing threshold for Mooncake's policy that is never reached.

In Mooncake, an instance fetches a prefix from another instance that has much more of the prefix; the threshold says how much more. The
simulated engines cannot fetch prefixes, so the policy must never choose this.
"""

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
"""Policies that Fleet's policy is compared with in findings that have a target."""

PREFILL_QUEUE_SETTINGS = ("prefill_window_tokens", "prefill_size_seconds")
"""Settings of the router that determine the order in which prompts are computed."""

AS_THEY_COME = {"prefill_window_tokens": 0, "prefill_size_seconds": 0.0}
"""Settings that switch the prefill queue off, as in routers that have none: prompts are computed as they come."""


class Contestant(Struct, frozen=True, kw_only=True):
    name: str
    policy: str
    parameters: dict[str, Any] = {}  # policy parameters
    settings: dict[str, Any] = {}  # router settings

    def changes(self) -> dict[str, Any]:
        """Return the changes that make a scenario run this contestant."""
        return {
            "router.policy": self.policy,
            "router.policies": {self.policy: self.parameters},
            **{f"router.{name}": value for name, value in self.settings.items()},
        }


def published(policy: str, plan: RunPlan) -> Contestant:
    """Return a contestant with the published parameters of a policy. The prefill queue is switched off, except for Fleet's policy."""
    return Contestant(
        name=policy,
        policy=policy,
        parameters=fitted(policy, plan),
        settings={} if policy == "fleet" else AS_THEY_COME,
    )


def tuned(policy: str, workload: str, plan: RunPlan) -> Contestant:
    """Return a contestant with the parameters that were tuned for a workload; with the published ones if there are none."""
    found = tomllib.loads((FOLDER / "tuned.toml").read_text()).get(workload, {}).get(policy)
    return published(policy, plan) if found is None else chosen(policy, found, plan)


def chosen(policy: str, values: dict[str, Any], plan: RunPlan, name: str = "") -> Contestant:
    """Return a contestant with these `values` of policy parameters and prefill queue settings."""
    parameters = {key: value for key, value in values.items() if key not in PREFILL_QUEUE_SETTINGS}
    fit = fitted(policy, plan)
    for key, factor in parameters.items():
        if key in fit:  # an engine parameter is given as a factor of the true value
            fit[key] = fit[key] * factor
    settings = {key: values[key] for key in PREFILL_QUEUE_SETTINGS if key in values}
    if policy != "fleet":
        settings = {**AS_THEY_COME, **settings}
    return Contestant(name=name or policy, policy=policy, parameters={**parameters, **fit}, settings=settings)


def fitted(policy: str, plan: RunPlan) -> dict[str, Any]:
    """Return parameters with the true step times of the engines, for policies that need them in advance; otherwise none."""
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
