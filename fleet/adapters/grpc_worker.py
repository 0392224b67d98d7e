"""The service `fleet.v1.Worker` around a `WorkerServer`: streams to routers, health, reflection."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleet.adapters.grpc_options import SERVER_OPTIONS
from fleet.clock import MILLISECOND, Nanos
from fleet.errors import Reason
from fleet.v1 import worker_pb2 as pb
from fleet.v1 import worker_pb2_grpc as pb_grpc
from fleet.wire.work import Malformed, decode_router_message, encode_description, encode_worker_message
from fleet.work import Hello, Rejected
from workers.machine import LifePhase
from workers.server import WorkerServer
from workers.session import Session, StreamCut

log = logging.getLogger(__name__)

SERVICE = "fleet.v1.Worker"
HELLO_SECONDS = 10  # a router says hello with its first packet
HEALTH_SECONDS = 0.1  # how often a watched health follows the worker's phase
STOP_SECONDS = 2  # for the last messages of streams that end


class ListenRefused(Exception):
    """The address cannot be listened on; the message says which."""


class GrpcWorker(pb_grpc.WorkerServicer):
    """One `Serve` stream a router; when it breaks, its session ends and so does its work."""

    def __init__(self, worker: WorkerServer) -> None:
        self._worker = worker

    async def Serve(  # type: ignore[override]  # noqa: N802 - generated name; written to, not iterated: see _converse
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: "grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]",
    ) -> None:
        failures: tuple[BaseException, ...] = ()
        try:
            hello = await self._hello(request_iterator)
            with self._worker.session(hello.router_id) as session:
                await self._converse(session, request_iterator, context)
        except* (Malformed, StreamCut) as group:
            failures = group.exceptions
        if failures:
            malformed = isinstance(failures[0], Malformed)
            code = grpc.StatusCode.INVALID_ARGUMENT if malformed else grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, str(failures[0]))

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

    async def _hello(self, requests: AsyncIterator[pb.RouterMessage]) -> Hello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = decode_router_message(await anext(requests))
        except (TimeoutError, StopAsyncIteration):
            first = None
        if not isinstance(first, Hello):
            raise Malformed("hello", "the first message on a stream must be hello")
        return first

    async def _converse(
        self,
        session: Session,
        requests: AsyncIterator[pb.RouterMessage],
        context: "grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]",
    ) -> None:
        """Both directions, until the router ends its own, the worker has no more to say, or the stream breaks.

        Writing waits where the router does not read; being cut has to end that wait.
        """
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._read(session, requests), name="read router"),
                tasks.create_task(session.cut_off(), name="watch for a cut"),
            ]
            async for message in session.messages():
                await context.write(encode_worker_message(message))
            for task in others:
                task.cancel()

    async def _read(self, session: Session, requests: AsyncIterator[pb.RouterMessage]) -> None:
        async for request in requests:
            try:
                message = decode_router_message(request)
            except Malformed as error:
                if not error.request_id:
                    raise
                session.offer(_refusal(error))  # the stream is sound, and so is other work on it
                continue
            if isinstance(message, Hello):
                raise Malformed("hello", "was already said on this stream")
            if message is not None:
                session.receive(message)
        session.finish()


def _refusal(error: Malformed) -> Rejected:
    return Rejected(request_id=error.request_id, reason=Reason.INVALID_ARGUMENT, message=str(error), field=error.field)


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
async def serve_worker(worker: WorkerServer, listen: str) -> AsyncIterator[str]:
    """Listen for routers until left; yields the address, with the port that was chosen.

    Args:
        worker: Its `run` is the caller's affair.
        listen: host:port (0: any) or unix:path.

    Raises:
        ListenRefused: The address is in use or none of this machine; nothing was started.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    pb_grpc.add_WorkerServicer_to_server(GrpcWorker(worker), server)
    health_pb2_grpc.add_HealthServicer_to_server(WorkerHealth(worker), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ListenRefused(f"listen: {listen} is in use, or no address of this machine") from error
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=STOP_SECONDS)
