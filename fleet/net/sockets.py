"""Listening sockets, and the options that they pass on to the connections of clients."""

import socket

from fleet.core.errors import ConfigurationRefused

# Maximum number of unsent bytes that the kernel buffers for a client. Bytes on their way through the network do not count.
UNSENT_BYTES = 16 << 10
# Maximum number of connections that wait to be accepted: Linux's default maximum; in a burst, further ones would be
# delayed by a second.
BACKLOG = 4096


def split_listen_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[host]:port``; return the host without brackets, and the port.

    Raises:
        ValueError: There is no host, or the port is not a number below 65,536. A port alone is refused, because it
            would stand for all addresses of this machine.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError("must be host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bind_tcp(address: str, *, setting: str, shared: bool = False) -> tuple[socket.socket, str]:
    """Bind a listening socket at ``host:port``; also return the address with the port that was taken.

    Port 0 takes a free port. With `shared`, other processes of this user may listen on the port, and the kernel spreads
    connections over the processes. Errors name the `setting` that holds the address.

    Raises:
        ConfigurationRefused: The address is malformed or cannot be bound.
    """
    try:
        host, port = split_listen_address(address)
    except ValueError as error:
        raise ConfigurationRefused(f"{setting}: cannot listen on {address}: {error}") from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        raise ConfigurationRefused(f"{setting}: cannot listen on {address}: {error.strerror or error}") from error
    return listening, f"{address.rpartition(':')[0]}:{listening.getsockname()[1]}"


def configure_client_port(listening: socket.socket) -> None:
    """Make the connections of a TCP port send immediately and report promptly how much their clients read.

    By default, the kernel buffers some MB for a slow reader, and then accepts no more bytes until a third of them is read.
    At 40 kB/s this takes half a minute, in which the client seems to read nothing.

    Linux copies the options of a listening socket to each connection that is made after this call. Other systems may not
    copy them. There, a client that reads slowly may be cut off too early.
    """
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
