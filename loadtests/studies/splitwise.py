"""Study of Splitwise's six cluster designs of equal electric power, compared with the figures of Splitwise's own simulator.

The study has the same step times, the same lengths, and the same nine limits. At the 50th, 90th and 99th percentile, TTFT may be 2, 3
and 6 times that of an idle A100, and TPOT and whole answers may take 1.25, 1.5 and 5 times as long. Arrivals are a Poisson process of
two minutes, and rates are tried in steps of 10 requests per second. There are three differences. Fleet's router places requests, so no
machine changes its pool. Prompts over 2,048 tokens are computed in chunks. The first token of a disaggregated request comes from the
decode worker, a transfer and a step later.
"""

import tomllib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.sim.results.outcomes import EndedRequest
from fleet.sim.run import RunPlan
from fleet.sim.scenario import SimulatedPoolSection
from loadtests.studies import recorded_lengths
from loadtests.studies.findings import StudyFinding, StudyReport, StudyTable
from loadtests.studies.runs import FOLDER, Effort, planned_of, read, simulated, spread

SECONDS = 120
STEP = 10  # step of the grid, requests per second
HANDED_OVER = 16  # a step with fewer prompt tokens is a decode step; the tokens then come from handoffs
MIXED = 1.1  # a step of prompts and decodes takes this many times as long in Splitwise as a step of prompts alone
KV_BYTES = 2 * 70 * 14336 * 2
MEMORY = 8 * 85_899_345_920 - 329_000_000_000  # bytes that a machine has for KV in Splitwise
BANDWIDTH = 200 * 2.0**30

LIMITS = {"TTFT": (2.0, 3.0, 6.0), "TBT": (1.25, 1.5, 5.0), "E2E": (1.25, 1.5, 5.0)}
SHARES = (0.5, 0.9, 0.99)


class Machines(Struct, frozen=True):
    role: Role
    times: str  # name of the step times in profiles/splitwise.toml
    count: int


DESIGNS: dict[str, tuple[tuple[Machines, ...], int]] = {
    "A100 baseline": ((Machines(Role.BOTH, "a100", 70),), 50),
    "H100 baseline": ((Machines(Role.BOTH, "h100", 40),), 120),
    "A100 + A100": ((Machines(Role.PREFILL, "a100", 45), Machines(Role.DECODE, "a100", 25)), 120),
    "H100 + H100": ((Machines(Role.PREFILL, "h100", 25), Machines(Role.DECODE, "h100", 15)), 130),
    "H100 + A100": ((Machines(Role.PREFILL, "h100", 25), Machines(Role.DECODE, "a100", 26)), 140),
    "H100 + capped H100": ((Machines(Role.PREFILL, "h100", 25), Machines(Role.DECODE, "h100-capped", 21)), 140),
}
"""For each design, its machines, and the highest rate of Splitwise's simulator in requests per second (conversations, one seed)."""

FOUND: dict[str, tuple[float, float]] = {
    "A100 baseline": (1.0, 1.4),
    "H100 baseline": (0.91, 1.09),
    "A100 + A100": (0.83, 1.0),
    "H100 + H100": (0.7, 1.0),
    "H100 + A100": (0.65, 1.0),
    "H100 + capped H100": (0.85, 1.0),
}
"""Range of the highest rate when the study was written, divided by the rate of Splitwise's simulator."""


