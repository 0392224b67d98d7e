"""Replay scenario: a simulation whose pools are sized by a rule while it runs. It is a scenario with a section `[planner]`."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from fleet.config import load
from fleet.planner.decisions import PlanBudget
from fleet.planner.messages import Replicas
from fleet.sim.scenario import Scenario, Seconds, pool_name
from fleet.sim.workload.clients import OpenClients

Number = float | int | str


class ReplayPoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one pool, and how long its changes take. `gpus` of the pool is what it begins with."""

    least: Replicas = 1
    most: Replicas = 64
    start_seconds: Seconds = 85.0
    """Time from asking for a replica until it serves."""

    start_spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Starts are evenly distributed up to this share of the time below and above it."""

    drain_seconds: Seconds = 120.0
    """Longest drain; most replicas leave earlier, when their last stream has ended."""


class PlannerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How pools are sized."""

    rule: str = "fleet"
    """Rule that decides, unless the command line names others."""

    percentile: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """Share of all requests that have to keep each goal of `[slo]`."""

    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.97
    """Share of requests that rules with hindsight keep in time."""

    pools: dict[str, ReplayPoolSection] = {}
    """Limits by the name of a pool."""

    budget: PlanBudget = PlanBudget()
    """Limits on all pools together; `gpus` is also the number of GPUs that exist."""

    warm_up_seconds: Seconds = 0.0
    """Time from the start that figures leave out, because the first numbers of replicas are not the rule's."""

    metric_delay_seconds: Seconds = 0.0
    """Time from an event until the rule can know of it."""

    gap_every_seconds: Seconds = 0.0
    gap_seconds: Seconds = 0.0
    """Time between the starts of two gaps in which no metrics are delivered, and the length of a gap; 0: there are none."""

    parameters: dict[str, dict[str, Number]] = {}
    """Parameters of rules, by the name of the rule."""

    def __post_init__(self) -> None:
        if self.gap_every_seconds and not 0 < self.gap_seconds < self.gap_every_seconds:
            raise ValueError(
                f"gap_seconds: {self.gap_seconds:g} is not between 0 and gap_every_seconds, {self.gap_every_seconds:g}"
            )


class ReplayScenario(Scenario, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulation whose pools a rule sizes."""

    planner: PlannerSection = PlannerSection()

    def __post_init__(self) -> None:
        super().__post_init__()
        names = {pool_name(pool) for pool in self.pools}
        for name, section in self.planner.pools.items():
            if name not in names:
                raise ValueError(f"planner.pools.{name}: there is no such pool; there are {', '.join(sorted(names))}")
            if section.least > section.most:
                raise ValueError(
                    f"planner.pools.{name}.least: {section.least} is more than most, which is {section.most}"
                )
        if not isinstance(self.clients, OpenClients):
            raise ValueError('clients.kind: rules are compared on the same arrivals, so clients must be "open"')  # noqa: TRY004 - of a field

    def limits(self, name: str) -> ReplayPoolSection:
        """Return the limits of a pool."""
        return self.planner.pools.get(name, ReplayPoolSection())


def read_replay(path: Path, changes: dict[str, Any] | None = None) -> ReplayScenario:
    """Read a replay scenario from a TOML file and change some of its fields.

    Raises:
        ConfigurationRefused: It cannot be read; the message names file and field.
    """
    return load(path, ReplayScenario, changes)
