"""gRPC port: listening, health, reflection and an orderly stop for any services."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fleet.core.errors import ConfigurationRefused
from fleet.net.grpc.calls import (
    Context,
    answer_call,
    parse_message,
    send_message,
    serialize,
    unary_context_handler,
)
from kvstore.net.addresses import host_port, unix_path
from kvstore.net.reflection import V1, V1ALPHA, add_descriptor
from kvstore.net.socket_guard import SocketGuard

LIVENESS = "liveness"
"""Name by which liveness probes ask for the health of the process. Other endpoint pickers use the same name."""

# Seconds between two checks whether a service's health has changed; watchers are notified of a change.
HEALTH_SECONDS = 0.25
STOP_SECONDS = 2.0  # when the port closes, time for running calls to send their last messages before they are cancelled


class GrpcServerApi(Protocol):
    """The server methods that a port needs; `grpc.aio.Server` and `Http2Server` have them."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler], /) -> None: ...

    def add_insecure_port(self, address: str, /) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float | None) -> None: ...


@asynccontextmanager
async def open_port(
    server: GrpcServerApi,
    listen: str,
    services: Sequence[str],
    serving: Callable[[], bool],
    *,
    setting: str,
    alive: Mapping[str, Callable[[], bool]] | None = None,
    bind: Callable[[Any, str], int] | None = None,
    guard: SocketGuard | None = None,
) -> AsyncIterator[str]:
    """Serve until the context ends, and yield the address with the port that was taken.

    At the end, running calls get `STOP_SECONDS` to send their last messages, and are then cancelled.

    Args:
        server: The server with its services, not started.
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``.
        services: The full service names, for health and reflection.
        serving: Returns whether the services can serve now; called for each health request and several times a second.
        setting: The settings field that holds the address; errors name it.
        alive: Further health services by name, as functions that return whether the process works at all, independent of
            what it can serve.
        bind: Binds the server and returns the port, or raises RuntimeError. None: `add_insecure_port` of the server does
            this.
        guard: Limits the connections of a TCP port; the server has it as an interceptor.

    Raises:
        ConfigurationRefused: The address is malformed or cannot be bound.
    """
    healths = _HealthService(dict.fromkeys(("", *services), serving) | dict(alive or {}))
    server.add_generic_rpc_handlers((healths.handler(), *_reflections((*services, health.SERVICE_NAME))))
    address = _bind(server, listen, setting, bind)
    await healths.notify()
    await server.start()
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(healths.watch())]
        if guard is not None and not unix_path(address):
            watches.append(tasks.create_task(guard.run(host_port(address)[1])))
        try:
            yield address
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error  # raised after the task group, which would wrap the body's error in a group
        finally:
            for watch in watches:
                watch.cancel()
            await healths.notify()  # sends the callers of `Watch` the last state
            await server.stop(STOP_SECONDS)
    if failure is not None:
        raise failure


def _bind(server: GrpcServerApi, listen: str, setting: str, bind: Callable[[Any, str], int] | None) -> str:
    try:
        port = server.add_insecure_port(listen) if bind is None else bind(server, listen)
    except RuntimeError as error:
        why = error.__cause__ or "in use, or no address of this machine"  # grpc.aio does not report why it cannot bind
        raise ConfigurationRefused(f"{setting}: cannot listen on {listen}: {why}") from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def _reflections(names: Sequence[str]) -> list[grpc.GenericRpcHandler]:
    """Return the handlers of gRPC's reflection service, in both of its versions, for the services with these names."""
    add_descriptor()
    versions = (V1ALPHA, V1)
    services = reflection.aio.ReflectionServicer((*names, *versions))

    async def requests(messages: AsyncIterator[bytes]) -> AsyncIterator[Message]:
        async for content in messages:
            yield parse_message(reflection_pb2.ServerReflectionRequest, content)

    async def info(messages: AsyncIterator[bytes], context: Context) -> None:
        async for answer in services.ServerReflectionInfo(requests(messages), context):
            await send_message(context, answer)

    async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
        await answer_call(info(messages, context), context)

    stream: Any = grpc.stream_stream_rpc_method_handler  # Any, because the type stubs do not allow coroutines
    methods = {"ServerReflectionInfo": stream(handle, response_serializer=serialize)}
    return [grpc.method_handlers_generic_handler(version, methods) for version in versions]


class _HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # the library ships no types
    """Serves gRPC's standard health service.

    It reports a service as SERVING while the service's function returns True.
    """

    def __init__(self, services: Mapping[str, Callable[[], bool]]) -> None:
        super().__init__()
        self._services = services
        self._notified: dict[str, int] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the service's methods, which take requests as bytes."""
        stream: Any = grpc.unary_stream_rpc_method_handler  # Any, because the type stubs do not allow coroutines
        methods = {
            "Check": unary_context_handler(self._check),
            "Watch": stream(self._watch, response_serializer=serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    async def _check(self, content: bytes, context: Context) -> Message:
        service = parse_message(health_pb2.HealthCheckRequest, content).service
        if service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service: {service[:100]!r} is not served here")
        answer: Message = health_pb2.HealthCheckResponse(status=self._status(service))
        return answer

    async def _watch(self, content: bytes, context: Context) -> None:
        async def follow() -> None:
            await self.Watch(parse_message(health_pb2.HealthCheckRequest, content), context)

        await answer_call(follow(), context)

    async def watch(self) -> None:
        """Call `notify` every `HEALTH_SECONDS` until cancelled."""
        while True:
            await self.notify()
            await asyncio.sleep(HEALTH_SECONDS)

    async def notify(self) -> None:
        """Send the callers of `Watch` the health of each service whose health has changed since the last call."""
        for service in self._services:
            if (status := self._status(service)) != self._notified.get(service):
                self._notified[service] = status
                await self.set(service, status)

    def _status(self, service: str) -> int:
        states = health_pb2.HealthCheckResponse
        status: int = states.SERVING if self._services[service]() else states.NOT_SERVING
        return status
