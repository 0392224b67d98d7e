"""TLS: opens a client's connections to routers, and refuses to send an API key unencrypted over a network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from kvstore.net.addresses import is_local


class ClientTls(Struct, frozen=True, kw_only=True):
    """Names the TLS files of a client: the authorities that it trusts, and the certificate that it shows to routers."""

    authority: str = ""
    """PEM file of the authorities of which one must have signed the router's certificate. If it is empty, the client
    trusts the authorities that gRPC knows."""

    certificate: str = ""
    """PEM file of the client's certificate, which routers with the setting `tls.client_authority` demand; empty if
    there is none."""

    key: str = ""
    """PEM file of the private key that belongs to `certificate`."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return gRPC's credentials.

        Raises:
            ConfigurationRefused: A file cannot be read, or only one of `certificate` and `key` is given.
        """
        if bool(self.certificate) != bool(self.key):
            raise ConfigurationRefused("tls.key: certificate and key go together")
        authority = _content("authority", self.authority)
        return grpc.ssl_channel_credentials(
            authority, _content("key", self.key), _content("certificate", self.certificate)
        )


Options = Sequence[tuple[str, Any]]


def open_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.Channel:
    """Return a channel for synchronous calls; raise ConfigurationRefused like `ClientTls.credentials`."""
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def open_aio_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.aio.Channel:
    """Return a channel for calls on an event loop; raise ConfigurationRefused like `ClientTls.credentials`."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def may_need_tls(addresses: Sequence[str], tls: ClientTls | None) -> bool:
    """Return whether a client connects without TLS to a TCP address, at which the router may demand TLS."""
    return tls is None and any(not each.startswith("unix:") for each in addresses)


def check_key_is_safe(address: str, api_key: str, tls: ClientTls | None, *, insecure: bool) -> None:
    """Refuse to send an API key to another host without TLS, unless `insecure` is true.

    Raises:
        ConfigurationRefused: The key would be sent over a network without encryption, or the address is malformed.
    """
    if not api_key or tls is not None or insecure:
        return
    try:
        local = is_local(address)
    except ValueError as error:
        raise ConfigurationRefused(f"address: {error}") from error
    if not local:
        raise ConfigurationRefused(
            f"api_key: would cross the network to {address} in the clear: use TLS, or set insecure on a network that nobody else is on"
        )


def _content(field: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationRefused(f"tls.{field}: {path} cannot be read: {error.strerror}") from error
