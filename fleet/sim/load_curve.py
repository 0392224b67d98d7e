"""How much of an SLO a scenario keeps at other loads: the curve that a report draws.

Each point is a run of its own: the same requests in the same order, faster or slower; of users that wait for answers, more or fewer.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from fleet.sim.history import Arrivals
from fleet.sim.planning import run_scenario
from fleet.sim.results import Outcome
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
    outcome: Outcome


def at_load(scenario: Scenario, folder: Path, load: float) -> LoadPoint:
    """Run a scenario at so many times its load; for what is raised, see `run_scenario`."""
    loaded, arrivals = scaled(scenario, load), Arrivals()
    outcome = run_scenario(loaded, folder, told=arrivals.add).outcome
    return LoadPoint(load=load, rate=arrivals.rate, users=waiting_users(loaded), outcome=outcome)


def load_curve(
    scenario: Scenario,
    folder: Path,
    loads: Sequence[float] = LOADS,
    *,
    known: LoadPoint | None = None,
    tried: Callable[[LoadPoint], None] | None = None,
) -> list[LoadPoint]:
    """Run a scenario at other loads.

    Args:
        scenario: Its first `MOST_REQUESTS` requests count.
        folder: That its paths are relative to.
        loads: Of its own; in any order. Larger ones follow, until the curve has fallen.
        known: What came of one of them already; it is not run again, unless it had more requests than these.
        tried: Told of each.

    Raises:
        ConfigurationRefused: The scenario cannot be run.
    """
    workload = scenario.workload
    cut = structs.replace(workload, requests=min(workload.requests or MOST_REQUESTS, MOST_REQUESTS))
    points: list[LoadPoint] = []

    def at(load: float) -> None:
        if known is not None and known.load == load and known.outcome.requests <= MOST_REQUESTS:
            points.append(known)
        else:
            points.append(at_load(structs.replace(scenario, workload=cut), folder, load))
        if tried is not None:
            tried(points[-1])

    for load in sorted(loads):
        at(load)
    for _ in range(MOST_FURTHER):
        if not points or points[-1].outcome.attainment < ENOUGH:
            break
        at(points[-1].load * FURTHER)
    return points
