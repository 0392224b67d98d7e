"""What a run came to, for people: a few lines for a terminal, or one page with plots.

Rules of the page:

1. It opens anywhere: no script, nothing fetched, and its own policy (`Content-Security-Policy`) says so to the browser.
2. Names come from files that others wrote. They are text: the template escapes all that it is given (`report.jinja`).
3. It is read on light and dark ground, on paper, and by those who hear it: every chart has its figures in a table.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, TextIO, assert_never

import jinja2
import msgspec
from markupsafe import Markup
from msgspec import Struct, structs

from fleet.sim.charts import LINES, Line, Mark, chart, number, thinned
from fleet.sim.history import Window
from fleet.sim.load_curve import LoadPoint
from fleet.sim.results import Outcome, PoolLook, PoolOutcome, Quantiles, Slo, Timeline
from fleet.sim.run import Run
from fleet.sim.scenario import (
    CutFault,
    FaultSection,
    Flip,
    NodeFault,
    PoolSection,
    Scenario,
    SlowFault,
    StoreFault,
    WorkerFault,
    pool_name,
)
from fleet.sim.workloads import Drawn

SECRET = ("tenants", "tenant_secret", "openai_workers", "store_credentials", "worker_credentials")
"""Of a router's settings: a page is passed on."""

RISE = 0.005
"""Of a distribution function, between two points that are drawn."""

LEVELS = (0.9, 0.99)
"""Attainments that people ask for."""

