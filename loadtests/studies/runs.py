"""Runs of a study: scenarios with changes, parts of traces and loads, on several cores.

A load is the work of the requests, divided by the most work that the workers could do in the same time (`loadtests.studies.bound`). At a
load of 1, all workers would be busy all the time if every prefix were cached everywhere and there were no imbalance.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.sim.results.outcomes import EndedRequest, RunOutcome
from fleet.sim.run import RunPlan, simulate
from fleet.sim.run_plan import plan
from fleet.sim.scenario import Scenario, read_scenario
from fleet.sim.workload.traffic import requests_of
from kvstore.eviction.trace_replay import TraceRequest
from loadtests.studies.bound import UpperBound, bound_of

FOLDER = Path(__file__).parent
# The search for a capacity ends when two rates differ by at most this share. Other seeds change the result by more.
CLOSE = 0.03

Item = TypeVar("Item")
Result = TypeVar("Result")


class Effort(Struct, frozen=True, kw_only=True):
    """How much a study computes: seeds, processes, and requests of each run."""

    seeds: tuple[int, ...] = (1,)
    processes: int = 1
    requests: int = 0
    """Maximum number of requests of each run; 0: all. With fewer requests, findings may fail."""


class WorkloadPart(StrEnum):
    """Part of a workload's requests."""

    ALL = "all"
    FIRST = "first"  # first half, for tuning
    SECOND = "second"  # second half, for figures


class StudyCase(Struct, frozen=True, kw_only=True):
    """One run of a study: the scenario, and what is changed in it."""

    scenario: str
    """Name of a scenario file in this folder, without its suffix."""

    changes: dict[str, Any] = {}
    part: WorkloadPart = WorkloadPart.ALL
    requests: int = 0
    load: float = 0.0
    """Load at which requests come; 0: as in the scenario."""

    seed: int = 1


class StudyRun(Struct, frozen=True, kw_only=True):
    """Results of one run, and the upper bound of its attainment."""

    case: StudyCase
    outcome: RunOutcome
    rate: float  # mean number of arrivals per second
    bound: float  # upper bound of the attainment


def run(case: StudyCase) -> StudyRun:
    """Run one case. Processes of a pool may call this function."""
    planned = structs.replace(planned_of(read(case.scenario, case.changes)), seed=case.seed)
    wanted = {path: value for path, value in case.changes.items() if not path.startswith("router.")}
    requests, limit = _offered(case.scenario, msgspec.json.encode(wanted, order="sorted"), case.part, case.requests)
    speed = case.load / limit.load if case.load else 1.0
    outcome = simulated(planned, faster(requests, speed))
    seconds = requests[-1].arrival / SECOND / speed
    return StudyRun(
        case=case,
        outcome=outcome,
        rate=len(requests) / seconds if seconds else 0.0,
        bound=limit.attainment(speed),
    )


def simulated(
    plan: RunPlan, requests: Iterable[TraceRequest], on_end: Callable[[EndedRequest], None] | None = None
) -> RunOutcome:
    """Simulate requests on a plan, and return the outcome. Each request arrives at its own time, whatever happens to earlier ones."""
    return simulate(plan, iter(requests), on_end=on_end).outcome


def run_all(
    cases: Sequence[StudyCase], effort: Effort, on_end: Callable[[StudyRun], None] | None = None
) -> list[StudyRun]:
    """Run all cases and return their results in order."""
    ran = []
    for each in spread(run, cases, effort.processes):
        if on_end is not None:
            on_end(each)
        ran.append(each)
    return ran


def spread(work: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """Map a function over items on several cores, with results in the order of the items."""
    if processes == 1:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(work, items)


def read(name: str, changes: dict[str, Any] | None = None) -> Scenario:
    """Read a scenario of this folder."""
    return read_scenario(FOLDER / f"{name}.toml", changes or {})


def planned_of(scenario: Scenario) -> RunPlan:
    return plan(scenario, FOLDER)


def requests_in(scenario: Scenario, part: WorkloadPart = WorkloadPart.ALL, most: int = 0) -> list[TraceRequest]:
    """Return the requests of a part of a scenario's workload, at most `most` of them (0: all), the first one at instant 0."""
    drawn = requests_of(scenario.workload, FOLDER, block_tokens=scenario.engine.block_tokens, seed=scenario.seed)
    requests = list(drawn)
    half = len(requests) // 2
    match part:
        case WorkloadPart.FIRST:
            requests = requests[:half]
        case WorkloadPart.SECOND:
            requests = requests[half:]
        case WorkloadPart.ALL:
            pass
    requests = requests[: most or None]
    first = requests[0].arrival
    return [_at(each, Nanos(each.arrival - first)) for each in requests] if first else requests


def faster(requests: Iterable[TraceRequest], speed: float) -> Iterator[TraceRequest]:
    """Yield the same requests; their arrivals come `speed` times as fast."""
    for each in requests:
        yield each if speed == 1 else _at(each, Nanos(round(each.arrival / speed)))


def _at(request: TraceRequest, arrival: Nanos) -> TraceRequest:
    return TraceRequest(arrival, request.prompt_tokens, request.chain, request.output_tokens, request.session)


@lru_cache(maxsize=4)
def _offered(name: str, changes: bytes, part: WorkloadPart, most: int) -> tuple[list[TraceRequest], UpperBound]:
    """Return the requests and their upper bound, which do not depend on the policy."""
    scenario = read(name, msgspec.json.decode(changes))
    requests = requests_in(scenario, part, most)
    return requests, bound_of(requests, planned_of(scenario))


def capacity(
    attained: Callable[[float], float], *, wanted: float = 0.9, first: float = 1.0, close: float = CLOSE
) -> float:
    """Return the highest load (or rate) with the wanted attainment, found in steps of 1.5 and then by halving the interval.

    Args:
        attained: Returns the attainment at a load.
        wanted: Wanted attainment.
        first: Load at which the search begins.
        close: Relative distance at which the search ends; of the two final loads, the lower one is returned.
    """
    low, high = first, first
    if attained(first) >= wanted:
        while attained(high := low * 1.5) >= wanted:
            low = high
    else:
        while attained(low := high / 1.5) < wanted:
            high = low
    while high / low > 1 + close:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if attained(middle) >= wanted else (low, middle)
    return low
