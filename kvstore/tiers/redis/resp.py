"""RESP: the Redis protocol on an authenticated connection, with pipelined requests and values received in place.

Rules:

1. Payloads are sent from the caller's memory and received into it. Only reply lines, and the first bytes of a value that
   arrive together with such a line, are copied. The usual client libraries copy each value two or three times, which
   takes more time than the server's own work.
2. A turn is a sequence of requests and their replies. It has one deadline, at which all its operations end. After an
   `OSError` or `ValueError` the boundary between two replies is unknown, so the owner closes the connection. After a
   `RedisErrorReply` the connection can be used further.
3. A server sends nothing but replies. Bytes that arrive between two turns belong to a damaged or repeated reply, and would
   be read as replies to the next requests. A connection with such bytes is not used again (`is_quiet`).
"""

import socket
import ssl
from collections.abc import Callable, Iterable

from kvstore.buffers import BufferRun
from kvstore.clock import Clock, Nanos, seconds

BUFFER_BYTES = 4096  # size of the buffer for lines, and for the first bytes of a value, which arrive with a line
LINE_BYTES = 2048  # maximum length of a reply line in bytes; a longer line counts as invalid


class RedisErrorReply(Exception):
    """The server answered a request with an error; the connection can be used further."""

    @property
    def code(self) -> str:
        """The first word of the error: "OOM", "WRONGTYPE" and so on."""
        return str(self).partition(" ")[0]


class RedisPipeline:
    """Sends requests on one connection and reads their replies. Only one thread at a time may use it."""

    def __init__(self, connection: socket.socket, close: Callable[[], None], clock: Clock):
        self._socket = connection
        self._gathers = not isinstance(connection, ssl.SSLSocket)
        self._close = close
        self._clock = clock
        self._deadline = Nanos(0)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # offsets in the buffer: the bytes between them were received and not read yet
        self.answered = False  # True if a reply has arrived in this turn (rule 2)

    def begin(self, deadline: Nanos) -> None:
        """Begin a turn (rule 2), in which each request gets one reply."""
        self._deadline = deadline
        self.answered = False

    def is_quiet(self) -> bool:
        """Return whether the connection is open and has no unread bytes, so that a new turn can begin (rule 3)."""
        if self._start != self._end:
            return False
        try:
            self._socket.settimeout(0)
            self._socket.recv_into(self._view, 1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        if not self._gathers:
            for part in parts:
                self._socket.settimeout(self._left())
                self._socket.sendall(part)
            return
        run = BufferRun(memoryview(part) for part in parts)
        while run.left:
            self._socket.settimeout(self._left())
            run.advance(self._socket.sendmsg(run.front(run.left)))

    def status(self) -> bytes:
        """Read a reply that is a status or an integer, and return its word or number.

        Raises:
            RedisErrorReply: The reply is an error.
            ValueError: The reply is something else.
            OSError: The connection has failed, or the deadline of the turn has passed.
        """
        line = self._line()
        if line[:1] not in (b"+", b":"):
            raise ValueError("the reply is not a status")
        return line[1:]

    def value(self) -> "RedisValue | None":
        """Begin to read a value; return None if the key has no value.

        The caller has to call `skip` of the value before it reads the next reply.

        Raises:
            RedisErrorReply: The reply is an error.
            ValueError: The reply is something else.
            OSError: The connection has failed, or the deadline of the turn has passed.
        """
        line = self._line()
        if line[:1] != b"$":
            raise ValueError("the reply is not a value")
        length = int(line[1:])
        return None if length < 0 else RedisValue(self, length)

    def fill(self, into: memoryview) -> None:
        """Fill `into` with the next bytes of the reply."""
        at_hand = min(len(into), self._end - self._start)
        into[:at_hand] = self._view[self._start : self._start + at_hand]
        self._start += at_hand
        into = into[at_hand:]
        while len(into):
            # The same system call receives bytes that follow the value, usually a short line, into the buffer.
            count = self._receive([into, self._view])
            self._start, self._end = 0, max(count - len(into), 0)
            into = into[count:]

    def close(self) -> None:
        self._close()

    def _line(self) -> bytes:
        """Read a line, and return it without its end.

        Raises:
            RedisErrorReply: The line is an error.
            ValueError: The line is longer than `LINE_BYTES`.
            OSError: The connection has failed, or the deadline of the turn has passed.
        """
        line = b""
        while not line.endswith(b"\r\n"):
            if self._start == self._end:
                self._start, self._end = 0, self._receive([self._view])
            stop = self._buffer.find(b"\n", self._start, self._end) + 1 or self._end
            line += self._buffer[self._start : stop]
            self._start = stop
            if len(line) > LINE_BYTES:
                raise ValueError("the reply line is too long")
        self.answered = True
        if line[:1] == b"-":
            raise RedisErrorReply(line[1:-2].decode(errors="replace"))
        return line[:-2]

    def _receive(self, into: list[memoryview]) -> int:
        self._socket.settimeout(self._left())
        count = self._socket.recvmsg_into(into)[0] if self._gathers else self._socket.recv_into(into[0])
        if not count:
            raise ConnectionError("the server closed the connection")
        return count

    def _left(self) -> float:
        left = seconds(self._deadline - self._clock.now())
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left


class RedisValue:
    """The `RecordSource` of a value that is being received from Redis."""

    def __init__(self, pipe: RedisPipeline, length: int):
        self._pipe = pipe
        self.left = length

    def fill(self, into: memoryview) -> None:
        assert len(into) <= self.left, (len(into), self.left)
        self.left -= len(into)
        self._pipe.fill(into)

    def skip(self) -> None:
        """Read and drop the rest of the value, including its end of line."""
        scrap = memoryview(bytearray(min(self.left + 2, 1 << 16)))
        left = self.left + 2
        while left:
            self._pipe.fill(scrap[:left])
            left -= min(left, len(scrap))


def request(*words: bytes) -> bytes:
    """Return a request with these words, encoded in RESP."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def request_with(value_bytes: int, *words: bytes, after: tuple[bytes, ...] = ()) -> tuple[bytes, bytes]:
    """Encode a request with a value between `words` and `after`; return the bytes before and after the value."""
    before = b"*%d\r\n" % (len(words) + 1 + len(after))
    before += b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in after)
    return before + b"$%d\r\n" % value_bytes, end
