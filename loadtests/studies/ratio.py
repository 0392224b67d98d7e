"""Study of the best split of sixteen workers into prefill and decode: highest rate with 90 % in time, for three kinds of traffic."""

from fleet.core.roles import Role
from fleet.sim.scenario import SimulatedPoolSection
from loadtests.studies.findings import Cell, StudyFinding, StudyReport, StudyTable
from loadtests.studies.rates import ClusterVariant, carried
from loadtests.studies.runs import Effort, spread

WORKERS = 16
TP = 4
PREFILLS = (2, 4, 6, 8, 10, 12)
TRAFFIC = {"chat": (1000, 400), "documents": (4000, 400), "summaries": (8000, 150)}
"""Mean tokens of prompt and answer, by kind of traffic."""

FOUND: dict[str, tuple[float, float]] = {"chat": (8, 12), "documents": (8, 12), "summaries": (10, 12)}
"""Range of the number of prefill workers in the best split when the study was written."""


def _cluster(name: str, prefill: int, effort: Effort) -> ClusterVariant:
    prompt, answer = TRAFFIC[name]
    return ClusterVariant(
        scenario="ratio",
        pools=(
            SimulatedPoolSection(role=Role.PREFILL, gpu="h100", gpus=prefill * TP, tp=TP),
            SimulatedPoolSection(role=Role.DECODE, gpu="h100", gpus=(WORKERS - prefill) * TP, tp=TP),
        ),
        changes={"workload.prompt_tokens": prompt, "workload.output_tokens": answer},
        requests=effort.requests,
        seed=effort.seeds[0],
        first=min(prefill * 12_000 / prompt, (WORKERS - prefill) * 1500 / answer),
    )


def study(effort: Effort) -> StudyReport:
    places = [(name, prefill) for name in TRAFFIC for prefill in PREFILLS]
    clusters = [_cluster(*place, effort) for place in places]
    found = dict(zip(places, spread(carried, clusters, effort.processes), strict=True))
    rows: list[tuple[Cell, ...]] = []
    findings = []
    for name, (prompt, answer) in TRAFFIC.items():
        rates = {prefill: found[name, prefill].rate for prefill in PREFILLS}
        best = max(rates, key=lambda each: rates[each])
        rows.append((name, f"{prompt}/{answer}", *rates.values(), f"{best}:{WORKERS - best}"))
        low, high = FOUND.get(name, (float("-inf"), float("inf")))
        findings.append(
            StudyFinding(claim=f"{name}: workers for prompts in the best ratio", figure=float(best), low=low, high=high)
        )
    return StudyReport(
        study="ratio",
        tables=(
            StudyTable(
                title="Highest rate on 64 H100, requests a second, by workers for prompts and for answers",
                columns=("traffic", "tokens", *(f"{each}:{WORKERS - each}" for each in PREFILLS), "best"),
                rows=rows,
            ),
        ),
        findings=tuple(findings),
    )