TIME_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From which length on, how many seconds one has, its name."""

BASES = {
    "model": "this model there",
    "gpu": "other models there",
    "engine": "this engine on other GPUs",
    "": "not said",
}
"""Whose measurements step times rest on."""


class Tile(Struct, frozen=True):
    value: str
    what: str


class Table(Struct, frozen=True, kw_only=True):
    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False  # cells are words, not figures


class Section(Struct, frozen=True, kw_only=True):
    title: str
    said: str = ""
    charts: Sequence[Markup] = ()
    tables: Sequence[Table] = ()


def summary(outcome: Outcome) -> list[str]:
    """Lines for a terminal."""
    refused = sum(outcome.refused.values())
    pace = f"{outcome.cpu_seconds:.1f} s of CPU, {outcome.requests_per_cpu_second:,.0f} requests a second"
    per_token = f"${outcome.cost_per_million_tokens:.3f} a million tokens, {outcome.joules_per_token:.1f} J a token"
    return [
        f"{outcome.requests:,} requests in {outcome.simulated_seconds:,.0f} s simulated ({pace}); {refused:,} refused",
        f"ttft ms    {_row(outcome.ttft_ms)}",
        f"tpot ms    {_row(outcome.tpot_ms)}",
        f"itl ms     {_row(outcome.itl_ms)}",
        f"attainment {outcome.attainment:.1%}, goodput {outcome.goodput_rps:.2f} requests a second",
        f"hit rate   {outcome.hit_rate:.1%}{_tiers(outcome)}, imbalance {outcome.imbalance:.2f}, utilisation {outcome.utilisation:.0%}",
        f"cost       ${outcome.cost:,.2f} for {outcome.gpu_hours:,.1f} GPU hours, {per_token}",
    ]


def _tiers(outcome: Outcome) -> str:
    """Where hits were, if not all in one place."""
    tiers = outcome.hit_rate_by_tier
    return f" ({', '.join(f'{tier} {share:.1%}' for tier, share in tiers.items())})" if len(tiers) > 1 else ""


def _row(quantiles: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}" for name, value in quantiles.items())


def write_report(
    file: TextIO,
    name: str,
    scenario: Scenario,
    run: Run,
    *,
    windows: Sequence[Window] = (),
    curve: Sequence[LoadPoint] = (),
) -> None:
    """One page that opens without a network.

    Args:
        file: Gets it.
        name: Of the scenario.
        scenario: That was run.
        run: What came of it.
        windows: How it went, by when requests arrived (`History`).
        curve: What comes of other loads (`load_curve`).
    """
    outcome = run.outcome
    names = [pool_name(pool) for pool in scenario.pools]
    pools = sorted(outcome.pools, key=lambda pool: names.index(pool.name) if pool.name in names else len(names))
    sections = (
        _load(curve, outcome),
        _latency(run, scenario.slo),
        _times(run.timeline, windows, scenario),
        _pools(pools),
        _refusals(outcome),
        _trust(pools),
    )
    file.write(
        _template().render(
            name=name,
            what=_what(scenario, outcome),
            when=_when(scenario, outcome),
            tiles=_tiles(outcome),
            sections=[section for section in sections if section.charts or section.tables],
            scenario=msgspec.json.format(msgspec.json.encode(_chosen(scenario))).decode(),
            digest=outcome.digest,
        )
    )


@cache
def _template() -> jinja2.Template:
    text = resources.files(__package__).joinpath("report.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(text)


def _what(scenario: Scenario, outcome: Outcome) -> str:
    pools = ", ".join(_pool_in_words(pool) for pool in scenario.pools)
    return f"{outcome.requests:,} requests to {scenario.model} on {pools}; policy {scenario.router.policy}."


def _pool_in_words(pool: PoolSection) -> str:
    ways = ((name, getattr(pool, name)) for name in ("tp", "pp", "dp", "ep"))
    cut = " ".join(f"{name} {degree}" for name, degree in ways if degree > 1)
    return f"{pool.gpus} {pool.gpu} as {pool_name(pool)}{f' ({cut})' if cut else ''}"


def _when(scenario: Scenario, outcome: Outcome) -> str:
    workload, slo = scenario.workload, scenario.slo
    source = "drawn by chance" if isinstance(workload, Drawn) else f"from {workload.file}"
    whole = f", the whole answer within {number(slo.e2e_ms)} ms" if slo.e2e_ms is not None else ""
    return (
        f"Requests {source}, seed {scenario.seed}; {outcome.simulated_seconds:,.0f} s simulated in "
        f"{outcome.cpu_seconds:.1f} s of CPU. Good is a request whose first token comes within {number(slo.ttft_ms)} ms and the "
        f"others within {number(slo.tpot_ms)} ms each{whole}."
    )


def _tiles(outcome: Outcome) -> list[Tile]:
    return [
        Tile(f"{outcome.attainment:.1%}", "of requests are good"),
        Tile(f"{outcome.goodput_rps:.3g}", "good requests a second"),
        Tile(f"{number(outcome.ttft_ms['p50'])} ms", f"to the first token; p99 {number(outcome.ttft_ms['p99'])} ms"),
        Tile(f"{number(outcome.tpot_ms['p50'])} ms", f"a token after it; p99 {number(outcome.tpot_ms['p99'])} ms"),
        Tile(f"{outcome.hit_rate:.1%}", "of prompt tokens from caches"),
        Tile(f"${outcome.cost_per_million_tokens:.3f}", "a million tokens, prompts included"),
        Tile(f"{outcome.joules_per_token:.3g} J", "a generated token"),
        Tile(f"{outcome.utilisation:.0%}", "of the time GPUs are at work"),
        Tile(f"{outcome.imbalance:.2f}", "busiest worker over the mean"),
        Tile(f"{sum(outcome.refused.values()):,}", "requests refused"),
    ]


def _load(curve: Sequence[LoadPoint], outcome: Outcome) -> Section:
    """Attainment, goodput, latency and cost against the load."""
    points = [point for point in curve if point.users or point.rate]
    if len(points) < 2:
        return Section(title="")
    users = bool(points[0].users)
    x = "users" if users else "requests a second"

    def line(name: str, value: Callable[[Outcome], float]) -> Line:
        return Line(
            name=name, points=[(point.users if users else point.rate, value(point.outcome)) for point in points]
        )

    levels = [Mark(at=level, name=f"{level:.0%}", upright=False) for level in LEVELS]
    goodput = [line("good", lambda of: of.goodput_rps)]
    if not users:
        goodput.append(Line(name="all that came", points=[(point.rate, point.rate) for point in points]))
    return Section(
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
            chart("Cost", x, "dollars a million tokens", [line("cost", lambda of: of.cost_per_million_tokens)]),
        ),
    )


def _latency(run: Run, slo: Slo) -> Section:
    outcome, tally = run.outcome, run.tally
    rows = {
        "first token, ms": outcome.ttft_ms,
        "per token after it, ms": outcome.tpot_ms,
        "whole answer, ms": outcome.e2e_ms,
    }
    return Section(
        title="Latency",
        said="Lines of distributions rise to the share of requests that took at most so long.",
        charts=(
            _distribution("Time to the first token", tally.ttft, slo.ttft_ms),
            _distribution("Time per token after it", tally.tpot, slo.tpot_ms),
            _distribution("Time of the whole answer", tally.e2e, slo.e2e_ms),
        ),
        tables=(
            Table(
                name="latency",
                head=("", *outcome.ttft_ms),
                rows=[(name, *(f"{value:,.1f}" for value in row.values())) for name, row in rows.items()],
            ),
        ),
    )


def _distribution(title: str, quantiles: Quantiles, limit_ms: float | None) -> Markup:
    marks = [] if limit_ms is None else [Mark(at=limit_ms, name=f"SLO {number(limit_ms)} ms")]
    curve = thinned([point for point in quantiles.curve() if point[0] > 0], RISE)
    return chart(title, "ms", "requests", [Line(name="share", points=curve)], log_x=True, shares=True, marks=marks)


def _times(looks: Sequence[Timeline], windows: Sequence[Window], scenario: Scenario) -> Section:
    """How the run went."""
    last = max([*(look.seconds for look in looks), *(window.end for window in windows)], default=0.0)
    unit, unit_name = next((seconds, name) for least, seconds, name in TIME_UNITS if last >= least)
    x = f"simulated {unit_name}"
    faults = [Mark(at=fault.at_seconds / unit, name=_event(fault)) for fault in scenario.faults[:LINES]]

    def over_time(title: str, y: str, lines: Sequence[Line], *, shares: bool = False) -> Markup:
        return chart(title, x, y, lines, shares=shares, marks=faults)

    def of_windows(name: str, value: Callable[[Window], float], holds: Callable[[Window], float]) -> Line:
        return Line(name=name, points=[(each.middle / unit, value(each)) for each in windows if holds(each)])

    def of_pools(value: Callable[[PoolLook], float]) -> list[Line]:
        return [Line(name=name, points=_pool_points(looks, name, value, unit)) for name in names]

    names = _pool_names(looks)
    looked = [(earlier, later) for earlier, later in pairwise([_NOTHING, *looks]) if later.seconds > earlier.seconds]
    charts = [
        over_time(
            "Arrivals and answers",
            "requests a second",
            [
                of_windows("arrived", lambda each: each.rate, lambda _: True),
                Line(
                    name="ended",
                    points=[
                        (later.seconds / unit, later.finished / (later.seconds - earlier.seconds))
                        for earlier, later in looked
                    ],
                ),
            ],
        ),
        over_time(
            "Requests by where they are",
            "requests",
            [
                *of_pools(lambda look: look.running),
                Line(name="waiting in the router", points=[(look.seconds / unit, look.queued) for look in looks]),
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
    return Section(title="Over time", charts=charts)


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
        case Flip():
            return f"{fault.worker} becomes {fault.role}"
        case _:
            assert_never(fault)


_NOTHING = Timeline(seconds=0.0, running=0, queued=0, kv_share=0.0, finished=0)


def _pool_names(looks: Sequence[Timeline]) -> list[str]:
    """Those that a chart has lines for, beside the router's."""
    names = list(dict.fromkeys(pool.name for look in looks for pool in look.pools))
    return names[: LINES - 1]


