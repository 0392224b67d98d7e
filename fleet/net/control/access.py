"""Access control of control ports (router and worker): what callers must prove, and what clients send as proof.

Rules:

1. A Unix socket requires no proof: the modes of its file and folder keep other users out.
2. Over TCP a caller shows a certificate, or its calls carry proofs of a secret (`kvstore.security.call_proofs`). Routers and
   workers refuse to listen if their settings (`RouterSettings`, `WorkerSettings`) have neither a certificate nor a
   secret, unless the settings declare the network as trusted.
3. Health checks and reflection need no proof of the secret. They reveal only whether the process serves, and the public
   .proto files.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc

from fleet.core.errors import ConfigurationRefused
from fleet.net.control.address import locked_folder, private_umask, remove_stale_socket
from fleet.net.grpc.options import (
    BLOCKING_CHANNEL_OPTIONS,
    CHANNEL_OPTIONS,
    SEPARATE_CHANNEL_OPTIONS,
    SERVER_OPTIONS,
    SHARED_SERVER_OPTIONS,
)
from kvstore.errors import BadCredentials
from kvstore.net.addresses import unix_path
from kvstore.net.socket_guard import SocketGuard
from kvstore.net.unix_sockets import identity, remove
from kvstore.security.authentication import Purpose
from kvstore.security.call_proofs import ProofServerInterceptor
from kvstore.security.channels import OPEN, LoadedCredentials, load
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import diagnose_address

REFLECTION = "/grpc.reflection."
DIAGNOSIS_SECONDS = 0.5
"""Time limit for each step of a TLS diagnosis after a failed call."""


class ControlAccess:
    """Opens servers and channels of a control port with its loaded credentials."""

    def __init__(self, access: LoadedCredentials = OPEN) -> None:
        self._access = access

    @property
    def asks(self) -> bool:
        """Return whether callers over TCP must show a certificate or a proof of the secret."""
        return bool(self._access.control_key or (self._access.has_certificate and self._access.has_authority))

    def server(self, guard: SocketGuard | None = None, *, shared: bool = False) -> grpc.aio.Server:
        """Return a gRPC server. If the credentials require proofs, the server's callers over TCP must prove that they know the secret.

        Args:
            guard: Limits the connections of the server's TCP port; `fleet.net.grpc.port.open_port` runs it. None: no limit.
            shared: True if other processes may listen on the same port.
        """
        key = self._access.control_key
        options = SHARED_SERVER_OPTIONS if shared else SERVER_OPTIONS
        proofs: list[grpc.aio.ServerInterceptor] = [_ProofInterceptor(key)] if key else []
        return grpc.aio.server(options=options, interceptors=proofs if guard is None else [*proofs, guard])

    def binder(self, held: ExitStack | AsyncExitStack) -> Callable[[Any, str], int]:
        """Return the function that binds a server to an address and returns the port.

        A Unix socket is for this user alone. It replaces a socket that a killed process left behind. When `held` ends, the
        socket is removed, unless another process has replaced it by then.

        The function raises RuntimeError if the address cannot be bound, and ConfigurationRefused if the path of a Unix
        socket cannot be used, for example because a process listens at it.
        """

        def bind(server: Any, address: str) -> int:
            if not (path := unix_path(address)):
                return self._access.bind(server, address)
            with locked_folder(address):
                remove_stale_socket(address)
                with private_umask():
                    port = self._access.bind(server, address)
            Path(path).chmod(0o600)
            held.callback(remove, path, identity(path))
            return port

        return bind

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel for synchronous calls. If the credentials require proofs, calls over TCP carry proofs of the secret."""
        return self._access.channel(address, BLOCKING_CHANNEL_OPTIONS)

    def aio_channel(self, address: str, *, separate: bool = False) -> grpc.aio.Channel:
        """Return a channel for asyncio calls. If the credentials require proofs, calls over TCP carry proofs of the secret.

        With `separate`, the channel has a connection of its own (`SEPARATE_CHANNEL_OPTIONS`).
        """
        return self._access.aio_channel(address, SEPARATE_CHANNEL_OPTIONS if separate else CHANNEL_OPTIONS)

    def diagnose(self, address: str, field: str) -> str:
        """Return why TLS to a control port fails; empty if TLS is not the cause. This takes some seconds at most.

        The text names the settings fields to check, which lie within `field`.
        """
        if is_unix_socket(address):
            return ""
        return diagnose_address(address, self._access.files, field=field, timeout_seconds=DIAGNOSIS_SECONDS)


OPEN_ACCESS = ControlAccess()
"""Access without credentials: callers need no proof, and calls carry none."""


def load_control_access(field: str, credentials: Credentials) -> ControlAccess:
    """Read the files of the credentials of a control port; error messages name the settings section `field`.

    Raises:
        ConfigurationRefused: A file cannot be used.
    """
    try:
        return ControlAccess(load(credentials, Purpose.ROUTER_CONTROL, field=field))
    except BadCredentials as error:
        raise ConfigurationRefused(str(error)) from error


def caller_name(context: Any) -> str:
    """Return the name under which limits per caller are counted at a control port.

    It is the name in the caller's certificate, otherwise the caller's host, or the peer name of gRPC on a Unix socket.
    """
    names: Sequence[bytes] = context.auth_context().get("x509_common_name") or ()
    if names:
        return f"certificate {names[0].decode(errors='replace')}"
    peer: str = context.peer()
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]


def is_unix_socket(address: str) -> bool:
    """Return whether an address is a Unix socket, which the permissions of its file protect."""
    return bool(unix_path(address))


class _ProofInterceptor(ProofServerInterceptor):
    """Lets reflection pass without a proof (rule 3); `ProofServerInterceptor` checks all other calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(REFLECTION):
            return await continuation(handler_call_details)
        return await super().intercept_service(continuation, handler_call_details)
