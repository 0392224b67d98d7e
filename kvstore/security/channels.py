"""Secure channels: TLS with certificates on both ends, proofs of a secret, or both, for the control plane between hosts.

Rules:

1. Unix sockets are for the node's own user (mode 0600) and need no further protection.
2. A node listens beyond loopback only if its callers have to prove something: a certificate of the authority
   (`certificate`, `key` and `authority` are set), or the secret. The TCP data plane only supports the secret.
   `insecure` allows a node to listen without either.
3. With a secret, each call over TCP carries a proof and each answer another one, also on loopback. With certificates on
   both ends, TLS has done that already. Health checks are exempt: they only tell that the node lives.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import TIMEOUT_SECONDS, diagnose_address
from kvstore.system_clock import unix_seconds

PLAIN_TIMEOUT_SECONDS = 0.2

Options = Sequence[tuple[str, Any]]


class LoadedCredentials(Struct, frozen=True, kw_only=True):
    """Contents of the files in `Credentials`."""

    secret: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    authority: bytes = b""
    insecure: bool = False
    files: Credentials = Credentials()
    """The files that were read; error messages name the wrong one."""
    purpose: Purpose = Purpose.CONTROL
    """Purpose of the proofs on calls: a proof for one kind of port is useless at another."""

    def __repr__(self) -> str:
        return "LoadedCredentials(…)"  # the real contents, which are secrets, must not appear in logs

    @property
    def data_key(self) -> AuthenticationKey | None:
        """Key that both ends of the data plane prove; None: they prove nothing."""
        return AuthenticationKey(self.secret, Purpose.DATA) if self.secret else None

    @property
    def control_key(self) -> AuthenticationKey | None:
        """Key that both ends of a call over TCP prove; None if there is no secret, or if TLS has proven both ends."""
        return AuthenticationKey(self.secret, self.purpose) if self.secret and not self._certified else None

    @property
    def _certified(self) -> bool:
        return bool(self.certificate and self.authority)

    def require(self, listen: Sequence[str], data_listen: str) -> None:
        """Refuse to listen without protection (rule 2): raise StoreNotStarted, which names the address."""
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
        """Make a server listen and return the port; raise RuntimeError if the address cannot be bound."""
        if address.startswith("unix:") or not self.certificate:
            return server.add_insecure_port(address)
        authority = self.authority or None
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=authority, require_client_auth=authority is not None
        )
        return server.add_secure_port(address, credentials)

    def interceptors(self, now: Calendar = unix_seconds) -> list[grpc.aio.ServerInterceptor]:
        """Return the interceptors with which a server checks and gives proofs."""
        return [ProofServerInterceptor(self.control_key, now)] if self.control_key else []

    def channel(self, address: str, options: Options, now: Calendar = unix_seconds) -> grpc.Channel:
        """Open a channel to a node for synchronous calls."""
        if address.startswith("unix:"):
            return grpc.insecure_channel(address, options=options)
        if self.authority:
            channel = grpc.secure_channel(address, self._for_channels(), options=options)
        else:
            channel = grpc.insecure_channel(address, options=options)
        key = self.control_key
        return grpc.intercept_channel(channel, ProofUnaryInterceptor(key, now)) if key else channel

    def aio_channel(self, address: str, options: Options, now: Calendar = unix_seconds) -> grpc.aio.Channel:
        """Open a channel to a node for calls on an event loop."""
        key = None if address.startswith("unix:") else self.control_key
        interceptors: list[grpc.aio.ClientInterceptor] = (
            [ProofStreamInterceptor(key, now), ProofAioUnaryInterceptor(key, now)] if key else []
        )
        if address.startswith("unix:") or not self.authority:
            return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
        return grpc.aio.secure_channel(address, self._for_channels(), options=options, interceptors=interceptors)

    def diagnose(self, address: str) -> str:
        """Return why a client gets no TLS connection to a node, or an empty string; see `kvstore.security.tls_diagnosis`.

        It takes a second or two. A client without TLS waits only a moment, because most nodes that do not answer have
        no TLS.
        """
        timeout_seconds = TIMEOUT_SECONDS if self.authority else PLAIN_TIMEOUT_SECONDS
        return diagnose_address(address, self.files, timeout_seconds=timeout_seconds)

    def _for_channels(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key or None, self.certificate or None)


OPEN = LoadedCredentials()
"""Credentials without secret and certificate, for nodes and clients that need no protection."""


def load(credentials: Credentials, purpose: Purpose = Purpose.CONTROL) -> LoadedCredentials:
    """Read the files; `purpose` is that of the proofs on calls.

    Raise BadCredentials, which names the field, if a file cannot be read or its content protects nothing.
    """
    secret = _read("secret_file", credentials.secret_file).strip()
    if credentials.secret_file and len(secret) < SECRET_BYTES:
        raise BadCredentials(
            f"credentials.secret_file: {credentials.secret_file} holds {len(secret)} bytes: a secret has {SECRET_BYTES} or more"
        )
    return LoadedCredentials(
        secret=secret,
        certificate=_read("certificate", credentials.certificate),
        key=_read("key", credentials.key),
        authority=_read("authority", credentials.authority),
        insecure=credentials.insecure,
        files=credentials,
        purpose=purpose,
    )


def _read(field: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadCredentials(f"credentials.{field}: {path} cannot be read: {error.strerror}") from error
