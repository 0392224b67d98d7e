"""Objectives of a sweep: which scenario spends least money or energy for its good requests, among those that keep the SLO.

A request that was late is of no use, but costs as much. So figures are per good request, not per token.
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
    """The figure that should be low."""

    COST = "cost"  # dollars per thousand good requests
    ENERGY = "energy"  # kilojoules per good request


class RankedScenario(Struct, frozen=True, kw_only=True):
    """A scenario with its changes; all seeds together."""

    scenario: str
    changes: dict[str, object]
    seeds: int
    attainment: float  # mean
    figure: float | None  # mean over the seeds; None if no request was good
    keeps: bool  # whether the wanted attainment was reached


def spent(outcome: RunOutcome, objective: SweepObjective) -> float:
    """Return the figure of a run; infinite if no request was good."""
    if not (good := outcome.attainment * outcome.requests):
        return inf
    match objective:
        case SweepObjective.COST:
            return 1000 * outcome.cost / good
        case SweepObjective.ENERGY:
            return outcome.energy_kwh * JOULES_PER_KWH / 1000 / good


def ranked(rows: Sequence[SweepRow], objective: SweepObjective, attainment: float) -> list[RankedScenario]:
    """Rank scenarios: first those that reach the attainment, by their figure; then the others, by their attainment.

    Rows that differ only in their seeds are one scenario, whose attainment is the mean.
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
