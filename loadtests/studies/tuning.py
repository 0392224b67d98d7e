"""Tuning of policies: the same number of trials for each policy, on other requests than those of the reported figures.

A trial draws each parameter from a short list. The first trial has the published defaults, so tuning never makes a policy worse. The
trial with the highest attainment is chosen, at loads at which requests begin to be late. Nothing is tuned for agentic sessions, for which
all policies have their defaults.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from loadtests.studies.contestants import Contestant, chosen, published
from loadtests.studies.findings import StudyFinding, StudyReport, StudyTable
from loadtests.studies.runs import Effort, StudyCase, WorkloadPart, planned_of, read, run_all

TRIALS = 8
LOADS = {"conversation": (0.75,), "split": (0.7,)}

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "fleet": {
        "decode_weight": (0.03, 0.1, 0.3),
        "others_weight": (0.3, 1.0, 2.0),
        "stall_weight": (0.03, 0.1, 0.3),
        "prefill_window_tokens": (8192, 16384, 32768),
        "prefill_size_seconds": (1.0, 3.0, 10.0, 30.0),
    },
    "dynamo": {
        "overlap_score_credit": (0.75, 1.0, 1.5, 2.0),
        "overlap_score_credit_decay": (0.0, 0.5),
        "prefill_load_scale": (1.0, 2.0, 4.0, 8.0),
        "decode_active_request_weight": (0.0, 1.0, 4.0),
        "router_temperature": (0.0, 0.02),
    },
    "mooncake": {
        "prefill_seconds_per_token": (0.5, 0.75, 1.0, 1.5, 2.0),  # factors of the engine's true value
        "quadratic_seconds": (0.0, 0.5, 1.0, 2.0, 4.0),
    },
}
"""For each policy and parameter, the values from which a trial draws."""

WORKLOADS: dict[str, tuple[str, dict[str, Any], WorkloadPart]] = {
    "conversation": ("policies-conversation", {}, WorkloadPart.FIRST),
    "split": ("policies-split", {}, WorkloadPart.FIRST),
}
"""For each workload, the scenario, its changes, and the part of the requests that is used for tuning."""

REQUESTS = {"conversation": 4000, "split": 0}
"""Maximum number of requests of a run, by workload; 0: all."""


def trials(policy: str, count: int) -> list[dict[str, float]]:
    """Return the parameter values of all trials; the first trial has the defaults."""
    chance = Random(policy)
    grid = GRIDS[policy]
    drawn: list[dict[str, float]] = [{}]
    while len(drawn) < count:
        values = {name: chance.choice(each) for name, each in grid.items()}
        if values not in drawn:
            drawn.append(values)
    return drawn


def search(
    workload: str, policy: str, effort: Effort, *, count: int = TRIALS, report: Callable[[str], None] = print
) -> list[tuple[float, Contestant, dict[str, float]]]:
    """Run all trials, and return for each its mean attainment, its contestant and its values; the best trial comes first."""
    scenario, changes, part = WORKLOADS[workload]
    loads = LOADS[workload]
    planned = planned_of(read(scenario, changes))
    tried = [
        (published(policy, planned) if not values else chosen(policy, values, planned), values)
        for values in trials(policy, count)
    ]
    cases = [
        StudyCase(
            scenario=scenario,
            changes={**changes, **contestant.changes()},
            part=part,
            requests=effort.requests or REQUESTS[workload],
            load=load,
            seed=effort.seeds[0],
        )
        for contestant, _ in tried
        for load in loads
    ]
    ran = run_all(cases, effort)
    found = []
    for place, (contestant, values) in enumerate(tried):
        attained = [each.outcome.attainment for each in ran[place * len(loads) : (place + 1) * len(loads)]]
        mean = sum(attained) / len(attained)
        found.append((mean, contestant, values))
        report(f"{policy:10} {mean:.4f} {' '.join(f'{each:.3f}' for each in attained)} {values}")
    return sorted(found, key=lambda each: -each[0])


def study(effort: Effort) -> StudyReport:
    """Run all trials, and report the best parameters of each policy, compared with its defaults."""
    tables, findings = [], []
    for workload in WORKLOADS:
        rows = []
        for policy in GRIDS:
            found = search(workload, policy, effort)
            best, _, values = found[0]
            default = next(mean for mean, _, each in found if not each)
            rows.append((policy, default, best, " ".join(f"{name}={value:g}" for name, value in values.items())))
            findings.append(
                StudyFinding(
                    claim=f"{workload}: what tuning gives {policy}, in attainment on the first half",
                    figure=best - default,
                    low=0.0,
                )
            )
        tables.append(
            StudyTable(
                title=f"{workload}: best of {TRIALS} trials each, mean attainment at loads {LOADS[workload]}",
                columns=("policy", "default", "best", "values"),
                rows=rows,
            )
        )
    return StudyReport(study="tuning", tables=tuple(tables), findings=tuple(findings))
