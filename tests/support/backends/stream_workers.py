"""Stream workers: fake workers that a test controls over real streams, and a `WorkerStreams` that dials them."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from fleet.backends.workers.streams import WorkerStreams
from fleet.core.ids import WorkerId
from fleet.core.work import RouterHello, RouterMessage, WorkerDescription, WorkerMessage
from fleet.membership.messages import MemberJoined, MemberLeft, MembershipChange
from fleet.router.messages import WorkerEvent
from fleet.router.settings.router import RouterSettings
from fleet.v1 import worker_pb2 as pb
from fleet.wire.worker import decode_router_message, encode_worker_message
from kvstore.net.frames import FrameConnection, open_server


class StreamWorker:
    """Plays a worker process towards a router."""

    def __init__(self, description: WorkerDescription, folder: Path):
        self.description = description
        self.address = f"unix:{folder}/{description.worker_id}-{description.incarnation}"
        self.hellos: list[str] = []
        self.silent = False  # True: the worker sends no description
        self.connection: FrameConnection  # the latest connection that has sent a hello
        self._stack = AsyncExitStack()
        self._inbox: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self._connected = asyncio.Event()

    async def start(self) -> None:
        await self._stack.enter_async_context(open_server("listen", self.address, self._accept))

    def _accept(self, connection: FrameConnection) -> "_StreamWorkerConnection":
        return _StreamWorkerConnection(self, connection)

    def received(self, payload: bytes, connection: FrameConnection) -> None:
        message = decode_router_message(pb.RouterMessage.FromString(payload))
        if isinstance(message, RouterHello):
            self.hellos.append(message.router_id)
            self.connection = connection
            if not self.silent:
                connection.send(encode_worker_message(self.description).SerializeToString())
            self._connected.set()
        else:
            assert message is not None
            self._inbox.put_nowait(message)

    async def connected(self) -> None:
        async with asyncio.timeout(60):
            await self._connected.wait()

    async def heard(self) -> RouterMessage:
        async with asyncio.timeout(60):
            return await self._inbox.get()

    async def say(self, message: WorkerMessage | pb.WorkerMessage) -> None:
        await self.connected()
        wire = message if isinstance(message, pb.WorkerMessage) else encode_worker_message(message)
        self.connection.send(wire.SerializeToString())

    async def leave(self) -> None:
        self._connected.clear()
        await self._stack.aclose()


class _StreamWorkerConnection:
    def __init__(self, peer: StreamWorker, connection: FrameConnection):
        self._peer = peer
        self._connection = connection

    def received(self, payload: bytes) -> None:
        self._peer.received(payload, self._connection)

    def resumed(self) -> None: ...

    def lost(self, cause: Exception | None) -> None: ...


class EventInbox:
    """Queues the events that a router receives."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()

    def __call__(self, event: WorkerEvent) -> None:
        self._events.put_nowait(event)

    def is_empty(self) -> bool:
        return self._events.empty()

    async def take(self) -> WorkerEvent:
        async with asyncio.timeout(60):
            return await self._events.get()


class StreamSetup:
    def __init__(
        self,
        folder: Path,
        stack: AsyncExitStack,
        addresses: tuple[str, ...] = (),
        accepts: Callable[[WorkerDescription], bool] = lambda _: True,
        **settings: Any,
    ):
        self._folder = folder
        self._stack = stack
        self.heard = EventInbox()
        self.changes: asyncio.Queue[MembershipChange] = asyncio.Queue()
        self.workers = WorkerStreams(
            RouterSettings(router_id="router-7", max_reconnect_seconds=0.1, **settings),
            self._membership(),
            addresses,
            accepts=accepts,
        )

    async def take(self) -> WorkerEvent:
        return await self.heard.take()

    async def _membership(self) -> AsyncIterator[MembershipChange]:
        while True:
            yield await self.changes.get()

    async def peer(self, description: WorkerDescription) -> StreamWorker:
        """Start a worker that listens, but that the router does not know; `announce` makes it known."""
        peer = StreamWorker(description, self._folder)
        await peer.start()
        self._stack.push_async_callback(peer.leave)
        return peer

    async def join(self, description: WorkerDescription) -> StreamWorker:
        peer = await self.peer(description)
        self.announce(peer)
        return peer

    def announce(self, peer: StreamWorker) -> None:
        self.changes.put_nowait(
            MemberJoined(
                worker_id=peer.description.worker_id,
                incarnation=peer.description.incarnation,
                address=peer.address,
            )
        )

    def withdraw(self, worker_id: str) -> None:
        self.changes.put_nowait(MemberLeft(worker_id=WorkerId(worker_id)))


@asynccontextmanager
async def a_stream_setup(**settings: Any) -> AsyncIterator[StreamSetup]:
    folder = Path(tempfile.mkdtemp(prefix="fleet-", dir="/tmp"))
    try:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            world = StreamSetup(folder, stack, **settings)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = tasks.create_task(world.workers.run(world.heard))
            stack.callback(running.cancel)
            yield world
    finally:
        shutil.rmtree(folder)
