"""Planner of one deployment: runs a planner loop and its demand source, and restarts both after a failure."""

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
    """Port that creates the scaling rule and the rehearsal of a planner.

    The composition root implements it with models of the engines and the simulator.
    """

    def rule(self, settings: PlannerSettings) -> ScalingRule:
        """Return the scaling rule that the settings demand.

        Raises:
            ConfigurationRefused: Bounds contradict each other, an engine's model or GPU is not known, or the model does not
                fit the GPUs.
        """
        ...

    def rehearsal(self, settings: PlannerSettings) -> Rehearsal | None:
        """Return the rehearsal for the settings. Return None if the settings disable it, or name no engine for one of the pools.

        Raises:
            ConfigurationRefused: An engine's model or GPU is not known, or the model does not fit the GPUs.
        """
        ...


class PlannerTask(Struct, frozen=True):
    """Holds all inputs of a deployment's planner. If one of them changes, a new planner replaces the old one."""

    settings: PlannerSettings
    secret: bytes
    """Control secret of the deployment's routers; empty if their control ports demand no proof."""

    def __repr__(self) -> str:
        return f"PlannerTask({self.settings!r}, …)"  # the secret is left out, because this text may be logged


class DeploymentPlanner:
    """Runs the planner loop of one deployment, and restarts it after a failure."""

    def __init__(
        self,
        task: PlannerTask,
        parts: PlannerParts,
        cluster: KubernetesApi,
        election: PlanElection,
        clock: Clock,
        wall_ms: Callable[[], int],
    ) -> None:
        """Create the planner without opening any connection.

        Raises:
            ConfigurationRefused: The scaling rule or the rehearsal cannot be created with these settings.
        """
        settings, source, target = task.settings, task.settings.source, task.settings.target
        assert isinstance(source, RouterDemandSettings)
        assert isinstance(target, KubernetesTarget)
        self.task = task
        pools = {pool.name: pool.role for pool in settings.pools}
        stale_after = Nanos(round(source.stale_seconds * SECOND))
        prefix = f"{target.deployment}-"  # names of worker pods begin with <deployment>-<role>-
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
        """Plan until cancelled.

        If a plan is under way when this task is cancelled, the next leader or the deployment's next planner finishes it.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.demand.run())
                    tasks.create_task(self.loop.run())
            # supervisor: an error in one deployment's planner does not stop other planners; this planner starts again
            except Exception:
                log.exception("planner of a deployment crashed, will restart", extra={"deployment": self._where})
            await asyncio.sleep(AGAIN_SECONDS)
