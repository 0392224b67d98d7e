"""Capacity search: finds the highest load at which a scenario keeps its SLO.

Apart from noise, attainment falls when the load grows. So the load is doubled until the SLO is missed, or halved until it is kept. Then a
bisection begins between the highest load that kept the SLO and the lowest load that missed it. The search ends when the relative distance
of these two loads is at most `CLOSE`. The load is the rate of arrivals, or the number of users if users wait for answers. Every run has
the same requests in the same order. While one load runs, other processes can already run loads that may come next: some in case the SLO
is kept, and some in case it is missed. The curve has a point for each load that the search has tried, and for each additional load that
the caller wants.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.sim.experiments.load_curve import LoadRuns, load_runs
from fleet.sim.scenario import Scenario, scaled, waiting_users

CLOSE = 0.02
"""The search ends when the lowest load that missed the SLO is at most this share above the highest load that kept it."""

MOST_DOUBLINGS = 20
# If the SLO is still missed after this number of halvings, the search fails. At such a low rate, requests hardly ever wait for each
# other. So an even lower rate would not help.
MOST_HALVINGS = 8


class CapacityPoint(Struct, frozen=True, kw_only=True):
    """Results of the run at one load; one point of the curve in `Capacity`."""

    rate: float  # arrivals per second
    users: int  # number of users that wait for answers; 0: requests arrive at a rate
    attainment: float
    goodput_rps: float
    ttft_ms: float  # 90th percentile of TTFT
    tpot_ms: float
    cost_per_million_tokens: float


class Capacity(Struct, frozen=True, kw_only=True):
    """The capacity that the search has found, and the runs of the search. `fleet sim capacity --json` prints it."""

    rate: float  # the capacity in requests per second
    rate_per_gpu: float
    users: int
    attainment: float  # attainment at the found rate
    wanted: float
    goodput_rps: float
    tries: int
    curve: tuple[CapacityPoint, ...]  # results of all runs, in ascending order of their loads


def capacity(
    scenario: Scenario,
    folder: Path,
    wanted: float,
    *,
    points: int = 0,
    processes: int = 1,
    on_point: Callable[[CapacityPoint], None] | None = None,
) -> Capacity:
    """Search for the highest load at which a scenario keeps its SLO.

    Args:
        scenario: The scenario; its own load is tried first.
        folder: Folder that the paths in the scenario are relative to.
        wanted: Share of requests that have to keep the SLO.
        points: Number of additional loads to run for the curve, at equal distances up to 1.5 times the capacity.
        processes: Maximum number of runs at a time; it does not change the result.
        on_point: Called with the results of each run.

    Raises:
        ConfigurationRefused: The scenario cannot be run, or all loads that the search tried keep its SLO, or all of them miss it.
    """
    with load_runs(scenario, folder, processes) as runs:
        search = _Search(scenario, runs, wanted, on_point)
        low, high = _bracket(search)
        while high / low > 1 + CLOSE and not search.same(low, high):
            middle = _middle(low, high)
            if search.same(low, middle) or search.same(middle, high):
                break  # the loads are numbers of users, and no number lies between them
            search.expect(islice(_middles(low, high), 1, None))
            low, high = (middle, high) if search.keeps(middle) else (low, middle)
        best = search.at(low)
        others = [1.5 * low * number / points for number in range(1, points + 1)]
        for index, load in enumerate(others):
            search.expect(others[index + 1 :])
            search.at(load)
    gpus = sum(pool.gpus for pool in scenario.pools)
    return Capacity(
        rate=best.rate,
        rate_per_gpu=best.rate / gpus,
        users=best.users,
        attainment=best.attainment,
        wanted=wanted,
        goodput_rps=best.goodput_rps,
        tries=len(search.points),
        curve=tuple(search.points[load] for load in sorted(search.points)),
    )


class _Search:
    """Runs one scenario at several loads, and keeps the results in `points`. Loads are multiples of the scenario's own load."""

    def __init__(
        self, scenario: Scenario, runs: LoadRuns, wanted: float, on_point: Callable[[CapacityPoint], None] | None
    ):
        self._scenario, self._runs, self._wanted, self._on_point = scenario, runs, wanted, on_point
        self.points: dict[float, CapacityPoint] = {}

    def expect(self, loads: Iterable[float]) -> None:
        """Begin runs in other processes at loads that the search may need soon, as far as processes are free."""
        self._runs.expect(load for load in loads if load not in self.points)

    def keeps(self, load: float) -> bool:
        return self.at(load).attainment >= self._wanted

    def same(self, load: float, other: float) -> bool:
        """Return True if two loads give the same number of users.

        Always return False if the load of this scenario is a rate.
        """
        users = waiting_users(scaled(self._scenario, load))
        return 0 < users == waiting_users(scaled(self._scenario, other))

    def at(self, load: float) -> CapacityPoint:
        if (known := self.points.get(load)) is not None:
            return known
        ran = self._runs.at(load)
        outcome = ran.outcome
        point = CapacityPoint(
            rate=ran.rate,
            users=ran.users,
            attainment=outcome.attainment,
            goodput_rps=outcome.goodput_rps,
            ttft_ms=outcome.ttft_ms["p90"],
            tpot_ms=outcome.tpot_ms["p90"],
            cost_per_million_tokens=outcome.cost_per_million_tokens,
        )
        self.points[load] = point
        if self._on_point is not None:
            self._on_point(point)
        return point


def _bracket(search: _Search) -> tuple[float, float]:
    """Return a load that keeps the SLO, and the double of this load, which misses it; raise ConfigurationRefused if none is found."""
    load = 1.0
    search.expect((2 * load, load / 2))
    if search.keeps(load):
        for _ in range(MOST_DOUBLINGS):
            search.expect((_middle(load, 2 * load), 4 * load))
            if not search.keeps(2 * load):
                return load, 2 * load
            load *= 2
        raise ConfigurationRefused(
            f"slo: is still kept at {load:g} times the load: the workload is too short to find the limit"
        )
    for _ in range(MOST_HALVINGS):
        if search.same(load / 2, load):
            break  # one user is the smallest load
        search.expect((_middle(load / 2, load), load / 4))
        if search.keeps(load / 2):
            return load / 2, load
        load /= 2
    raise ConfigurationRefused(
        "slo: is kept at no rate: too many requests take longer even alone; raise it, or use faster workers"
    )


def _middle(low: float, high: float) -> float:
    return float((low * high) ** 0.5)


def _middles(low: float, high: float) -> Iterator[float]:
    """Yield the loads that a bisection between two loads may try, in the order of its steps."""
    spans = deque([(low, high)])
    while spans:
        low, high = spans.popleft()
        if high / low > 1 + CLOSE:
            middle = _middle(low, high)
            yield middle
            spans += [(low, middle), (middle, high)]
