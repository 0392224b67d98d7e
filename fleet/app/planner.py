"""Planner process: builds the rule, the demand source, the connector and the election, and plans until a stop signal."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path

from msgspec import structs
from prometheus_client import CollectorRegistry, start_http_server

from fleet.app.planner_engines import pool_engine
from fleet.app.process import Announce, ServiceDefinition, cancelled_by_signals, stop_signal
from fleet.app.rehearsal import rehearsal_of
from fleet.config import load
from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock, unix_milliseconds
from fleet.net.control.access import load_control_access
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.connectors.open import connector_of
from fleet.planner.control.metrics import PlannerMetrics
from fleet.planner.control.service import OnlyPlanner, open_planner_port
from fleet.planner.decisions import ScalingRule
from fleet.planner.election.open import open_election
from fleet.planner.load_rule import LoadRule
from fleet.planner.loop import PlannerLoop
from fleet.planner.machine import PlannerMachine
from fleet.planner.messages import PlanWriter
from fleet.planner.records import PlanHistory
from fleet.planner.settings import (
    LoadRuleSettings,
    MetricsDemandSettings,
    PlannerSettings,
    PrometheusDemandSettings,
    RouterDemandSettings,
)
from fleet.planner.sizing.capacity import StepCapacity
from fleet.planner.sizing.prices import PriceBook, priced
from fleet.planner.sources.metrics import MetricsDemandSource
from fleet.planner.sources.ports import DemandSource
from fleet.planner.sources.prometheus import PrometheusDemandSource
from fleet.planner.sources.routers import RouterDemandSource, source_names
from fleet.recording.planner_decisions import PlannerRecorder
from kvstore.net.addresses import host_port


async def run_planner(settings: PlannerSettings, announce: Announce) -> None:
    """Run a planner until a stop signal.

    Raises:
        ConfigurationRefused: An address is in use, a model is unknown, or a package is not installed.
    """
    settings = priced_settings(settings)
    clock = SystemClock()
    identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
    rule, demand = scaling_rule(settings), demand_source(settings, clock)
    access = load_control_access("control_credentials", settings.control_credentials)
    history = PlanHistory(Path(settings.history) if settings.history else None)
    async with (
        cancelled_by_signals(),
        open_election(settings, identity, clock) as election,
        connector_of(settings.target, PlanWriter.PLANNER) as connector,
        stop_signal() as stop,
        AsyncExitStack() as held,
    ):
        loop = PlannerLoop(
            settings,
            rule,
            demand,
            connector,
            election,
            history,
            clock,
            unix_milliseconds,
            identity=identity,
            rehearsal=rehearsal_of(settings),
            recorder=_recorder(settings, held),
        )
        registry = CollectorRegistry()
        registry.register(PlannerMetrics(loop))
        with _metrics_port(settings.metrics_listen, registry) as metrics:
            async with (
                open_planner_port(settings.listen, access, OnlyPlanner(loop)) as listening,
                asyncio.TaskGroup() as tasks,
            ):
                running = [tasks.create_task(each) for each in (election.run(), demand.run(), loop.run())]
                announce({"control": listening} | ({"metrics": metrics} if metrics else {}))
                await stop.wait()
                for task in running:
                    task.cancel()


def priced_settings(settings: PlannerSettings) -> PlannerSettings:
    """Return the settings with the prices of their price book.

    Raises:
        ConfigurationRefused: The book cannot be read, has no such region, or no price for a GPU; or a budget is below the floors.
    """
    if not settings.prices:
        return settings
    pools = priced(settings.pools, load(Path(settings.prices), PriceBook), settings.region)
    try:
        return structs.replace(settings, pools=pools, prices="")
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def _recorder(settings: PlannerSettings, held: AsyncExitStack) -> PlannerRecorder | None:
    """Begin the recording of the settings, which ends with `held`.

    Raises:
        ConfigurationRefused: The file cannot be written.
    """
    if not settings.record:
        return None
    return held.enter_context(closing(PlannerRecorder(Path(settings.record), settings.record_mib << 20, settings)))


def scaling_rule(settings: PlannerSettings) -> ScalingRule:
    """Build the rule of the settings.

    Raises:
        ConfigurationRefused: Bounds contradict each other, or an engine's model or GPU is not known.
    """
    if isinstance(settings.rule, LoadRuleSettings):
        return LoadRule(settings.rule, settings.pools, settings.budget)
    try:
        capacity = StepCapacity({pool.name: pool_engine(settings, pool) for pool in settings.pools})
        return PlannerMachine(settings.rule.settings, settings.pools, settings.goals, capacity, settings.budget)
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def demand_source(settings: PlannerSettings, clock: Clock) -> DemandSource:
    """Build the demand source of the settings; nothing is dialled yet.

    Raises:
        ConfigurationRefused: A credentials file cannot be used.
    """
    source = settings.source
    pools = {pool.name: pool.role for pool in settings.pools}
    stale_after = Nanos(round(source.stale_seconds * SECOND))
    match source:
        case RouterDemandSettings():
            access = load_control_access("source.credentials", source.credentials)
            names = source_names(source)
            aggregator = DemandAggregator(settings.model, names, pools, clock.now(), stale_after)
            return RouterDemandSource(source, access, aggregator, clock)
        case MetricsDemandSettings():
            aggregator = DemandAggregator(settings.model, source.urls, pools, clock.now(), stale_after)
            return MetricsDemandSource(source, aggregator, clock)
        case PrometheusDemandSettings():
            aggregator = DemandAggregator(settings.model, [source.url], pools, clock.now(), stale_after)
            return PrometheusDemandSource(source, aggregator, clock)


@contextmanager
def _metrics_port(listen: str, registry: CollectorRegistry) -> Iterator[str]:
    """Serve /metrics in a thread; yield the address, or nothing without one."""
    if not listen:
        yield ""
        return
    try:
        host, port = host_port(listen)
        server, thread = start_http_server(port, host, registry)
    except (ValueError, OSError) as error:
        raise ConfigurationRefused(f"metrics_listen: {listen}: {error}") from error
    try:
        with closing(server.socket):
            yield f"{host}:{server.server_port}"
            server.shutdown()
    finally:
        thread.join(1.0)


SERVICE = ServiceDefinition(PlannerSettings, run_planner)
