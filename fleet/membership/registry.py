"""Registry over gRPC: contains the service that a router runs, and the clients with which workers register."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import Message

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import invalid
from fleet.core.ids import Incarnation, WorkerId
from fleet.core.system_clock import SystemClock
from fleet.membership.compatibility import IncompatiblePeers, Link
from fleet.membership.messages import Deregister, NameOccupied, Register, RegistrationSuperseded
from fleet.membership.ports import (
    NameHeld,
    RegistrationIncompatible,
    RegistrationListener,
    RegistrationRefused,
    RegistryUnreachable,
    WorkerSuperseded,
)
from fleet.membership.server import RegistryServer
from fleet.net.control.access import OPEN_ACCESS, ControlAccess
from fleet.net.grpc.calls import Context, parse_message, unary_context_handler, unary_handler
from fleet.net.grpc.port import GrpcServerApi
from fleet.v1 import control_pb2 as pb
from fleet.v1 import control_pb2_grpc as pb_grpc
from kvstore.net.addresses import host_port, unix_path
from kvstore.protocol.range_messages import parse_range, range_message
from kvstore.protocol.versions import NoCommonProtocol, agree, own_protocols

log = logging.getLogger(__name__)

SERVICE = "fleet.v1.Registry"
TIMEOUT = Nanos(2 * SECOND)

ResolveAddresses = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that resolves a host name to addresses with the given port. It raises OSError if the name has no address."""


