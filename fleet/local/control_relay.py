"""Control relay: a Unix socket for several router processes, which passes each connection on to one of them.

Processes can share a TCP port but no Unix socket. So each process has a control socket of its own, and their supervisor
listens at the well-known one. Rules:

1. Connections go to the processes in turn. A process that accepts none is skipped, so the address works while any
   process lives.
2. Bytes are passed on unchanged, no faster than the receiver takes them. When one side ends, the connection ends after
   its last bytes have been delivered; the other side has `CLOSE_SECONDS` to take them.
3. At most `MOST_CONNECTIONS` run at a time; a further one is closed at once.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count

from fleet.core.errors import ConfigurationRefused
from fleet.net.control.address import ALTERNATIVES, private_umask, remove_stale_socket
from kvstore.net.addresses import unix_path
from kvstore.net.listeners import stop_listening
from kvstore.net.unix_sockets import BACKLOG, identity, remove

MOST_CONNECTIONS = 1024  # most open connections; a worker and a command need one each
CONNECT_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # Most seconds to deliver the last bytes: a local process that takes none for so long hangs.
CHUNK_BYTES = 64 << 10


@asynccontextmanager
async def open_control_relay(address: str, targets: Sequence[str]) -> AsyncIterator[None]:
    """Listen until the context ends.

    Args:
        address: ``unix:/path`` to listen on.
        targets: Control addresses of the processes.

    Raises:
        ConfigurationRefused: Another process listens there, or the path cannot be used.
    """
    remove_stale_socket(address)
    path = unix_path(address)
    relay = _ControlRelay([unix_path(each) for each in targets])
    listener = _bound(path)
    own = identity(path)
    try:
        server = await asyncio.start_unix_server(relay.take, sock=listener, backlog=BACKLOG)
        try:
            yield
        finally:
            stop_listening(server)
            await asyncio.sleep(0)
            relay.close()
    finally:
        listener.close()
        remove(path, own)


def _bound(path: str) -> socket.socket:
    """Make a socket at that path for this user alone.

    Raises:
        ConfigurationRefused: The path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with private_umask():
            listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigurationRefused(
            f"control_listen: {path} cannot be bound: {error.strerror or error}; {ALTERNATIVES}"
        ) from error
    return listener


class _ControlRelay:
    """Relays each connection to one of the processes, which take turns; `close` ends all open connections."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self._turns = count()
        self._open: set[asyncio.StreamWriter] = set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side ends."""
        if len(self._open) >= 2 * MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            there = await self._connect()
            if there is None:
                return
            other_reader, other_writer = there
            self._open.add(other_writer)
            try:
                await _joined(reader, writer, other_reader, other_writer)
                await _closed(writer, other_writer)
            finally:
                self._open.discard(other_writer)
                other_writer.transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the next process that accepts; return None if none does."""
        first = next(self._turns)
        for number in range(len(self._targets)):
            target = self._targets[(first + number) % len(self._targets)]
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    return await asyncio.open_unix_connection(target)
        return None

    def close(self) -> None:
        """End all connections."""
        for writer in self._open:
            writer.transport.abort()


async def _joined(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Relay bytes in both directions until one of them ends."""
    async with asyncio.TaskGroup() as tasks:
        passing = [
            tasks.create_task(_passed(reader, other_writer)),
            tasks.create_task(_passed(other_reader, writer)),
        ]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for each in passing:
            each.cancel()


async def _closed(*writers: asyncio.StreamWriter) -> None:
    """Close connections after their last bytes have left, or at the deadline."""
    for writer in writers:
        writer.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            for writer in writers:
                with suppress(OSError):
                    await writer.wait_closed()


async def _passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
