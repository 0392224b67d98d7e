"""Study of DistServe's self-check: OPT-13B, prefill on two A100 with tensor parallelism, decode on one, 1.56 requests per second and GPU.

DistServe's simulator halves an interval from 0 to 5 requests per second and GPU until its width is at most a quarter, with 300 requests
and one seed. The limits were kept at 1.56 and missed at 1.72, so the true value lies between. This study has the same steps, times and
limits (90 % of TTFT within 200 ms, 90 % of TPOT within 100 ms), with lengths of Azure's conversations below 2,048 tokens. DistServe uses
ShareGPT's lengths, which are not public but have nearly the same means. In DistServe, the first token exists when the prefill ends; a
client of Fleet gets it a handoff and a step later. The study reports a rate for each case: with the first token at the end of the prefill
(`prefill`), and at the client (`client`).
"""

import tomllib
from functools import cache

from msgspec import Struct, structs

from fleet.core.clock import Nanos
from fleet.sim.results.outcomes import EndedRequest
from fleet.sim.run import RunPlan
from kvstore.eviction.trace_replay import TraceRequest
from loadtests.studies import recorded_lengths
from loadtests.studies.findings import Cell, StudyFinding, StudyReport, StudyTable
from loadtests.studies.runs import FOLDER, Effort, planned_of, read, simulated, spread

THEIRS = 1.5625
GPUS = 3
LONGEST = 2048
TTFT_MS, TPOT_MS, SHARE = 200.0, 100.0, 0.9
MANY = 95  # from this number of sequences on, the coefficients `decode_many` apply
OVERHEAD_MS, OVERHEAD_TOKEN_MS = 2.0, 1e-4  # DistServe's overhead of each step: ms, and ms per token
PIPELINE_MS = 1.0  # additional ms of each prefill step in DistServe
HANDED_OVER = 16  # a step with fewer prompt tokens is a decode step; the tokens then come from handoffs
CLOSE = 0.05  # the search ends when its interval is this small, in requests per second and GPU

FOUND = {"prefill": (1.1, 1.45), "client": (0.4, 0.65)}
"""Ranges of the highest rates when the study was written, divided by DistServe's rate."""


class DistServeTimes(Struct, frozen=True):
    """Step times by the formulas of DistServe's simulator, with coefficients in milliseconds."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    decode_many: tuple[float, float, float]
    kv_tokens: int

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        if prefill_tokens >= HANDED_OVER:
            base, token, square = self.prefill
            taken = base + token * prefill_tokens + square * 2 * prefill_pairs + PIPELINE_MS
            return (taken + OVERHEAD_MS + OVERHEAD_TOKEN_MS * prefill_tokens) / 1000
        sequences, context = decodes + prefill_tokens, decode_context + prefill_pairs
        base, token, sequence = self.decode if sequences < MANY else self.decode_many
        taken = base + token * context + sequence * sequences
        return (taken + OVERHEAD_MS + OVERHEAD_TOKEN_MS * context) / 1000


@cache
def fitted(name: str) -> DistServeTimes:
    row = tomllib.loads((FOLDER / "profiles/distserve.toml").read_text())[name]
    return DistServeTimes(tuple(row["prefill"]), tuple(row["decode"]), tuple(row["decode_many"]), row["kv_tokens"])


def plan_of() -> RunPlan:
    """Return the plan with DistServe's times and with handoffs that take no time, as in its simulator."""
    scenario = read("distserve")
    planned = planned_of(scenario)
    pools = tuple(
        structs.replace(
            pool,
            times=times,
            limits=structs.replace(pool.limits, kv_blocks=times.kv_tokens // scenario.engine.block_tokens),
            bandwidth=1e15,
            link_latency=Nanos(0),
            front=Nanos(0),
            front_per_token=0.0,
        )
        for pool, times in zip(planned.pools, (fitted("tp2"), fitted("tp1")), strict=True)
    )
    return structs.replace(planned, pools=pools, message_delay=Nanos(0))


class Shares(Struct, frozen=True):
    """Shares of the requests that keep a limit."""

    client: float  # TTFT limit, counted when the client gets the first token
    prefill: float  # TTFT limit, counted when the prefill ends
    tokens: float  # TPOT limit


def shares(rate: float, requests: int, seed: int) -> Shares:
    planned = structs.replace(plan_of(), seed=seed)
    drawn = recorded_lengths.no_longer_than(LONGEST, requests, rate * GPUS, seed)
    whole: list[EndedRequest] = []
    simulated(planned, drawn, whole.append)
    prompts: list[EndedRequest] = []  # answers of one token, which end on the prefill worker
    simulated(
        planned, [TraceRequest(each.arrival, each.prompt_tokens, each.chain, 1) for each in drawn], prompts.append
    )
    return Shares(
        client=sum(each.ttft_ms < TTFT_MS for each in whole) / len(whole),
        prefill=sum(each.ttft_ms < TTFT_MS for each in prompts) / len(prompts),
        tokens=sum(each.tpot_ms < TPOT_MS for each in whole) / len(whole),
    )


def kept(task: tuple[str, int, int]) -> float:
    """Return the highest rate per GPU that keeps both limits, found by halving the interval from 0 to 5."""
    which, requests, seed = task
    low, high = 0.0, 5.0
    while high - low > CLOSE:
        middle = (low + high) / 2
        found = shares(middle, requests, seed)
        first = found.prefill if which == "prefill" else found.client
        low, high = (middle, high) if min(first, found.tokens) >= SHARE else (low, middle)
    return low


def study(effort: Effort) -> StudyReport:
    counts = (effort.requests,) if effort.requests else (300, 1500)
    tasks = [(which, count, seed) for which in FOUND for count in counts for seed in effort.seeds]
    found = dict(zip(tasks, spread(kept, tasks, effort.processes), strict=True))
    rows: list[tuple[Cell, ...]] = [
        (which, count, *(found[which, count, seed] for seed in effort.seeds)) for which in FOUND for count in counts
    ]
    findings = []
    for which, (low, high) in FOUND.items():
        rates = [found[which, counts[-1], seed] for seed in effort.seeds]
        findings.append(
            StudyFinding(
                claim=f"rate a GPU, first tokens counted at the {which}, over DistServe's {THEIRS}",
                figure=sum(rates) / len(rates) / THEIRS,
                low=low,
                high=high,
            )
        )
    return StudyReport(
        study="distserve",
        tables=(
            StudyTable(
                title=f"Highest rate, requests a second and GPU (DistServe's simulator: {THEIRS}, with 300 requests)",
                columns=("counted at", "requests", *(f"seed {seed}" for seed in effort.seeds)),
                rows=rows,
            ),
        ),
        findings=tuple(findings),
    )
