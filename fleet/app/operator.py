"""The operator's process."""

from fleet.adapters.clock import SystemClock, utc_now
from fleet.app.process import Announce, stop_signal
from fleet.errors import ConfigurationRefused
from operators.settings import OperatorSettings


async def run_operator(settings: OperatorSettings, announce: Announce) -> None:
    """The operator on Kubernetes, or a standby of it.

    Raises:
        ConfigurationRefused: An address is in use, or it is not said how to reach the API.
    """
    try:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - each process loads its own part only

        from fleet.adapters.router_registrations import RouterRegistrations  # noqa: PLC0415
        from fleet.adapters.served_probes import ServedProbes  # noqa: PLC0415
        from operators.process import serve_operator  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigurationRefused(
            "operator: needs the package kubernetes: pip install 'fleet-serving[kubernetes]'"
        ) from error

    async with stop_signal() as stop:
        routers = RouterRegistrations() if settings.ask_routers else None
        clients = ServedProbes(settings.probe.keys, settings.probe.deadline_seconds)
        await serve_operator(settings, routers, clients, SystemClock(), utc_now, CollectorRegistry(), announce, stop)