class Points(Struct, frozen=True):
    """Step times as straight lines between measured points; the outer lines are extended beyond the points."""

    tokens: tuple[float, ...]
    prompt: tuple[float, ...]  # seconds of a step of prompts, for each number of `tokens`
    token: tuple[float, ...]  # seconds of a decode step, for each number of `tokens`

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:  # noqa: ARG002
        if prefill_tokens < HANDED_OVER:
            return self._at(self.token, decodes + prefill_tokens)
        if decodes:
            return MIXED * self._at(self.prompt, prefill_tokens + decodes)
        return self._at(self.prompt, prefill_tokens)

    def _at(self, values: tuple[float, ...], tokens: float) -> float:
        place = min(max(bisect_right(self.tokens, tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[place - 1], self.tokens[place]
        share = (tokens - low) / (high - low)
        return values[place - 1] + share * (values[place] - values[place - 1])


@cache
def points(name: str) -> Points:
    rows = tomllib.loads((FOLDER / "profiles/splitwise.toml").read_text())[name]
    return Points(
        tuple(row[0] for row in rows), tuple(row[1] / 1000 for row in rows), tuple(row[2] / 1000 for row in rows)
    )


def plan_of(design: str) -> RunPlan:
    """Return the plan with the machines of a design and their measured times."""
    machines, _ = DESIGNS[design]
    scenario = read("splitwise")
    sections = tuple(
        SimulatedPoolSection(
            name=f"{each.role.value}-{each.times}",
            role=each.role,
            gpu="a100" if each.times == "a100" else "h100",
            gpus=8 * each.count,
            tp=8,
        )
        for each in machines
    )
    planned = planned_of(structs.replace(scenario, pools=sections))
    block_tokens = scenario.engine.block_tokens
    fastest = min(points(each.times).seconds(1024, 0, 0, 0) for each in machines)
    pools = tuple(
        structs.replace(
            pool,
            times=points(each.times),
            limits=structs.replace(pool.limits, kv_blocks=int(MEMORY / KV_BYTES) // block_tokens),
            kv_bytes_per_token=float(KV_BYTES),
            bandwidth=BANDWIDTH,
            front=Nanos(0),
            front_per_token=0.0,
            prefill_speed=fastest / points(each.times).seconds(1024, 0, 0, 0),
            decode_speed=1.0,
        )
        for pool, each in zip(planned.pools, machines, strict=True)
    )
    return structs.replace(planned, pools=pools)


class SearchStep(Struct, frozen=True):
    design: str
    rate: float
    seed: int
    requests: int  # maximum number of requests; 0: two minutes of arrivals


def slowdowns(tried: SearchStep) -> dict[str, tuple[float, float, float]]:
    """Return for each kind of latency how many times as long as on an idle A100 it is, at the percentiles `SHARES`."""
    count = round(tried.rate * SECONDS)
    requests = recorded_lengths.independent(tried.requests or count, tried.rate, tried.seed)
    planned = structs.replace(plan_of(tried.design), seed=tried.seed)
    over: list[EndedRequest] = []
    simulated(planned, requests, over.append)
    alone = points("a100")
    token = alone.seconds(0, 0, 1, 0)
    ratios: dict[str, list[float]] = {name: [] for name in LIMITS}
    for each in over:
        assert each.first_token is not None, each
        prompt = alone.seconds(max(HANDED_OVER, each.prompt_tokens), 0, 0, 0)
        first = (each.first_token - each.arrival) / SECOND
        whole = (each.end - each.arrival) / SECOND
        ratios["TTFT"].append(first / prompt)
        ratios["TBT"].append((whole - first) / each.output_tokens / token)
        ratios["E2E"].append(whole / (prompt + token * (each.output_tokens - 1)))
    return {name: _quantiles(values) for name, values in ratios.items()}


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    low, middle, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES)
    return low, middle, high


def in_limits(found: dict[str, tuple[float, float, float]]) -> bool:
    return all(
        figure <= limit for name, limits in LIMITS.items() for figure, limit in zip(found[name], limits, strict=True)
    )


class Searched(Struct, frozen=True):
    design: str
    rate: float
    closest: str  # the figure that exceeded its limit most at the next higher rate, as text


def highest(task: tuple[str, int, int]) -> Searched:
    """Return the highest rate, in steps of `STEP`, that keeps all nine limits; begin with the rate of Splitwise's simulator."""
    design, seed, requests = task
    rate, kept, missed = float(DESIGNS[design][1]), 0.0, ""
    while True:
        found = slowdowns(SearchStep(design, rate, seed, requests))
        if in_limits(found):
            kept = rate
            if missed:
                break
            rate += STEP
        else:
            missed = _worst(found)
            if kept or rate <= STEP:
                break
            rate -= STEP
    return Searched(design, kept, missed)


def _worst(found: dict[str, tuple[float, float, float]]) -> str:
    name, place = max(
        ((name, place) for name in LIMITS for place in range(len(SHARES))),
        key=lambda each: found[each[0]][each[1]] / LIMITS[each[0]][each[1]],
    )
    return f"{name} P{100 * SHARES[place]:.0f} {found[name][place]:.2f} > {LIMITS[name][place]:g}"


def study(effort: Effort) -> StudyReport:
    tasks = [(design, effort.seeds[0], effort.requests) for design in DESIGNS]
    searched = list(spread(highest, tasks, effort.processes))
    base = searched[0].rate
    theirs_base = DESIGNS["A100 baseline"][1]
    rows, findings = [], []
    for each in searched:
        machines, theirs = DESIGNS[each.design]
        count = " + ".join(str(each.count) for each in machines)
        rows.append(
            (
                each.design,
                count,
                theirs,
                theirs / theirs_base,
                each.rate,
                each.rate / base if base else 0.0,
                each.closest,
            )
        )
        low, high = FOUND.get(each.design, (float("-inf"), float("inf")))
        findings.append(
            StudyFinding(
                claim=f"{each.design}: rate beside Splitwise's simulator", figure=each.rate / theirs, low=low, high=high
            )
        )
    return StudyReport(
        study="splitwise",
        tables=(
            StudyTable(
                title="Highest rate that keeps all nine limits, requests a second",
                columns=("design", "machines", "Splitwise", "of A100", "here", "of A100", "first over its limit"),
                rows=rows,
            ),
        ),
        findings=tuple(findings),
    )
