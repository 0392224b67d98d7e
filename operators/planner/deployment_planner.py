"""Planner of one deployment: a planner loop with its demand source and its connector, started again after a failure."""

import asyncio
import logging
from collections.abc import Callable
from typing import Never, Protocol

from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.control.access import ControlAccess
from fleet.net.kubernetes.ports import KubernetesApi
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.decisions import ScalingRule
from fleet.planner.election.ports import PlanElection
from fleet.planner.loop import PlannerLoop
from fleet.planner.messages import PlanWriter
from fleet.planner.ports import Rehearsal
from fleet.planner.records import PlanHistory
from fleet.planner.settings import KubernetesTarget, PlannerSettings, RouterDemandSettings
from fleet.planner.sources.routers import RouterDemandSource
from kvstore.security.authentication import Purpose
from kvstore.security.channels import LoadedCredentials
from operators.plan_connector import KubernetesConnector
from operators.planner.demand import DeploymentDemand

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0


class PlannerParts(Protocol):
    """Port that makes the rule and the rehearsal of a planner; the composition root implements it with engines and simulator."""

    def rule(self, settings: PlannerSettings) -> ScalingRule:
        """Return the rule of the settings.

        Raises:
            ConfigurationRefused: Bounds contradict each other, or a model does not fit.
        """
        ...

    def rehearsal(self, settings: PlannerSettings) -> Rehearsal | None:
        """Return the rehearsal of the settings, or None if there is none.

        Raises:
            ConfigurationRefused: An engine is not known.
        """
        ...


class PlannerTask(Struct, frozen=True):
    """All inputs of a deployment's planner; when one of them changes, another planner is started."""

    settings: PlannerSettings
    secret: bytes
    """Control secret of the deployment's routers; empty: they demand nothing."""

    def __repr__(self) -> str:
        return f"PlannerTask({self.settings!r}, …)"  # secrets are not for logs


class DeploymentPlanner:
    """Runs the planner of one deployment, and starts it again after a failure."""

    def __init__(
        self,
        task: PlannerTask,
        parts: PlannerParts,
        cluster: KubernetesApi,
        election: PlanElection,
        clock: Clock,
        wall_ms: Callable[[], int],
    ) -> None:
        """Create the planner; nothing is dialled yet.

        Raises:
            ConfigurationRefused: The rule or the rehearsal cannot be made of the settings.
        """
        settings, source, target = task.settings, task.settings.source, task.settings.target
        assert isinstance(source, RouterDemandSettings)
        assert isinstance(target, KubernetesTarget)
        self.task = task
        pools = {pool.name: pool.role for pool in settings.pools}
        stale_after = Nanos(round(source.stale_seconds * SECOND))
        prefix = f"{target.deployment}-"  # pods are called <deployment>-<role>-…
        aggregator = DemandAggregator(settings.model, (), pools, clock.now(), stale_after, workers_prefix=prefix)
        access = ControlAccess(LoadedCredentials(secret=task.secret, purpose=Purpose.ROUTER_CONTROL))
        self.demand = DeploymentDemand(RouterDemandSource(source, access, aggregator, clock), aggregator)
        self.loop = PlannerLoop(
            settings,
            parts.rule(settings),
            self.demand,
            KubernetesConnector(cluster, target, PlanWriter.PLANNER),
            election,
            PlanHistory(None),
            clock,
            wall_ms,
            identity=settings.identity,
            rehearsal=parts.rehearsal(settings),
        )
        self._where = f"{target.namespace}/{target.deployment}"

    async def run(self) -> Never:
        """Plan until cancelled. A plan in flight is then left to the next leader, or to the next planner of this deployment."""
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.demand.run())
                    tasks.create_task(self.loop.run())
            except Exception:  # supervisor: a fault with one deployment must not stop the others
                log.exception("planner of a deployment crashed, will restart", extra={"deployment": self._where})
            await asyncio.sleep(AGAIN_SECONDS)
