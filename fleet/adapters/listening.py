"""Sockets to listen on, and why there is none."""

import socket

from fleet.errors import ConfigurationRefused

BACKLOG = 4096  # connections that wait to be accepted, as many as Linux allows by default; a flood must not make others wait a second


def bind(address: str, *, shared: bool = False) -> tuple[socket.socket, str]:
    """A listening socket at ``host:port``; also returns the address with the port that was taken.

    Args:
        address: Port 0 takes a free one.
        shared: Whether other processes of this user may listen on the same port; the kernel spreads connections.

    Raises:
        ConfigurationRefused: The address is not one, or is in use.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigurationRefused(f"cannot listen on {address}: must be host:port")
    plain = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    try:
        listening = socket.create_server((plain, int(port)), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        raise ConfigurationRefused(f"cannot listen on {address}: {error.strerror or error}") from error
    return listening, f"{host}:{listening.getsockname()[1]}"
