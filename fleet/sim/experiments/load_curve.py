"""Load curve: the share of requests that keep the SLO, at several loads of a scenario.

Rules:

1. Each point is a separate run with the same requests in the same order. Only the rate of arrivals differs or, if users wait for
   answers, the number of users.
2. Points are computed one after the other. While one point is computed, runs for later points can already begin in other processes
   (`LoadRuns.expect`). The points and their results are the same with any number of processes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, structs

from fleet.sim.experiments.process_pool import process_pool, watch
from fleet.sim.results.history import ArrivalRate
from fleet.sim.results.outcomes import RunOutcome
from fleet.sim.run_plan import run_scenario
from fleet.sim.scenario import Scenario, scaled, waiting_users

LOADS = (0.5, 1.0, 1.5, 2.0)
"""Default loads of the curve, as multiples of the load that the scenario states."""

FURTHER, MOST_FURTHER, ENOUGH = 1.5, 4, 0.5
"""Parameters of the rule by which a curve is continued above its highest load.

Further loads are run until attainment is below `ENOUGH`, but at most `MOST_FURTHER` of them. Each is `FURTHER` times
the previous load.
"""

MOST_REQUESTS = 20_000
"""Maximum number of requests of one point. Without a limit, the curve of a long trace would take many times as long as
one run of the trace."""


class LoadPoint(Struct, frozen=True, kw_only=True):
    """Outcome of the run at one load; one point of the curve."""

    load: float  # multiple of the load that the scenario states
    rate: float  # arrivals per second
    users: int  # number of users that wait for answers; 0: requests arrive at a rate
    outcome: RunOutcome


def at_load(scenario: Scenario, folder: Path, load: float) -> LoadPoint:
    """Run a scenario at a multiple of the load that it states. Raises the same errors as `run_scenario`."""
    loaded, arrivals = scaled(scenario, load), ArrivalRate()
    outcome = run_scenario(loaded, folder, on_end=arrivals.add).outcome
    return LoadPoint(load=load, rate=arrivals.rate, users=waiting_users(loaded), outcome=outcome)


class LoadRuns:
    """Runs a scenario at several loads. Runs that may be needed soon are computed in advance in a process pool."""

    def __init__(self, scenario: Scenario, folder: Path, pool: ProcessPoolExecutor | None, beside: int):
        """Create the object without runs. It starts at most `beside` runs at a time in the process pool, if there is a pool."""
        self._scenario, self._folder, self._pool, self._beside = scenario, folder, pool, beside
        self._begun: dict[float, Future[LoadPoint]] = {}

    def expect(self, loads: Iterable[float]) -> None:
        """Begin runs at loads that may be needed soon, as long as the process pool has free processes.

        In `loads`, the load that is most likely needed comes first.
        """
        if self._pool is None:
            return
        room = self._beside - sum(not each.done() for each in self._begun.values())
        for load in loads:
            if room <= 0:
                return
            if load not in self._begun:
                self._begun[load] = self._pool.submit(at_load, self._scenario, self._folder, load)
                watch(self._pool)
                room -= 1

    def at(self, load: float) -> LoadPoint:
        """Return the results of the run at a load. If `expect` has not begun it, run it now. Raises the same errors as `run_scenario`."""
        begun = self._begun.get(load)
        return at_load(self._scenario, self._folder, load) if begun is None else begun.result()


@contextmanager
def load_runs(scenario: Scenario, folder: Path, processes: int) -> Iterator[LoadRuns]:
    """Open a `LoadRuns` that uses at most `processes` processes, including the caller's.

    When the `with` block ends, runs that are still under way are ended.
    """
    if processes == 1:
        yield LoadRuns(scenario, folder, None, 0)
        return
    with process_pool(processes - 1, finish=False) as pool:
        yield LoadRuns(scenario, folder, pool, processes - 1)


def load_curve(
    scenario: Scenario,
    folder: Path,
    loads: Sequence[float] = LOADS,
    *,
    known: LoadPoint | None = None,
    on_point: Callable[[LoadPoint], None] | None = None,
    processes: int = 1,
) -> list[LoadPoint]:
    """Run a scenario at several loads.

    Args:
        scenario: The scenario; only its first `MOST_REQUESTS` requests are used.
        folder: Folder that the paths in the scenario are relative to.
        loads: Multiples of the scenario's load, in any order. Higher loads are added until attainment is below `ENOUGH`, but at most
            `MOST_FURTHER` of them.
        known: A finished run of the scenario, or None. Its load is not run again, unless the run had more than
            `MOST_REQUESTS` requests.
        on_point: Called with each point of the curve.
        processes: Maximum number of runs at a time.

    Raises:
        ConfigurationRefused: The scenario cannot be run.
    """
    workload = scenario.workload
    cut = structs.replace(workload, requests=min(workload.requests or MOST_REQUESTS, MOST_REQUESTS))
    reused = known if known is not None and known.outcome.requests <= MOST_REQUESTS else None
    points: list[LoadPoint] = []

    def at(load: float, later: Iterable[float]) -> None:
        runs.expect(each for each in later if reused is None or each != reused.load)
        points.append(reused if reused is not None and reused.load == load else runs.at(load))
        if on_point is not None:
            on_point(points[-1])

    with load_runs(structs.replace(scenario, workload=cut), folder, processes) as runs:
        ordered = sorted(loads)
        for index, load in enumerate(ordered):
            at(load, ordered[index + 1 :])
        for _ in range(MOST_FURTHER):
            if not points or points[-1].outcome.attainment < ENOUGH:
                break
            at(load := points[-1].load * FURTHER, (load * FURTHER,))
    return points
