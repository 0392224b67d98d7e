"""Tests of the demand source on real routers: several processes behind one address, restarts, and no workers at all."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from fleet.client import Client, FleetError
from fleet.core.ids import ModelName
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.net.control.access import OPEN_ACCESS
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.messages import PoolName
from fleet.planner.settings import RouterDemandSettings
from fleet.planner.sources.routers import RouterDemandSource, source_names
from tests.support.fleet_processes import routers_of, start_service
from tests.support.kvstore.builders import a_short_folder
from tests.support.planner.demand_routers import MODEL, DemandRouter, serve_demand
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.integration

PROCESSES = 3


@pytest.fixture
def routers(model_dir):
    with a_short_folder() as folder:
        settings = {
            "http_listen": f"127.0.0.1:{a_free_port()}",
            "grpc_listen": f"127.0.0.1:{a_free_port()}",
            "control_listen": f"unix:{folder}/control.sock",
            "models": {"tiny": str(model_dir)},
        }
        with (folder / "log").open("w") as log:
            process, endpoints = start_service(
                "router", settings, folder / "router.json", "--processes", str(PROCESSES), stdout=log, stderr=log
            )
        try:
            assert endpoints, (folder / "log").read_text()
            yield process, settings["grpc_listen"], settings["control_listen"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@asynccontextmanager
async def a_source(address):
    settings = RouterDemandSettings(addresses=(address,), connections=PROCESSES, stale_seconds=5)
    clock = SystemClock()
    pools = {PoolName("decode"): Role.DECODE}
    aggregator = DemandAggregator(ModelName("tiny"), source_names(settings), pools, clock.now())
    source = RouterDemandSource(settings, OPEN_ACCESS, aggregator, clock)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(source.run())
        try:
            await until(lambda: not aggregator.stale(clock.now()), 30.0)
            yield source
        finally:
            running.cancel()


def ask(address, times):
    for model in ["", "tiny"] * (times // 2):
        with Client(address) as client, pytest.raises(FleetError):
            client.complete([1, 2, 3], max_tokens=1, model=model)


async def test_refusals_without_workers_are_demand_of_all_processes(routers):
    _, grpc_address, control = routers
    async with a_source(control) as source:
        source.window()
        await asyncio.to_thread(ask, grpc_address, 24)
        windows = []

        def counted():
            windows.append(source.window())
            return sum(each.refused for each in windows) >= 24

        await until(counted, 30.0)
    assert sum(each.arrivals for each in windows) == sum(each.refused for each in windows) == 24
    assert {stale for each in windows for stale in each.stale} == set()


async def test_unexpected_error_makes_only_the_source_stale(tmp_path, monkeypatch):
    router, clock, address = DemandRouter(), SystemClock(), f"unix:{tmp_path}/r"
    aggregator = DemandAggregator(MODEL, [address], {}, clock.now())

    def fail(*_):
        raise RuntimeError("a bug")

    async with serve_demand(router, address), asyncio.TaskGroup() as tasks:
        with monkeypatch.context() as patch:
            patch.setattr(aggregator, "hear", fail)
            settings = RouterDemandSettings(addresses=(address,))
            running = tasks.create_task(RouterDemandSource(settings, OPEN_ACCESS, aggregator, clock).run())
            await until(lambda: any("RuntimeError: a bug" in each for each in aggregator.stale(clock.now())))
        await until(lambda: not aggregator.stale(clock.now()))
        running.cancel()


async def test_killed_process_is_stale_until_its_successor_reports(routers):
    process, grpc_address, control = routers
    async with a_source(control) as source:
        source.window()
        victim = routers_of(process.pid)[0]
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: len(set(routers_of(process.pid)) - {victim}) == PROCESSES, 60.0)
        await until(lambda: not source.window().stale, 60.0)
        await asyncio.to_thread(ask, grpc_address, 12)
        windows = []

        def counted():
            windows.append(source.window())
            return sum(each.refused for each in windows) >= 12

        await until(counted, 30.0)
    assert sum(each.refused for each in windows) == 12
