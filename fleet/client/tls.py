"""TLS: opens a client's connections to routers, and refuses to send an API key unencrypted over a network.

The files of `ClientTls` are read again when they change: later calls use a new connection, and running calls go on.
"""

from collections.abc import Sequence
from typing import Any, cast

import grpc
from msgspec import Struct

from fleet.config import grpc_authorities
from fleet.core.errors import ConfigurationRefused
from kvstore.errors import BadCredentials
from kvstore.net.addresses import is_local
from kvstore.security.certificates import CertificateFiles
from kvstore.security.credentials import Credentials
from kvstore.security.renewed_channels import RenewedAioChannel, RenewedChannel
from kvstore.security.tls_diagnosis import diagnose_address


class ClientTls(Struct, frozen=True, kw_only=True):
    """Names the TLS files of a client: the authorities that it trusts, and the certificate that it shows to routers."""

    authority: str = ""
    """PEM file of certificate authorities, one of which must have signed the router's certificate. If it is empty, the
    client trusts the authorities that gRPC knows."""

    certificate: str = ""
    """PEM file of the client's certificate, which routers with the setting `tls.client_authority` demand; empty if
    there is none."""

    key: str = ""
    """PEM file of the private key that belongs to `certificate`."""

    def files(self) -> CertificateFiles:
        """Read the files; the result reads them again when they change.

        Raises:
            ConfigurationRefused: A file cannot be read, is too large or is a pipe, or only one of `certificate` and `key` is given.
        """
        if bool(self.certificate) != bool(self.key):
            raise ConfigurationRefused("tls.key: certificate and key go together")
        try:
            return CertificateFiles(
                certificate=self.certificate, key=self.key, authority=self.authority, field="tls", logs=True
            )
        except BadCredentials as error:
            raise ConfigurationRefused(str(error)) from error


Options = Sequence[tuple[str, Any]]

DIAGNOSIS_SECONDS = 0.5  # time limit for each step of a connection that a TLS diagnosis opens

LEAVE_OUT_TLS = "; leave out tls"
GIVE_TLS = ": give it tls=ClientTls(authority=FILE)"
"""Last parts of the error texts if only the client (`LEAVE_OUT_TLS`) or only the router (`GIVE_TLS`) uses TLS.
`fleet.cli.console.address` replaces these parts by the names of command-line options.
"""


def open_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.Channel:
    """Return a channel for synchronous calls, without TLS if `tls` is None or the address is a Unix socket.

    Raises:
        ConfigurationRefused: The files cannot be used (`ClientTls.files`).
    """
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    renewed: Any = RenewedChannel(tls.files(), lambda opened: grpc.secure_channel(address, opened, options=options))
    return cast(grpc.Channel, renewed)


def open_aio_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.aio.Channel:
    """Return a channel for calls on an event loop, without TLS if `tls` is None or the address is a Unix socket.

    Raises:
        ConfigurationRefused: The files cannot be used (`ClientTls.files`).
    """
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    renewed: Any = RenewedAioChannel(
        tls.files(), lambda opened: grpc.aio.secure_channel(address, opened, options=options)
    )
    return cast(grpc.aio.Channel, renewed)


def tls_cause(address: str, tls: ClientTls | None) -> str:
    """Return why TLS with a router's port for clients fails, and what to correct; empty if TLS is not the cause.

    The diagnosis connects to the address, and takes a few seconds at most. The text names fields of `ClientTls` as ``tls.FIELD``.
    """
    files, known = Credentials(), grpc_authorities()
    if tls is not None:
        files = Credentials(authority=tls.authority or known, certificate=tls.certificate, key=tls.key)
    cause = diagnose_address(address, files, field="tls", timeout_seconds=DIAGNOSIS_SECONDS)
    for phrase, meaning in (
        (": tls.authority is set", LEAVE_OUT_TLS),
        (": set tls.authority", GIVE_TLS),
        (f"the authority in {known}", "an authority that gRPC knows; tls.authority names the file of another one"),
    ):
        cause = cause.replace(phrase, meaning)
    return cause


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
