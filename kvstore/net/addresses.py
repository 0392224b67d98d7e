"""Addresses of nodes: ``unix:/path`` or ``host:port``, where an IPv6 host is in brackets. Also checks URLs to which keys are sent."""

import ipaddress
from urllib.parse import urlsplit

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


def check_listen_address(field: str, address: str, *, or_unix: bool = False, optional: bool = False) -> None:
    """Check the form of an address to listen at.

    Args:
        field: The settings field of the address, for the message.
        address: ``host:port``. The host must not be empty; ``0.0.0.0`` stands for all addresses of the machine.
        or_unix: True if ``unix:/path`` is valid too.
        optional: True if an empty address is valid too.

    Raises:
        ValueError: The address has another form.
    """
    if (optional and not address) or (or_unix and unix_path(address)):
        return
    try:
        host_port(address)
    except ValueError:
        forms = "neither unix:/path nor host:port" if or_unix else "not host:port"
        all_addresses = f"; 0.0.0.0{address} listens at all addresses" if address.startswith(":") else ""
        raise ValueError(f"{field}: {address!r} is {forms} with a port up to 65535{all_addresses}") from None


def is_local(address: str) -> bool:
    """Return whether only processes of this host can connect to the address; raise ValueError for a malformed address."""
    if unix_path(address):
        return True
    return _is_loopback(host_port(address)[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_plain_hop(url: str) -> bool:
    """Return whether requests to the URL cross a network unencrypted: it is an http URL of another host."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not _is_loopback(parts.hostname or "")


def refuse_credentials(field: str, url: str, instead: str) -> None:
    """Raise ValueError if the URL may contain a user name or a password. The message does not show the URL.

    An ``@`` anywhere in the URL is refused, because in an invalid URL it is not clear which part contains the ``@``.

    Args:
        field: The settings field of the URL, for the message.
        url: A URL that may be invalid.
        instead: The settings field in which a credential belongs, for the message.
    """
    if "@" in url:
        raise ValueError(f"{field}: must hold no user name and no password; use {instead}")


def check_http_url(field: str, url: str) -> None:
    """Raise ValueError if a program cannot send requests to the URL. The URL must contain no password, because the message shows it.

    Args:
        field: The settings field of the URL, for the message.
        url: ``http://host:port`` or ``https://host:port``; the port may be missing, and a path may follow.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except (
        ValueError
    ):  # the port or an IPv6 host is invalid, or a part of the host is empty or longer than 63 characters
        usable = False
    if not usable or not all(" " < character < "\x7f" for character in url):
        raise ValueError(
            f"{field}: {url!r} must be http://host:port or https://host:port, with a port up to 65535, and a valid host"
        )


def refuse_plain_key(field: str, url: str, key_field: str, permission: str) -> None:
    """Raise ValueError if a key would cross the network unencrypted, because the URL has no TLS and names another host.

    Args:
        field: The settings field of the URL, for the message.
        url: ``http://host:port`` or ``https://host:port``.
        key_field: The settings field of the key.
        permission: The settings field that would allow the key to be sent unencrypted. The caller calls this function
            only if the field is false.
    """
    if not is_plain_hop(url):
        return
    raise ValueError(
        f"{field}: {key_field} would cross the network to {urlsplit(url).hostname} in the clear: use https,"
        f" or set {permission} = true on a network that nobody else is on"
    )
