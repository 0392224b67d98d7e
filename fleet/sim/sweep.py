"""Many runs at once: scenarios times changes times seeds, on all cores."""

import itertools
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import Struct

from fleet.errors import ConfigurationRefused
from fleet.sim.results import Outcome
from fleet.sim.run import Plan, simulate
from fleet.sim.scenario import Scenario, plan, read_scenario
from fleet.sim.workloads import requests_of

MOST_RUNS = 10_000


class Case(Struct, frozen=True, kw_only=True):
    """One run of a sweep."""

    scenario: str
    changes: dict[str, Any]
    seed: int


class Row(Struct, frozen=True, kw_only=True):
    """What one run came to."""

    scenario: str
    changes: dict[str, Any]
    seed: int
    outcome: Outcome


def cases(scenarios: Sequence[Path], over: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[Case]:
    """All combinations, in order: scenario, then each field of `over`, then seed.

    Raises:
        ConfigurationRefused: They are too many, or one of them cannot be run; the message says which field.
    """
    number = len(scenarios) * len(seeds)
    for values in over.values():
        number *= len(values)
    if number > MOST_RUNS:
        raise ConfigurationRefused(f"--over: {number:,} runs are more than {MOST_RUNS:,}")
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    made = [
        Case(scenario=str(path), changes=changes, seed=seed)
        for path in scenarios
        for changes in combinations
        for seed in seeds
    ]
    for case in made:
        if case.seed == seeds[0]:
            _prepared(case)
    return made


def run_all(made: Sequence[Case], processes: int) -> Iterator[Row]:
    """Run them, at most so many at a time; rows come in the order of the cases."""
    if processes == 1 or len(made) == 1:
        yield from map(run_case, made)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(processes, len(made)), mp_context=context) as pool:
        yield from pool.map(run_case, made)


def run_case(case: Case) -> Row:
    scenario, planned = _prepared(case)
    folder = Path(case.scenario).parent
    requests = requests_of(scenario.workload, folder, block_tokens=scenario.engine.block_tokens, seed=scenario.seed)
    outcome = simulate(planned, requests).outcome
    return Row(scenario=case.scenario, changes=case.changes, seed=case.seed, outcome=outcome)


def _prepared(case: Case) -> tuple[Scenario, Plan]:
    path = Path(case.scenario)
    scenario = read_scenario(path, {**case.changes, "seed": case.seed})
    return scenario, plan(scenario, path.parent)
