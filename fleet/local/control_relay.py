"""Control relay: listens at one Unix socket for several router processes, and passes each connection on to one of them.

Processes can share a TCP port, but no Unix socket. So each router process has a control socket of its own. The supervisor
listens at the socket whose address workers and commands know. Rules:

1. The relay gives new connections to the processes in turn. It skips a process that does not accept connections, so the
   address works while any process lives. If no process accepts, the connection is closed.
2. Bytes are passed on unchanged, and no faster than the receiver reads them. When one side closes its connection, the
   other side has at most `CLOSE_SECONDS` to read the last bytes. Then the relay also closes the connection to the other
   side.
3. At most `MOST_CONNECTIONS` connections are open at a time. A further connection is closed at once.
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

MOST_CONNECTIONS = 1024  # maximum number of open connections; each worker and each running command needs one
CONNECT_SECONDS = 1.0
CLOSE_SECONDS = 5.0  # time limit for one side to read the last bytes after the other side has closed its connection
CHUNK_BYTES = 64 << 10


@asynccontextmanager
async def open_control_relay(address: str, targets: Sequence[str]) -> AsyncIterator[None]:
    """Relay connections until the end of the `with` block.

    Args:
        address: ``unix:/path`` at which the relay listens.
        targets: Control addresses of the router processes.

    Raises:
        ConfigurationRefused: Another process listens at the address, or its path cannot be used.
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
    """Return a Unix socket that is bound to a path, and to which only this user can connect.

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
    """Relays each connection to one router process, in turn (rule 1). `close` ends all open connections."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self._turns = count()
        self._open: set[asyncio.StreamWriter] = set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until one side closes it."""
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
        """Connect to the next process that accepts a connection; return None if no process accepts one."""
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
    """Relay bytes in both directions until one of the two connections ends."""
    async with asyncio.TaskGroup() as tasks:
        passing = [
            tasks.create_task(_passed(reader, other_writer)),
            tasks.create_task(_passed(other_reader, writer)),
        ]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for each in passing:
            each.cancel()


async def _closed(*writers: asyncio.StreamWriter) -> None:
    """Close connections, and wait until their last bytes have left, but at most `CLOSE_SECONDS`."""
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
