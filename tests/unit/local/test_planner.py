"""Tests of the planner's settings in a local cluster: errors name the fields of the topology."""

from pathlib import Path

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.core.roles import Role
from fleet.local.planner import planner_settings
from fleet.local.settings import ClusterSection, LocalPlannerSection, PlannedPoolSection, PoolSection, Topology
from fleet.planner.decisions import PlanBudget, PlanGoals
from fleet.planner.messages import PoolName
from fleet.planner.settings import RehearsalSettings
from fleet.router.settings.router import RouterSettings
from tests.support.sim.pipes import a_pipe


def test_bounds_of_a_pool_are_refused_by_its_name():
    bounds = {PoolName("decode"): PlannedPoolSection(least=4, most=2)}
    section = LocalPlannerSection(goals=PlanGoals(ttft_seconds=1.0, tpot_seconds=0.1), pools=bounds)
    topology = Topology(pools=(PoolSection(role=Role.PREFILL), PoolSection(role=Role.DECODE)))

    with pytest.raises(ConfigurationRefused, match=r"^planner\.pools\.decode\.least: 4 is above `most`, 2"):
        planner_settings(
            topology, section, ["prefill", "decode"], folder=Path("/run"), model=ModelName("m"), control="unix:/c"
        )


@pytest.mark.parametrize(("own", "limit"), [(None, 3.0), (7.0, 7.0)])
def test_rehearsals_refuse_as_the_router_of_the_cluster_does(own, limit):
    goals, rehearsal = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.1), RehearsalSettings(max_queue_seconds=own)
    pools, router = (PoolSection(role=Role.BOTH),), RouterSettings(max_queue_seconds=3.0)
    topology = Topology(cluster=ClusterSection(engine="simulated"), pools=pools, router=router)
    settings = planner_settings(
        topology,
        LocalPlannerSection(goals=goals, rehearsal=rehearsal),
        ["both"],
        folder=Path("/run"),
        model=ModelName("m"),
        control="unix:/c",
    )
    assert settings.rehearsal.max_queue_seconds == limit


BOOK = "[regions.east]\nh100 = 2.5\nb200 = 5.0\n[regions.west]\nh100 = 3.5\n"


def priced_by(folder, region="", budget=None, prices=None, **pool):
    book = folder / "prices.toml"
    book.write_text(BOOK)
    section = LocalPlannerSection(
        goals=PlanGoals(ttft_seconds=1.0, tpot_seconds=0.1),
        budget=budget or PlanBudget(),
        pools={PoolName("both"): PlannedPoolSection(**{"least": 2, "gpu": "h100", "gpus": 4, **pool})},
        prices=str(book) if prices is None else prices,
        region=region,
    )
    topology = Topology(cluster=ClusterSection(engine="simulated"), pools=(PoolSection(role=Role.BOTH),))
    return planner_settings(topology, section, ["both"], folder=folder, model=ModelName("m"), control="unix:/c").pools[
        0
    ]


def test_own_power_of_a_pool_goes_before_the_estimate(tmp_path):
    assert priced_by(tmp_path, watts=250.0).replica_watts == 4 * 250.0
    assert priced_by(tmp_path).replica_watts > 4 * 250.0


@pytest.mark.parametrize(("region", "dollars"), [("", 2.5), ("east", 2.5), ("west", 3.5)])
def test_price_book_prices_pools_by_gpu_and_region(tmp_path, region, dollars):
    pool = priced_by(tmp_path, region)
    assert (pool.dollars_per_hour, pool.replica_dollars) == (dollars, 4 * dollars)


def test_price_book_can_come_from_a_pipe(tmp_path):
    with a_pipe('{"regions": {"east": {"h100": 7.5}}}') as file:
        assert priced_by(tmp_path, prices=str(file)).dollars_per_hour == 7.5


def test_own_price_of_a_pool_goes_before_the_book(tmp_path):
    assert priced_by(tmp_path, dollars_per_hour=1.0).dollars_per_hour == 1.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"region": "north"}, r"^planner\.region: 'north' is not a region of .*prices\.toml; use east, west"),
        (
            {"region": "west", "gpu": "b200"},
            r"^planner\.prices: .*prices\.toml: regions\.west\.b200: the price book has no price for this GPU",
        ),
        (
            {"gpu": "", "budget": PlanBudget(gpus=8)},
            r"^planner\.budget\.gpus: would limit nothing, because no pool has",
        ),
        ({"region": "west", "prices": ""}, r"^planner\.region: 'west' needs `prices`"),
        ({"prices": "/nowhere/p.toml"}, r"^planner\.prices: /nowhere/p\.toml: No such file or directory"),
        (
            {"budget": PlanBudget(dollars_per_hour=19.0)},
            "planner.budget.dollars_per_hour: 19.0 is below what the floors",
        ),
    ],
)
def test_wrong_price_or_region_is_refused_by_field(tmp_path, fields, said):
    with pytest.raises(ConfigurationRefused, match=said):
        priced_by(tmp_path, **fields)
