"""Where nodes listen: ``unix:/path`` or ``host:port``, with brackets around the host where it is an IPv6 address."""

import ipaddress

UNIX = "unix:"


def unix_path(address: str) -> str:
    """The path of ``unix:/path`` or ``unix:///path``; empty where the address is not that of a Unix socket."""
    if not address.startswith(UNIX):
        return ""
    path = address.removeprefix(UNIX)
    return path.removeprefix("//") if path.startswith("///") else path


def host_port(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of ``host:port``.

    Raises:
        ValueError: It is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{address!r} is neither unix:/path nor host:port with a port up to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_local(address: str) -> bool:
    """Whether nobody on another host can connect to it."""
    if unix_path(address):
        return True
    host, _ = host_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
