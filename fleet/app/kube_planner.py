"""kube-planner process: plans all deployments of a Kubernetes cluster that have a ServingPlan, until a stop signal."""

from prometheus_client import CollectorRegistry

from fleet.app.planner import scaling_rule
from fleet.app.process import Announce, ServiceDefinition, cancelled_by_signals, stop_signal
from fleet.app.rehearsal import SimulatedRehearsal, rehearsal_of
from fleet.core.errors import missing_package
from fleet.core.system_clock import SystemClock, unix_milliseconds, utc_now
from fleet.planner.decisions import ScalingRule
from fleet.planner.settings import PlannerSettings
from operators.planner.settings import KubePlannerSettings


class _SimulatedParts:
    """Builds the scaling rule and the rehearsal of a planner. Implements `operators.planner.deployment_planner.PlannerParts`."""

    def rule(self, settings: PlannerSettings) -> ScalingRule:
        return scaling_rule(settings)

    def rehearsal(self, settings: PlannerSettings) -> SimulatedRehearsal | None:
        return rehearsal_of(settings)


async def run_kube_planner(settings: KubePlannerSettings, announce: Announce) -> None:
    """Run the planner of a Kubernetes cluster until a stop signal. While another planner leads, this one only waits.

    Raises:
        ConfigurationRefused: An address is in use, a package is not installed, or the settings do not state how to reach
            the API server.
    """
    try:
        from operators.planner.process import serve_kube_planner  # noqa: PLC0415 - optional
    except ImportError as error:
        raise missing_package("kube-planner", "kubernetes", "kubernetes") from error

    async with cancelled_by_signals(), stop_signal() as stop:
        await serve_kube_planner(
            settings, _SimulatedParts(), SystemClock(), utc_now, unix_milliseconds, CollectorRegistry(), announce, stop
        )


SERVICE = ServiceDefinition(KubePlannerSettings, run_kube_planner)
