"""Operator process: runs the Kubernetes operator until a stop signal (`fleet serve operator`)."""

from prometheus_client import CollectorRegistry

from fleet.app.process import Announce, ServiceDefinition, stop_signal
from fleet.core.errors import missing_package
from fleet.core.system_clock import SystemClock, utc_now
from operators.settings import OperatorSettings


async def run_operator(settings: OperatorSettings, announce: Announce) -> None:
    """Run the Kubernetes operator until a stop signal. While another operator leads, this one only waits.

    Raises:
        ConfigurationRefused: An address is in use, a package is not installed, or the settings do not state how to reach
            the API server.
    """
    try:
        from operators.observed.router_registrations import RouterRegistrations  # noqa: PLC0415 - optional
        from operators.probes.http_probes import HttpProbeSender  # noqa: PLC0415 - optional
        from operators.process import serve_operator  # noqa: PLC0415 - optional
    except ImportError as error:
        raise missing_package("operator", "kubernetes", "kubernetes") from error

    async with stop_signal() as stop:
        routers = RouterRegistrations() if settings.ask_routers else None
        clients = HttpProbeSender(
            settings.probe.keys, settings.probe.deadline_seconds, insecure=settings.probe.insecure
        )
        await serve_operator(settings, routers, clients, SystemClock(), utc_now, CollectorRegistry(), announce, stop)


SERVICE = ServiceDefinition(OperatorSettings, run_operator)
