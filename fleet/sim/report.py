"""What a run came to, for people: a few lines for a terminal, or one page with plots."""

from html import escape
from typing import Any, TextIO

import msgspec
from msgspec import Struct, structs

from fleet.sim.charts import Line, Mark, chart
from fleet.sim.results import Outcome, Quantiles
from fleet.sim.run import Run
from fleet.sim.scenario import Scenario, pool_name

SECRET = ("tenants", "tenant_secret", "openai_workers", "store_credentials", "worker_credentials")
"""Of a router's settings: a page is passed on."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #222; background: #fff }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .2rem .8rem .2rem 0; text-align: left }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .8rem }} .tile {{ border: 1px solid #ddd; border-radius: 6px; padding: .5rem .9rem }}
.tile b {{ display: block; font-size: 1.3rem }} .tile span {{ color: #666; font-size: .85rem }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem }}
figure {{ margin: 0 }} svg {{ width: 100% }} svg text {{ font-size: 11px; fill: #444 }}
.grid {{ stroke: #e4e4e4 }} .mark {{ stroke: #222; stroke-dasharray: 4 3 }} polyline {{ fill: none; stroke-width: 1.8 }}
.middle {{ text-anchor: middle }} .end {{ text-anchor: end }} pre {{ background: #f6f6f6; padding: .8rem; overflow: auto }}
</style></head><body>
<h1>{title}</h1>
<div class="tiles">{tiles}</div>
<h2>Latency</h2>
{table}
<div class="charts">{latency}</div>
<h2>Over time</h2>
<div class="charts">{timeline}</div>
<h2>Scenario</h2>
<pre>{scenario}</pre>
<p>Digest {digest}: the same scenario and seed give the same.</p>
</body></html>
"""


def summary(outcome: Outcome) -> list[str]:
    """Lines for a terminal."""
    refused = sum(outcome.refused.values())
    pace = f"{outcome.cpu_seconds:.1f} s of CPU, {outcome.requests_per_cpu_second:,.0f} requests a second"
    per_token = f"${outcome.cost_per_million_tokens:.3f} a million tokens, {outcome.joules_per_token:.1f} J a token"
    return [
        f"{outcome.requests:,} requests in {outcome.simulated_seconds:,.0f} s simulated ({pace}); {refused:,} refused",
        f"ttft ms    {_row(outcome.ttft_ms)}",
        f"tpot ms    {_row(outcome.tpot_ms)}",
        f"attainment {outcome.attainment:.1%}, goodput {outcome.goodput_rps:.2f} requests a second",
        f"hit rate   {outcome.hit_rate:.1%}, imbalance {outcome.imbalance:.2f}, utilisation {outcome.utilisation:.0%}",
        f"cost       ${outcome.cost:,.2f} for {outcome.gpu_hours:,.1f} GPU hours, {per_token}",
    ]


def _row(quantiles: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}" for name, value in quantiles.items())


def write_report(file: TextIO, name: str, scenario: Scenario, run: Run) -> None:
    """One page that opens without a network.

    Args:
        file: Gets it.
        name: Of the scenario.
        scenario: That was run.
        run: What came of it.
    """
    outcome, tally, slo = run.outcome, run.tally, scenario.slo
    pools = ", ".join(f"{pool.gpus} {pool.gpu} as {pool_name(pool)}" for pool in scenario.pools)
    tiles = {
        "keep the SLO": f"{outcome.attainment:.1%}",
        "goodput, requests/s": f"{outcome.goodput_rps:.2f}",
        "of prompts from caches": f"{outcome.hit_rate:.1%}",
        "a million tokens": f"${outcome.cost_per_million_tokens:.3f}",
        "busiest worker over mean": f"{outcome.imbalance:.2f}",
        "of the time at work": f"{outcome.utilisation:.0%}",
        "refused": f"{sum(outcome.refused.values()):,}",
    }
    looks = run.timeline
    rates = [
        (look.seconds, look.finished / (look.seconds - before))
        for look, before in zip(looks, [0.0, *(look.seconds for look in looks)], strict=False)
    ]
    content = PAGE.format(
        title=escape(f"{name}: {pools}"),
        tiles="".join(
            f'<div class="tile"><b>{value}</b><span>{escape(what)}</span></div>' for what, value in tiles.items()
        ),
        table=_table(outcome),
        latency="".join(
            (
                _distribution("Time to the first token", tally.ttft, slo.ttft_ms),
                _distribution("Time per output token", tally.tpot, slo.tpot_ms),
            )
        ),
        timeline="".join(
            (
                chart(
                    "Requests",
                    "simulated seconds",
                    "requests",
                    [
                        Line(name="on workers", points=[(look.seconds, look.running) for look in looks]),
                        Line(name="waiting in the router", points=[(look.seconds, look.queued) for look in looks]),
                    ],
                ),
                chart(
                    "KV memory held by requests",
                    "simulated seconds",
                    "share",
                    [Line(name="held", points=[(look.seconds, look.kv_share) for look in looks])],
                ),
                chart("Finished", "simulated seconds", "requests a second", [Line(name="finished", points=rates)]),
            )
        ),
        scenario=escape(msgspec.json.format(msgspec.json.encode(_chosen(scenario))).decode()),
        digest=outcome.digest,
    )
    file.write(content)


def _distribution(title: str, quantiles: Quantiles, limit_ms: float) -> str:
    curve = [point for point in quantiles.curve() if point[0] > 0]
    mark = Mark(at=limit_ms, name=f"SLO {limit_ms:g} ms")
    return chart(title, "ms", "share of requests", [Line(name=title, points=curve)], log_x=True, mark=mark)


def _table(outcome: Outcome) -> str:
    rows = {
        "first token, ms": outcome.ttft_ms,
        "per output token, ms": outcome.tpot_ms,
        "whole answer, ms": outcome.e2e_ms,
    }
    head = "".join(f"<th>{escape(name)}</th>" for name in outcome.ttft_ms)
    body = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f'<td class="number">{value:,.1f}</td>' for value in row.values())
        + "</tr>"
        for name, row in rows.items()
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


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
