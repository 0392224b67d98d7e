"""Secure channels: TLS with certificates of both peers, proofs of a secret, or both, for control calls between hosts.

Rules:

1. Unix sockets are for the node's own user (mode 0600) and need no further protection.
2. A node listens beyond loopback only if its callers have to show a certificate of the authority (`certificate`, `key`
   and `authority` are set), or to prove that they know the secret. The TCP data plane only supports the secret.
   `insecure` allows a node to listen without either.
3. With a secret, each call over TCP carries a proof and each answer another one, also on loopback. If both peers have
   certificates, no proofs are needed, because TLS has proven who the peers are. Health checks need no proof: they only
   report that the node lives.
4. Servers and channels follow renewed certificates (`kvstore.security.certificates`). At each handshake, gRPC asks for
   the certificate that the server has now. After a renewal, a client's channel is opened again before its next call,
   and running calls go on over the old channel.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from msgspec import Struct

from kvstore.errors import BadCredentials, StoreNotStarted
from kvstore.net.addresses import is_local
from kvstore.security.authentication import SECRET_BYTES, AuthenticationKey, Purpose
from kvstore.security.call_proofs import (
    Calendar,
    ProofAioUnaryInterceptor,
    ProofServerInterceptor,
    ProofStreamInterceptor,
    ProofUnaryInterceptor,
)
from kvstore.security.certificates import CertificateFiles
from kvstore.security.credentials import Credentials
from kvstore.security.renewed_channels import RenewedAioChannel, RenewedChannel
from kvstore.security.tls_diagnosis import TIMEOUT_SECONDS, diagnose_address
from kvstore.system_clock import unix_seconds

PLAIN_TIMEOUT_SECONDS = 0.2

Options = Sequence[tuple[str, Any]]


class LoadedCredentials(Struct, frozen=True, kw_only=True):
    """Holds the contents of the files in `Credentials`, and opens ports and channels that use them."""

    secret: bytes = b""
    certificates: CertificateFiles | None = None
    """The certificate files; None if the settings name none."""
    insecure: bool = False
    files: Credentials = Credentials()
    """The paths of the files that were read, for error messages and TLS diagnoses."""
    field: str = "credentials"
    """Name of the settings section that names the files, for error messages."""
    purpose: Purpose = Purpose.CONTROL
    """The purpose for which proofs on calls are made. A proof for one kind of port is not accepted at another kind."""

    def __repr__(self) -> str:
        return "LoadedCredentials(…)"  # the real contents, which are secrets, must not appear in logs

    @property
    def data_key(self) -> AuthenticationKey | None:
        """The key for the proofs of both ends of a data connection; None without a secret."""
        return AuthenticationKey(self.secret, Purpose.DATA) if self.secret else None

    @property
    def control_key(self) -> AuthenticationKey | None:
        """The key for the proofs of both ends of a call over TCP.

        It is None if there is no secret, or if both `certificate` and `authority` are set: TLS then proves who the
        peers are (rule 3).
        """
        return AuthenticationKey(self.secret, self.purpose) if self.secret and not self._certified else None

    @property
    def has_certificate(self) -> bool:
        """True if this process shows a certificate to its peers."""
        return bool(self.files.certificate)

    @property
    def has_authority(self) -> bool:
        """True if this process verifies the peer's certificate."""
        return bool(self.files.authority)

    @property
    def _certified(self) -> bool:
        return self.has_certificate and self.has_authority

    def require(self, listen: Sequence[str], data_listen: str) -> None:
        """Raise StoreNotStarted if a node must not listen at one of these addresses without protection (rule 2)."""
        if self.insecure:
            return
        remedy = "or credentials.insecure = true on a network that nobody else is on"
        for index, address in enumerate(listen):
            if not (self.secret or self._certified or is_local(address)):
                raise StoreNotStarted(
                    f"listen[{index}]: {address} is open to other hosts: set credentials.secret_file, or certificate, key and authority, {remedy}"
                )
        if data_listen and not (self.secret or is_local(data_listen)):
            raise StoreNotStarted(
                f"data_listen: {data_listen} is open to other hosts: set credentials.secret_file, {remedy}"
            )

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Make a server listen at an address and return the port; raise RuntimeError if the address cannot be used."""
        if address.startswith("unix:") or self.certificates is None or not self.has_certificate:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, renewed_server_credentials(self.certificates))

    def interceptors(self, now: Calendar = unix_seconds) -> list[grpc.aio.ServerInterceptor]:
        """Return the interceptors that check callers' proofs and add the server's own; none if calls need no proofs."""
        return [ProofServerInterceptor(self.control_key, now)] if self.control_key else []

    def channel(self, address: str, options: Options, now: Calendar = unix_seconds) -> grpc.Channel:
        """Open a channel to a node for synchronous calls, with TLS and proofs as these credentials require (rule 3)."""
        if address.startswith("unix:"):
            return grpc.insecure_channel(address, options=options)
        channel: Any
        if self.certificates is not None and self.has_authority:
            channel = RenewedChannel(self.certificates, lambda tls: grpc.secure_channel(address, tls, options=options))
        else:
            channel = grpc.insecure_channel(address, options=options)
        key = self.control_key
        return grpc.intercept_channel(channel, ProofUnaryInterceptor(key, now)) if key else channel

    def aio_channel(self, address: str, options: Options, now: Calendar = unix_seconds) -> grpc.aio.Channel:
        """Open a channel to a node for calls on an event loop, with TLS and proofs as these credentials require (rule 3)."""
        key = None if address.startswith("unix:") else self.control_key
        interceptors: list[grpc.aio.ClientInterceptor] = (
            [ProofStreamInterceptor(key, now), ProofAioUnaryInterceptor(key, now)] if key else []
        )
        if address.startswith("unix:") or self.certificates is None or not self.has_authority:
            return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
        renewed: Any = RenewedAioChannel(
            self.certificates,
            lambda tls: grpc.aio.secure_channel(address, tls, options=options, interceptors=interceptors),
        )
        return cast(grpc.aio.Channel, renewed)

    def diagnose(self, address: str) -> str:
        """Return why a client gets no TLS connection to a node; empty if TLS is not the cause.

        The diagnosis takes a second or two. For a client without TLS, its time limit is much shorter, because the node
        then probably has no TLS either.
        """
        timeout_seconds = TIMEOUT_SECONDS if self.has_authority else PLAIN_TIMEOUT_SECONDS
        return diagnose_address(address, self.files, field=self.field, timeout_seconds=timeout_seconds)


def renewed_server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return server credentials that get the certificate at each handshake, so that a renewed certificate is used."""

    def current() -> grpc.ServerCertificateConfiguration:
        pem = files.pem
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority or None)

    return grpc.dynamic_ssl_server_credentials(
        current(), current, require_client_authentication=bool(files.pem.authority)
    )


