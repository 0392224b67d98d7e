"""Simulated orchestrator: carries out plans on the elastic pools of a simulated cluster.

It keeps the plan in memory, and makes the plan report from the states of the pools. The planner writes the plan through
`VirtualConnector`, as in production. So production's code also handles conflicts, pinned pools and revisions in the
simulation.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from fleet.core.clock import SECOND, Nanos
from fleet.planner.connectors.virtual import (
    Intent,
    PlanReport,
    PoolReport,
    RecordsSnapshot,
    VirtualConnector,
)
from fleet.planner.messages import PlanWriter, PoolGapReason, PoolName
from fleet.planner.ports import ConnectorUnreachable
from fleet.sim.cluster.elastic_pools import ElasticPools
from fleet.sim.kernel import Kernel

TAKES_UP = Nanos(SECOND // 2)
"""Time from the write of a plan until the orchestrator acts on the plan: half of the typical interval between two polls of a real one."""

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""Wall-clock time at the beginning of virtual time, from which the times in plans are computed."""


class SimulatedOrchestrator:
    """Sets the sizes of elastic pools to those of each written plan. Implements `fleet.planner.connectors.virtual.PlanRecords`."""

    def __init__(self, kernel: Kernel, pools: ElasticPools, takes_up: Nanos = TAKES_UP) -> None:
        self._kernel, self._pools, self._takes_up = kernel, pools, takes_up
        self._intent = Intent()
        self._writes = 0
        self._read = 0
        self.reachable = True
        """If False, reads and writes of the plan and the report fail with `ConnectorUnreachable`."""

    async def read(self) -> RecordsSnapshot:
        self._check_reachable()
        pools = {PoolName(name): self._report(name) for name in self._pools.names}
        report = PlanReport(revision=self._read, pools=pools)
        return RecordsSnapshot(intent=self._intent, report=report, token=self._writes)

    async def write(self, intent: Intent, over: RecordsSnapshot) -> bool:
        self._check_reachable()
        if over.token != self._writes:
            return False
        self._intent = intent
        self._writes += 1
        self._kernel.after(self._takes_up, self._take_up)
        return True

    def _check_reachable(self) -> None:
        if not self.reachable:
            raise ConnectorUnreachable("the simulated orchestrator does not answer")

    def _take_up(self) -> None:
        self._read = self._intent.revision
        for name, intent in self._intent.pools.items():
            self._pools.resize(name, intent.replicas)

    def _report(self, name: str) -> PoolReport:
        state = self._pools.state(name)
        why, message = None, ""
        if state.ready < state.wanted:
            why = PoolGapReason.NO_ROOM if self._pools.lacks_room(name) else PoolGapReason.UNDER_WAY
            message = (
                f"{state.ready} of {state.wanted} serve, {state.starting} start, and {state.draining} of others drain"
            )
        return PoolReport(asked=state.wanted, ready=state.ready, draining=state.draining, why=why, message=message)


def simulated_connector(
    kernel: Kernel, orchestrator: SimulatedOrchestrator, writer: PlanWriter = PlanWriter.PLANNER
) -> VirtualConnector:
    """Return production's `VirtualConnector`, which writes to a simulated orchestrator and reads a clock in virtual time."""
    return VirtualConnector(orchestrator, writer, _wall_clock(kernel))


def _wall_clock(kernel: Kernel) -> Callable[[], datetime]:
    return lambda: EPOCH + timedelta(seconds=kernel.instant / SECOND)
