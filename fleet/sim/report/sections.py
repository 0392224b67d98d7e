"""Sections of a report: the charts and tables of one run."""

from collections.abc import Callable, Sequence
from typing import assert_never

from markupsafe import Markup
from msgspec import Struct

from fleet.sim.experiments.load_curve import LoadPoint
from fleet.sim.report.charts import LINES, ChartLine, LimitMark, chart, number, thinned
from fleet.sim.results.history import ArrivalWindow
from fleet.sim.results.outcomes import PoolOutcome, PoolSample, RunOutcome, Slo, TimelineSample
from fleet.sim.results.quantiles import Quantiles
from fleet.sim.run import RunResult
from fleet.sim.scenario import (
    CutFault,
    FaultSection,
    NodeFault,
    RoleFlipFault,
    Scenario,
    SlowFault,
    StoreFault,
    WorkerFault,
)

RISE = 0.005
"""Minimum difference between the shares of two drawn points of a distribution function. Points in between are left
out."""

LEVELS = (0.9, 0.99)
"""Usual targets of attainment. The chart of attainment by load marks them with lines."""

TIME_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Units of the time axis. Each entry states the minimum length of a run in seconds, the seconds of one unit, and its name."""

BASES = {
    "model": "this model there",
    "gpu": "other models there",
    "engine": "this engine on other GPUs",
    "": "not said",
}
"""Text for each value of `PredictionQuality.basis`: the measurements from which step times were fitted."""


class ReportTable(Struct, frozen=True, kw_only=True):
    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False  # True: the cells of the table contain words instead of numbers


class ReportSection(Struct, frozen=True, kw_only=True):
    title: str
    said: str = ""
    charts: Sequence[Markup] = ()
    tables: Sequence[ReportTable] = ()


def load(curve: Sequence[LoadPoint], outcome: RunOutcome) -> ReportSection:
    """Return the section that shows attainment, goodput, latency and cost at each load of a load curve.

    If the curve has fewer than two points, the section is empty.
    """
    points = [point for point in curve if point.users or point.rate]
    if len(points) < 2:
        return ReportSection(title="")
    users = bool(points[0].users)
    x = "users" if users else "requests a second"

    def line(name: str, value: Callable[[RunOutcome], float]) -> ChartLine:
        return ChartLine(
            name=name, points=[(point.users if users else point.rate, value(point.outcome)) for point in points]
        )

    levels = [LimitMark(at=level, name=f"{level:.0%}", upright=False) for level in LEVELS]
    goodput = [line("good", lambda of: of.goodput_rps)]
    if not users:
        goodput.append(ChartLine(name="all that came", points=[(point.rate, point.rate) for point in points]))
    return ReportSection(
        title="Attainment against load",
        said=f"Each point is a run of its own. The run that the rest of this page tells of has an attainment of {outcome.attainment:.1%}.",
        charts=(
            chart(
                "Attainment",
                x,
                "good requests",
                [line("good", lambda of: of.attainment)],
                shares=True,
                marks=levels,
            ),
            chart("Goodput", x, "requests a second", goodput),
            chart(
                "Time to the first token and per token, p90",
                x,
                "ms",
                [
                    line("first token", lambda of: of.ttft_ms["p90"]),
                    line("per token after it", lambda of: of.tpot_ms["p90"]),
                ],
                log_y=True,
            ),
            chart(
                "Cost",
                x,
                "dollars a million tokens of prompts and answers",
                [line("cost", lambda of: of.cost_per_million_tokens)],
            ),
        ),
    )


def latency(run: RunResult, slo: Slo) -> ReportSection:
    outcome, totals = run.outcome, run.totals
    rows = {
        "first token, ms": outcome.ttft_ms,
        "per token after it, ms": outcome.tpot_ms,
        "whole answer, ms": outcome.e2e_ms,
    }
    return ReportSection(
        title="Latency",
        said="Lines of distributions rise to the share of requests that took at most so long.",
        charts=(
            _distribution("Time to the first token", totals.ttft, slo.ttft_ms),
            _distribution("Time per token after it", totals.tpot, slo.tpot_ms),
            _distribution("Time of the whole answer", totals.e2e, slo.e2e_ms),
        ),
        tables=(
            ReportTable(
                name="latency",
                head=("", *outcome.ttft_ms),
                rows=[(name, *(f"{value:,.1f}" for value in row.values())) for name, row in rows.items()],
            ),
        ),
    )


def _distribution(title: str, quantiles: Quantiles, limit_ms: float | None) -> Markup:
    marks = [] if limit_ms is None else [LimitMark(at=limit_ms, name=f"SLO {number(limit_ms)} ms")]
    curve = thinned([point for point in quantiles.curve() if point[0] > 0], RISE)
    return chart(title, "ms", "requests", [ChartLine(name="share", points=curve)], log_x=True, shares=True, marks=marks)


def times(looks: Sequence[TimelineSample], windows: Sequence[ArrivalWindow], scenario: Scenario) -> ReportSection:
    """Return the section that shows how arrivals, queues, KV memory and latencies of the run change over time."""
    last = max([*(look.seconds for look in looks), *(window.end for window in windows)], default=0.0)
    unit, unit_name = next((seconds, name) for least, seconds, name in TIME_UNITS if last >= least)
    x = f"simulated {unit_name}"
    faults = [LimitMark(at=fault.at_seconds / unit, name=_event(fault)) for fault in scenario.faults[:LINES]]

    def over_time(title: str, y: str, lines: Sequence[ChartLine], *, shares: bool = False) -> Markup:
        return chart(title, x, y, lines, shares=shares, marks=faults)

    def of_windows(
        name: str, value: Callable[[ArrivalWindow], float], holds: Callable[[ArrivalWindow], float]
    ) -> ChartLine:
        return ChartLine(name=name, points=[(each.middle / unit, value(each)) for each in windows if holds(each)])

    def of_pools(value: Callable[[PoolSample], float]) -> list[ChartLine]:
        return [ChartLine(name=name, points=_pool_points(looks, name, value, unit)) for name in names]

    names = _pool_names(looks)
    charts = [
        over_time(
            "Arrivals and answers",
            "requests a second",
            [
                # Leave the last window out, because arrivals end within it, so its rate would be too low.
                ChartLine(name="arrived", points=[(each.middle / unit, each.rate) for each in windows[:-1] or windows]),
                ChartLine(name="ended", points=_ended(looks, len(windows), unit)),
            ],
        ),
        over_time(
            "Requests by where they are",
            "requests",
            [
                *of_pools(lambda look: look.running),
                ChartLine(name="waiting in the router", points=[(look.seconds / unit, look.queued) for look in looks]),
            ],
        ),
        over_time("Waiting in engines", "requests", of_pools(lambda look: look.waiting)),
        over_time("KV memory held by requests", "of the blocks", of_pools(lambda look: look.kv_share), shares=True),
    ]
    if windows:
        charts += [
            over_time(
                "Good requests, by arrival",
                "good requests",
                [of_windows("good", lambda each: each.good / each.arrived, lambda each: each.arrived)],
                shares=True,
            ),
            over_time(
                "Time to the first token, by arrival",
                "ms",
                [
                    of_windows("p50", lambda each: each.ttft_ms[0], lambda each: each.arrived > each.refused),
                    of_windows("p90", lambda each: each.ttft_ms[1], lambda each: each.arrived > each.refused),
                ],
            ),
            over_time(
                "Prompt tokens from caches, by arrival",
                "of prompt tokens",
                [
                    of_windows(
                        "from caches",
                        lambda each: each.cached_tokens / each.prompt_tokens,
                        lambda each: each.prompt_tokens,
                    )
                ],
                shares=True,
            ),
        ]
    if any(look.workers != looks[0].pools[0].workers for each in looks for look in each.pools[:1]) or scenario.faults:
        charts.append(over_time("Workers that are up", "workers", of_pools(lambda look: look.workers)))
    return ReportSection(title="Over time", charts=charts)


def _event(fault: FaultSection) -> str:
    match fault:
        case WorkerFault():
            return f"{fault.worker} dies"
        case NodeFault():
            return f"{fault.node} dies"
        case StoreFault():
            return f"{fault.node} loses its store"
        case SlowFault():
            return f"{fault.worker} is slow"
        case CutFault():
            return f"{fault.worker} is cut off"
        case RoleFlipFault():
            return f"{fault.worker} becomes {fault.role}"
        case _:
            assert_never(fault)


def _ended(looks: Sequence[TimelineSample], points: int, unit: float) -> list[tuple[float, float]]:
    """Return the rate of ended requests at about `points` instants, as pairs of an instant and a rate."""
    together = max(1, round(len(looks) / max(1, points)))
    drawn, since, count = [], 0.0, 0
    for seen, look in enumerate(looks, 1):
        count += look.finished
        if look.seconds > since and (seen % together == 0 or seen == len(looks)):
            drawn.append(((since + look.seconds) / 2 / unit, count / (look.seconds - since)))
            since, count = look.seconds, 0
    return drawn


def _pool_names(looks: Sequence[TimelineSample]) -> list[str]:
    """Return the names of the pools that charts over time show, each as a line: the first `LINES` - 1 pools."""
    names = list(dict.fromkeys(pool.name for look in looks for pool in look.pools))
    return names[: LINES - 1]


def _pool_points(
    looks: Sequence[TimelineSample], name: str, value: Callable[[PoolSample], float], unit: float
) -> list[tuple[float, float]]:
    points = []
    for look in looks:
        pool = next((pool for pool in look.pools if pool.name == name), None)
        points.append((look.seconds / unit, value(pool) if pool is not None else 0.0))
    return points


def pools(pools: Sequence[PoolOutcome]) -> ReportSection:
    return ReportSection(
        title="Pools, cost and energy",
        said=(
            "Tokens are those that a pool computed of prompts, and generated; what was found in a cache is not computed. "
            "Energy is that of the GPUs' boards."
        ),
        tables=(
            ReportTable(
                name="pools",
                head=(
                    "pool",
                    "GPUs",
                    "at work",
                    "imbalance",
                    "prompt tokens",
                    "generated",
                    "GPU hours",
                    "cost",
                    "$ a million computed or generated tokens",
                    "energy, kWh",
                    "J a computed or generated token",
                ),
                rows=[
                    (
                        pool.name,
                        f"{pool.gpus} {pool.gpu}",
                        f"{pool.utilisation:.0%}",
                        f"{pool.imbalance:.2f}",
                        f"{pool.computed_tokens:,}",
                        f"{pool.generated_tokens:,}",
                        f"{pool.gpu_hours:,.2f}",
                        f"${pool.cost:,.2f}",
                        f"{pool.cost_per_million_tokens:,.3f}",
                        f"{pool.energy_kwh:,.2f}",
                        f"{pool.joules_per_token:,.3g}",
                    )
                    for pool in pools
                ],
            ),
        )
        if pools
        else (),
    )


def refusals(outcome: RunOutcome) -> ReportSection:
    rows = [(reason or "given up", f"{count:,}") for reason, count in sorted(outcome.refused.items())]
    table = ReportTable(name="refusals", head=("reason", "requests"), rows=rows)
    return ReportSection(title="Refused", tables=(table,) if rows else ())


def trust(pools: Sequence[PoolOutcome]) -> ReportSection:
    """Return the section on the accuracy of step times, with a row for each pool.

    A row names the measurements to which the step times were fitted, and the errors of the predictions.
    """
    rows = [
        (
            pool.name,
            BASES[pool.quality.basis],
            f"± {pool.quality.ttft_error:.0%}",
            f"± {pool.quality.tpot_error:.0%}",
            f"± {pool.quality.power_error:.0%}",
            pool.quality.price or "not said",
        )
        for pool in pools
    ]
    return ReportSection(
        title="How far to trust this",
        said=(
            "Times of steps are fitted to public measurements. Errors are medians on measurements of that kind that were not used "
            "to fit; that of power is an estimate. See docs/hardware.md."
        ),
        tables=(
            ReportTable(
                name="errors",
                head=("pool", "step times rest on measurements of", "first token", "per token", "power", "price"),
                rows=rows,
                words=True,
            ),
        )
        if rows
        else (),
    )
