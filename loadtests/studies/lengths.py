"""Study that compares aggregated and disaggregated serving on 32 H100, for several lengths of prompt and answer.

Eight aggregated workers are compared with the best split into prefill and decode workers, by the highest rate with 90 % of the requests
in time (TTFT 2 s, TPOT 40 ms).
"""

from fleet.core.roles import Role
from fleet.sim.scenario import SimulatedPoolSection
from loadtests.studies.findings import Cell, StudyFinding, StudyReport, StudyTable
from loadtests.studies.rates import ClusterVariant, carried
from loadtests.studies.runs import Effort, spread

PROMPTS = (500, 2000, 8000)
ANSWERS = (100, 400)
WORKERS = 8
TP = 4
SPLITS = (3, 5)  # numbers of prefill workers that are tried; the other workers decode

FOUND: dict[tuple[int, int], tuple[float, float]] = {
    (2000, 100): (1.1, 1.6),
    (2000, 400): (1.1, 1.7),
    (8000, 100): (1.1, 1.6),
    (8000, 400): (1.1, 1.7),
}
"""Range of the gain when the study was written, by tokens of prompt and answer: rate of the best split / rate of aggregated workers.

There is no entry for prompts of 500 tokens: the workers serve these so fast that the thousand requests of a run end before the load
is steady.
"""


def _pools(prefill: int) -> tuple[SimulatedPoolSection, ...]:
    if not prefill:
        return (SimulatedPoolSection(role=Role.BOTH, gpu="h100", gpus=WORKERS * TP, tp=TP),)
    return (
        SimulatedPoolSection(role=Role.PREFILL, gpu="h100", gpus=prefill * TP, tp=TP),
        SimulatedPoolSection(role=Role.DECODE, gpu="h100", gpus=(WORKERS - prefill) * TP, tp=TP),
    )


def _first(prompt: int, answer: int) -> float:
    """Return the approximate highest rate of eight workers, as the start value of a search."""
    return WORKERS / (prompt / 12_000 + answer / 1500)


def study(effort: Effort) -> StudyReport:
    places = [(prompt, answer, prefill) for prompt in PROMPTS for answer in ANSWERS for prefill in (0, *SPLITS)]
    clusters = [
        ClusterVariant(
            scenario="lengths",
            pools=_pools(prefill),
            changes={"workload.prompt_tokens": prompt, "workload.output_tokens": answer},
            requests=effort.requests,
            seed=effort.seeds[0],
            first=_first(prompt, answer),
        )
        for prompt, answer, prefill in places
    ]
    found = dict(zip(places, spread(carried, clusters, effort.processes), strict=True))
    rows: list[tuple[Cell, ...]] = []
    findings = []
    for prompt in PROMPTS:
        for answer in ANSWERS:
            whole = found[prompt, answer, 0].rate
            split = {prefill: found[prompt, answer, prefill].rate for prefill in SPLITS}
            best = max(split, key=lambda each: split[each])
            gain = split[best] / whole if whole else float("inf")
            rows.append((prompt, answer, whole, *split.values(), f"{best}:{WORKERS - best}", gain))
            low, high = FOUND.get((prompt, answer), (float("-inf"), float("inf")))
            findings.append(
                StudyFinding(
                    claim=f"prompts of {prompt}, answers of {answer}: best split over whole requests",
                    figure=gain,
                    low=low,
                    high=high,
                )
            )
    return StudyReport(
        study="lengths",
        tables=(
            StudyTable(
                title="Highest rate on 32 H100, requests a second, 90 % in time",
                columns=(
                    "prompt",
                    "answer",
                    "whole",
                    *(f"{each}:{WORKERS - each}" for each in SPLITS),
                    "best split",
                    "gain",
                ),
                rows=rows,
            ),
        ),
        findings=tuple(findings),
    )
