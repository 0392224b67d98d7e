"""Relay: a Unix socket in front of another one; a test can let it hold back, delay or damage the bytes that it forwards.

A cut holds bytes back and closes no connection, like a network that drops packets. Frames of `kvstore.net.frames` can be damaged one by
one. Not every kernel has `tc netem`; the relay works on every machine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto
from pathlib import Path

from google.protobuf.message import DecodeError

from fleet.v1 import worker_pb2 as pb
from kvstore.net.frames import HEAD, FrameDecoder
from tests.support.waiting import pace

CHUNK = 1 << 16


class Spoiling(Enum):
    NOTHING = auto()
    CORRUPT = auto()  # one frame becomes unreadable
    DUPLICATE = auto()  # each frame with KV events is sent twice
    REORDER = auto()  # each frame with KV events is sent after the next frame


class Relay:
    """Forwards connections from `path` to `target`; a fault affects all of them."""

    def __init__(self, path: Path, target: str, *, frames: bool):
        """Prepare a relay.

        Args:
            path: Path of the Unix socket on which the relay listens.
            target: Path of the Unix socket to which the relay connects.
            frames: True if the target sends frames of a worker, which `spoiling` can change.
        """
        self.address = f"unix:{path}"
        self.delay_seconds = 0.0
        self.spoiling = Spoiling.NOTHING
        self.spoiled = 0
        self._path, self._target, self._frames = path, target.removeprefix("unix:"), frames
        self._flows = asyncio.Event()
        self._flows.set()

    def cut(self) -> None:
        self._flows.clear()

    def heal(self) -> None:
        """End all faults."""
        self.delay_seconds = 0.0
        self.spoiling = Spoiling.NOTHING
        self._flows.set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._connected, self._path)
        try:
            yield
        finally:
            server.close()
            self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.ensure_future(self._pump(reader, there_writer, frames=False)),
            asyncio.ensure_future(self._pump(there_reader, writer, frames=self._frames)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            await self._flows.wait()  # during a cut, the end of a connection is held back, too
        finally:
            for pump in pumps:
                pump.cancel()
            for each in (writer, there_writer):
                each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, frames: bool) -> None:
        decoder = FrameDecoder()
        kept: list[bytes] = []
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK):
                await self._flows.wait()
                if self.delay_seconds:
                    await pace(self.delay_seconds, "the link delays every piece")
                if frames:
                    chunk = b"".join(self._spoil(payload, kept) for payload in decoder.cut(chunk))
                writer.write(chunk)
                await writer.drain()

    def _spoil(self, payload: bytes, kept: list[bytes]) -> bytes:
        """Return the bytes to forward instead of a frame; `kept` holds a frame that is sent after the next one."""
        frame = HEAD.pack(len(payload)) + payload
        if self.spoiling is Spoiling.CORRUPT:
            self.spoiling = Spoiling.NOTHING
            self.spoiled += 1
            return HEAD.pack(len(payload)) + b"\xff" * len(payload)
        if kept:
            frame += kept.pop()
        if self.spoiling is Spoiling.NOTHING or not _is_kv_events(payload):
            return frame
        self.spoiled += 1
        if self.spoiling is Spoiling.DUPLICATE:
            return frame + frame
        kept.append(frame)
        return b""


def _is_kv_events(payload: bytes) -> bool:
    try:
        return pb.WorkerMessage.FromString(payload).WhichOneof("message") == "kv_events"
    except DecodeError:
        return False
