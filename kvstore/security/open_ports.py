"""Open ports: warns of each port that other hosts reach without credentials, or at which API keys arrive unencrypted.

A port that can ask for credentials, such as that of a store node, does not listen beyond loopback without them, unless
the settings allow it (`insecure`, `metrics_access.open`). Other ports have no such rule: their protocol has no
authentication (NIXL), or they may serve clients without API keys or without TLS (the HTTP port of a router). Processes
call this module with the open ports of their settings when they start.
"""

import logging
from collections.abc import Iterable

from msgspec import Struct

from kvstore.net.addresses import is_local

log = logging.getLogger(__name__)

NO_CREDENTIALS = "callers need no credentials"

UCX_PORTS = "the ports that UCX opens"
"""Text that stands for the addresses of NIXL in a warning. UCX, which moves NIXL's data, chooses these ports. It listens
on every network device of the host, also beyond loopback."""


class OpenPort(Struct, frozen=True):
    """A port that other hosts may reach, although callers need no credentials or the connection is not encrypted."""

    setting: str
    address: str
    """The address as the settings name it, or a description if the settings do not name it, such as `UCX_PORTS`."""

    cause: str
    remedy: str

    @property
    def is_reached_by_others(self) -> bool:
        """True if processes of other hosts can connect to the address, or if it is not host:port."""
        return is_open_to_others(self.address)


def is_open_to_others(address: str) -> bool:
    """Return True if processes of other hosts can connect to the address, or if it is not host:port."""
    try:
        return not is_local(address)
    except ValueError:  # not host:port
        return True


def warn_of_open_ports(ports: Iterable[OpenPort]) -> None:
    """Log a warning for each port that other hosts reach."""
    for port in ports:
        if port.is_reached_by_others:
            log.warning(
                "port open to other hosts",
                extra={
                    "setting": port.setting,
                    "address": port.address,
                    "cause": port.cause,
                    "remedy": port.remedy,
                },
            )
