"""The registry over gRPC: the service in the router process, and the client that workers use."""

from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import Message

from fleet.adapters.grpc_calls import Context, parse, unary, unary_in_context
from fleet.adapters.grpc_options import CHANNEL_OPTIONS
from fleet.adapters.replicas import Replicas
from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.control.messages import Deregister, Register
from fleet.control.server import RegistryServer
from fleet.errors import invalid
from fleet.ids import Incarnation, WorkerId
from fleet.v1 import control_pb2 as pb
from fleet.v1 import control_pb2_grpc as pb_grpc
from workers.ports import RegistryUnreachable, Superseded

SERVICE = "fleet.v1.Registry"
TIMEOUT = Nanos(2 * SECOND)


class GrpcRegistry:
    """The service `fleet.v1.Registry`."""

    def __init__(self, registry: RegistryServer, replicas: Replicas | None = None) -> None:
        """`replicas` hear of what is registered here."""
        self._registry = registry
        self._replicas = replicas

    def add(self, server: grpc.aio.Server) -> None:
        methods = {"Register": unary_in_context(self._register), "Deregister": unary(self._deregister)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    async def _register(self, content: bytes, context: Context) -> Message:
        request = parse(pb.RegisterRequest, content)
        for field in ("worker_id", "incarnation", "address"):
            if not getattr(request, field):
                raise invalid(field, "is empty")
        event = Register(
            worker_id=WorkerId(request.worker_id),
            incarnation=Incarnation(request.incarnation),
            address=request.address,
        )
        if not self._registry.register(event):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker_id: {request.worker_id[:100]} is held by a newer process; every worker needs an id of its own",
            )
        if self._replicas is not None:
            self._replicas.registered(event)
        return pb.RegisterResponse(lease_ms=self._registry.lease_ms)

    async def _deregister(self, content: bytes) -> Message:
        request = parse(pb.DeregisterRequest, content)
        event = Deregister(worker_id=WorkerId(request.worker_id), incarnation=Incarnation(request.incarnation))
        self._registry.deregister(event)
        if self._replicas is not None:
            self._replicas.deregistered(event)
        return pb.DeregisterResponse()


class GrpcRegistryClient:
    """Implements `workers.ports.Registry`; an async context manager that owns its channel."""

    def __init__(self, address: str, timeout: Nanos = TIMEOUT) -> None:
        self._timeout_seconds = timeout / SECOND
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = pb_grpc.RegistryStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        request = pb.RegisterRequest(worker_id=worker_id, incarnation=incarnation, address=address)
        try:
            response = await self._stub.Register(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise Superseded(error.details()) from error
            raise RegistryUnreachable(f"{error.code().name}: {error.details()}") from error
        return Nanos(response.lease_ms * MILLISECOND)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        request = pb.DeregisterRequest(worker_id=worker_id, incarnation=incarnation)
        try:
            await self._stub.Deregister(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise RegistryUnreachable(f"{error.code().name}: {error.details()}") from error
