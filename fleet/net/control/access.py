"""Access to control ports, a router's and a worker's: what they ask of callers, and what callers prove.

Rules:

1. A Unix socket asks for nothing: the mode of its file, and of the folder around it, keeps other users out.
2. Over TCP callers show a certificate, or their calls carry proofs of a secret (`kvstore.security.call_proofs`). Routers and workers refuse
   to listen without either (`RouterSettings`, `WorkerSettings`), unless their settings say that everybody on the network is trusted.
3. Health checks and reflection need no proof. They tell whether the process serves, and what is in the .proto files anyway.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from fleet.core.errors import ConfigurationRefused
from fleet.net.grpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS, SHARED_SERVER_OPTIONS
from kvstore.errors import BadCredentials
from kvstore.net.addresses import unix_path
from kvstore.security.authentication import Purpose
from kvstore.security.call_proofs import ProofServerInterceptor
from kvstore.security.channels import OPEN, LoadedCredentials, load
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import diagnose_address

REFLECTION = "/grpc.reflection."
DIAGNOSIS_SECONDS = 0.5
"""For each of the few steps of a TLS diagnosis, after a call that has failed already."""


class ControlAccess:
    """Credentials of a control port, read from their files."""

    def __init__(self, access: LoadedCredentials = OPEN) -> None:
        self._access = access

    @property
    def asks(self) -> bool:
        """True if callers over TCP have to prove who they are."""
        return bool(self._access.control_key or (self._access.certificate and self._access.authority))

    def server(self, *, shared: bool = False) -> grpc.aio.Server:
        """Make a server that asks its callers for proofs.

        Args:
            shared: Whether other processes may listen on the same port.
        """
        key = self._access.control_key
        options = SHARED_SERVER_OPTIONS if shared else SERVER_OPTIONS
        return grpc.aio.server(options=options, interceptors=[_ProofInterceptor(key)] if key else [])

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Have the server listen at an address; returns the port.

        Raises:
            RuntimeError: It cannot be bound.
        """
        return self._access.bind(server, address)

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel for synchronous calls that carry the proofs."""
        return self._access.channel(address, CHANNEL_OPTIONS)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel for calls on an event loop that carry the proofs."""
        return self._access.aio_channel(address, CHANNEL_OPTIONS)

    def diagnose(self, address: str, field: str) -> str:
        """Return why there is no connection over TLS to a control port; empty where TLS is not the cause. Takes some seconds at most.

        Args:
            address: Of the control port.
            field: Of the settings, where the credentials stand; the answer names fields in it.
        """
        if is_unix_socket(address):
            return ""
        return diagnose_address(address, self._access.files, field=field, timeout_seconds=DIAGNOSIS_SECONDS)


OPEN_ACCESS = ControlAccess()
"""Asks for nothing, and proves nothing."""


def load_control_access(field: str, credentials: Credentials) -> ControlAccess:
    """Read the files of credentials for a control port.

    Args:
        field: Of the settings; messages begin with it.
        credentials: What they say.

    Raises:
        ConfigurationRefused: A file cannot be used.
    """
    try:
        return ControlAccess(load(credentials, Purpose.ROUTER_CONTROL))
    except BadCredentials as error:
        raise ConfigurationRefused(f"{field}.{str(error).removeprefix('credentials.')}") from error


def caller_name(context: Any) -> str:
    """Return who makes a call to a control port, as far as limits for each caller tell callers apart.

    That is the name in the certificate that the caller has shown; else the host that it calls from; on a Unix socket the user of it.
    """
    names: Sequence[bytes] = context.auth_context().get("x509_common_name") or ()
    if names:
        return f"certificate {names[0].decode(errors='replace')}"
    peer: str = context.peer()
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]


def is_unix_socket(address: str) -> bool:
    """True if an address is a Unix socket, whose file protects it."""
    return bool(unix_path(address))


class _ProofInterceptor(ProofServerInterceptor):
    """The proofs of a control port (rule 3)."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(REFLECTION):
            return await continuation(handler_call_details)
        return await super().intercept_service(continuation, handler_call_details)
