"""Control port of a worker for administrators: gRPC with the service `fleet.v1.Worker`, health and reflection.

Routers do not connect to this port.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import grpc
from google.protobuf.message import Message

from fleet.core.clock import MILLISECOND, Nanos
from fleet.net.control.access import ControlAccess
from fleet.net.grpc.calls import parse_message, unary_handler
from fleet.net.grpc.options import SERVER_OPTIONS
from fleet.net.grpc.port import LIVENESS, open_port
from fleet.v1 import worker_pb2 as pb
from fleet.wire.worker import encode_description
from kvstore.net.addresses import unix_path
from kvstore.net.socket_guard import SocketGuard
from workers.machine import LifePhase
from workers.registration import WorkerMembership
from workers.server import WorkerServer

SERVICE = "fleet.v1.Worker"


@asynccontextmanager
async def serve_control(
    worker: WorkerServer, listen: str, presence: WorkerMembership, access: ControlAccess
) -> AsyncIterator[str]:
    """Serve the control port while the context is open; yield the address with the chosen port.

    For readiness probes, the overall health is SERVING while the worker serves and is registered in all its registries.
    For liveness probes, the health service `liveness` is SERVING while the process answers. It is not SERVING if the
    engine hangs and the process has not ended within `workers.server.END_SECONDS`.

    Args:
        worker: The worker, which the caller runs.
        listen: Address as host:port (port 0: any free port) or unix:path.
        presence: The worker's registrations. When a drain is requested at this port, they are ended at once.
        access: The proof that callers have to show; health and reflection need none.

    Raises:
        ConfigurationRefused: The address is in use or does not belong to this machine; nothing was started.
    """

    async def describe(content: bytes) -> Message:
        parse_message(pb.DescribeRequest, content)
        return encode_description(worker.description)

    async def drain(content: bytes) -> Message:
        asked = parse_message(pb.DrainRequest, content)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(presence.leave())
            draining = tasks.create_task(worker.drain(Nanos(asked.deadline_ms * MILLISECOND)))
        cancelled = draining.result()
        return pb.DrainResponse(cancelled=cancelled)

    guard = None if unix_path(listen) else SocketGuard()
    server = access.server(guard)
    methods = {"Describe": unary_handler(describe), "Drain": unary_handler(drain)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    with ExitStack() as held:
        async with open_port(
            server,
            listen,
            (SERVICE,),
            lambda: worker.phase is LifePhase.SERVING and presence.ready,
            setting="control_listen",
            alive={LIVENESS: lambda: worker.live},
            bind=access.binder(held),
            guard=guard,
        ) as address:
            yield address


@asynccontextmanager
async def serve_rank(listen: str, serving: Callable[[], bool]) -> AsyncIterator[str]:
    """Serve only the health service, in the process of a rank that is not the first of its engine; yield the address.

    The overall health is SERVING while `serving` returns True.

    Raises:
        ConfigurationRefused: The address is in use or does not belong to this machine.
    """
    alive = {LIVENESS: lambda: True}
    guard = SocketGuard()
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
    async with open_port(server, listen, (), serving, setting="control_listen", alive=alive, guard=guard) as address:
        yield address
