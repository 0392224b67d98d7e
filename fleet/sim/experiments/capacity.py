"""The highest load at which a scenario keeps its SLO.

Attainment falls as the load grows, but for noise. So: double the load until it is missed, then halve the distance between the
highest load that kept it and the lowest that did not, until they are `CLOSE`. The load is the rate of arrivals; of clients that
wait for answers it is their number. Every try has the same requests in the same order, and is a point of the curve. Both loads that
may come after the one that runs can run beside it: what nobody asks for is no point.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.sim.experiments.load_curve import LoadRuns, tries
from fleet.sim.scenario import Scenario, scaled, waiting_users

CLOSE = 0.02
"""Relative distance of the two loads between which the answer lies."""

MOST_DOUBLINGS = 20
MOST_HALVINGS = 8  # at so low a rate requests are alone


class CapacityPoint(Struct, frozen=True, kw_only=True):
    """One load that was tried."""

    rate: float  # requests a second
    users: int  # clients that wait for answers; 0: they do not
    attainment: float
    goodput_rps: float
    ttft_ms: float  # p90
    tpot_ms: float
    cost_per_million_tokens: float


class Capacity(Struct, frozen=True, kw_only=True):
    """What `fleet sim capacity --json` prints."""

    rate: float  # requests a second
    rate_per_gpu: float
    users: int
    attainment: float  # at that rate
    wanted: float
    goodput_rps: float
    tries: int
    curve: tuple[CapacityPoint, ...]  # attainment over load: all that was tried, by load


def capacity(
    scenario: Scenario,
    folder: Path,
    wanted: float,
    *,
    points: int = 0,
    processes: int = 1,
    tried: Callable[[CapacityPoint], None] | None = None,
) -> Capacity:
    """Search.

    Args:
        scenario: Its own rate, its trace's, or its number of users is the first that is tried.
        folder: That its paths are relative to.
        wanted: Share of requests that keep the SLO.
        points: So many loads more are tried, at equal distances up to one and a half times the answer.
        processes: Tries at a time; the answer is the same.
        tried: Told of each try.

    Raises:
        ConfigurationRefused: The scenario cannot be run; or no load keeps its SLO, however low, or every one does.
    """
    with tries(scenario, folder, processes) as run:
        search = _Search(scenario, run, wanted, tried)
        low, high = _bracket(search)
        while high / low > 1 + CLOSE and not search.same(low, high):
            middle = _middle(low, high)
            if search.same(low, middle) or search.same(middle, high):
                break  # there is no number of users in between
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
    """Loads that have been tried, in units of the scenario's own."""

    def __init__(self, scenario: Scenario, run: LoadRuns, wanted: float, tried: Callable[[CapacityPoint], None] | None):
        self._scenario, self._run, self._wanted, self._tried = scenario, run, wanted, tried
        self.points: dict[float, CapacityPoint] = {}

    def expect(self, loads: Iterable[float]) -> None:
        """Loads that may be tried after the next one."""
        self._run.expect(load for load in loads if load not in self.points)

    def keeps(self, load: float) -> bool:
        return self.at(load).attainment >= self._wanted

    def same(self, load: float, other: float) -> bool:
        """Whether two loads are the same number of users."""
        users = waiting_users(scaled(self._scenario, load))
        return 0 < users == waiting_users(scaled(self._scenario, other))

    def at(self, load: float) -> CapacityPoint:
        if (known := self.points.get(load)) is not None:
            return known
        ran = self._run.at(load)
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
        if self._tried is not None:
            self._tried(point)
        return point


def _bracket(search: _Search) -> tuple[float, float]:
    """Two loads, one twice the other, of which the lower keeps the SLO."""
    load = 1.0
    search.expect((2 * load, load / 2))
    if search.keeps(load):
        for _ in range(MOST_DOUBLINGS):
            search.expect((_middle(load, 2 * load), 4 * load))
            if not search.keeps(2 * load):
                return load, 2 * load
            load *= 2
        raise ConfigurationRefused(
            f"slo: is kept at {load:g} times the load as well: the workload is too short to tell"
        )
    for _ in range(MOST_HALVINGS):
        if search.same(load / 2, load):
            break  # one user
        search.expect((_middle(load / 2, load), load / 4))
        if search.keeps(load / 2):
            return load / 2, load
        load /= 2
    raise ConfigurationRefused(
        "slo: is kept at no rate: too many requests take longer even alone; raise it, or take faster workers"
    )


def _middle(low: float, high: float) -> float:
    return float((low * high) ** 0.5)


def _middles(low: float, high: float) -> Iterator[float]:
    """Loads that may be tried after the one between two: those between either and it, and so on."""
    spans = deque([(low, high)])
    while spans:
        low, high = spans.popleft()
        if high / low > 1 + CLOSE:
            middle = _middle(low, high)
            yield middle
            spans += [(low, middle), (middle, high)]
