"""Process of a KV store node."""

from fleet.app.process import Announce, stop_signal
from fleet.core.errors import ConfigurationRefused
from kvstore.service.settings import StoreSettings


async def run_kvstore(settings: StoreSettings, announce: Announce) -> None:
    """Run a store node until a stop signal.

    Raises:
        ConfigurationRefused: An address is in use, or there is too little memory.
    """
    from kvstore.errors import StoreNotStarted  # noqa: PLC0415 - each process loads its own part only
    from kvstore.service.server import open_node  # noqa: PLC0415
    from kvstore.system_clock import MonotonicClock  # noqa: PLC0415

    try:
        async with stop_signal() as stop, open_node(settings, MonotonicClock()) as endpoints:
            announce({"grpc": endpoints.listen[0], "data": endpoints.data_address})
            await stop.wait()
    except StoreNotStarted as error:
        raise ConfigurationRefused(str(error)) from error
