"""Tests of the demand of a deployment on Kubernetes while its router pods come and go."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.net.control.access import OPEN_ACCESS
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.messages import PoolName
from fleet.planner.settings import RouterDemandSettings
from fleet.planner.sources.routers import RouterDemandSource
from operators.planner.demand import DeploymentDemand, FollowedRouter
from tests.support.planner.demand_routers import MODEL, DemandRouter, serve_demand
from tests.support.servers.processes import a_free_port
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration


@asynccontextmanager
async def a_demand():
    clock = SystemClock()
    aggregator = DemandAggregator(MODEL, (), {PoolName("both"): Role.BOTH}, clock.now())
    source = RouterDemandSource(RouterDemandSettings(addresses=("routers:1",)), OPEN_ACCESS, aggregator, clock)
    demand = DeploymentDemand(source, aggregator)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(demand.run())
        try:
            yield demand
        finally:
            running.cancel()


def a_router(name, port, *, ready=True):
    return FollowedRouter(name, f"127.0.0.1:{port}", ready)


async def test_no_router_is_no_demand_signal():
    async with a_demand() as demand:
        assert demand.window().stale == ("routers: none is ready or has reported yet",)
        demand.routers_are([a_router("starting", a_free_port(), ready=False)])
        await turns()
        assert demand.window().stale == ("routers: none is ready or has reported yet",)


async def test_starting_router_is_followed_but_not_waited_for():
    ports = a_free_port(), a_free_port()
    first = DemandRouter()
    async with a_demand() as demand, serve_demand(first, f"127.0.0.1:{ports[0]}"):
        demand.routers_are([a_router("first", ports[0]), a_router("second", ports[1], ready=False)])
        await until(lambda: not demand.window().stale)

        demand.routers_are([a_router("first", ports[0]), a_router("second", ports[1])])
        await until(lambda: any(each.startswith("second: has not reported yet") for each in demand.window().stale))
        second = DemandRouter()
        async with serve_demand(second, f"127.0.0.1:{ports[1]}", incarnation="2"):
            await until(lambda: not demand.window().stale)


async def test_router_that_ends_is_missed_by_nobody():
    port = a_free_port()
    router = DemandRouter()
    async with a_demand() as demand, serve_demand(router, f"127.0.0.1:{port}"):
        demand.routers_are([a_router("first", port)])
        await until(lambda: not demand.window().stale)
        router.counted = structs.replace(router.counted, arrivals=7)
        counted = 0

        def heard():
            nonlocal counted
            counted += demand.window().arrivals
            return counted

        await until(heard)
        demand.routers_are([])
        await until(lambda: demand.window().stale == ("routers: none is ready or has reported yet",))
        assert counted == 7
