"""Operator process: creates the API client, the leader election, the operator's loops and the health server."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from fleet.core.clock import Clock
from fleet.core.errors import ConfigurationRefused
from fleet.net.certificate_watch import certificate_watch, metrics_port_certificates
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.leader import LeaseLeader
from fleet.net.kubernetes.ports import KubernetesError, WallClock
from kvstore.net.addresses import host_port
from kvstore.security.metrics_access import MetricsGuard
from operators.controller.control_secrets import ControlSecrets
from operators.controller.events import CONTROLLER
from operators.health_server import open_health_server
from operators.observed.router_poller import RouterReports
from operators.probes.prober import ProbeSender
from operators.server import Operator
from operators.settings import OperatorSettings
from operators.telemetry import OperatorGauges, OperatorMetrics

log = logging.getLogger(__name__)

AGENT = "fleet-operator"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def serve_operator(
    settings: OperatorSettings,
    routers: RouterReports | None,
    clients: ProbeSender | None,
    clock: Clock,
    wall: WallClock,
    registry: CollectorRegistry,
    announce: Callable[[Mapping[str, str]], None],
    stop: asyncio.Event,
) -> None:
    """Run the operator until `stop` is set.

    Args:
        settings: Settings of the operator.
        routers: Asks routers which workers they know, or None if routers are not asked.
        clients: Sends probes, or None if no probes are sent.
        clock: Monotonic clock for durations.
        wall: Wall clock for times in Kubernetes objects.
        registry: Metrics of the process; the operator's metrics are added.
        announce: Called once with the bound address when the health server accepts connections.
        stop: The caller sets this event to end the operator.

    Raises:
        ConfigurationRefused: The settings cannot be used here; for example, the address is in use, a certificate file
            cannot be read, or the API server's address is not configured.
    """
    namespace = _namespace(settings)
    try:
        host, port = host_port(settings.listen)
    except ValueError as error:
        raise ConfigurationRefused(f"listen: {error}") from error
    guard = MetricsGuard.of(settings.metrics_access, settings.listen)
    certificates = metrics_port_certificates(settings.metrics_tls)
    watch = certificate_watch({}, certificates)
    registry.register(watch)
    metrics = OperatorMetrics(registry)
    try:
        async with open_api_client(settings.kubeconfig, f"{AGENT}/{settings.identity}") as cluster:
            leader = LeaseLeader(
                cluster, settings.lease, namespace, settings.identity, clock, wall, controller=CONTROLLER
            )
            secrets = ControlSecrets(cluster, namespace, settings.control_secret, settings.lease.owner)
            operator = Operator(settings, cluster, routers, leader, clock, wall, metrics, clients, secrets=secrets)
            gauges = OperatorGauges(
                leads=leader.leads,
                waiting=operator.waiting,
                objects=operator.store.sizes,
                restarts=operator.restarts,
                ready=operator.by_readiness,
            )
            registry.register(gauges)
            async with (
                open_health_server(
                    host, port, operator.unread, operator.lost, registry, guard, certificates
                ) as address,
                asyncio.TaskGroup() as tasks,
            ):
                watching = tasks.create_task(watch.run())
                announce({"http": address})
                await operator.run(stop)
                watching.cancel()
    except OSError as error:
        raise ConfigurationRefused(f"listen: {settings.listen}: {error.strerror}") from error
    except KubernetesError as error:
        raise ConfigurationRefused(str(error)) from error


def _namespace(settings: OperatorSettings) -> str:
    """Return the namespace of the Lease for the leader election.

    Raises:
        ConfigurationRefused: No namespace is configured, and this process does not run in a pod.
    """
    if settings.lease.namespace:
        return settings.lease.namespace
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError as error:
        raise ConfigurationRefused("lease.namespace: is required outside of a pod") from error