def secure_binder(files: CertificateFiles) -> Callable[[Any, str], int]:
    """Return a function that makes a server listen with TLS and returns the port; it raises RuntimeError if that is not possible."""
    return lambda server, address: server.add_secure_port(address, renewed_server_credentials(files))


OPEN = LoadedCredentials()
"""Credentials without secret and certificate, for nodes and clients that need no protection."""


def load(
    credentials: Credentials, purpose: Purpose = Purpose.CONTROL, *, field: str = "credentials"
) -> LoadedCredentials:
    """Read the credential files.

    `purpose` is the purpose of the proofs on calls. `field` is the name of the settings section, for error messages.

    Raises:
        BadCredentials: A file cannot be read, a certificate file is too large or is a pipe, or the secret is too short.
            The message names the field.
    """
    secret = _read(f"{field}.secret_file", credentials.secret_file).strip()
    if credentials.secret_file and len(secret) < SECRET_BYTES:
        raise BadCredentials(
            f"{field}.secret_file: {credentials.secret_file} holds {len(secret)} bytes: a secret has {SECRET_BYTES} or more"
        )
    certificates = None
    if credentials.certificate or credentials.authority:
        certificates = CertificateFiles(
            certificate=credentials.certificate, key=credentials.key, authority=credentials.authority, field=field
        )
    return LoadedCredentials(
        secret=secret,
        certificates=certificates,
        insecure=credentials.insecure,
        files=credentials,
        purpose=purpose,
        field=field,
    )


def _read(place: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadCredentials(f"{place}: {path} cannot be read: {error.strerror}") from error
