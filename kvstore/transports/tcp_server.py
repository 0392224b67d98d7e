"""The node's end of the TCP data plane.

All on one event loop: nothing changes between a look at the machine and the bytes moved right after it.
"""

import asyncio
import socket
from typing import cast

from kvstore.buffers import crc32c
from kvstore.clock import SECOND, Clock, Nanos
from kvstore.errors import NamespaceUnknown, StoreNotStarted
from kvstore.machine import BlockMachine
from kvstore.messages import Address, Slot
from kvstore.ports import MemoryTier
from kvstore.transports.frames import MAGIC, OPENING, REPLY, REQUEST, Operation, Status

STALLED = Nanos(10 * SECOND)
"""A connection that is in the middle of something and has not moved a byte for this long is cut."""

CONNECTIONS = 512
WRITE_BUFFER_BYTES = 1 << 20  # that may wait for a slow reader; further requests are not read before they are gone


class DataPlane:
    """Serves blocks to other hosts."""

    def __init__(self, machine: BlockMachine, tier: MemoryTier, clock: Clock):
        self.machine = machine
        self.tier = tier
        self.clock = clock
        self.connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> str:
        """Start serving; returns the ``host:port`` that was bound.

        Raises:
            StoreNotStarted: The address cannot be had.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Connection(self), host, port)
        except OSError as error:
            raise StoreNotStarted(f"data_listen: {host}:{port} cannot be bound: {error.strerror or error}") from error
        bound = self._server.sockets[0].getsockname()
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    def cut_stalled(self, now: Nanos) -> None:
        """Ends connections whose other end has stopped in the middle of something."""
        for connection in list(self.connections):
            if connection.busy and now - connection.moved_at >= STALLED:
                connection.cut()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.cut()


class Connection(asyncio.BufferedProtocol):
    """One client. Bytes of a PUT are received straight into the pool, as long as the reservation lasts."""

    def __init__(self, plane: DataPlane):
        self._plane = plane
        self._digest: bytes | None = None
        self._block_bytes = 0
        self._head = memoryview(bytearray(REQUEST.size))
        self._filled = 0  # of the head, or of the body
        self._put: Slot | None = None  # whose body is being received
        self._scratch: memoryview | None = None  # takes a body that has no place to go
        self._paused = False
        self.moved_at = plane.clock.now()

    @property
    def busy(self) -> bool:
        return self._filled > 0 or self._put is not None or self._paused or self._digest is None

    def cut(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._plane.connections.add(self)
        if len(self._plane.connections) > CONNECTIONS:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it ended does not matter
        self._plane.connections.discard(self)

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self.moved_at = self._plane.clock.now()
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the frame says how much comes
        if self._put is None:
            return self._head[self._filled :]
        address = self._writable()
        if address is not None and self._scratch is None:
            return self._plane.tier.view(address).data[self._filled :]
        if self._scratch is None:  # the reservation ended under the writer, or never was
            self._scratch = memoryview(bytearray(min(self._block_bytes, 1 << 16)))
        return self._scratch[: self._block_bytes - self._filled]

    def buffer_updated(self, nbytes: int) -> None:
        self.moved_at = self._plane.clock.now()
        self._filled += nbytes
        if self._put is not None:
            if self._filled == self._block_bytes:
                self._finish_put(self._put)
        elif self._filled == REQUEST.size:
            self._filled = 0
            self._begin(bytes(self._head))

    def _begin(self, head: bytes) -> None:
        magic, operation, offset, generation, length, checksum = REQUEST.unpack(head)
        opening = operation == Operation.OPEN
        if magic != MAGIC or opening != (self._digest is None) or (not opening and length != self._block_bytes):
            self.cut()
        elif opening:
            self._open(OPENING.unpack(head)[2])
        elif operation == Operation.GET:
            self._get(Slot(offset, generation))
        elif operation == Operation.PUT:
            self._put = Slot(offset, generation, checksum)
            self._scratch = None
        else:
            self.cut()

    def _open(self, digest: bytes) -> None:
        try:
            self._block_bytes = self._plane.machine.namespace(digest).block_bytes
        except NamespaceUnknown:
            self._reply(Status.UNKNOWN)
            self._transport.close()
            return
        self._digest = digest
        self._reply(Status.DONE)

    def _get(self, slot: Slot) -> None:
        assert self._digest is not None
        address = self._plane.machine.readable(self._digest, slot)
        if address is None:
            self._reply(Status.GONE)
            return
        held = self._plane.machine.find(self._digest, address.key.name)
        assert held is not None
        self._transport.write(REPLY.pack(MAGIC, Status.DONE, address.length, held.crc32c))
        self._transport.write(self._plane.tier.view(address).data)

    def _finish_put(self, slot: Slot) -> None:
        address = self._writable()
        whole = self._scratch is None
        self._put, self._scratch, self._filled = None, None, 0
        if address is None or not whole:
            self._reply(Status.GONE)
        elif crc32c([self._plane.tier.view(address)]) != slot.crc32c:
            self._reply(Status.CORRUPT)
        else:
            self._reply(Status.DONE)

    def _writable(self) -> Address | None:
        assert self._digest is not None
        assert self._put is not None
        return self._plane.machine.writable(self._digest, self._put)

    def _reply(self, status: Status) -> None:
        self._transport.write(REPLY.pack(MAGIC, status, 0, 0))
