"""Contract tests of the simulated connector: pools of a simulated cluster, whose virtual time passes while the tests run."""

import asyncio
import contextlib
from functools import partial
from random import Random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.connectors.virtual import VirtualConnector
from fleet.planner.messages import PlanWriter
from fleet.sim.cluster.elastic_pools import ElasticPool, ElasticPools
from fleet.sim.kernel import Kernel
from fleet.sim.planning.orchestrator import SimulatedOrchestrator, simulated_connector
from kvstore.eviction.trace_replay import TraceRequest
from tests.contract.planner.connector_contract import *  # noqa: F403 - they run here
from tests.contract.planner.connector_contract import ROOM, ProcessKilled, a_plan
from tests.support.planner.connectors import KilledOnWrite
from tests.support.sim.worlds import BLOCK, a_pool
from tests.support.sim.worlds import a_plan as a_run_plan
from tests.support.sim.worlds import a_world as a_cluster
from tests.support.waiting import pace, until

STRIDE = Nanos(SECOND // 10)
"""Virtual time that passes in one step. Answers take hours of virtual time, so workers are busy for longer than any test takes."""


class SimulatedConnectorSetup:
    """A simulated cluster with a prefill and a decode worker, and room for one more."""

    def __init__(self) -> None:
        profiles = [a_pool(role, workers=1, kv_blocks=1 << 20) for role in (Role.PREFILL, Role.DECODE)]
        self.kernel = Kernel(1)
        self.world, _ = a_cluster(self.kernel, a_run_plan(*profiles))
        elastic = [ElasticPool(profile=profile, drain_limit=Nanos(10**6 * SECOND)) for profile in profiles]
        self.pools = ElasticPools(self.kernel, self.world.cluster, elastic, random=Random(1), gpus=ROOM)
        self.orchestrator = SimulatedOrchestrator(self.kernel, self.pools)
        self.busy = []

    async def run(self) -> None:
        while True:
            until = Nanos(self.kernel.instant + STRIDE)
            self.kernel.run(until)
            self.kernel.skip(until)
            self.pools.check()
            await pace(0.01, "the world advances by one stride in each of these periods")

    @contextlib.asynccontextmanager
    async def open(self, writer=PlanWriter.PLANNER):
        yield simulated_connector(self.kernel, self.orchestrator, writer)

    @contextlib.asynccontextmanager
    async def open_mortal(self, answered):
        records = KilledOnWrite(self.orchestrator, "write", answered, ProcessKilled)
        yield simulated_connector(self.kernel, records)

    @contextlib.asynccontextmanager
    async def open_cut(self):
        self.orchestrator.reachable = False
        try:
            yield simulated_connector(self.kernel, self.orchestrator)
        finally:
            self.orchestrator.reachable = True

    async def occupy(self) -> None:
        for number in range(4):
            now = self.kernel.instant
            self.busy.append(self.world.send(TraceRequest(now, BLOCK, (number,), 10**7)))
        await until(lambda: all(worker.engine.held for worker in self.world.cluster if worker.role is Role.DECODE))

    async def finish(self) -> None:
        assert all(worker.engine.held for worker in self.world.cluster if worker.leaves)
        for request_id in self.busy:
            self.kernel.after(0, partial(self.world.cancel, request_id))

    async def pin(self, pool, replicas) -> None:
        async with self.open(PlanWriter.PERSON) as person:
            await person.apply(a_plan("by hand", **{pool: replicas}), await person.observe())


@pytest.fixture
async def a_world():
    setup = SimulatedConnectorSetup()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(setup.run())
        yield setup
        running.cancel()


async def test_plan_is_taken_up_only_after_the_orchestrators_delay():
    setup = SimulatedConnectorSetup()
    connector = simulated_connector(setup.kernel, setup.orchestrator)
    assert isinstance(connector, VirtualConnector)
    await connector.apply(a_plan("more", decode=2), await connector.observe())

    before = await connector.observe()
    setup.kernel.run(Nanos(SECOND))
    after = await connector.observe()

    assert [each.why for each in before.pools] == ["not_taken_up", None]
    assert [each.why for each in after.pools] == ["under_way", None]
    assert setup.pools.state("decode").starting == 1
