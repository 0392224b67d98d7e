"""TLS of a client's connection to a router, and the rule that API keys do not cross a network in the clear."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from kvstore.net.addresses import is_local


class ClientTls(Struct, frozen=True, kw_only=True):
    """TLS files of a client: the authority that it trusts, and the certificate that it shows."""

    authority: str = ""
    """PEM file of the certificates that must have signed the router's certificate. Empty: the authorities that gRPC knows."""

    certificate: str = ""
    """PEM file of the client's certificate, for routers with `tls.client_authority`; empty: none."""

    key: str = ""
    """PEM file of that certificate's private key."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            ConfigurationRefused: A file cannot be read, or certificate and key do not go together.
        """
        if bool(self.certificate) != bool(self.key):
            raise ConfigurationRefused("tls.key: certificate and key go together")
        authority = _content("authority", self.authority)
        return grpc.ssl_channel_credentials(
            authority, _content("key", self.key), _content("certificate", self.certificate)
        )


Options = Sequence[tuple[str, Any]]


def open_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.Channel:
    """Return a channel for synchronous calls; it raises ConfigurationRefused like `ClientTls.credentials`."""
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def open_aio_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.aio.Channel:
    """Return a channel for calls on an event loop; it raises ConfigurationRefused like `ClientTls.credentials`."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def check_key_is_safe(address: str, api_key: str, tls: ClientTls | None, *, insecure: bool) -> None:
    """Refuse to send an API key to another host in the clear, unless `insecure` declares that others cannot read it.

    Raises:
        ConfigurationRefused: The key would be sent in the clear, or the address is malformed.
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
