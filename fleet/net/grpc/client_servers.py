"""gRPC servers of the ports for clients: one that uses libnghttp2, and gRPC's own server as the fallback.

Both serve the same handlers, so services do not know which one runs. `GrpcSettings.library` chooses the server.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from fleet.core.errors import ConfigurationRefused
from fleet.net.client_tls import ServerCertificates
from fleet.net.grpc.options import frontend_server_options
from fleet.net.grpc.port import GrpcServerApi
from fleet.net.settings import GrpcLibrary, GrpcSettings
from fleet.net.sockets import split_listen_address
from kvstore.security.channels import renewed_server_credentials


class MessageMemory(Protocol):
    """Counts the bytes of the messages that arrive or are served (`held_bytes`). Beyond `max_held_bytes`, long messages are refused."""

    held_bytes: int
    max_held_bytes: int


class ClientServer(GrpcServerApi, MessageMemory, Protocol):
    """Interface of a gRPC server that serves a port for clients."""


class GrpcioServer:
    """Implements `ClientServer` by `grpc.aio`."""

    def __init__(
        self,
        *,
        shared: bool = False,
        connection_seconds: float = 0,
        limits: GrpcSettings,
        max_held_bytes: int,
        certificates: ServerCertificates | None = None,
    ) -> None:
        """Create a server with the arguments of `fleet.net.grpc.http2.Http2Server`."""
        options = (
            *frontend_server_options(shared=shared, connection_seconds=connection_seconds),
            ("grpc.max_allowed_incoming_connections", limits.max_connections),
            ("grpc.server_handshake_timeout_ms", round(limits.first_byte_timeout_seconds * 1000)),
        )
        self.held_bytes = 0
        self.max_held_bytes = max_held_bytes
        self._server = grpc.aio.server(options=options)
        self._certificates = certificates

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_insecure_port(self, listen: str) -> int:
        """Bind ``host:port`` or ``unix:/path``; return the port. If the server has certificates, a TCP port speaks TLS.

        Raises:
            RuntimeError: The address is malformed or cannot be bound.
        """
        if not listen.startswith("unix:"):
            try:
                split_listen_address(listen)
            except ValueError as error:
                raise RuntimeError(f"cannot listen on {listen}: {error}") from error
            if self._certificates is not None:
                return self._server.add_secure_port(listen, renewed_server_credentials(self._certificates.files))
        return self._server.add_insecure_port(listen)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)


def client_server(
    limits: GrpcSettings,
    *,
    shared: bool = False,
    connection_seconds: float = 0,
    max_held_bytes: int,
    certificates: ServerCertificates | None = None,
) -> ClientServer:
    """Create the server that `limits.library` names; the arguments are those of `fleet.net.grpc.http2.Http2Server`.

    Raises:
        ConfigurationRefused: The library `ngh2` does not load.
    """
    arguments: dict[str, Any] = {
        "shared": shared, "connection_seconds": connection_seconds, "limits": limits, "max_held_bytes": max_held_bytes,
        "certificates": certificates,
    }  # fmt: skip
    if limits.library is GrpcLibrary.GRPCIO:
        return GrpcioServer(**arguments)
    try:
        from fleet.net.grpc.http2 import Http2Server  # noqa: PLC0415 - imported only here, so that the fallback works where ngh2 does not load
    except ImportError as error:
        raise ConfigurationRefused(
            f"grpc.library: ngh2 does not load ({error}); install it (pip install ngh2), or set grpcio"
        ) from error
    return Http2Server(**arguments)
