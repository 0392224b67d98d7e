"""Sockets to listen on, and why there is none."""

import socket

from fleet.core.errors import ConfigurationRefused

UNSENT_BYTES = 16 << 10  # that the kernel takes for a client on top of what its network and its buffers have room for
BACKLOG = 4096  # connections that wait to be accepted, as many as Linux allows by default; a flood must not make others wait a second


def bind_tcp(address: str, *, shared: bool = False) -> tuple[socket.socket, str]:
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


def configure_client_socket(sock: socket.socket) -> None:
    """Make a client's connection send at once what is written, and show soon what its client reads.

    Otherwise the kernel takes some MB for a client that reads slowly, and then nothing until a third of it is gone: at 40 kB/s that is
    half a minute, in which the client seems to read nothing.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
