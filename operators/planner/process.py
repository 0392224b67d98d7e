"""Planner process of a cluster: creates its API client, leader election, planners, health server and control port."""

import asyncio
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from fleet.core.clock import Clock
from fleet.core.errors import ConfigurationRefused
from fleet.net.certificate_watch import certificate_watch, metrics_port_certificates
from fleet.net.control.access import load_control_access
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.kinds import GROUP
from fleet.net.kubernetes.leader import LeaseLeader
from fleet.net.kubernetes.own_pod import own_namespace
from fleet.net.kubernetes.ports import KubernetesError, WallClock
from fleet.planner.control.service import open_planner_port
from fleet.planner.messages import PlanWriter
from kvstore.net.addresses import host_port
from kvstore.security.metrics_access import MetricsGuard
from operators.controller.control_secrets import ControlSecrets
from operators.health_server import open_health_server
from operators.planner.deployment_planner import PlannerParts
from operators.planner.metrics import ClusterPlannerMetrics
from operators.planner.server import KubePlanner
from operators.planner.settings import KubePlannerSettings

CONTROLLER = f"{GROUP}/planner"
"""The name of the planner in Kubernetes events."""

AGENT = "fleet-planner"


async def serve_kube_planner(
    settings: KubePlannerSettings,
    parts: PlannerParts,
    clock: Clock,
    wall: WallClock,
    wall_ms: Callable[[], int],
    registry: CollectorRegistry,
    announce: Callable[[Mapping[str, str]], None],
    stop: asyncio.Event,
) -> None:
    """Run the planner process until `stop` is set.

    Args:
        settings: Settings of the planner.
        parts: Creates scaling rules and rehearsals.
        clock: Monotonic clock for durations.
        wall: Wall clock for times in Kubernetes objects.
        wall_ms: Returns the wall-clock time in milliseconds, for ids of plans.
        registry: Metrics of the process; the planner's metrics are added.
        announce: Called once with the bound addresses, by name, when the process accepts connections.
        stop: The caller sets this event to end the planner.

    Raises:
        ConfigurationRefused: The settings cannot be used here; for example, an address is in use, a certificate file
            cannot be read, or the API server's address is not configured.
    """
    namespace = settings.lease.namespace or own_namespace()
    if not namespace:
        raise ConfigurationRefused("lease.namespace: is required outside of a pod")
    try:
        host, port = host_port(settings.listen)
    except ValueError as error:
        raise ConfigurationRefused(f"listen: {error}") from error
    guard = MetricsGuard.of(settings.metrics_access, settings.listen)
    access = load_control_access("control_credentials", settings.control_credentials)
    certificates = metrics_port_certificates(settings.metrics_tls)
    watch = certificate_watch({"control_credentials": settings.control_credentials}, certificates)
    registry.register(watch)
    try:
        async with open_api_client(settings.kubeconfig, f"{AGENT}/{settings.identity}", PlanWriter.PLANNER) as cluster:
            leader = LeaseLeader(
                cluster, settings.lease, namespace, settings.identity, clock, wall, controller=CONTROLLER
            )
            place = settings.control_secret_namespace or namespace
            secrets = ControlSecrets(cluster, place, settings.control_secret)
            planner = KubePlanner(settings, cluster, leader, secrets, parts, clock, wall, wall_ms)
            registry.register(ClusterPlannerMetrics(leader.leads, planner.planners))
            async with (
                open_health_server(host, port, planner.unread, planner.lost, registry, guard, certificates) as address,
                open_planner_port(settings.control_listen, access, planner) as control,
                asyncio.TaskGroup() as tasks,
            ):
                watching = tasks.create_task(watch.run())
                announce({"http": address, "control": control})
                await planner.run(stop)
                watching.cancel()
    except OSError as error:
        raise ConfigurationRefused(f"listen: {settings.listen}: {error.strerror}") from error
    except KubernetesError as error:
        raise ConfigurationRefused(str(error)) from error
