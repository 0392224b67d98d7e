"""Demand router for tests of planners: it serves `WatchDemand` with a load that the test sets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from fleet.core.clock import Nanos
from fleet.core.demand_reports import ModelDemand, SampledRequest, WorkerLoad
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.frontend.control.demand import DemandWatch
from fleet.net.control.access import OPEN_ACCESS, ControlAccess

MODEL = ModelName("tiny")
ROLES = {"prefill": Role.PREFILL, "both": Role.BOTH}
"""Roles of workers by the beginning of their names; all other workers have the role `decode`."""


class DemandRouter:
    """Implements the part of a router that a demand watch reads. `running` has each worker's number of requests."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.counted = ModelDemand(model=MODEL)
        self.recent: list[SampledRequest] = []
        self._clock = SystemClock()

    def demand(self) -> tuple[Nanos, tuple[ModelDemand, ...], tuple[WorkerLoad, ...]]:
        workers = tuple(
            WorkerLoad(
                worker_id=WorkerId(name),
                model=MODEL,
                role=ROLES.get(name.partition("-")[0], Role.DECODE),
                running=running,
                waiting=0,
                kv_used=0.1,
            )
            for name, running in self.running.items()
        )
        return self._clock.now(), (self.counted,), workers

    def recent_requests(self, after: int) -> tuple[int, tuple[SampledRequest, ...]]:
        return len(self.recent), tuple(self.recent[after:])


@asynccontextmanager
async def serve_demand(
    router: DemandRouter,
    address: str,
    every_seconds: float = 0.1,
    access: ControlAccess = OPEN_ACCESS,
    incarnation: str = "1",
) -> AsyncIterator[None]:
    """Serve the router's demand at an address while the context is open, to callers with the proof that `access` demands."""
    server = access.server()
    watch = DemandWatch(router, "router", Incarnation(incarnation), every_seconds=every_seconds)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fleet.v1.Cluster", watch.methods()),))
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
