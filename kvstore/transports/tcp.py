"""The client's end of the TCP data plane: one connection, requests pipelined, everything with a deadline."""

import contextlib
import socket
import threading
from collections.abc import Sequence

from kvstore.breaker import Breaker
from kvstore.buffers import Block, ByteArray, MutableBlock, crc32c, pieces, size_of
from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import NamespaceUnknown, StoreUnreachable
from kvstore.messages import Outcome, Slot
from kvstore.transports.frames import MAGIC, OPENING, REPLY, REQUEST, WINDOW, Operation, Status

OUTCOMES = {Status.DONE: Outcome.MOVED, Status.GONE: Outcome.GONE, Status.CORRUPT: Outcome.CORRUPT}


class TcpTransport:
    """See `kvstore.ports.Transport`. Threads take turns. A broken connection is opened again by the next call."""

    def __init__(self, address: str, digest: bytes, block_bytes: int, clock: Clock, deadline: Nanos):
        """Connects and binds to the namespace.

        Args:
            address: ``host:port``.
            digest: Of the namespace.
            block_bytes: Of the namespace.
            clock: For deadlines.
            deadline: Of the connection.

        Raises:
            StoreUnreachable: Nobody answers there in time.
            NamespaceUnknown: The node does not know the namespace.
        """
        host, _, port = address.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._digest = digest
        self._block_bytes = block_bytes
        self._clock = clock
        self._breaker = Breaker()
        self._turn = threading.Lock()
        self._socket: socket.socket | None = self._open(deadline)

    def get(self, slots: Sequence[Slot], into: Sequence[MutableBlock], deadline: Nanos) -> list[Outcome]:
        parts = [self._pieces(block) for block in into]
        return self._exchange(Operation.GET, slots, parts, deadline)

    def put(self, slots: Sequence[Slot], blocks: Sequence[Block], deadline: Nanos) -> list[Outcome]:
        parts = [self._pieces(block) for block in blocks]
        return self._exchange(Operation.PUT, slots, parts, deadline)

    def close(self) -> None:
        with self._turn:
            self._disconnect()

    def _exchange(
        self, operation: Operation, slots: Sequence[Slot], blocks: Sequence[list[ByteArray]], deadline: Nanos
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        left = seconds(deadline - self._clock.now())
        if left > 0 and self._turn.acquire(timeout=left):
            try:
                wire = self._wire(deadline)
                if wire is not None:
                    self._pipeline(operation, list(zip(slots, blocks, strict=True)), outcomes, wire)
            finally:
                self._turn.release()
        outcomes.extend([Outcome.GONE] * (len(slots) - len(outcomes)))
        return outcomes

    def _pipeline(
        self, operation: Operation, work: list[tuple[Slot, list[ByteArray]]], outcomes: list[Outcome], wire: "_Wire"
    ) -> None:
        """Appends an outcome for each block that was dealt with before the connection broke, if it did."""
        started = self._clock.now()
        in_step = False
        try:
            for start in range(0, len(work), WINDOW):
                window = work[start : start + WINDOW]
                for slot, parts in window:
                    head = REQUEST.pack(MAGIC, operation, slot.offset, slot.generation, self._block_bytes, slot.crc32c)
                    wire.send([head, *(part.data for part in parts)] if operation is Operation.PUT else [head])
                for slot, parts in window:
                    outcomes.append(self._outcome(operation, slot, parts, wire))
            in_step = True
        except (OSError, ValueError):
            self._breaker.failed(started, self._clock.now())
        finally:
            if not in_step:  # replies that nobody reads would be taken for those of the next requests
                self._disconnect()

    def _outcome(self, operation: Operation, slot: Slot, parts: list[ByteArray], wire: "_Wire") -> Outcome:
        status, length, sent_crc = wire.reply()
        outcome = OUTCOMES[status]
        if operation is Operation.PUT or outcome is not Outcome.MOVED:
            if length:
                raise ValueError("bytes after a reply that has none")
            return outcome
        if length != self._block_bytes:
            raise ValueError(f"a block of {length} bytes")
        for part in parts:
            wire.receive(part.data)
        if sent_crc != slot.crc32c:
            return Outcome.GONE
        return Outcome.MOVED if crc32c(parts) == slot.crc32c else Outcome.CORRUPT

    def _wire(self, deadline: Nanos) -> "_Wire | None":
        if self._socket is not None:
            return _Wire(self._socket, self._clock, deadline)
        started = self._clock.now()
        if not self._breaker.allows(started):
            return None
        try:
            self._socket = self._open(deadline)
        except (StoreUnreachable, NamespaceUnknown):  # the control plane will find out which, and mend it
            self._breaker.failed(started, self._clock.now())
            return None
        self._breaker.succeeded()
        return _Wire(self._socket, self._clock, deadline)

    def _open(self, deadline: Nanos) -> socket.socket:
        try:
            with contextlib.ExitStack() as undo:
                timeout_seconds = max(seconds(deadline - self._clock.now()), 0.001)
                connection = undo.enter_context(socket.create_connection((self._host, self._port), timeout_seconds))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire = _Wire(connection, self._clock, deadline)
                wire.send([OPENING.pack(MAGIC, Operation.OPEN, self._digest)])
                status, _, _ = wire.reply()
                if status is Status.UNKNOWN:
                    raise NamespaceUnknown(self._digest)
                undo.pop_all()
                return connection
        except (OSError, ValueError) as error:
            raise StoreUnreachable(f"no data plane at {self._host}:{self._port}: {error}") from error

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _pieces(self, block: Block) -> list[ByteArray]:
        parts = pieces(block)
        assert size_of(parts) == self._block_bytes, (size_of(parts), self._block_bytes)
        return parts


class _Wire:
    """A connection, for as long as a deadline allows. Raises OSError when it breaks, ValueError when it talks nonsense."""

    def __init__(self, connection: socket.socket, clock: Clock, deadline: Nanos):
        self._connection = connection
        self._clock = clock
        self._deadline = deadline

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self._connection.settimeout(self._left())
            self._connection.sendall(part)

    def reply(self) -> tuple[Status, int, int]:
        head = bytearray(REPLY.size)
        self.receive(memoryview(head))
        magic, status, length, checksum = REPLY.unpack(head)
        if magic != MAGIC:
            raise ValueError("that is not a store node")
        return Status(status), length, checksum

    def receive(self, into: memoryview) -> None:
        while len(into):
            self._connection.settimeout(self._left())
            count = self._connection.recv_into(into)
            if not count:
                raise ConnectionError("the node closed the connection")
            into = into[count:]

    def _left(self) -> float:
        left = seconds(self._deadline - self._clock.now())
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left
