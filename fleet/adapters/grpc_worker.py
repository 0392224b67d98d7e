"""The gRPC port of a worker, for operators: the service `fleet.v1.Worker`, health, reflection. Routers do not call it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleet.adapters.grpc_options import SERVER_OPTIONS
from fleet.clock import MILLISECOND, Nanos
from fleet.errors import ConfigurationRefused
from fleet.v1 import worker_pb2 as pb
from fleet.v1 import worker_pb2_grpc as pb_grpc
from fleet.wire.work import encode_description
from workers.machine import LifePhase
from workers.server import WorkerServer

SERVICE = "fleet.v1.Worker"
HEALTH_SECONDS = 0.1  # how often a watched health follows the worker's phase
STOP_SECONDS = 2  # for the last answers


class GrpcWorker(pb_grpc.WorkerServicer):
    """The service; `serve_control` makes it."""

    def __init__(self, worker: WorkerServer) -> None:
        self._worker = worker

    async def Describe(  # noqa: N802 - generated name
        self,
        request: pb.DescribeRequest,  # noqa: ARG002 - its signature
        context: "grpc.aio.ServicerContext[pb.DescribeRequest, pb.Description]",  # noqa: ARG002 - its signature
    ) -> pb.Description:
        return encode_description(self._worker.description)

    async def Drain(  # noqa: N802 - generated name
        self,
        request: pb.DrainRequest,
        context: "grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]",  # noqa: ARG002 - its signature
    ) -> pb.DrainResponse:
        cancelled = await self._worker.drain(Nanos(request.deadline_ms * MILLISECOND))
        return pb.DrainResponse(cancelled=cancelled)


class WorkerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # ships no types
    """The standard health service: SERVING only while the worker takes work."""

    def __init__(self, worker: WorkerServer) -> None:
        self._worker = worker

    async def Check(  # noqa: N802 - generated name
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service: {request.service} is not served here")
        return self._answer()

    async def Watch(  # noqa: N802 - generated name
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",  # noqa: ARG002 - its signature
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if request.service not in ("", SERVICE):  # the protocol wants this told, not refused: it may come to be
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            return
        told = None
        while True:
            if (phase := self._worker.phase) is not told:
                told = phase
                yield self._answer()
            await asyncio.sleep(HEALTH_SECONDS)

    def _answer(self) -> health_pb2.HealthCheckResponse:
        serving = self._worker.phase is LifePhase.SERVING
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)


@asynccontextmanager
async def serve_control(worker: WorkerServer, listen: str) -> AsyncIterator[str]:
    """Listen for operators until left; yields the address, with the port that was chosen.

    Args:
        worker: Its `run` is the caller's affair.
        listen: host:port (0: any) or unix:path.

    Raises:
        ConfigurationRefused: The address is in use or none of this machine; nothing was started.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    pb_grpc.add_WorkerServicer_to_server(GrpcWorker(worker), server)
    health_pb2_grpc.add_HealthServicer_to_server(WorkerHealth(worker), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigurationRefused(f"control_listen: {listen} is in use, or no address of this machine") from error
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=STOP_SECONDS)
