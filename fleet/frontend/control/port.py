"""Control port of a router: the registry of workers, `fleet.v1.Cluster` and `fleet.v1.Selection`, health and reflection.

Whoever is served here can register workers, read what routers know of prompts, hold workers' capacity and change thresholds. So
the port is never the clients' one: it is a Unix socket of the router's user, or asks each caller for a proof (`control_access`).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from fleet.frontend.control.cluster import ClusterService, PeerRoutersApi, RouterApi, store_status_call
from fleet.net.control.access import ControlAccess
from fleet.net.control.address import control_socket, private_folder, private_umask, remove_stale_socket
from fleet.net.grpc.options import CHANNEL_OPTIONS
from fleet.net.grpc.port import GrpcServerApi, open_port
from kvstore.net.addresses import unix_path
from kvstore.net.unix_sockets import identity, remove
from kvstore.security.channels import OPEN, LoadedCredentials
from kvstore.v1 import blocks_pb2_grpc

CLUSTER = "fleet.v1.Cluster"


@asynccontextmanager
async def open_control_port(
    listen: str,
    access: ControlAccess,
    router: RouterApi,
    serving: Callable[[], bool],
    *,
    grpc_address: str,
    services: Mapping[str, Callable[[GrpcServerApi], None]] | None = None,
    store: str = "",
    store_access: LoadedCredentials = OPEN,
    shared: bool = False,
    others: PeerRoutersApi | None = None,
) -> AsyncIterator[str]:
    """Listen and serve until the context ends; then running calls are cancelled. Yields the address.

    Args:
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``; empty: the Unix socket that belongs to `grpc_address`.
        access: What callers over TCP have to prove.
        router: Says how the cluster is.
        serving: Whether requests can be served now, for health.
        grpc_address: Where clients reach this router.
        services: More services: what adds each to the server, by full name.
        store: gRPC address of the KV store node, asked how full it is; empty: there is none.
        store_access: What the router proves to that node.
        shared: Whether other processes may listen on the same port.
        others: The other routers of the cluster, if there are any.

    Raises:
        ConfigurationRefused: Nobody can listen there, or others could reach the socket; the message says why.
    """
    services = services or {}
    if not listen:
        private_folder()
        listen = control_socket(grpc_address)
    async with AsyncExitStack() as held:
        ask_store = None
        if store:
            channel = await held.enter_async_context(store_access.aio_channel(store, CHANNEL_OPTIONS))
            ask_store = store_status_call(blocks_pb2_grpc.BlockStoreStub(channel))
        server = access.server(shared=shared)
        methods = ClusterService(router, ask_store, others).methods()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CLUSTER, methods),))
        for add in services.values():
            add(server)

        def bind(server: Any, address: str) -> int:
            if not (path := unix_path(address)):
                return access.bind(server, address)
            remove_stale_socket(address)
            with private_umask():
                port = access.bind(server, address)
            Path(path).chmod(0o600)
            held.callback(
                remove, path, identity(path)
            )  # the server removes it when it stops, and a successor may be there by then
            return port

        yield await held.enter_async_context(open_port(server, listen, (CLUSTER, *services), serving, bind=bind))
