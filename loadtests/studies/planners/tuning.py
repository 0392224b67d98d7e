"""Tuning of planners: the same number of trials for each rule, on other seeds and parts of the traces than those of the study."""

from typing import Any

from loadtests.studies.findings import Cell, StudyFinding, StudyReport, StudyTable
from loadtests.studies.planners.comparison import SAMPLED, TUNED, PlannerCase, PlannerRun, replayed
from loadtests.studies.runs import Effort, spread

ATTAINMENT = 0.97
SEED = 1001
REQUESTS = 5000
"""Maximum number of requests of a trial."""

LOADS: dict[str, dict[str, Any]] = {
    "day": {},
    "conversation": {"workload.part": [0.0, 0.5]},
    "agentic": {**SAMPLED, "workload.file": "traces/agentic_first.jsonl.gz"},
}
"""Loads of the tuning: the names of the scenarios `planner-NAME.toml`, each with its changes."""

TRIALS: dict[str, tuple[dict[str, float], ...]] = {
    "fleet": (
        {},
        {"caution": 0.0, "deadband": 0.05},
        {"deadband": 0.05, "cool_down_seconds": 120},
        {"caution": 0.0, "deadband": 0.05, "cool_down_seconds": 120},
    ),
    "hpa": ({}, {"target": 0.75}, {"target": 0.85, "down_seconds": 120}, {"target": 0.5}),
    "kpa": ({}, {"target": 0.5}, {"target": 0.4, "down_seconds": 600}, {"target": 0.9, "down_seconds": 120}),
    "dynamo": ({}, {"margin": 1.2}, {"margin": 1.4}, {"margin": 1.2, "throughput_seconds": 60}),
    "llmd_slo": (
        {},
        {"up": 0.75, "down": 0.5},
        {"up": 0.4, "down": 0.25},
        {"up": 0.75, "down": 0.6, "down_every_seconds": 60},
    ),
    "wva_saturation": (
        {},
        {"up": 0.6, "down": 0.45},
        {"up": 0.45, "down": 0.3},
        {"up": 0.6, "down": 0.45, "down_seconds": 400},
    ),
    "wva_queueing": ({}, {"margin": 1.2}, {"margin": 1.4}, {"margin": 1.1, "down_seconds": 300}),
    "sageserve": ({}, {"margin": 1.3}, {"margin": 1.3, "plan_seconds": 300}, {"margin": 1.5, "plan_seconds": 300}),
    "chiron": (
        {},
        {"busy": 0.3},
        {"busy": 0.3, "down_seconds": 300},
        {"pressure": 0.4, "busy": 0.3, "down_seconds": 300},
    ),
    "tokenscale": (
        {},
        {"use": 0.7},
        {"use": 0.7, "velocity_seconds": 60},
        {"use": 0.6, "velocity_seconds": 60, "down_seconds": 180},
    ),
    "heteroscale": ({}, {"target": 0.5}, {"target": 0.5, "down_seconds": 300}, {"target": 0.4, "down_seconds": 300}),
    "melange": ({}, {"use": 0.9}, {"use": 0.8}, {"use": 0.7}),
}
"""Parameters of each trial, by rule: an empty dict stands for the defaults. Each rule has the same number of trials."""


def study(effort: Effort) -> StudyReport:
    """Try all parameters, and write the best ones of each rule and load to `tuned.toml`."""
    cases = [(load, rule, number) for load in LOADS for rule, trials in TRIALS.items() for number in range(len(trials))]
    runs = dict(zip(cases, spread(_run, cases, effort.processes), strict=True))
    chosen: dict[str, dict[str, int]] = {}
    rows: list[tuple[Cell, ...]] = []
    for load in LOADS:
        for rule, trials in TRIALS.items():
            found = [runs[load, rule, number] for number in range(len(trials))]
            best = min(range(len(trials)), key=lambda number: _rank(found[number]))
            chosen.setdefault(load, {})[rule] = best
            rows.append((f"{load} {rule}", *(_shown(each) for each in found), str(trials[best] or "defaults")))
    TUNED.write_text(_as_toml(chosen), encoding="utf-8")
    return StudyReport(
        study="planner-tuning",
        tables=(
            StudyTable(
                title="Requests in time and GPU-hours of the trials",
                columns=("load and rule", "defaults", "second", "third", "fourth", "chosen"),
                rows=rows,
            ),
        ),
        findings=(StudyFinding(claim="trials for each rule and load", figure=4.0, low=4.0, high=4.0),),
    )


def _run(case: tuple[str, str, int]) -> PlannerRun:
    load, rule, number = case
    planned = PlannerCase(load=load, rule=rule, seed=SEED, requests=REQUESTS)
    return PlannerRun(
        case=planned, outcome=replayed(planned, {**LOADS[load], "seed": SEED}, dict(TRIALS[rule][number]))
    )


def _rank(run: PlannerRun) -> tuple[float, float]:
    """Return the sort key of a trial; the best trial has the lowest: what is missing to `ATTAINMENT`, and then the GPU-hours."""
    return max(0.0, ATTAINMENT - run.outcome.attainment), run.outcome.gpu_hours


def _shown(run: PlannerRun) -> str:
    return f"{100 * run.outcome.attainment:.1f} % {run.outcome.gpu_hours:.1f} h"


def _as_toml(chosen: dict[str, dict[str, int]]) -> str:
    lines = ["# Parameters of rules by load: the best of the trials of `python -m loadtests.studies planner-tuning`.\n"]
    for load, rules in chosen.items():
        for rule, number in rules.items():
            lines.append(f"\n[{load}.{rule}]\n")
            lines += [f"{name} = {value}\n" for name, value in TRIALS[rule][number].items()]
    return "".join(lines)
