"""TCP proxy in front of a server; a test can cut all of its connections."""

import asyncio
import contextlib

from tests.support.servers.processes import a_free_port


class SeverableProxy:
    """Forwards connections to a local port; `close` cuts all of them."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.port = a_free_port()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()

    async def _carry(self, reader, writer) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, far_writer}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._copy(reader, far_writer))
            tasks.create_task(self._copy(far_reader, writer))
        self._open -= {writer, far_writer}

    async def _copy(self, reader, writer) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        writer.transport.abort()