def _pool_points(
    looks: Sequence[Timeline], name: str, value: Callable[[PoolLook], float], unit: float
) -> list[tuple[float, float]]:
    points = []
    for look in looks:
        pool = next((pool for pool in look.pools if pool.name == name), None)
        points.append((look.seconds / unit, value(pool) if pool is not None else 0.0))
    return points


def _pools(pools: Sequence[PoolOutcome]) -> Section:
    return Section(
        title="Pools, cost and energy",
        said=(
            "Tokens are those that a pool computed of prompts, and generated; what was found in a cache is not computed. "
            "Energy is that of the GPUs' boards."
        ),
        tables=(
            Table(
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
                    "$ a million tokens",
                    "energy, kWh",
                    "J a token",
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


def _refusals(outcome: Outcome) -> Section:
    rows = [(reason or "given up", f"{count:,}") for reason, count in sorted(outcome.refused.items())]
    table = Table(name="refusals", head=("reason", "requests"), rows=rows)
    return Section(title="Refused", tables=(table,) if rows else ())


def _trust(pools: Sequence[PoolOutcome]) -> Section:
    """What the figures rest on."""
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
    return Section(
        title="How far to trust this",
        said=(
            "Times of steps are fitted to public measurements. Errors are medians on measurements of that kind that were not used "
            "to fit; that of power is an estimate. See docs/hardware.md."
        ),
        tables=(
            Table(
                name="errors",
                head=("pool", "step times rest on measurements of", "first token", "per token", "power", "price"),
                rows=rows,
                words=True,
            ),
        )
        if rows
        else (),
    )


def _chosen(settings: Struct) -> dict[str, Any]:
    """Fields that are not as they are by default, without what may be secret."""
    chosen: dict[str, Any] = {}
    for field in structs.fields(settings):
        value = getattr(settings, field.name)
        if value == field.default or field.name in SECRET:
            continue
        if isinstance(value, Struct):
            value = _chosen(value)
        elif isinstance(value, tuple):
            value = [_chosen(each) if isinstance(each, Struct) else each for each in value]
        chosen[field.name] = value
    return chosen
