"""Addresses of nodes: ``unix:/path`` or ``host:port``, where an IPv6 host is in brackets."""

import ipaddress

UNIX = "unix:"


def unix_path(address: str) -> str:
    """Return the path of ``unix:/path`` or ``unix:///path``; empty for other addresses."""
    if not address.startswith(UNIX):
        return ""
    path = address.removeprefix(UNIX)
    return path.removeprefix("//") if path.startswith("///") else path


def host_port(address: str) -> tuple[str, int]:
    """Split ``host:port``, without the brackets of the host; raise ValueError for another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{address!r} is neither unix:/path nor host:port with a port up to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_local(address: str) -> bool:
    """Return whether only processes of this host can connect to the address."""
    if unix_path(address):
        return True
    host, _ = host_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
