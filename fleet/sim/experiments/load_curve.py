"""How much of an SLO a scenario keeps at other loads: the curve that a report draws.

Rules:

1. Each point is a run of its own: the same requests in the same order, faster or slower; of users that wait for answers, more or fewer.
2. Points are asked for one after the other. While one runs, others that may be asked for next run beside it, in processes of their
   own (`LoadRuns.expect`). What is asked for, and what comes of it, is the same with any number of processes.
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
"""Of the scenario's own."""

FURTHER, MOST_FURTHER, ENOUGH = 1.5, 4, 0.5
"""Beyond the last one, so many times as much each time, until fewer than that share of requests are good: a curve that ends before it
falls says little."""

MOST_REQUESTS = 20_000
"""Of one point, so that the curve of a long trace does not take many times as long as the trace."""


class LoadPoint(Struct, frozen=True, kw_only=True):
    """One load."""

    load: float  # of the scenario's own
    rate: float  # requests a second, while they came
    users: int  # that wait for answers; 0: they do not
    outcome: RunOutcome


def at_load(scenario: Scenario, folder: Path, load: float) -> LoadPoint:
    """Run a scenario at so many times its load; for what is raised, see `run_scenario`."""
    loaded, arrivals = scaled(scenario, load), ArrivalRate()
    outcome = run_scenario(loaded, folder, told=arrivals.add).outcome
    return LoadPoint(load=load, rate=arrivals.rate, users=waiting_users(loaded), outcome=outcome)


class LoadRuns:
    """Runs of one scenario at other loads."""

    def __init__(self, scenario: Scenario, folder: Path, pool: ProcessPoolExecutor | None, beside: int):
        """None has begun; `beside` of them may run in the pool at a time."""
        self._scenario, self._folder, self._pool, self._beside = scenario, folder, pool, beside
        self._begun: dict[float, Future[LoadPoint]] = {}

    def expect(self, loads: Iterable[float]) -> None:
        """Begin with loads that may be asked for soon, the likeliest first, as far as there is room."""
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
        """One of them; for what is raised, see `run_scenario`."""
        begun = self._begun.get(load)
        return at_load(self._scenario, self._folder, load) if begun is None else begun.result()


@contextmanager
def tries(scenario: Scenario, folder: Path, processes: int) -> Iterator[LoadRuns]:
    """Of a scenario, so many at a time, the caller's included; what nobody has asked for ends with the block."""
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
    tried: Callable[[LoadPoint], None] | None = None,
    processes: int = 1,
) -> list[LoadPoint]:
    """Run a scenario at other loads.

    Args:
        scenario: Its first `MOST_REQUESTS` requests count.
        folder: That its paths are relative to.
        loads: Of its own; in any order. Larger ones follow, until the curve has fallen.
        known: What came of one of them already; it is not run again, unless it had more requests than these.
        tried: Told of each.
        processes: Points at a time.

    Raises:
        ConfigurationRefused: The scenario cannot be run.
    """
    workload = scenario.workload
    cut = structs.replace(workload, requests=min(workload.requests or MOST_REQUESTS, MOST_REQUESTS))
    told = known if known is not None and known.outcome.requests <= MOST_REQUESTS else None
    points: list[LoadPoint] = []

    def at(load: float, later: Iterable[float]) -> None:
        run.expect(each for each in later if told is None or each != told.load)
        points.append(told if told is not None and told.load == load else run.at(load))
        if tried is not None:
            tried(points[-1])

    with tries(structs.replace(scenario, workload=cut), folder, processes) as run:
        ordered = sorted(loads)
        for index, load in enumerate(ordered):
            at(load, ordered[index + 1 :])
        for _ in range(MOST_FURTHER):
            if not points or points[-1].outcome.attainment < ENOUGH:
                break
            at(load := points[-1].load * FURTHER, (load * FURTHER,))
    return points
