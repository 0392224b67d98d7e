"""Planner report: writes one HTML page about a replayed planner, with demand, replicas, goals, cost, and decisions with their reasons."""

from collections.abc import Sequence
from math import ceil
from typing import TextIO

import msgspec
from markupsafe import Markup

from fleet.sim.planning.replay import ReplayResult, ReplayStep
from fleet.sim.planning.scenario import ReplayScenario
from fleet.sim.report.charts import LINES, ChartLine, LimitMark, chart, number
from fleet.sim.report.page import SummaryTile, chosen_settings, report_template
from fleet.sim.report.sections import TIME_UNITS, ReportSection, ReportTable
from fleet.sim.scenario import pool_name

MOST_DECISIONS = 200
"""Maximum number of decisions that the page lists for each scaling rule."""

POINTS = 400
"""Maximum number of points of a line in a chart. If a scaling rule has made more decisions, only some of them get a point."""

KINDS = ("wanted", "ready")
"""The numbers of replicas of a pool that get a line: fields of `ReplayStep`."""


def write_planner_report(
    file: TextIO, name: str, scenario: ReplayScenario, results: Sequence[ReplayResult], prices: dict[str, float]
) -> None:
    """Write the page about the replays of one or more rules. `prices` maps each pool to the dollars per hour of one replica."""
    assert results, "a page is about one rule at least"
    first = results[0].outcome
    sizers = "one rule sizes" if len(results) == 1 else f"{len(results)} rules size"
    file.write(
        report_template().render(
            name=name,
            what=f"{first.requests:,} requests to {scenario.model} on pools that {sizers}.",
            when=(
                f"Figures are taken from {number(results[0].span[0])} s to {number(results[0].span[1])} s. A request is good if its "
                f"first token comes within {number(scenario.slo.ttft_ms)} ms and the others within {number(scenario.slo.tpot_ms)} ms each."
            ),
            tiles=[
                SummaryTile(
                    f"{each.outcome.attainment:.1%}",
                    f"good with {each.outcome.gpu_hours:,.1f} GPU-hours: {each.outcome.rule}",
                )
                for each in results
            ],
            sections=[_comparison(results), *(_course(each, scenario, prices) for each in results)],
            scenario=msgspec.json.format(msgspec.json.encode(chosen_settings(scenario))).decode(),
            digest="",
        )
    )


def _comparison(results: Sequence[ReplayResult]) -> ReportSection:
    rows = []
    for each in results:
        figures = each.outcome
        error = "none" if figures.predicted_error is None else f"{figures.predicted_error:.1%}"
        rows.append(
            (
                figures.rule,
                f"{figures.attainment:.2%}",
                f"{figures.gpu_hours:,.2f}",
                f"{figures.dollars:,.2f}",
                str(figures.direction_changes),
                str(figures.most_replicas),
                str(figures.plans),
                f"{figures.refused:,}",
                error,
            )
        )
    head = ("rule", "attainment", "GPU-hours", "dollars", "turns", "most replicas", "plans", "refused", "error")
    return ReportSection(
        title="Rules",
        said="Turns are changes of a pool's wanted number against the direction of the change before. "
        "The error is the mean distance of the forecast rate from the rate that came.",
        tables=(ReportTable(name="rules", head=head, rows=rows),),
    )


def _course(result: ReplayResult, scenario: ReplayScenario, prices: dict[str, float]) -> ReportSection:
    last = result.steps[-1].at if result.steps else 0.0
    unit, unit_name = next((seconds, name) for least, seconds, name in TIME_UNITS if last >= least)
    x = f"simulated {unit_name}"
    steps = thinned(result.steps)
    names = [pool_name(pool) for pool in scenario.pools]
    empty = [name for name in names if not any(step.wanted[name] or step.held[name] for step in result.steps)]

    def line(name: str, points: Sequence[tuple[float, float]]) -> ChartLine:
        return ChartLine(name=name, points=[(at / unit, value) for at, value in points])

    def replicas(names: Sequence[str]) -> list[ChartLine]:
        return [
            line(f"{name} {kind}", [(step.at, float(getattr(step, kind)[name])) for step in steps])
            for name in names
            for kind in KINDS
        ]

    sized, most = [name for name in names if name not in empty], LINES // len(KINDS)
    groups = [sized[first : first + most] for first in range(0, len(sized), most)]
    goal = LimitMark(at=scenario.planner.attainment, name=f"{scenario.planner.attainment:.0%}", upright=False)
    good = [(window.middle, window.good / window.arrived) for window in result.windows if window.arrived]
    cost = [(step.at, sum(count * prices[name] for name, count in step.held.items())) for step in steps]
    charts: list[Markup] = [
        chart("Demand", x, "requests a second", [line("arrivals", [(w.middle, w.rate) for w in result.windows])]),
        *(
            chart(_replicas_title(place, len(groups)), x, "replicas", replicas(group), whole=True)
            for place, group in enumerate(groups, start=1)
        ),
        chart("Goals kept", x, "good requests", [line("good", good)], shares=True, marks=[goal]),
        chart("Cost", x, "dollars an hour", [line("cost", cost)]),
    ]
    return ReportSection(
        title=f"Course of {result.outcome.rule}",
        said=f"These pools never had a replica: {', '.join(empty)}." if empty else "",
        charts=charts,
        tables=(
            ReportTable(
                name="decisions",
                head=("second", "replicas", "reason", "message"),
                rows=[_decision(step) for step in result.steps if step.changed][:MOST_DECISIONS],
                words=True,
            ),
        ),
    )


def _replicas_title(place: int, charts: int) -> str:
    return "Replicas" if charts == 1 else f"Replicas ({place} of {charts})"


def thinned(steps: Sequence[ReplayStep]) -> Sequence[ReplayStep]:
    """Return at most `POINTS` of the steps, at equal distances, beginning with the first one."""
    return steps[:: max(1, ceil(len(steps) / POINTS))]


def _decision(step: ReplayStep) -> tuple[str, str, str, str]:
    wanted = ", ".join(f"{name} {count}" for name, count in step.wanted.items())
    conditions = "".join(f" {each.type.value}: {each.message}" for each in step.conditions)
    return f"{step.at:,.0f}", wanted, step.reason.value, step.message + conditions
