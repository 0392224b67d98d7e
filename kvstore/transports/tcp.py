"""TCP transport: the client's end of the TCP data plane, with at most four connections.

A read blocks in the kernel, without Python's interpreter lock (GIL), until all requested bytes have arrived or the
kernel's timer ends the wait. One system call therefore moves megabytes. If the client polled before each read, one call
would only move the bytes of one socket buffer.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvstore.buffers import Block, BufferRun, ByteArray, MutableBlock, crc32c, pieces, size_of
from kvstore.circuit_breaker import CircuitBreaker
from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import NamespaceUnknown, StoreUnreachable
from kvstore.messages import AnySlots, BlockOutcome, FetchResult, Slot
from kvstore.net.addresses import host_port
from kvstore.net.unix_sockets import TIMEVAL
from kvstore.security.authentication import AuthenticationKey, ProofSide, nonce
from kvstore.transports.put_summing import put_with_checksums
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

CONNECTIONS = 4
"""Maximum number of connections of one client. At most this number of threads move bytes at the same time; other
threads wait."""

CHUNK_BYTES = 4 << 20  # bytes received at a time; the checksum is computed while they are in the processor's cache

OUTCOMES = {
    DataPlaneStatus.DONE: BlockOutcome.MOVED,
    DataPlaneStatus.GONE: BlockOutcome.GONE,
    DataPlaneStatus.CORRUPT: BlockOutcome.CORRUPT,
}

Each = TypeVar("Each")


class TcpTransport:
    """Moves blocks between a client and a node on another host over TCP.

    If a connection breaks, the next call opens a new one, unless the circuit breaker forbids it.
    """

    def __init__(
        self,
        address: str,
        digest: bytes,
        block_bytes: int,
        clock: Clock,
        deadline: Nanos,
        key: AuthenticationKey | None = None,
    ):
        """Connect, and bind to the namespace.

        Args:
            address: ``host:port``.
            digest: The namespace's digest.
            block_bytes: The namespace's block size.
            clock: The clock of deadlines.
            deadline: Time limit of the connection attempt.
            key: The key by which client and node prove to each other that they know the secret (`Purpose.DATA`). None:
                the client sends no proof, and cannot use a node that demands one.

        Raises:
            StoreUnreachable: No store node answers at the address in time, or client and node do not have the same key.
            NamespaceUnknown: The node does not know the namespace.
        """
        self._host, self._port = host_port(address)
        self._digest = digest
        self._block_bytes = block_bytes
        self._clock = clock
        self._key = key
        self._breaker = CircuitBreaker()
        self._room = threading.Semaphore(CONNECTIONS)
        self._guard = threading.Lock()  # guards `_breaker`, `_closed`, `busy` and `_idle`
        self._closed = False
        self.busy: set[socket.socket] = set()
        self._idle = [self._open(deadline)]

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        return self._exchange(DataPlaneOperation.GET, slots, [self._pieces(block) for block in into], deadline)

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:
        return self._exchange(DataPlaneOperation.PUT, slots, [self._pieces(block) for block in blocks], deadline)

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        return put_with_checksums(self.put, slots, blocks, deadline)

    def close(self) -> None:
        """Close all connections.

        In running calls of other threads, the blocks that have not been moved yet are GONE.
        """
        with self._guard:
            self._closed = True
            for connection in self.busy:
                with contextlib.suppress(OSError):  # raised if the connection is broken already
                    connection.shutdown(socket.SHUT_RDWR)
            while self._idle:
                self._idle.pop().close()

    def _exchange(
        self, operation: DataPlaneOperation, slots: AnySlots, blocks: Sequence[list[ByteArray]], deadline: Nanos
    ) -> list[BlockOutcome]:
        work = [_BlockTransfer(slot, parts) for slot, parts in zip(slots, blocks, strict=True)]
        left = seconds(deadline - self._clock.now())
        if left > 0 and self._room.acquire(timeout=left):
            try:
                with self._connection(deadline) as connection:
                    if connection is not None:
                        _pipeline(operation, work, _DataPlaneSocket(connection, self._clock, deadline))
            finally:
                self._room.release()
        return [each.outcome for each in work]

    @contextlib.contextmanager
    def _connection(self, deadline: Nanos) -> Iterator[socket.socket | None]:
        """Yield a connection that no other thread uses; yield None if no connection can be opened in time.

        An OSError or ValueError of the context is not passed on: it closes the connection, and counts as a failure for
        the circuit breaker.
        """
        started = self._clock.now()
        connection = self._take(started, deadline)
        if connection is None:
            yield None
            return
        in_step = False
        try:
            yield connection
            in_step = True
        except (OSError, ValueError):
            with self._guard:
                self._breaker.failed(started, self._clock.now())
                # The idle connections lead to the same node, so they are probably broken too and are closed.
                while self._idle:
                    self._idle.pop().close()
        finally:
            with self._guard:
                self.busy.discard(connection)
                if in_step and not self._closed:
                    self._breaker.succeeded()
                    self._idle.append(connection)
                else:  # on this connection, unread replies would be taken for replies to later requests
                    connection.close()

    def _take(self, now: Nanos, deadline: Nanos) -> socket.socket | None:
        with self._guard:
            if self._closed:
                return None
            if self._idle:
                connection = self._idle.pop()
                self.busy.add(connection)
                return connection
            if not self._breaker.allows(now):
                return None
        try:
            connection = self._open(deadline)
        except (StoreUnreachable, NamespaceUnknown):
            # The cause is not handled here: the next call of the control plane finds the cause, and renews the session.
            with self._guard:
                self._breaker.failed(now, self._clock.now())
            return None
        with self._guard:
            self.busy.add(connection)
        return connection

    def _open(self, deadline: Nanos) -> socket.socket:
        try:
            with contextlib.ExitStack() as undo:
                timeout_seconds = max(seconds(deadline - self._clock.now()), 0.001)
                connection = undo.enter_context(socket.create_connection((self._host, self._port), timeout_seconds))
                connection.settimeout(None)  # Python's timeout is off, because `_limit` sets timers of the kernel
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._shake_hands(_DataPlaneSocket(connection, self._clock, deadline))
                undo.pop_all()
                return connection
        except (OSError, ValueError) as error:
            raise StoreUnreachable(f"no data plane at {self._host}:{self._port}: {error}") from error

    def _shake_hands(self, channel: "_DataPlaneSocket") -> None:
        client_nonce = nonce()
        channel.send([OPENING.pack(MAGIC, DataPlaneOperation.OPEN, self._digest, client_nonce)])
        magic, status, node_nonce = CHALLENGE.unpack(channel.read(CHALLENGE.size))
        if magic != MAGIC:
            raise ValueError("the answer is not from a store node")
        if status == DataPlaneStatus.AUTHENTICATE:
            if self._key is None:
                raise StoreUnreachable(
                    f"{self._host}:{self._port} asks for a proof: give this client the node's secret"
                )
            words = (self._digest, client_nonce, node_nonce)
            channel.send([self._key.proof(ProofSide.CLIENT, *words)])
            magic, status, proof = VERDICT.unpack(channel.read(VERDICT.size))
            if magic != MAGIC or status == DataPlaneStatus.REFUSED:
                raise StoreUnreachable(f"{self._host}:{self._port} has another secret than this client")
            if not self._key.proves(proof, ProofSide.NODE, *words):
                raise StoreUnreachable(f"{self._host}:{self._port} is not the node: it does not prove the secret")
        elif self._key is not None:
            raise StoreUnreachable(f"{self._host}:{self._port} has no secret: give the node this client's secret")
        if status == DataPlaneStatus.UNKNOWN:
            raise NamespaceUnknown(self._digest)
        if status != DataPlaneStatus.DONE:
            raise ValueError(f"unexpected status {status}")

    def _pieces(self, block: Block) -> list[ByteArray]:
        parts = pieces(block)
        assert size_of(parts) == self._block_bytes, (size_of(parts), self._block_bytes)
        return parts


class _BlockTransfer:
    """Holds one block that is being moved, and its outcome so far."""

    def __init__(self, slot: Slot, parts: list[ByteArray]):
        self.slot = slot
        self.parts = parts
        self.outcome = BlockOutcome.GONE


class _DataPlaneSocket:
    """A connection with a deadline.

    An OSError means that the connection is broken, and a ValueError means that the node has sent invalid bytes.
    """

    def __init__(self, connection: socket.socket, clock: Clock, deadline: Nanos):
        self._connection = connection
        self._clock = clock
        self._deadline = deadline

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        run = BufferRun(memoryview(buffer) for buffer in buffers)
        while run.left:
            self._limit(socket.SO_SNDTIMEO)
            run.advance(self._connection.sendmsg(run.front(run.left)))

    def receive(self, buffers: Sequence[memoryview]) -> None:
        run = BufferRun(buffers)
        while run.left:
            self._limit(socket.SO_RCVTIMEO)
            count = self._connection.recvmsg_into(run.front(run.left), 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionError("the node closed the connection")
            run.advance(count)

    def read(self, size: int) -> bytes:
        into = bytearray(size)
        self.receive([memoryview(into)])
        return bytes(into)

    def _limit(self, option: int) -> None:
        left = self._deadline - self._clock.now()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._connection.setsockopt(
            socket.SOL_SOCKET, option, TIMEVAL.pack(left // 1_000_000_000, max(left % 1_000_000_000 // 1000, 1))
        )


def _pipeline(operation: DataPlaneOperation, work: list[_BlockTransfer], channel: _DataPlaneSocket) -> None:
    """Move blocks, and record the outcome of each.

    If the connection breaks, the outcome of the remaining blocks stays GONE.
    """
    waiting: list[_BlockTransfer] = []
    for window in _batches(work, WINDOW):
        _send_request(operation, window, channel)
        if waiting:  # read the reply to the previous request, while the node works on the one that was just sent
            _read_reply(operation, waiting, channel)
        waiting = window
    _read_reply(operation, waiting, channel)


def _send_request(operation: DataPlaneOperation, window: list[_BlockTransfer], channel: _DataPlaneSocket) -> None:
    heads = [ENTRY.pack(each.slot.offset, each.slot.generation, each.slot.crc32c) for each in window]
    bodies = [part.data for each in window for part in each.parts] if operation is DataPlaneOperation.PUT else []
    channel.send([b"".join([REQUEST.pack(MAGIC, operation, len(window)), *heads]), *bodies])


def _read_reply(operation: DataPlaneOperation, window: list[_BlockTransfer], channel: _DataPlaneSocket) -> None:
    reply = channel.read(REPLY.size + len(window))
    if REPLY.unpack_from(reply) != (MAGIC, len(window)):
        raise ValueError("the reply does not match the request")
    statuses = [_status(each) for each in reply[REPLY.size :]]
    if operation is DataPlaneOperation.PUT:
        for each, status in zip(window, statuses, strict=True):
            each.outcome = OUTCOMES[status]
        return
    incoming = [each for each, status in zip(window, statuses, strict=True) if status is DataPlaneStatus.DONE]
    for chunk in _batches(incoming, max(1, CHUNK_BYTES // size_of(window[0].parts))):
        channel.receive([part.data for each in chunk for part in each.parts])
        for each in chunk:
            if crc32c(each.parts) == each.slot.crc32c:
                each.outcome = BlockOutcome.MOVED
    after = [_status(each) for each in channel.read(len(window))]
    for each, *held in zip(window, statuses, after, strict=True):
        if each.outcome is not BlockOutcome.MOVED and held == [DataPlaneStatus.DONE, DataPlaneStatus.DONE]:
            each.outcome = BlockOutcome.CORRUPT  # the place still belonged to the block, so the bytes are wrong


def _status(value: int) -> DataPlaneStatus:
    status = DataPlaneStatus(value)
    if status not in OUTCOMES:
        raise ValueError(f"unexpected status {status.name} in a reply")
    return status


def _batches(work: list[Each], size: int) -> Iterator[list[Each]]:
    for start in range(0, len(work), size):
        yield work[start : start + size]
