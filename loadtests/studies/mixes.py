"""Study of GPUs by price: H100, B200, MI300X, and mixes in which one kind prefills and another one decodes.

All clusters serve the same requests, and are compared by the cost of a million requests in time at list prices (`fleet hardware list`).
Figures of MI300X are computed from its data sheet and the efficiencies of other GPUs, and may be wrong by 35 % (docs/hardware.md), so
the rank of MI300X may be wrong, too.
"""

from fleet.core.roles import Role
from fleet.sim.scenario import SimulatedPoolSection
from loadtests.studies.findings import StudyFinding, StudyReport, StudyTable
from loadtests.studies.rates import ClusterVariant, carried
from loadtests.studies.runs import Effort, spread

MILLION_OVER_HOUR = 1e6 / 3600


def _whole(gpu: str, gpus: int, tp: int) -> tuple[SimulatedPoolSection, ...]:
    return (SimulatedPoolSection(role=Role.BOTH, gpu=gpu, gpus=gpus, tp=tp),)


def _pair(prefill: tuple[str, int, int], decode: tuple[str, int, int]) -> tuple[SimulatedPoolSection, ...]:
    return (
        SimulatedPoolSection(role=Role.PREFILL, gpu=prefill[0], gpus=prefill[1], tp=prefill[2]),
        SimulatedPoolSection(role=Role.DECODE, gpu=decode[0], gpus=decode[1], tp=decode[2]),
    )


CLUSTERS: dict[str, tuple[SimulatedPoolSection, ...]] = {
    "32 H100": _whole("h100", 32, 4),
    "16 B200": _whole("b200", 16, 2),
    "32 MI300X": _whole("mi300x", 32, 4),
    "16 + 16 H100": _pair(("h100", 16, 4), ("h100", 16, 4)),
    "8 + 8 B200": _pair(("b200", 8, 2), ("b200", 8, 2)),
    "16 H100 + 16 MI300X": _pair(("h100", 16, 4), ("mi300x", 16, 4)),
    "8 B200 + 16 H100": _pair(("b200", 8, 2), ("h100", 16, 4)),
    "8 B200 + 16 MI300X": _pair(("b200", 8, 2), ("mi300x", 16, 4)),
    "16 H100 and 8 B200": (
        SimulatedPoolSection(role=Role.BOTH, gpu="h100", gpus=16, tp=4),
        SimulatedPoolSection(role=Role.BOTH, gpu="b200", gpus=8, tp=2),
    ),
}
"""Clusters by name. *A + B*: prefill on A, decode on B; *A and B*: both GPU types serve whole requests."""

FOUND: dict[str, tuple[float, float]] = {
    "16 B200": (0.65, 0.9),
    "32 MI300X": (0.6, 0.85),
    "16 + 16 H100": (0.85, 1.15),
    "8 + 8 B200": (0.7, 0.95),
    "8 B200 + 16 H100": (0.7, 0.95),
    "8 B200 + 16 MI300X": (0.65, 0.9),
}
"""Range of the cost of a request, divided by its cost on 32 H100, when the study was written."""


def study(effort: Effort) -> StudyReport:
    clusters = [
        ClusterVariant(scenario="mixes", pools=pools, requests=effort.requests, seed=effort.seeds[0], first=16.0)
        for pools in CLUSTERS.values()
    ]
    found = dict(zip(CLUSTERS, spread(carried, clusters, effort.processes), strict=True))
    dollars = {
        name: each.dollars_per_hour / each.rate * MILLION_OVER_HOUR if each.rate else float("inf")
        for name, each in found.items()
    }
    base = dollars["32 H100"]
    findings = []
    for name, cost in dollars.items():
        low, high = FOUND.get(name, (float("-inf"), float("inf")))
        findings.append(
            StudyFinding(
                claim=f"{name}: dollars a request, over those of 32 H100", figure=cost / base, low=low, high=high
            )
        )
    return StudyReport(
        study="mixes",
        tables=(
            StudyTable(
                title="Highest rate with 90 % in time, and what that costs",
                columns=("cluster", "requests/s", "$/h", "$ a million", "of H100", "handed over"),
                rows=[
                    (
                        name,
                        found[name].rate,
                        found[name].dollars_per_hour,
                        dollars[name],
                        dollars[name] / base,
                        f"{found[name].handed_over:.0%}",
                    )
                    for name in sorted(dollars, key=lambda each: dollars[each])
                ],
            ),
        ),
        findings=tuple(findings),
    )
