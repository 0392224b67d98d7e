"""Report: shows the results of a run as a few lines for a terminal, or as one HTML page with plots.

Rules of the page:

1. It has no scripts and loads nothing, and its `Content-Security-Policy` tells the browser so.
2. Names come from files that other people wrote. They are shown as plain text: the template (`report.jinja`) escapes everything.
3. It can be read on light and dark backgrounds, and on paper. It can be read with a screen reader, because every chart has a table of its
   values.
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, TextIO

import jinja2
import msgspec
from msgspec import Struct, structs

from fleet.sim.experiments.load_curve import LoadPoint
from fleet.sim.report import sections as report_sections
from fleet.sim.report.charts import number
from fleet.sim.results.history import ArrivalWindow
from fleet.sim.results.outcomes import RunOutcome
from fleet.sim.run import RunResult
from fleet.sim.scenario import (
    Scenario,
    SimulatedPoolSection,
    pool_name,
)
from fleet.sim.workload.drawn import DrawnWorkload

SECRET = (
    *("tenants", "tenants_redis", "tenant_secret", "prompt_secret", "openai_workers"),
    *("store_credentials", "worker_credentials", "tracing"),
)
"""Router settings that the page does not show, because pages are shared with other people."""


class SummaryTile(Struct, frozen=True):
    value: str
    what: str


def summary(outcome: RunOutcome) -> list[str]:
    """Return the summary of a run as lines for a terminal."""
    refused = sum(outcome.refused.values())
    pace = f"{outcome.cpu_seconds:.1f} s of CPU, {outcome.requests_per_cpu_second:,.0f} requests a second"
    per_token = (
        f"${outcome.cost_per_million_tokens:.3f} a million tokens of prompts and answers,"
        f" {outcome.joules_per_token:.1f} J a generated token"
    )
    return [
        f"{outcome.requests:,} requests in {outcome.simulated_seconds:,.0f} s simulated ({pace}); {refused:,} refused",
        f"ttft ms    {_row(outcome.ttft_ms)}",
        f"tpot ms    {_row(outcome.tpot_ms)}",
        f"itl ms     {_row(outcome.itl_ms)}",
        f"attainment {outcome.attainment:.1%}, goodput {outcome.goodput_rps:.2f} requests a second",
        f"hit rate   {outcome.hit_rate:.1%}{_tiers(outcome)}, imbalance {outcome.imbalance:.2f}, utilisation {outcome.utilisation:.0%}",
        f"cost       ${outcome.cost:,.2f} for {outcome.gpu_hours:,.1f} GPU hours, {per_token}",
    ]


def _tiers(outcome: RunOutcome) -> str:
    """Return the hit rate of each tier as text. Return an empty text if there is only one tier."""
    tiers = outcome.hit_rate_by_tier
    return f" ({', '.join(f'{tier} {share:.1%}' for tier, share in tiers.items())})" if len(tiers) > 1 else ""


def _row(quantiles: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}" for name, value in quantiles.items())


def write_report(
    file: TextIO,
    name: str,
    scenario: Scenario,
    run: RunResult,
    *,
    windows: Sequence[ArrivalWindow] = (),
    curve: Sequence[LoadPoint] = (),
) -> None:
    """Write the report of a run as one HTML page. `windows` is the result of `History.windows`, `curve` that of `load_curve`."""
    outcome = run.outcome
    names = [pool_name(pool) for pool in scenario.pools]
    pools = sorted(outcome.pools, key=lambda pool: names.index(pool.name) if pool.name in names else len(names))
    sections = (
        report_sections.load(curve, outcome),
        report_sections.latency(run, scenario.slo),
        report_sections.times(run.timeline, windows, scenario),
        report_sections.pools(pools),
        report_sections.refusals(outcome),
        report_sections.trust(pools),
    )
    file.write(
        report_template().render(
            name=name,
            what=_what(scenario, outcome),
            when=_when(scenario, outcome),
            tiles=_tiles(outcome),
            sections=[section for section in sections if section.charts or section.tables],
            scenario=msgspec.json.format(msgspec.json.encode(chosen_settings(scenario))).decode(),
            digest=outcome.digest,
        )
    )


@cache
def report_template() -> jinja2.Template:
    """Return the Jinja template of a page, which escapes all values."""
    text = resources.files(__package__).joinpath("report.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(text)


def _what(scenario: Scenario, outcome: RunOutcome) -> str:
    pools = ", ".join(_pool_in_words(pool) for pool in scenario.pools)
    return f"{outcome.requests:,} requests to {scenario.model} on {pools}; policy {scenario.router.policy}."


def _pool_in_words(pool: SimulatedPoolSection) -> str:
    ways = ((name, getattr(pool, name)) for name in ("tp", "pp", "dp", "ep"))
    cut = " ".join(f"{name} {degree}" for name, degree in ways if degree > 1)
    return f"{pool.gpus} {pool.gpu} as {pool_name(pool)}{f' ({cut})' if cut else ''}"


def _when(scenario: Scenario, outcome: RunOutcome) -> str:
    workload, slo = scenario.workload, scenario.slo
    source = "drawn by chance" if isinstance(workload, DrawnWorkload) else f"from {workload.file}"
    whole = f", the whole answer within {number(slo.e2e_ms)} ms" if slo.e2e_ms is not None else ""
    return (
        f"Requests {source}, seed {scenario.seed}; {outcome.simulated_seconds:,.0f} s simulated in "
        f"{outcome.cpu_seconds:.1f} s of CPU. Good is a request whose first token comes within {number(slo.ttft_ms)} ms and the "
        f"others within {number(slo.tpot_ms)} ms each{whole}."
    )


def _tiles(outcome: RunOutcome) -> list[SummaryTile]:
    return [
        SummaryTile(f"{outcome.attainment:.1%}", "of requests are good"),
        SummaryTile(f"{outcome.goodput_rps:.3g}", "good requests a second"),
        SummaryTile(
            f"{number(outcome.ttft_ms['p50'])} ms", f"to the first token; p99 {number(outcome.ttft_ms['p99'])} ms"
        ),
        SummaryTile(
            f"{number(outcome.tpot_ms['p50'])} ms", f"a token after it; p99 {number(outcome.tpot_ms['p99'])} ms"
        ),
        SummaryTile(f"{outcome.hit_rate:.1%}", "of prompt tokens from caches"),
        SummaryTile(f"${outcome.cost_per_million_tokens:.3f}", "a million tokens of prompts and answers"),
        SummaryTile(f"{outcome.joules_per_token:.3g} J", "a generated token"),
        SummaryTile(f"{outcome.utilisation:.0%}", "of the time GPUs are at work"),
        SummaryTile(f"{outcome.imbalance:.2f}", "busiest worker over the mean"),
        SummaryTile(f"{sum(outcome.refused.values()):,}", "requests refused"),
    ]


def chosen_settings(settings: Struct) -> dict[str, Any]:
    """Return the settings of a Struct that differ from their defaults, except for those in `SECRET`."""
    chosen: dict[str, Any] = {}
    for field in structs.fields(settings):
        value = getattr(settings, field.name)
        if value == field.default or field.name in SECRET:
            continue
        if isinstance(value, Struct):
            value = chosen_settings(value)
        elif isinstance(value, tuple):
            value = [chosen_settings(each) if isinstance(each, Struct) else each for each in value]
        chosen[field.name] = value
    return chosen
