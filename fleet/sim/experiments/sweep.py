"""Sweep: runs all combinations of scenarios, changed fields and seeds, on all cores or on a Ray cluster."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct, structs

from fleet.config import merge_changes
from fleet.core.errors import ConfigurationRefused
from fleet.sim.experiments.process_pool import process_pool, watch
from fleet.sim.experiments.ray_tasks import map_on_ray
from fleet.sim.results.outcomes import RunOutcome
from fleet.sim.run import RunPlan, simulate
from fleet.sim.run_plan import plan, traffic
from fleet.sim.scenario import Scenario, read_scenario
from fleet.sim.workload.traffic import RecordedWorkload

MOST_RUNS = 10_000


class SweepCase(Struct, frozen=True, kw_only=True):
    """Describes one run of a sweep: a scenario file, changed fields, and a seed."""

    scenario: str
    changes: dict[str, Any]
    seed: int


class SweepRow(Struct, frozen=True, kw_only=True):
    """One run of a sweep with its outcome."""

    scenario: str
    changes: dict[str, Any]
    seed: int
    outcome: RunOutcome


class _Prepared(Struct, frozen=True, kw_only=True):
    """A case with the contents of all its files except for the trace, so that another machine can run it."""

    case: SweepCase
    scenario: Scenario
    plan: RunPlan


def cases(
    scenarios: Sequence[Path], over: Mapping[str, Sequence[Any]], seeds: Sequence[int], set_: Mapping[str, Any] = {}
) -> list[SweepCase]:
    """Return all combinations of scenario files, values of the fields in `over`, and seeds. The changes in `set_` apply to each case.

    Each combination is checked with the first seed only. For this check, the whole trace is read, unless an earlier case reads the trace in
    the same way.

    Raises:
        ConfigurationRefused: There are too many combinations, or one of them cannot be run; the message names the field or row.
    """
    number = len(scenarios) * len(seeds)
    for values in over.values():
        number *= len(values)
    if number > MOST_RUNS:
        raise ConfigurationRefused(f"{'--over' if over else '--seeds'}: {number:,} runs are more than {MOST_RUNS:,}")
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    made = [
        SweepCase(scenario=str(path), changes=merge_changes(set_, changes), seed=seed)
        for path in scenarios
        for changes in combinations
        for seed in seeds
    ]
    read: list[tuple[object, ...]] = []
    for case in made:
        if case.seed == seeds[0]:
            prepared = _prepared(case)
            if (same := _as_read(prepared)) not in read:
                _read(prepared)
                read.append(same)
    return made


def run_all(made: Sequence[SweepCase], processes: int, *, ray: str | None = None) -> Iterator[SweepRow]:
    """Run cases on this machine, or on the Ray cluster at the address `ray`, and yield their rows in the order of the cases.

    Raises:
        ConfigurationRefused: A case can no longer be run, because a file has changed since `cases`. Or the Ray cluster cannot
            be used or fails, or a process was killed.
    """
    if ray is not None:
        yield from map_on_ray(ray, run_prepared, [(prepared := _prepared(case), _trace(prepared)) for case in made])
        return
    if processes == 1 or len(made) == 1:
        yield from map(run_case, made)
        return
    with process_pool(min(processes, len(made))) as pool:
        rows = pool.map(run_case, made)
        watch(pool)
        yield from rows


def run_case(case: SweepCase) -> SweepRow:
    prepared = _prepared(case)
    return _run(prepared, prepared.scenario)


def run_prepared(prepared: _Prepared, trace: bytes) -> SweepRow:
    """Run a case on a machine that has none of its files; `trace` is the content of the trace file."""
    scenario = prepared.scenario
    if not isinstance(scenario.workload, RecordedWorkload):
        return _run(prepared, scenario)
    with TemporaryDirectory(prefix="fleet-sim-") as folder:
        file = Path(folder) / Path(scenario.workload.file).name
        file.write_bytes(trace)
        moved = structs.replace(scenario, workload=structs.replace(scenario.workload, file=str(file)))
        return _run(prepared, moved)


def _run(prepared: _Prepared, scenario: Scenario) -> SweepRow:
    case = prepared.case
    outcome = simulate(prepared.plan, traffic(scenario, Path(case.scenario).parent)).outcome
    return SweepRow(scenario=case.scenario, changes=case.changes, seed=case.seed, outcome=outcome)


def _prepared(case: SweepCase) -> _Prepared:
    path = Path(case.scenario)
    scenario = read_scenario(path, {**case.changes, "seed": case.seed})
    with _naming(path):
        return _Prepared(case=case, scenario=scenario, plan=plan(scenario, path.parent))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """If the `with` block raises ConfigurationRefused, put the path of the scenario file before the error's message."""
    try:
        yield
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{path}: {error}") from error


def _trace(prepared: _Prepared) -> Path | None:
    workload = prepared.scenario.workload
    return Path(prepared.case.scenario).parent / workload.file if isinstance(workload, RecordedWorkload) else None


def _as_read(prepared: _Prepared) -> tuple[object, ...]:
    """Return the settings of a scenario that determine which rows of its trace are read and which of them are valid.

    If these settings are equal for two cases, the trace needs to be checked for only one of the cases.
    """
    scenario, workload = prepared.scenario, prepared.scenario.workload
    if isinstance(workload, RecordedWorkload):
        workload = structs.replace(workload, speed=1.0)
    return prepared.case.scenario, workload, scenario.engine.block_tokens, type(scenario.clients)


def _read(prepared: _Prepared) -> None:
    """Read the whole trace once, to find invalid rows before any run."""
    path = Path(prepared.case.scenario)
    with _naming(path):
        sent = traffic(prepared.scenario, path.parent)
        if isinstance(prepared.scenario.workload, RecordedWorkload):
            for _ in sent:
                pass
