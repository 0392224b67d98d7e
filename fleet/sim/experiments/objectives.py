"""Which of many runs is best: by what its good requests cost, in money or in energy, among those that keep the SLO.

A request that was late is no use to anybody, but is paid for; so figures are of good requests, and not of tokens.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from statistics import fmean

from msgspec import Struct

from fleet.sim.experiments.sweep import SweepRow
from fleet.sim.results.outcomes import RunOutcome

JOULES = 3.6e6
"""Of a kWh."""


class SweepObjective(StrEnum):
    """What is to be little."""

    COST = "cost"  # dollars a thousand good requests
    ENERGY = "energy"  # kilojoules a good request


class RankedScenario(Struct, frozen=True, kw_only=True):
    """A scenario with some changes, all seeds together."""

    scenario: str
    changes: dict[str, object]
    seeds: int
    attainment: float  # mean
    figure: float | None  # mean; None: no request was good
    keeps: bool  # as large an attainment as was asked for


def spent(outcome: RunOutcome, objective: SweepObjective) -> float:
    """For its good requests; infinite where there are none."""
    if not (good := outcome.attainment * outcome.requests):
        return inf
    match objective:
        case SweepObjective.COST:
            return 1000 * outcome.cost / good
        case SweepObjective.ENERGY:
            return outcome.energy_kwh * JOULES / 1000 / good


def ranked(rows: Sequence[SweepRow], objective: SweepObjective, attainment: float) -> list[RankedScenario]:
    """The best first: those that keep the attainment by what they spend, then all others by how much they attain.

    Args:
        rows: Of a sweep; those that differ in their seeds alone are one.
        objective: That counts.
        attainment: To be kept, on average over the seeds.
    """
    alike: dict[tuple[str, str], list[SweepRow]] = {}
    for row in rows:
        alike.setdefault((row.scenario, repr(row.changes)), []).append(row)
    found = []
    for group in alike.values():
        attained = fmean(row.outcome.attainment for row in group)
        figure = fmean(spent(row.outcome, objective) for row in group)
        found.append(
            RankedScenario(
                scenario=group[0].scenario,
                changes=group[0].changes,
                seeds=len(group),
                attainment=round(attained, 5),
                figure=None if figure == inf else round(figure, 4),
                keeps=attained >= attainment,
            )
        )
    return sorted(found, key=_order)


def _order(each: RankedScenario) -> tuple[bool, float]:
    kept = inf if each.figure is None else each.figure
    return not each.keeps, kept if each.keeps else -each.attainment