class GrpcRegistry:
    """Serves the gRPC service `fleet.v1.Registry`, at which workers register."""

    def __init__(
        self,
        registry: RegistryServer,
        replicas: RegistrationListener | None = None,
        *,
        router_id: str = "",
        incompatible: IncompatiblePeers | None = None,
    ) -> None:
        """Build the service.

        Args:
            registry: The registry that handles the calls.
            replicas: Informs the peer routers of each registration and deregistration; None: they are not informed.
            router_id: Name of this router in error messages.
            incompatible: Remembers the workers that were refused for lack of a common protocol version; None: this service alone
                remembers them, to limit its log messages.
        """
        self._registry = registry
        self._replicas = replicas
        self._router_id = router_id
        self._incompatible = incompatible or IncompatiblePeers(SystemClock())

    def add(self, server: GrpcServerApi) -> None:
        methods = {"Register": unary_context_handler(self._register), "Deregister": unary_handler(self._deregister)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    async def _register(self, content: bytes, context: Context) -> Message:
        request = parse_message(pb.RegisterRequest, content)
        for field in ("worker_id", "incarnation", "address"):
            if not getattr(request, field):
                raise invalid(field, "is empty")
        name = request.worker_id[:100]
        try:
            agree(
                own_protocols(),
                parse_range(request),
                own_name=f"router {self._router_id}",
                peer_name=f"worker {name} at {request.address[:200]}",
            )
        except NoCommonProtocol as error:
            if refusals := self._incompatible.refused(Link.REGISTRY, name, str(error)):
                log.warning(
                    "registration refused: no common protocol version",
                    extra={"worker": name, "cause": str(error), "refusals": refusals},
                )
            # With the status OUT_OF_RANGE, workers of protocol version 1 try again. With FAILED_PRECONDITION they would end.
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        self._incompatible.accepted(Link.REGISTRY, name)
        event = Register(
            worker_id=WorkerId(request.worker_id),
            incarnation=Incarnation(request.incarnation),
            address=request.address,
        )
        match self._registry.register(event):
            case RegistrationSuperseded():
                why = f"worker_id: {name} is held by a newer process; every worker needs an id of its own"
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
            case NameOccupied() as occupied:
                await context.abort(
                    grpc.StatusCode.ALREADY_EXISTS, f"worker_id: {name} {_name_occupied_text(occupied)}"
                )
            case None:
                pass
        if self._replicas is not None:
            self._replicas.registered(event)
        return pb.RegisterResponse(lease_ms=self._registry.lease_ms, protocols=range_message())

    async def _deregister(self, content: bytes) -> Message:
        request = parse_message(pb.DeregisterRequest, content)
        event = Deregister(worker_id=WorkerId(request.worker_id), incarnation=Incarnation(request.incarnation))
        self._registry.deregister(event)
        if self._replicas is not None:
            self._replicas.deregistered(event)
        return pb.DeregisterResponse()


def _name_occupied_text(occupied: NameOccupied) -> str:
    """Return an error text that names the process with the worker's name, and says how long it keeps the name."""
    holder = f"the process at {occupied.holder[:200]}" if occupied.holder else "another process"
    if occupied.lease is None:
        until = "to which this router has a stream"
    else:
        until = f"whose lease ends in {occupied.lease / SECOND:.1f} s"
    return f"is held by {holder}, {until}; every worker needs an id of its own"


class GrpcRegistryClient:
    """Registers a worker at one registry. It is an async context manager that owns its gRPC channel.

    Implements `fleet.membership.ports.Registry`.
    """

    def __init__(self, address: str, timeout: Nanos = TIMEOUT, access: ControlAccess = OPEN_ACCESS) -> None:
        self._timeout_seconds = timeout / SECOND
        self._address = address
        self._access = access
        self._diagnosed = ("", "")
        """The latest failure that was diagnosed: its text, and its TLS cause. The second text is empty if TLS is not the
        cause."""

        self._channel = access.aio_channel(address)
        self._stub = pb_grpc.RegistryStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        request = pb.RegisterRequest(
            worker_id=worker_id, incarnation=incarnation, address=address, protocols=range_message()
        )
        try:
            response = await self._stub.Register(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise WorkerSuperseded(error.details()) from error
            if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                raise NameHeld(error.details()) from error
            raise _unreachable(error, await self._tls_cause(error)) from error
        self._diagnosed = ("", "")
        try:
            own_name, peer_name = f"worker {worker_id}", f"the router at {self._address}"
            agree(own_protocols(), parse_range(response), own_name=own_name, peer_name=peer_name)
        except NoCommonProtocol as error:
            raise RegistrationIncompatible(str(error)) from error
        return Nanos(response.lease_ms * MILLISECOND)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        request = pb.DeregisterRequest(worker_id=worker_id, incarnation=incarnation)
        try:
            await self._stub.Deregister(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise _unreachable(error) from error

    async def _tls_cause(self, error: grpc.aio.AioRpcError) -> str:
        """Return the TLS cause of a failure, or an empty text if TLS is not the cause.

        For equal failures in a row, the cause is looked for only once.
        """
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return ""
        failure = f"{error.code().name}: {error.details()}"
        if self._diagnosed[0] != failure:
            cause = await asyncio.to_thread(self._access.diagnose, self._address, "registry_credentials")
            self._diagnosed = (failure, cause)
        return self._diagnosed[1]


def _unreachable(error: grpc.aio.AioRpcError, tls_cause: str = "") -> RegistryUnreachable:
    said = f"{error.code().name}: {error.details()}"
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return RegistrationRefused(
                f"{said}; if the clocks agree, set registry_credentials to what the router's control_credentials ask for"
            )
        case grpc.StatusCode.OUT_OF_RANGE:
            return RegistrationIncompatible(error.details())
        case grpc.StatusCode.UNIMPLEMENTED:
            said += "; that is no router's control address: set registry to the router's control_listen"
        case _:
            said = f"{tls_cause} ({said})" if tls_cause else said
    return RegistryUnreachable(said)


class GrpcRegistries:
    """Registers a worker at all registries behind one name, such as the routers of a headless Kubernetes Service.

    Implements `fleet.membership.ports.Registry`. The name is resolved at each renewal, so a new router gets the
    registration within a third of a lease. A worker counts as registered when one router has accepted it, because other
    routers may be starting or stopping at this time. But if any router answers that another process has the worker's id,
    the registration fails.
    """

    def __init__(
        self,
        address: str,
        timeout: Nanos = TIMEOUT,
        look_up: ResolveAddresses | None = None,
        access: ControlAccess = OPEN_ACCESS,
    ) -> None:
        """Prepare the client; no connection is opened yet.

        Args:
            address: ``unix:/path``, or host:port.
            timeout: Time limit for the name resolution, and again for the calls to the registries, which run at the same time.
            look_up: Resolves the name; None: use the resolver of this host.
            access: Credentials of this worker.
        """
        self._address = address
        self._timeout = timeout
        self._look_up = look_up or resolve_addresses
        self._access = access
        self._clients: dict[str, GrpcRegistryClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._keep(())

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        await self._look()
        taken: list[Nanos] = []
        refused: list[RegistryUnreachable] = []
        replaced: list[WorkerSuperseded | NameHeld] = []

        async def tell(client: GrpcRegistryClient) -> None:
            try:
                taken.append(await client.register(worker_id, incarnation, address))
            except RegistryUnreachable as error:
                refused.append(error)
            except (WorkerSuperseded, NameHeld) as error:
                replaced.append(error)

        async with asyncio.TaskGroup() as tasks:
            for client in self._clients.values():
                tasks.create_task(tell(client))
        if replaced:
            raise min(replaced, key=lambda error: isinstance(error, NameHeld))
        if not taken:
            raise refused[0]
        return min(taken)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Deregister at all known registries that can be reached.

        Raises:
            RegistryUnreachable: None of the registries can be reached.
        """
        refused: list[RegistryUnreachable] = []

        async def tell(client: GrpcRegistryClient) -> None:
            try:
                await client.deregister(worker_id, incarnation)
            except RegistryUnreachable as error:
                refused.append(error)

        async with asyncio.TaskGroup() as tasks:
            for client in self._clients.values():
                tasks.create_task(tell(client))
        if refused and len(refused) == len(self._clients):
            raise refused[0]

    async def _look(self) -> None:
        """Update the clients to the present addresses of the name; keep the clients if the name cannot be resolved.

        Raises:
            RegistryUnreachable: The name cannot be resolved now, and was never resolved before.
        """
        if unix_path(self._address) or "//" in self._address:  # a Unix socket, or a URI that gRPC itself resolves
            await self._keep([self._address])
            return
        try:
            host, port = host_port(self._address)
            async with asyncio.timeout(self._timeout / SECOND):
                found = await self._look_up(host, port)
        except (OSError, TimeoutError, ValueError) as error:
            if not self._clients:
                raise RegistryUnreachable(f"{self._address}: {str(error) or 'no answer'}") from error
            return
        await self._keep(found)

    async def _keep(self, addresses: Sequence[str]) -> None:
        for gone in self._clients.keys() - set(addresses):
            await self._clients.pop(gone).__aexit__(None, None, None)
        for address in addresses:
            if address not in self._clients:
                self._clients[address] = GrpcRegistryClient(address, self._timeout, self._access)


async def resolve_addresses(host: str, port: int) -> list[str]:
    """Return every address of a name as ``ip:port``, in the order of the resolver.

    Raises:
        OSError: The name has no address.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]
