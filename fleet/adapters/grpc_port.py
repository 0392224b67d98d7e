"""A public gRPC port, from listening to the last message: health and reflection for whatever it serves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleet.errors import ConfigurationRefused

HEALTH_SECONDS = 0.25  # how often the health service looks whether a worker serves
STOP_SECONDS = 2.0  # for the last messages of calls that end


@asynccontextmanager
async def open_port(
    server: grpc.aio.Server, listen: str, services: Sequence[str], serving: Callable[[], bool]
) -> AsyncIterator[str]:
    """Serve until the context ends; then running calls are cancelled. Yields the address, with the port that was taken.

    Args:
        server: With its services, and not started.
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``.
        services: Their full names, for health and reflection.
        serving: Whether they can serve now; asked some times a second.

    Raises:
        ConfigurationRefused: Nobody can listen there; the message says why.
    """
    healths = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bind(server, listen)
    await server.start()
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch(healths, ("", *services), serving))
        try:
            yield address
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error  # the body's own, which the group would wrap
        finally:
            watch.cancel()
            await server.stop(STOP_SECONDS)
    if failure is not None:
        raise failure


def _bind(server: grpc.aio.Server, listen: str) -> str:
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigurationRefused(f"cannot listen on {listen}: in use, or no address of this machine") from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


async def _watch(healths: health.aio.HealthServicer, services: Sequence[str], serving: Callable[[], bool]) -> None:
    """Say SERVING while `serving` is true, for ever."""
    told: bool | None = None
    while True:
        if (now := serving()) is not told:
            told = now
            status = health_pb2.HealthCheckResponse
            for service in services:
                await healths.set(service, status.SERVING if now else status.NOT_SERVING)
        await asyncio.sleep(HEALTH_SECONDS)
