"""Objectives of a sweep: rank the scenarios that keep the SLO by their cost or energy for each good request.

A request that misses its SLO costs as much as a good one, but is useless. So cost and energy are divided by the number
of good requests, and not by the number of tokens.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from statistics import fmean

from msgspec import Struct

from fleet.sim.experiments.sweep import SweepRow
from fleet.sim.results.outcomes import RunOutcome

JOULES_PER_KWH = 3.6e6


class SweepObjective(StrEnum):
    """The figure by which a sweep ranks the scenarios that keep the SLO; the scenario with the lowest figure is the best."""

    COST = "cost"  # dollars per thousand good requests
    ENERGY = "energy"  # kilojoules per good request


class RankedScenario(Struct, frozen=True, kw_only=True):
    """A scenario with its changed fields, and its results over all seeds."""

    scenario: str
    changes: dict[str, object]
    seeds: int
    attainment: float  # mean over the seeds
    figure: float | None  # mean of the objective's figure over the seeds; None if a seed had no good request
    keeps: bool  # True if `attainment` is at least the wanted attainment


def spent(outcome: RunOutcome, objective: SweepObjective) -> float:
    """Return the objective's figure for one run, such as dollars per thousand good requests.

    The figure is infinite if no request was good.
    """
    if not (good := outcome.attainment * outcome.requests):
        return inf
    match objective:
        case SweepObjective.COST:
            return 1000 * outcome.cost / good
        case SweepObjective.ENERGY:
            return outcome.energy_kwh * JOULES_PER_KWH / 1000 / good


def ranked(rows: Sequence[SweepRow], objective: SweepObjective, attainment: float) -> list[RankedScenario]:
    """Rank scenarios: first those that reach `attainment`, by ascending figure; then all others, by descending attainment.

    Rows that differ only in their seeds count as one scenario, whose attainment is the mean over these rows.
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
