"""Highest rate at which a scenario keeps its SLO, for studies that compare clusters."""

from typing import Any

from msgspec import Struct, structs

from fleet.sim.scenario import Scenario, SimulatedPoolSection
from fleet.sim.workload.drawn import DrawnWorkload
from loadtests.studies.runs import capacity, planned_of, read, requests_in, simulated

WANTED = 0.9
NONE = 0.02  # a highest rate below this one, in requests per second, counts as 0


class ClusterVariant(Struct, frozen=True, kw_only=True):
    """A cluster that is compared with others: a scenario with other pools."""

    scenario: str
    pools: tuple[SimulatedPoolSection, ...]
    changes: dict[str, Any] = {}  # changed fields of the scenario
    requests: int = 0  # maximum number of requests; 0: as in the scenario
    seed: int = 1
    first: float = 1.0  # requests per second at which the search begins

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)


class CarriedRate(Struct, frozen=True, kw_only=True):
    rate: float  # highest rate in requests per second; 0: below `NONE`
    dollars_per_hour: float  # price of all GPUs of the cluster
    gpus: int
    handed_over: float  # share of the requests that were served disaggregated at this rate


def carried(cluster: ClusterVariant) -> CarriedRate:
    """Search for the highest rate at which a cluster keeps its SLO for 90 % of the requests."""
    scenario = structs.replace(read(cluster.scenario, cluster.changes), pools=cluster.pools, seed=cluster.seed)
    planned = planned_of(scenario)
    shares: dict[float, float] = {}

    def attained(rate: float) -> float:
        if rate < NONE:
            return 1.0
        requests = requests_in(_at(scenario, rate, cluster.requests))
        outcome = simulated(planned, requests)
        shares[rate] = outcome.disaggregated / outcome.requests
        return outcome.attainment

    rate = capacity(attained, wanted=WANTED, first=cluster.first)
    dollars = sum(pool.workers * pool.gpus * pool.dollars_per_hour for pool in planned.pools)
    return CarriedRate(
        rate=0.0 if rate < NONE else rate,
        dollars_per_hour=dollars,
        gpus=cluster.gpus,
        handed_over=shares.get(rate, 0.0),
    )


def _at(scenario: Scenario, rate: float, most: int) -> Scenario:
    assert isinstance(scenario.workload, DrawnWorkload), "a drawn workload"
    requests = min(most or scenario.workload.requests, scenario.workload.requests)
    return structs.replace(scenario, workload=structs.replace(scenario.workload, rate=rate, requests=requests))
