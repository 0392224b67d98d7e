"""Worker processes: a worker in its own process, and a router's stream to it that a test controls."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import msgspec

from fleet.core.work import Goodbye, Rejected, RouterHello, RouterMessage, Step, WorkerMessage
from fleet.v1 import worker_pb2 as pb
from fleet.wire.worker import decode_worker_message, encode_router_message
from kvstore.net.frames import FrameConnection, connect
from workers.settings import WorkerSettings

SECONDS = 60  # time limit for a process to start or to end


class WorkerProcess:
    """Runs a worker process. Its standard error goes to the file `log`; if `log` is None, to the standard error of the tests."""

    def __init__(self, folder: Path, settings: WorkerSettings, log: Path | None = None) -> None:
        self.settings = settings
        self.log = log
        self._config = folder / f"{settings.worker_id}.json"
        self._config.write_bytes(msgspec.json.encode(settings))
        self.process: asyncio.subprocess.Process | None = None
        self.address = ""  # address at which it takes streams of routers
        self.control = ""  # address of its control port
        self.endpoints: dict[str, str] = {}  # all announced addresses

    async def start(self) -> None:
        await self.spawn()
        await self.ready()

    async def spawn(self) -> None:
        with self.log.open("ab") if self.log is not None else nullcontext() as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "fleet.cli.main", "serve", "worker", "--config", str(self._config)),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )

    async def ready(self) -> None:
        """Wait until the worker announces its addresses."""
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            while (line := await self.process.stdout.readline()) and not line.startswith(b"{"):
                pass  # vLLM's libraries print other lines too
        assert line, "the worker ended before it was ready"
        self.endpoints = json.loads(line)
        self.address, self.control = self.endpoints.get("stream", ""), self.endpoints.get("grpc", "")

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def ended(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()

    async def close(self) -> None:
        """Kill the process if it still runs."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self.kill()
        await self.ended()


@asynccontextmanager
async def a_worker_process(folder: Path, settings: WorkerSettings) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(folder, settings)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()


class StreamEnded(Exception):
    """Raised when the stream has ended.

    Attributes:
        reason: The reason that the worker gave; empty if it gave none.
    """

    def __init__(self, reason: str):
        super().__init__(reason or "without a reason")
        self.reason = reason


class RouterStream:
    """Plays a router on its stream to one worker."""

    def __init__(self, connection: FrameConnection) -> None:
        self.connection = connection
        self.heard: list[WorkerMessage | None] = []
        self._inbox: asyncio.Queue[WorkerMessage | StreamEnded | None] = asyncio.Queue()
        self._reason = ""

    def received(self, payload: bytes) -> None:
        message = decode_worker_message(pb.WorkerMessage.FromString(payload))
        if isinstance(message, Goodbye):
            self._reason = message.reason
        else:
            self._inbox.put_nowait(message)

    def resumed(self) -> None: ...

    def lost(self, cause: Exception | None) -> None:
        self._inbox.put_nowait(StreamEnded(self._reason))

    async def say(self, message: RouterMessage) -> None:
        self.write(encode_router_message(message))

    def write(self, message: pb.RouterMessage) -> None:
        self.connection.send(message.SerializeToString())

    async def until(self, found):
        """Read messages until `found` returns a result other than None for one of them; return this result."""
        async with asyncio.timeout(SECONDS):
            while True:
                message = await self._inbox.get()
                if isinstance(message, StreamEnded):
                    raise message
                self.heard.append(message)
                if (result := found(message)) is not None:
                    return result

    async def ended(self) -> str:
        """Read until the stream ends, and return the reason of the end."""
        try:
            await self.until(lambda message: None)
        except StreamEnded as end:
            return end.reason
        raise AssertionError

    async def next(self, kind):
        return await self.until(lambda message: message if isinstance(message, kind) else None)

    async def do(self, start):
        """Start an attempt and wait for its end; return its tokens, and the last progress or the rejection."""
        await self.say(start)
        return await self.end_of(start.request_id)

    async def end_of(self, request_id: str):
        def ends(message):
            match message:
                case Rejected(request_id=rejected) if rejected == request_id:
                    return message
                case Step(progress=progress):
                    for one in progress:
                        if one.request_id == request_id and one.finish is not None:
                            return one
            return None

        end = await self.until(ends)
        return self.tokens_of(request_id), end

    def tokens_of(self, request_id: str) -> list[int]:
        return [
            token
            for message in self.heard
            if isinstance(message, Step)
            for one in message.progress
            if one.request_id == request_id
            for token in one.token_ids
        ]


@asynccontextmanager
async def a_router_stream(address: str, router_id: str = "router") -> AsyncIterator[RouterStream]:
    async with a_silent_stream(address) as stream:
        await stream.say(RouterHello(router_id=router_id))
        yield stream


@asynccontextmanager
async def a_silent_stream(address: str) -> AsyncIterator[RouterStream]:
    """Open a stream to a worker on which the router sends nothing, not even its first message."""
    opened: list[RouterStream] = []

    def accept(connection: FrameConnection) -> RouterStream:
        opened.append(RouterStream(connection))
        return opened[0]

    async with asyncio.timeout(SECONDS):
        connection = await connect(address, accept)
    try:
        yield opened[0]
    finally:
        connection.abort()


def a_raw_message(**fields) -> pb.RouterMessage:
    return pb.RouterMessage(**fields)
