"""Worker services over gRPC with nothing behind them but the test, and a `GrpcWorkers` that dials them."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from fleet.adapters.grpc_workers import GrpcWorkers
from fleet.control.messages import MemberJoined, MemberLeft, MembershipChange
from fleet.ids import WorkerId
from fleet.router.settings import RouterSettings
from fleet.v1 import worker_pb2 as pb
from fleet.v1 import worker_pb2_grpc as pb_grpc
from fleet.wire.work import decode_router_message, encode_worker_message
from fleet.work import Description, Hello, RouterMessage, WorkerMessage


class GrpcPeer(pb_grpc.WorkerServicer):
    """A worker process as the router sees it, with nothing behind the service but the test."""

    def __init__(self, description: Description, folder: Path):
        self.description = description
        self.address = f"unix:{folder}/{description.worker_id}-{description.incarnation}"
        self.hellos: list[str] = []
        self._server: Any = None
        self._inbox: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self._context: Any = None
        self._connected = asyncio.Event()

    async def start(self) -> None:
        self._server = grpc.aio.server()
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def Serve(self, request_iterator, context) -> None:  # noqa: N802 - generated name
        async for request in request_iterator:
            message = decode_router_message(request)
            if isinstance(message, Hello):
                self.hellos.append(message.router_id)
                await context.write(encode_worker_message(self.description))
                self._context = context
                self._connected.set()
            else:
                self._inbox.put_nowait(message)

    async def connected(self) -> None:
        async with asyncio.timeout(10):
            await self._connected.wait()

    async def heard(self) -> RouterMessage:
        async with asyncio.timeout(10):
            return await self._inbox.get()

    async def say(self, message: WorkerMessage | pb.WorkerMessage) -> None:
        await self.connected()
        await self._context.write(message if isinstance(message, pb.WorkerMessage) else encode_worker_message(message))

    async def leave(self) -> None:
        self._connected.clear()
        if self._server is not None:
            await self._server.stop(grace=0)
            self._server = None


class GrpcWorld:
    def __init__(self, folder: Path, stack: AsyncExitStack, addresses: tuple[str, ...] = (), **settings: Any):
        self._folder = folder
        self._stack = stack
        self.changes: asyncio.Queue[MembershipChange] = asyncio.Queue()
        self.workers = GrpcWorkers(
            RouterSettings(router_id="router-7", max_reconnect_seconds=0.1, **settings), self._membership(), addresses
        )

    async def _membership(self) -> AsyncIterator[MembershipChange]:
        while True:
            yield await self.changes.get()

    async def peer(self, description: Description) -> GrpcPeer:
        """A worker that listens and has not been announced."""
        peer = GrpcPeer(description, self._folder)
        await peer.start()
        self._stack.push_async_callback(peer.leave)
        return peer

    async def join(self, description: Description) -> GrpcPeer:
        peer = await self.peer(description)
        self.announce(peer)
        return peer

    def announce(self, peer: GrpcPeer) -> None:
        self.changes.put_nowait(
            MemberJoined(
                worker_id=peer.description.worker_id,
                incarnation=peer.description.incarnation,
                address=peer.address,
            )
        )

    def denounce(self, worker_id: str) -> None:
        self.changes.put_nowait(MemberLeft(worker_id=WorkerId(worker_id)))


@asynccontextmanager
async def a_grpc_world(**settings: Any) -> AsyncIterator[GrpcWorld]:
    folder = Path(tempfile.mkdtemp(prefix="fleet-", dir="/tmp"))
    try:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            world = GrpcWorld(folder, stack, **settings)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = tasks.create_task(world.workers.run())
            stack.callback(running.cancel)
            yield world
    finally:
        shutil.rmtree(folder)
