"""The node's end of the TCP data plane.

Rules:

1. All on one event loop, and bytes go between sockets and the pool directly. Nothing changes between a look at the
   machine and the system call right after it; after every pause the look is repeated.
2. A connection is a generator that reads like the conversation it leads (`kvstore.transports.tcp_frames`). It makes system
   calls that do not block, and yields what its socket has to be ready for before the next one.
3. After `TURN_BYTES` a connection lets the others go on.
4. Nothing is kept for a slow client but one request: what it does not take stays in the pool.
5. A connection is a newcomer until it has proven the secret; without a secret, until it has named a namespace that is open
   here. Newcomers have a small share of their own (`MAX_UNPROVEN`), in which the oldest gives way to the next
   (`kvstore.net.unproven_connections`), and never a place of the `CONNECTIONS` of those who are proven.
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
"""A connection that is in the middle of something and has not moved a byte for this long is cut."""

CONNECTIONS = 512
"""Proven ones, at a time: each client keeps four at most."""

MAX_UNPROVEN = 64
"""Connections in their handshake, at a time. It takes two round trips, so that these let thousands of clients in each second."""

BACKLOG = 128
TURN_BYTES = 2 << 20
SCRATCH_BYTES = 1 << 18
LOW_WATER_BYTES = 1 << 18  # of a body, received at a time if that much is still to come


class SocketReadiness(Enum):
    """What a connection waits for."""

    TO_READ = auto()
    TO_WRITE = auto()


Result = TypeVar("Result")
Steps = Generator[SocketReadiness, None, Result]


class DataPlaneServer:
    """Serves blocks to other hosts."""

    def __init__(self, machine: BlockMachine, tier: MemoryTier, clock: Clock, key: AuthenticationKey | None = None):
        """Serves from `listen` on.

        Args:
            machine: Says which places may be read and written.
            tier: Where the bytes lie.
            clock: Says which connections have stalled.
            key: That clients have to prove, and the node proves to them; None: anybody is served.
        """
        self.machine = machine
        self.tier = tier
        self.clock = clock
        self.key = key
        self.connections: set[DataPlaneConnection] = set()
        self.refused = 0  # clients that could not prove the key
        self.crowded_out = 0  # newcomers that gave way to the next before they had proven anything
        self._unproven: UnprovenConnections[DataPlaneConnection] = UnprovenConnections(MAX_UNPROVEN)
        self._listener: socket.socket | None = None
        self._accepts = False

    async def listen(self, host: str, port: int) -> str:
        """Start serving; returns the ``host:port`` that was bound.

        Raises:
            StoreNotStarted: The address cannot be had.
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
        """Ends connections whose other end has stopped in the middle of something. To be called now and then."""
        for connection in list(self.connections):
            if connection.busy and now - connection.moved_at >= STALLED:
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
        except OSError as error:  # a client that left meanwhile, mostly
            if error.errno in OUT_OF_FILES:
                self._stop_accepting()  # until the next look around
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
        """Take a newcomer among the proven connections; False where there are as many as may be."""
        if len(self.connections) - len(self._unproven) >= CONNECTIONS:
            return False
        self._unproven.discard(connection)
        return True

    def forget(self, connection: "DataPlaneConnection") -> None:
        """Count a connection no more, since it is over."""
        self.connections.discard(connection)
        self._unproven.discard(connection)


class DataPlaneConnection:
    """One client."""

    def __init__(self, plane: DataPlaneServer, accepted: socket.socket, loop: asyncio.AbstractEventLoop):
        self._plane = plane
        self._socket = accepted
        self._loop = loop
        self._conversation = self._serve()
        self._waits_for: SocketReadiness | None = None
        self._turn = 0  # bytes moved since the others had theirs
        self._scratch: bytearray | None = None
        self._low_water = 1
        self.busy = True  # in the middle of something: not between two requests
        self.moved_at = plane.clock.now()

    def proceed(self) -> None:
        """As far as it goes without waiting. Whatever goes wrong ends this connection, and no other."""
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

    # The conversation

    def _serve(self) -> Steps[None]:
        _, operation, digest, theirs = OPENING.unpack((yield from self._frame(OPENING.size)))
        if operation != DataPlaneOperation.OPEN:
            raise ValueError("that is not a client")
        if not (yield from self._open(digest, theirs)):
            return
        block_bytes = self._plane.machine.namespace(digest).block_bytes
        while True:
            self.busy = False
            _, operation, count = REQUEST.unpack((yield from self._frame(REQUEST.size)))
            if not 1 <= count <= WINDOW:
                raise ValueError("that is not a request")
            entries = yield from self._read(ENTRY.size * count)
            slots = [Slot(*entry) for entry in ENTRY.iter_unpack(entries)]
            if operation == DataPlaneOperation.GET:
                yield from self._get(digest, slots)
            elif operation == DataPlaneOperation.PUT:
                yield from self._put(digest, slots, block_bytes)
            else:
                raise ValueError(f"no operation {operation}")

    def _open(self, digest: bytes, theirs: bytes) -> Steps[bool]:
        """Whether the client may go on."""
        key, mine = self._plane.key, nonce()
        if key is None:
            status = self._namespace_status(digest)
            if status is DataPlaneStatus.DONE and not self._plane.admit(self):
                return False
            yield from self._write(CHALLENGE.pack(MAGIC, status, mine))
            return status is DataPlaneStatus.DONE
        yield from self._write(CHALLENGE.pack(MAGIC, DataPlaneStatus.AUTHENTICATE, mine))
        words = (digest, theirs, mine)
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
        """Straight into the pool, as long as the reservations last; what has no place to go is read and forgotten."""
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
        """Have the socket be ready to read only when that many bytes are there."""
        if count != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    def _judge(self, digest: bytes, block: "_IncomingBlock") -> DataPlaneStatus:
        address = self._plane.machine.writable(digest, block.slot) if block.whole else None
        if address is None:
            return DataPlaneStatus.GONE
        right = crc32c([self._plane.tier.view(address)]) == block.slot.crc32c
        return DataPlaneStatus.DONE if right else DataPlaneStatus.CORRUPT

    # Its steps

    def _frame(self, size: int) -> Steps[bytes]:
        """Ends the connection as soon as it can be seen that something else comes."""
        head = yield from self._read(1)
        self.busy = True
        head += yield from self._read(len(MAGIC) - 1)
        if head != MAGIC:
            raise ValueError("that does not begin with the magic")
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
        """How many bytes `act` has moved, which is called when the socket is ready, and again until it moves some."""
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
    """A block of a PUT, as far as it has arrived."""

    def __init__(self, slot: Slot):
        self.slot = slot
        self.filled = 0  # bytes
        self.whole = True  # all of them went to the block's place
