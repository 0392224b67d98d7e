"""Store node process: runs a KV store node until a stop signal (`fleet serve kvstore`)."""

from fleet.app.process import Announce, ServiceDefinition, stop_signal
from fleet.core.errors import ConfigurationRefused
from kvstore.errors import StoreNotStarted
from kvstore.service.server import open_node
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock


async def run_kvstore(settings: StoreSettings, announce: Announce) -> None:
    """Run a store node until a stop signal.

    Raises:
        ConfigurationRefused: The settings cannot be used on this machine, for example because an address is in use.
    """
    try:
        async with stop_signal() as stop, open_node(settings, MonotonicClock()) as endpoints:
            announce({"grpc": endpoints.listen[0], "data": endpoints.data_address})
            await stop.wait()
    except StoreNotStarted as error:
        raise ConfigurationRefused(str(error)) from error


SERVICE = ServiceDefinition(StoreSettings, run_kvstore)
