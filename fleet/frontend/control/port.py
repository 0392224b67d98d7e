"""Control port of a router: worker registry, `fleet.v1.Cluster`, `fleet.v1.Selection`, health and reflection.

A caller of this port can register workers, learn about prompts, reserve workers' capacity and change thresholds. So
clients must not reach it: the port is either a Unix socket that only the router's user can open, or it requires a proof
from each caller (`fleet.net.control.access`).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import grpc

from fleet.frontend.control.cluster import ClusterService, store_status_call
from fleet.frontend.control.demand import DemandWatch
from fleet.frontend.overflow import OverflowReports
from fleet.frontend.peer_routers import PeerRoutersApi
from fleet.membership.compatibility import IncompatiblePeers
from fleet.net.control.access import ControlAccess
from fleet.net.control.address import control_socket, private_folder
from fleet.net.grpc.options import CHANNEL_OPTIONS
from fleet.net.grpc.port import GrpcServerApi, open_port
from fleet.router.api import RouterApi
from kvstore.net.addresses import unix_path
from kvstore.net.socket_guard import SocketGuard
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
    demand: DemandWatch | None = None,
    overflow: OverflowReports | None = None,
    incompatible: IncompatiblePeers | None = None,
) -> AsyncIterator[str]:
    """Listen and serve until the context ends; then cancel running calls. The context yields the address.

    Args:
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``; empty for the Unix socket that belongs to
            `grpc_address`.
        access: Checks the proof that callers over TCP must send.
        router: Router whose state the services show and change.
        serving: Returns whether the router can serve requests now; the health service reports it.
        grpc_address: Address of the gRPC port for clients.
        services: Further gRPC services: the full name of each, with the function that adds the service to the server.
        store: gRPC address of the KV store node whose usage the status shows; empty if there is none.
        store_access: Credentials for the router's calls to that node.
        shared: Whether other processes may listen on the same port.
        others: The peer routers; None if there are none.
        demand: Serves the method `WatchDemand` for planners; None: the port does not have this method.
        overflow: Reports of the hosted endpoints; None if there are none.
        incompatible: Peers without a common protocol version, for the status; None: they are not shown.

    Raises:
        ConfigurationRefused: The address is malformed, in use, or open to other users.
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
        guard = None if unix_path(listen) else SocketGuard()
        server = access.server(guard, shared=shared)
        cluster = ClusterService(router, ask_store, others, overflow, incompatible)
        methods = cluster.methods() | (demand.methods() if demand else {})
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CLUSTER, methods),))
        for add in services.values():
            add(server)

        bind, names = access.binder(held), (CLUSTER, *services)
        port = open_port(server, listen, names, serving, setting="control_listen", bind=bind, guard=guard)
        yield await held.enter_async_context(port)
