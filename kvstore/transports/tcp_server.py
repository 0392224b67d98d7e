"""TCP server: the node's end of the TCP data plane.

Rules:

1. Everything runs on one event loop, and bytes move between sockets and the pool directly. For a PUT, a connection asks
   the pool machine for the addresses of the blocks right before it receives their bytes. It asks again after every wait,
   because a block may have lost its place meanwhile. For a GET, it asks before it sends the bytes, and again after it
   has sent them.
2. A connection is a generator that follows the protocol step by step (`kvstore.transports.tcp_frames`). It makes
   non-blocking system calls, and yields the socket state (readable or writable) that it needs before it can continue.
3. After a connection has moved `TURN_BYTES`, other connections are served first.
4. For a slow client, the node stores only one request; the blocks that the client has not taken stay in the pool.
5. A connection is unproven until it has proven the secret, or if the node has no secret, until it has named an open
   namespace. At most `MAX_UNPROVEN` unproven connections are open. A further one replaces an older one
   (`kvstore.net.unproven_connections`). Unproven connections do not count towards `CONNECTIONS`, the limit of proven
   ones. An unproven connection is closed if it is not proven within `STALLED` after its start, even if it moves bytes
   all the time.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeVar

from kvstore.buffers import BufferRun, crc32c
from kvstore.clock import SECOND, Clock, Nanos
from kvstore.errors import NamespaceUnknown, StoreNotStarted
from kvstore.messages import Slot
from kvstore.net.unix_sockets import OUT_OF_FILES
from kvstore.net.unproven_connections import UnprovenConnections
from kvstore.pool.machine import BlockMachine
from kvstore.ports import MemoryTier
from kvstore.security.authentication import PROOF_BYTES, AuthenticationKey, ProofSide, nonce
from kvstore.transports.tcp_frames import (
    CHALLENGE,
    ENTRY,
    MAGIC,
    OPENING,
    REPLY,
    REQUEST,
    VERDICT,
    WINDOW,
    DataPlaneOperation,
    DataPlaneStatus,
)

STALLED = Nanos(10 * SECOND)
"""A connection is closed if it has moved no byte for this long within its handshake or a request. An unproven
connection is also closed this long after its start."""

CONNECTIONS = 512
"""Maximum number of proven connections at a time; a further one is closed in its handshake. A client keeps at most
four."""

MAX_UNPROVEN = 64
"""Maximum number of unproven connections, which are in their handshake; a further one replaces an older one. A handshake
takes two round trips, so this limit still admits thousands of clients each second."""

BACKLOG = 128
TURN_BYTES = 2 << 20
SCRATCH_BYTES = 1 << 18
# While the blocks of a PUT arrive, a connection waits for at least this number of bytes, or for all that are left.
LOW_WATER_BYTES = 1 << 18


class SocketReadiness(Enum):
    """The socket state that a connection waits for."""

    TO_READ = auto()
    TO_WRITE = auto()


Result = TypeVar("Result")
Steps = Generator[SocketReadiness, None, Result]


class DataPlaneServer:
    """Serves the blocks of the pool to clients on other hosts."""

    def __init__(self, machine: BlockMachine, tier: MemoryTier, clock: Clock, key: AuthenticationKey | None = None):
        """Prepare the server; `listen` starts it.

        Args:
            machine: Decides which places may be read and written.
            tier: The pool with the bytes.
            clock: The clock by which stalled connections are found.
            key: The key by which clients and the node prove to each other that they know the secret. None: every client
                is served.
        """
        self.machine = machine
        self.tier = tier
        self.clock = clock
        self.key = key
        self.connections: set[DataPlaneConnection] = set()
        self.refused = 0  # number of connections that were refused since the start because the client's proof was wrong
        self.crowded_out = 0  # number of unproven connections (rule 5) that were closed for a new one, since the start
        self._unproven: UnprovenConnections[DataPlaneConnection] = UnprovenConnections(MAX_UNPROVEN)
        self._listener: socket.socket | None = None
        self._accepts = False

    async def listen(self, host: str, port: int) -> str:
        """Start serving; return the ``host:port`` that was bound.

        Raises:
            StoreNotStarted: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise StoreNotStarted(f"data_listen: {host}:{port} cannot be bound: {error.strerror or error}") from error
        self._listener.setblocking(False)
        self._accept_again()
        bound = self._listener.getsockname()
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    def cut_stalled(self, now: Nanos) -> None:
        """Close connections that have stalled (`STALLED`) within a request, or were unproven for too long (rule 5).

        Accept connections again if accepting was stopped.

        The node calls this regularly.
        """
        for connection in list(self.connections):
            since = connection.began_at if connection in self._unproven else connection.moved_at
            if connection.busy and now - since >= STALLED:
                connection.cut()
        self._accept_again()

    def close(self) -> None:
        if self._listener is not None:
            self._stop_accepting()
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.cut()

    def _accept_again(self) -> None:
        if self._listener is not None and not self._accepts:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            self._accepts = True

    def _stop_accepting(self) -> None:
        assert self._listener is not None
        if self._accepts:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._accepts = False

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, address = self._listener.accept()
        except OSError as error:  # raised mostly if a client has left before its connection was accepted
            if error.errno in OUT_OF_FILES:
                self._stop_accepting()  # the next call of `cut_stalled` begins to accept again
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = DataPlaneConnection(self, accepted, asyncio.get_running_loop())
        self.connections.add(connection)
        crowded_out = self._unproven.add(connection, address[0])
        if crowded_out is not None:
            self.crowded_out += 1
            crowded_out.cut()
        connection.proceed()

    def admit(self, connection: "DataPlaneConnection") -> bool:
        """Count a connection as proven (rule 5); return False if `CONNECTIONS` connections are proven already."""
        if len(self.connections) - len(self._unproven) >= CONNECTIONS:
            return False
        self._unproven.discard(connection)
        return True

    def forget(self, connection: "DataPlaneConnection") -> None:
        """Remove a closed connection from the sets of connections."""
        self.connections.discard(connection)
        self._unproven.discard(connection)


