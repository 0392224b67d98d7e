"""The highest rate of arrivals at which a scenario keeps its SLO.

Attainment falls as the rate grows, but for noise. So: double the rate until it is missed, then halve the distance between the
highest rate that kept it and the lowest that did not, until they are `CLOSE`. Every try has the same requests in the same order.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, structs

from fleet.clock import SECOND, Nanos
from fleet.errors import ConfigurationRefused
from fleet.sim.run import simulate
from fleet.sim.scenario import Scenario, plan
from fleet.sim.workloads import Drawn, Workload, requests_of
from kvstore.replay import Request

CLOSE = 0.02
"""Relative distance of the two rates between which the answer lies."""

MOST_DOUBLINGS = 20
MOST_HALVINGS = 8  # at so low a rate requests are alone


class Capacity(Struct, frozen=True, kw_only=True):
    """What `fleet sim capacity --json` prints."""

    rate: float  # requests a second
    rate_per_gpu: float
    attainment: float  # at that rate
    wanted: float
    goodput_rps: float
    tries: int


def capacity(
    scenario: Scenario, folder: Path, wanted: float, *, tried: Callable[[float, float], None] | None = None
) -> Capacity:
    """Search.

    Args:
        scenario: Its own rate, or its trace's, is the first that is tried.
        folder: That its paths are relative to.
        wanted: Share of requests that keep the SLO.
        tried: Told of each try: rate, attainment.

    Raises:
        ConfigurationRefused: The scenario cannot be run; or no rate keeps its SLO, however low, or every one does.
    """
    planned = plan(scenario, folder)
    gpus = sum(pool.workers * pool.gpus for pool in planned.pools)
    tries = 0
    kept: Capacity | None = None

    def keeps(speed: float) -> bool:
        nonlocal tries, kept
        tries += 1
        workload = _faster(scenario.workload, speed)
        requests = _Watched(
            requests_of(workload, folder, block_tokens=scenario.engine.block_tokens, seed=scenario.seed)
        )
        outcome = simulate(planned, requests).outcome
        rate = outcome.requests / (requests.last_arrival / SECOND) if requests.last_arrival else 0.0
        if tried is not None:
            tried(rate, outcome.attainment)
        if outcome.attainment < wanted:
            return False
        kept = Capacity(
            rate=rate,
            rate_per_gpu=rate / gpus,
            attainment=outcome.attainment,
            wanted=wanted,
            goodput_rps=outcome.goodput_rps,
            tries=tries,
        )
        return True

    low, high = _bracket(keeps)
    while high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    assert kept is not None
    return structs.replace(kept, tries=tries)


class _Watched(Iterator[Request]):
    """Requests, and when the latest of them came."""

    def __init__(self, requests: Iterator[Request]):
        self._requests = requests
        self.last_arrival = Nanos(0)

    def __next__(self) -> Request:
        request = next(self._requests)
        self.last_arrival = request.arrival
        return request


def _bracket(keeps: Callable[[float], bool]) -> tuple[float, float]:
    """Two speeds, one twice the other, of which the lower keeps the SLO."""
    speed = 1.0
    if keeps(speed):
        for _ in range(MOST_DOUBLINGS):
            if not keeps(2 * speed):
                return speed, 2 * speed
            speed *= 2
        raise ConfigurationRefused(
            f"slo: is kept at {speed:g} times the rate as well: the workload is too short to tell"
        )
    for _ in range(MOST_HALVINGS):
        if keeps(speed / 2):
            return speed / 2, speed
        speed /= 2
    raise ConfigurationRefused(
        "slo: is kept at no rate: too many requests take longer even alone; raise it, or take faster workers"
    )


def _faster(workload: Workload, speed: float) -> Workload:
    if isinstance(workload, Drawn):
        return structs.replace(workload, rate=workload.rate * speed)
    return structs.replace(workload, speed=workload.speed * speed)
