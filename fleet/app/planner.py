"""Planner process: builds the scaling rule, demand source, connector and leader election, and plans until a stop signal."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack, closing
from pathlib import Path

from msgspec import structs
from prometheus_client import CollectorRegistry

from fleet.app.planner_engines import pool_engine
from fleet.app.process import Announce, ServiceDefinition, cancelled_by_signals, stop_signal
from fleet.app.rehearsal import rehearsal_of
from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock, unix_milliseconds
from fleet.net.certificate_watch import certificate_watch, metrics_port_certificates
from fleet.net.control.access import load_control_access
from fleet.net.metrics_port import metrics_port
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.connectors.open import connector_of
from fleet.planner.control.metrics import PlannerMetrics
from fleet.planner.control.service import OnlyPlanner, open_planner_port
from fleet.planner.decisions import ScalingRule, check_gpu_limit
from fleet.planner.election.open import open_election
from fleet.planner.load_rule import LoadRule
from fleet.planner.loop import PlannerLoop
from fleet.planner.machine import PlannerMachine
from fleet.planner.messages import PlanWriter
from fleet.planner.price_books import priced_from_file
from fleet.planner.records import PlanHistory
from fleet.planner.settings import (
    LoadRuleSettings,
    MetricsDemandSettings,
    PlannerSettings,
    PrometheusDemandSettings,
    RouterDemandSettings,
)
from fleet.planner.sizing.capacity import StepCapacity
from fleet.planner.sources.metrics import MetricsDemandSource
from fleet.planner.sources.ports import DemandSource
from fleet.planner.sources.prometheus import PrometheusDemandSource
from fleet.planner.sources.routers import RouterDemandSource, source_names
from fleet.recording.planner_decisions import PlannerRecorder
from kvstore.security.certificates import CertificateFiles, CertificateWatch


async def run_planner(settings: PlannerSettings, announce: Announce) -> None:
    """Run a planner until a stop signal.

    Raises:
        ConfigurationRefused: The settings cannot be used, for example because an address is in use or a model is unknown.
    """
    settings = priced_settings(settings)
    clock = SystemClock()
    identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
    rule, demand = scaling_rule(settings), demand_source(settings, clock)
    access = load_control_access("control_credentials", settings.control_credentials)
    scraped = metrics_port_certificates(settings.metrics_tls)
    watch = _certificate_watch(settings, scraped)
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
        registry.register(watch)
        async with (
            metrics_port(settings.metrics_listen, settings.metrics_access, registry, scraped) as metrics,
            open_planner_port(settings.listen, access, OnlyPlanner(loop)) as listening,
            asyncio.TaskGroup() as tasks,
        ):
            running = [tasks.create_task(each) for each in (election.run(), demand.run(), loop.run(), watch.run())]
            announce({"control": listening} | ({"metrics": metrics} if metrics else {}))
            await stop.wait()
            for task in running:
                task.cancel()


def _certificate_watch(settings: PlannerSettings, scraped: CertificateFiles | None) -> CertificateWatch:
    """Return an object that checks regularly whether the certificates of the settings end soon, and whether renewals can be used.

    `scraped` is the certificate of the port for metrics; None: that port has no TLS.

    Raises:
        ConfigurationRefused: A file cannot be used.
    """
    sections = {"control_credentials": settings.control_credentials}
    if isinstance(settings.source, RouterDemandSettings):
        sections["source.credentials"] = settings.source.credentials
    return certificate_watch(sections, scraped)


def priced_settings(settings: PlannerSettings) -> PlannerSettings:
    """Return the settings with the GPU prices from the price book that they name.

    Raises:
        ConfigurationRefused: The price book cannot be read, or it lacks the region or the price of a GPU. Or there is a
            region without a price book. Or the budget is too small for the minimum numbers of replicas of all pools together,
            or limits GPUs that no pool has.
    """
    pools = priced_from_file(settings.pools, settings.prices, settings.region)
    try:
        check_gpu_limit(pools, settings.budget)
        return structs.replace(settings, pools=pools, prices="", region="")
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def _recorder(settings: PlannerSettings, held: AsyncExitStack) -> PlannerRecorder | None:
    """Begin the recording that the settings demand; it ends when the exit stack `held` closes.

    Return None if the settings demand no recording.

    Raises:
        ConfigurationRefused: The file cannot be written.
    """
    if not settings.record:
        return None
    return held.enter_context(closing(PlannerRecorder(Path(settings.record), settings.record_mib << 20, settings)))


def scaling_rule(settings: PlannerSettings) -> ScalingRule:
    """Build the scaling rule that the settings name.

    Raises:
        ConfigurationRefused: The bounds of pools contradict each other, an engine's model or GPU is not known, or a model
            does not fit its GPUs.
    """
    if isinstance(settings.rule, LoadRuleSettings):
        return LoadRule(settings.rule, settings.pools, settings.budget)
    try:
        capacity = StepCapacity({pool.name: pool_engine(settings, pool) for pool in settings.pools})
        return PlannerMachine(settings.rule.settings, settings.pools, settings.goals, capacity, settings.budget)
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def demand_source(settings: PlannerSettings, clock: Clock) -> DemandSource:
    """Build the demand source that the settings name, without connecting to it yet.

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


SERVICE = ServiceDefinition(PlannerSettings, run_planner)