class DataPlaneConnection:
    """Serves one connection of a client."""

    def __init__(self, plane: DataPlaneServer, accepted: socket.socket, loop: asyncio.AbstractEventLoop):
        self._plane = plane
        self._socket = accepted
        self._loop = loop
        self._conversation = self._serve()
        self._waits_for: SocketReadiness | None = None
        self._turn = 0  # number of bytes moved since the other connections were served last (rule 3)
        self._scratch: bytearray | None = None
        self._low_water = 1
        self.busy = True  # True in the handshake, and from the first byte of a request to the last byte of its reply
        self.began_at = self.moved_at = plane.clock.now()  # `moved_at`: instant of its latest moved byte

    def proceed(self) -> None:
        """Serve the connection until it has to wait for its socket. An error ends only this connection."""
        self._turn = 0
        try:
            ready = next(self._conversation)
        except (StopIteration, OSError, ValueError):
            self.cut()
            return
        if ready is self._waits_for:
            return
        self._wait_for(ready)

    def cut(self) -> None:
        if self not in self._plane.connections:
            return
        self._plane.forget(self)
        self._wait_for(None)
        self._conversation.close()
        self._socket.close()

    def _wait_for(self, ready: SocketReadiness | None) -> None:
        if self._waits_for is SocketReadiness.TO_READ:
            self._loop.remove_reader(self._socket)
        elif self._waits_for is SocketReadiness.TO_WRITE:
            self._loop.remove_writer(self._socket)
        if ready is SocketReadiness.TO_READ:
            self._loop.add_reader(self._socket, self.proceed)
        elif ready is SocketReadiness.TO_WRITE:
            self._loop.add_writer(self._socket, self.proceed)
        self._waits_for = ready

    # The methods below are for the exchanges of the protocol.

    def _serve(self) -> Steps[None]:
        _, operation, digest, client_nonce = OPENING.unpack((yield from self._frame(OPENING.size)))
        if operation != DataPlaneOperation.OPEN:
            raise ValueError("the first frame is not an OPENING")
        if not (yield from self._open(digest, client_nonce)):
            return
        block_bytes = self._plane.machine.namespace(digest).block_bytes
        while True:
            self.busy = False
            _, operation, count = REQUEST.unpack((yield from self._frame(REQUEST.size)))
            if not 1 <= count <= WINDOW:
                raise ValueError(f"a request of {count} blocks")
            entries = yield from self._read(ENTRY.size * count)
            slots = [Slot(*entry) for entry in ENTRY.iter_unpack(entries)]
            if operation == DataPlaneOperation.GET:
                yield from self._get(digest, slots)
            elif operation == DataPlaneOperation.PUT:
                yield from self._put(digest, slots, block_bytes)
            else:
                raise ValueError(f"unknown operation {operation}")

    def _open(self, digest: bytes, client_nonce: bytes) -> Steps[bool]:
        """Perform the handshake; return whether the client may send requests."""
        key, node_nonce = self._plane.key, nonce()
        if key is None:
            status = self._namespace_status(digest)
            if status is DataPlaneStatus.DONE and not self._plane.admit(self):
                return False
            yield from self._write(CHALLENGE.pack(MAGIC, status, node_nonce))
            return status is DataPlaneStatus.DONE
        yield from self._write(CHALLENGE.pack(MAGIC, DataPlaneStatus.AUTHENTICATE, node_nonce))
        words = (digest, client_nonce, node_nonce)
        proof = yield from self._read(PROOF_BYTES)
        if not key.proves(proof, ProofSide.CLIENT, *words):
            self._plane.refused += 1
            yield from self._write(VERDICT.pack(MAGIC, DataPlaneStatus.REFUSED, bytes(PROOF_BYTES)))
            return False
        if not self._plane.admit(self):
            return False
        status = self._namespace_status(digest)
        yield from self._write(VERDICT.pack(MAGIC, status, key.proof(ProofSide.NODE, *words)))
        return status is DataPlaneStatus.DONE

    def _namespace_status(self, digest: bytes) -> DataPlaneStatus:
        try:
            self._plane.machine.namespace(digest)
        except NamespaceUnknown:
            return DataPlaneStatus.UNKNOWN
        return DataPlaneStatus.DONE

    def _get(self, digest: bytes, slots: list[Slot]) -> Steps[None]:
        addresses = [self._plane.machine.readable(digest, slot) for slot in slots]
        statuses = bytes(DataPlaneStatus.GONE if address is None else DataPlaneStatus.DONE for address in addresses)
        bodies = [self._plane.tier.view(address).data for address in addresses if address is not None]
        yield from self._send(BufferRun([memoryview(REPLY.pack(MAGIC, len(slots)) + statuses), *bodies]))
        after = (self._plane.machine.readable(digest, slot) for slot in slots)
        yield from self._write(
            bytes(DataPlaneStatus.GONE if address is None else DataPlaneStatus.DONE for address in after)
        )

    def _put(self, digest: bytes, slots: list[Slot], block_bytes: int) -> Steps[None]:
        incoming = deque(_IncomingBlock(slot) for slot in slots)
        statuses = bytearray()
        left = len(incoming) * block_bytes
        while incoming:
            self._wake_at(min(left, LOW_WATER_BYTES))
            count = yield from self._attempt(
                SocketReadiness.TO_READ, lambda: self._receive(digest, incoming, block_bytes)
            )
            left -= count
            while count:
                first = incoming[0]
                taken = min(count, block_bytes - first.filled)
                first.filled += taken
                count -= taken
                if first.filled == block_bytes:
                    statuses.append(self._judge(digest, incoming.popleft()))
        self._wake_at(1)
        yield from self._write(REPLY.pack(MAGIC, len(slots)) + statuses)

    def _receive(self, digest: bytes, incoming: "deque[_IncomingBlock]", block_bytes: int) -> int:
        """Receive bytes directly into the pool; bytes of a block without a reservation are read and dropped."""
        views: list[memoryview] = []
        room = TURN_BYTES
        for block in incoming:
            address = self._plane.machine.writable(digest, block.slot) if block.whole else None
            block.whole = address is not None
            if address is None:
                self._scratch = self._scratch or bytearray(min(block_bytes, SCRATCH_BYTES))
                views.append(memoryview(self._scratch)[: block_bytes - block.filled])
                break
            views.append(self._plane.tier.view(address).data[block.filled :][:room])
            room -= len(views[-1])
            if not room:
                break
        return self._socket.recvmsg_into(views)[0]

    def _wake_at(self, count: int) -> None:
        """Let the event loop report the socket as readable only when `count` bytes have arrived."""
        if count != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    def _judge(self, digest: bytes, block: "_IncomingBlock") -> DataPlaneStatus:
        address = self._plane.machine.writable(digest, block.slot) if block.whole else None
        if address is None:
            return DataPlaneStatus.GONE
        right = crc32c([self._plane.tier.view(address)]) == block.slot.crc32c
        return DataPlaneStatus.DONE if right else DataPlaneStatus.CORRUPT

    # The methods below read and write bytes, and wait while the socket is not ready.

    def _frame(self, size: int) -> Steps[bytes]:
        """Read a frame; raise `ValueError` as soon as its magic is wrong."""
        head = yield from self._read(1)
        self.busy = True
        head += yield from self._read(len(MAGIC) - 1)
        if head != MAGIC:
            raise ValueError("the frame does not begin with the magic")
        return head + (yield from self._read(size - len(MAGIC)))

    def _read(self, size: int) -> Steps[bytes]:
        into = bytearray(size)
        run = BufferRun([memoryview(into)])
        while run.left:
            run.advance(
                (yield from self._attempt(SocketReadiness.TO_READ, lambda: self._socket.recv_into(run.front(size)[0])))
            )
        return bytes(into)

    def _write(self, data: bytes) -> Steps[None]:
        yield from self._send(BufferRun([memoryview(data)]))

    def _send(self, run: BufferRun) -> Steps[None]:
        while run.left:
            run.advance(
                (
                    yield from self._attempt(
                        SocketReadiness.TO_WRITE, lambda: self._socket.sendmsg(run.front(TURN_BYTES))
                    )
                )
            )

    def _attempt(self, ready: SocketReadiness, act: Callable[[], int]) -> Steps[int]:
        """Call `act` each time the socket is ready until it moves bytes; return their number."""
        if self._turn >= TURN_BYTES:
            yield ready
        while True:
            try:
                count = act()
            except BlockingIOError:
                yield ready
                continue
            if not count:
                raise ConnectionError("the client has left")
            self._turn += count
            self.moved_at = self._plane.clock.now()
            return count


class _IncomingBlock:
    """Holds the slot and the progress of one block of a PUT that is being received."""

    def __init__(self, slot: Slot):
        self.slot = slot
        self.filled = 0  # number of bytes received so far
        self.whole = True  # True if all bytes so far were written to the block's place
