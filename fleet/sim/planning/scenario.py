"""Replay scenario: a scenario with the section `[planner]`, in which a scaling rule sizes the pools during the run."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from fleet.config import load, read_file
from fleet.core.errors import ConfigurationRefused
from fleet.planner.decisions import PlanBudget
from fleet.planner.messages import Replicas
from fleet.sim.scenario import Scenario, Seconds, pool_name
from fleet.sim.workload.clients import OpenClients

Number = float | int | str

PLANNER = "planner"
"""Name of the section that makes a scenario a replay scenario."""


class ReplayPoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one pool, and the durations of its starts and drains. Its size at the beginning follows from its section in `[[pools]]`."""

    least: Replicas = 1
    most: Replicas = 64
    start_seconds: Seconds = 85.0
    """Time from the start of a replica until it can serve."""

    start_spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Variation of start durations, as a share of `start_seconds`: with 0.2, each is drawn uniformly from 0.8 to 1.2 times that time."""

    drain_seconds: Seconds = 120.0
    """Maximum duration of a drain; most replicas leave earlier, when their last answer has ended."""


class PlannerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the section `[planner]`: which rule sizes the pools, within which limits, and with which data about the demand."""

    rule: str = "fleet"
    """Name of the rule that decides, unless the command line names others."""

    percentile: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """Share of all requests that have to keep each goal of `[slo]`."""

    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.97
    """Share of requests that must keep the goals, for rules that know all requests in advance."""

    pools: dict[str, ReplayPoolSection] = {}
    """Limits of pools, by the name of the pool."""

    budget: PlanBudget = PlanBudget()
    """Limits on all pools together; its field `gpus` is also the number of GPUs that the cluster has."""

    warm_up_seconds: Seconds = 0.0
    """Time at the beginning that results leave out (except for `ReplayOutcome.plans`), because the first numbers of replicas come from the
    scenario, and not from the rule."""

    metric_delay_seconds: Seconds = 0.0
    """Delay from the end of a record (`fleet.sim.planning.demand`) until the demand windows that the rule gets contain it."""

    gap_every_seconds: Seconds = 0.0
    gap_seconds: Seconds = 0.0
    """Time between the starts of two gaps, and the length of a gap, in which no metrics are delivered; 0: there are no gaps."""

    parameters: dict[str, dict[str, Number]] = {}
    """Parameters of rules, by the name of the rule."""

    def __post_init__(self) -> None:
        if self.gap_every_seconds and not 0 < self.gap_seconds < self.gap_every_seconds:
            raise ValueError(
                f"gap_seconds: {self.gap_seconds:g} is not between 0 and gap_every_seconds, {self.gap_every_seconds:g}"
            )


class ReplayScenario(Scenario, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulation whose pools are sized by a rule: a scenario with the section `[planner]`."""

    planner: PlannerSection
    """The section is required, but may be empty: all its keys have defaults."""

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
        if self.faults:
            raise ValueError("faults: a replay has none; simulate them with `fleet sim run`")

    def limits(self, name: str) -> ReplayPoolSection:
        """Return the limits of a pool; the defaults if the scenario states none."""
        return self.planner.pools.get(name, ReplayPoolSection())


def read_replay(path: Path, changes: dict[str, Any] | None = None) -> ReplayScenario:
    """Read a replay scenario from a TOML file. `changes` maps paths of fields to values that replace the file's (`fleet.config.load`).

    Raises:
        ConfigurationRefused: The file cannot be read, or a field is invalid; the message names the file and the invalid field.
            Or neither the file nor `changes` has the section `[planner]`.
    """
    content = read_file(path)
    if PLANNER not in content and not any(where.split(".")[0] == PLANNER for where in changes or {}):
        raise ConfigurationRefused(
            f"{path}: planner: a replay needs this section, which says how large a rule may make the pools; see docs/simulator.md"
        )
    return load(path, ReplayScenario, changes, content=content)
