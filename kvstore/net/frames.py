"""Frames on a stream socket: the length of a payload in four little-endian bytes, then the payload.

Rules:

1. A payload has at most `limit` bytes. If a peer announces a longer one, its connection is closed before memory is
   allocated for the payload. The receiver first gets the frames before it, and then its method `lost` gets a
   `FrameTooLong`. If a stream ends within a frame, `lost` gets a `FrameTorn`.
2. An incoming payload is copied at most once, even if the stream was split into many pieces. An incomplete payload
   takes memory only for the bytes that have arrived.
3. Sending never waits. The frames of one iteration of the event loop leave in one write at its end, or earlier if they
   have more than `HIGH_WATER_BYTES` or `flush` is called. Bytes that the peer does not read are kept up to
   `send_limit`; beyond it, `send` raises `SendBufferFull`. A sender never reaches the limit if it checks `full` first,
   and waits for the call of the receiver's `resumed` while the connection is full.
4. One iteration of the event loop handles one piece of the stream, at most a few hundred KiB. Then other connections
   are served. If `turn_frames` is given, other connections are served after that many frames of a piece.
   After `pause_reading`, the receiver may still get the other frames of the piece that is being received, at most
   `turn_frames` of them.
5. The receiver's `lost` is called once for each connection, after all its other methods. No other method is called to
   report that the connection has ended.

This module does not check whether peers know a secret. A server that requires a proof passes a `ConnectionGuard`, which
decides which TCP connections are admitted.
"""

import asyncio
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Protocol, cast

from kvstore.errors import StoreNotStarted
from kvstore.net import unix_sockets as sockets
from kvstore.net.addresses import host_port, unix_path
from kvstore.net.listeners import stop_listening
from kvstore.net.unix_sockets import BACKLOG

HEAD = struct.Struct("<I")  # head of a frame: the length of the payload in bytes

FRAME_BYTES = 64 << 20
"""Default of `limit`: the maximum length of a payload in bytes (rule 1). A prompt of a million tokens has 4 MiB."""

SEND_BYTES = 2 * FRAME_BYTES
"""Default of `send_limit`: the maximum number of bytes that may wait to be sent on one connection (rule 3)."""

HIGH_WATER_BYTES = 256 << 10
"""A connection with more bytes than this to send is `full`. A network of 2 Gbit/s moves this number of bytes in a
millisecond."""

TURN_BYTES = 64 << 10  # if a connection has received this many bytes at once, other connections are served next
JOINED_BYTES = 32 << 10
"""Maximum number of bytes whose parts are joined into one piece for a write.

For more bytes, writing several parts costs less than joining.
"""

TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""With these options, the system notices within ten seconds that a host has gone, or that a peer reads no bytes. If no
bytes are sent, only heartbeats can detect a hanging process.
"""

TLS_BEGINS = 0x0316
"""The first two bytes of a TLS handshake, 0x16 and 3, as they appear in the low half of the length of a frame."""

HANDSHAKE_SECONDS = 5.0
"""Maximum duration of a TLS handshake. A handshake has some round trips, and its signatures take long on a busy
machine."""

STOP_SECONDS = 2  # time limit to send waiting bytes when a server stops; then the connections are aborted


class FrameTooLong(ConnectionError):
    """The payload of a frame is longer than the limit of the receiver or of the sender."""

    def __init__(self, size: int, limit: int):
        cause = "the peer speaks another protocol or limit"
        if size & 0xFFFF == TLS_BEGINS:
            cause = "the peer speaks TLS, and this end does not"
        super().__init__(f"a frame of {size} bytes, where {limit} are the most: {cause}")


class FrameTorn(ConnectionError):
    """The stream ended within a frame."""

    def __init__(self) -> None:
        super().__init__("the connection ended within a frame")


class SendBufferFull(ConnectionError):
    """The frame cannot be sent, because the peer has not taken earlier bytes. The connection can still be used."""

    def __init__(self, limit: int):
        super().__init__(f"the peer has not taken the last {limit} bytes")


class FrameDecoder:
    """Divides a stream into the payloads of its frames; the stream may arrive in pieces of any size. Does no I/O.

    Attributes:
        fault: The error if the stream has announced a payload that is too long, so that it cannot be used any more;
            otherwise None.
    """

    def __init__(self, limit: int = FRAME_BYTES):
        self._limit = limit
        self._head = b""  # those bytes of an incomplete frame's head that have arrived; empty between two frames
        self.body = BytesIO()
        self._missing = 0
        self.fault: FrameTooLong | None = None

    @property
    def torn(self) -> bool:
        """True if a frame has begun and is not complete."""
        return bool(self._head)

    def allow(self, limit: int) -> None:
        """Accept payloads of up to `limit` bytes from now on."""
        self._limit = limit

    def cut(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes, in order. The caller has to check `fault` afterwards."""
        payloads: list[bytes] = []
        try:
            start = self._resume(data, payloads) if self._head else 0
            size = len(data)
            while size - start >= HEAD.size:
                body = start + HEAD.size
                end = body + self._announced(data, start)
                if end > size:
                    break
                payloads.append(data[body:end])
                start = end
            if start < size:
                self._begin(data, start)
        except FrameTooLong as fault:
            self.fault = fault
        return payloads

    def _announced(self, data: bytes, at: int) -> int:
        length: int = HEAD.unpack_from(data, at)[0]
        if length > self._limit:
            raise FrameTooLong(length, self._limit)
        return length

    def _begin(self, data: bytes, start: int) -> None:
        """Keep the first part of a frame that is not complete yet."""
        body = start + HEAD.size
        self._head = data[start:body]
        if len(self._head) == HEAD.size:
            self._missing = self._announced(data, start) - self.body.write(memoryview(data)[body:])

    def _resume(self, data: bytes, payloads: list[bytes]) -> int:
        """Add bytes to the frame that has begun; return where in `data` the next frame begins."""
        start = 0
        if len(self._head) < HEAD.size:
            start = min(HEAD.size - len(self._head), len(data))
            self._head += data[:start]
            if len(self._head) < HEAD.size:
                return start
            self._missing = self._announced(self._head, 0)
        written = self.body.write(memoryview(data)[start : start + self._missing])
        self._missing -= written
        if not self._missing:
            payloads.append(self.body.getvalue())  # `getvalue` shares the buffer instead of copying it
            self._head, self.body = b"", BytesIO()
        return start + written


class FrameReceiver(Protocol):
    """Port of the consumer of a connection. Its methods are called on the event loop and must not block."""

    def received(self, payload: bytes) -> None:
        """Handle the next frame. An exception ends the connection."""

    def resumed(self) -> None:
        """Continue to send, because the connection is no longer `full`."""

    def lost(self, cause: Exception | None) -> None:
        """Handle the end of the connection. `cause` is None if one end has closed the connection without an error."""


class FrameConnection(asyncio.Protocol):
    """Sends and receives frames on one connection, by the rules of this module; made by `connect` or `open_server`."""

    def __init__(
        self,
        accept: "Accept",
        *,
        limit: int = FRAME_BYTES,
        send_limit: int = SEND_BYTES,
        turn_frames: int = sys.maxsize,
    ):
        self._accept = accept
        self._limit = limit
        self._send_limit = send_limit
        self._turn_frames = turn_frames
        # Received frames that are passed on in later iterations of the event loop (rule 4); reading is paused
        # meanwhile.
        self._waiting: deque[bytes] = deque()
        self._decoder = FrameDecoder(limit)
        self._leaving: list[bytes] = []  # parts to send at the end of this iteration of the event loop
        self._leaving_bytes = 0
        self._paused = False  # True while more bytes wait to be sent than asyncio's limits allow (`full`)
        self._reading = True  # False between `pause_reading` and `resume_reading`
        self._over = False  # True if the connection has ended or is being closed
        self._cause: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._receiver: FrameReceiver

    @property
    def full(self) -> bool:
        """True while too many bytes wait to be sent (`HIGH_WATER_BYTES`). When it becomes False, `FrameReceiver.resumed` is called."""
        return self._paused

    @property
    def torn(self) -> bool:
        """True if an incoming frame has begun and is not complete."""
        return self._decoder.torn

    def send(self, *parts: bytes) -> None:
        """Send one frame whose payload is the concatenation of `parts`. Do nothing if the connection has ended.

        Raises:
            FrameTooLong: The payload exceeds the limit.
            SendBufferFull: Too many bytes wait to be sent (rule 3).
        """
        size = sum(map(len, parts))
        if size > self._limit:
            raise FrameTooLong(size, self._limit)
        if self._over:
            return
        if self._leaving_bytes + self.transport.get_write_buffer_size() + size > self._send_limit:
            raise SendBufferFull(self._send_limit)
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(HEAD.pack(size))
        self._leaving += parts
        self._leaving_bytes += HEAD.size + size
        if self._leaving_bytes > HIGH_WATER_BYTES:
            self._flush()  # write now, so that `full` is up to date at once

    def flush(self) -> None:
        """Send the queued frames now, and not at the end of the iteration of the event loop.

        This is useful for a server whose clients wait for each answer.
        """
        self._flush()

    def allow(self, limit: int) -> None:
        """Allow payloads of up to `limit` bytes: at once for sending, for receiving from the next piece of the stream on."""
        self._limit = limit
        self._decoder.allow(limit)

    def hand_over(self, receiver: "FrameReceiver", limit: int) -> None:
        """Pass all frames to another receiver, from the next piece of the stream on.

        `limit` is the new maximum length of a payload, in bytes.
        """
        self._receiver = receiver
        self.allow(limit)

    def pause_reading(self) -> None:
        """Stop reading from the socket. The receiver may still get frames of the last piece that was read (rule 4).

        If the peer continues to send, its end of the connection becomes `full` after a while.
        """
        self._reading = False
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self._reading = True
        if self._waiting:
            self._loop.call_soon(self._receive_waiting)
        else:
            self.transport.resume_reading()

    def close(self, cause: Exception | None = None) -> None:
        """Send the waiting bytes, then close the connection; `lost` gets `cause`.

        Do nothing if the connection has ended or is being closed.
        """
        if not self._over:
            self._flush()
            self._over = True
            self._cause = cause
            self.transport.close()

    def abort(self, cause: Exception | None = None) -> None:
        """Close the connection at once, without sending the waiting bytes.

        `lost` gets `cause`, unless the connection was being closed already.
        """
        if not self._over:
            self._over = True
            self._cause = cause
        self._leaving.clear()
        self.transport.abort()

    # The event loop calls the methods below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if _family(self.transport) in (socket.AF_INET, socket.AF_INET6):
            opened: socket.socket = transport.get_extra_info("socket")
            for level, name, value in TCP_OPTIONS:
                opened.setsockopt(level, name, value)
        self._receiver = self._accept(self)

    def data_received(self, data: bytes) -> None:
        payloads = self._decoder.cut(data)
        if len(payloads) > self._turn_frames:
            self._waiting.extend(payloads)
            self.transport.pause_reading()
            self._receive_waiting()
            return
        received = self._receiver.received
        for payload in payloads:
            if self._over:
                return
            received(payload)
        if self._decoder.fault is not None:
            self.abort(self._decoder.fault)
        elif len(data) >= TURN_BYTES:
            self.transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def eof_received(self) -> None:
        if self._decoder.torn:
            self.abort(FrameTorn())

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if not self._over:
            self._receiver.resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._leaving.clear()
        self._waiting.clear()
        self._receiver.lost(self._cause or exc)

    def _receive_waiting(self) -> None:
        """Pass on up to `turn_frames` waiting frames; other connections are served before the next ones."""
        try:
            for _ in range(min(self._turn_frames, len(self._waiting))):
                if self._over or not self._reading:
                    return
                self._receiver.received(self._waiting.popleft())
        except Exception as error:
            self.abort(error)  # asyncio does the same after an error of `data_received`
            raise
        if self._waiting:
            self._loop.call_soon(self._receive_waiting)
        elif self._decoder.fault is not None:
            self.abort(self._decoder.fault)
        else:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._reading and not self._over:
            self.transport.resume_reading()

    def _flush(self) -> None:
        leaving, size = self._leaving, self._leaving_bytes
        if not leaving:
            return  # there is nothing to send: the parts have been sent already, or the connection has ended
        self._leaving, self._leaving_bytes = [], 0
        if size <= JOINED_BYTES:
            self.transport.write(b"".join(leaving))
        else:
            self.transport.writelines(leaving)


Accept = Callable[[FrameConnection], FrameReceiver]
"""A function that returns the receiver of a new connection."""


async def connect(
    address: str,
    accept: Accept,
    *,
    limit: int = FRAME_BYTES,
    send_limit: int = SEND_BYTES,
    tls: ssl.SSLContext | None = None,
    handshake_seconds: float = HANDSHAKE_SECONDS,
) -> FrameConnection:
    """Open a connection to ``unix:/path`` or ``host:port``; `accept` is called before anything is received.

    The call has no time limit of its own, so the caller has to limit it. Raise OSError if no process listens at the
    address or the TLS handshake fails, and ValueError if the address is invalid.
    """

    def made() -> FrameConnection:
        return FrameConnection(accept, limit=limit, send_limit=send_limit)

    loop = asyncio.get_running_loop()
    if path := unix_path(address):
        _, connection = await loop.create_unix_connection(made, path)
    else:
        host, port = host_port(address)
        within = None if tls is None else handshake_seconds
        _, connection = await loop.create_connection(made, host, port, ssl=tls, ssl_handshake_timeout=within)
    return connection


class ConnectionGuard(Protocol):
    """Decides which TCP connections reach the receivers of a server."""

    def guarding(
        self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept
    ) -> AbstractAsyncContextManager[None]:
        """Accept connections while the context is open, then close the listener.

        Args:
            listener: The listening socket.
            made: Function that makes the protocol object of a connection. Its argument is the function that returns the
                first receiver of the connection.
            accept: Function that returns the receiver of a connection that was admitted.
        """


@asynccontextmanager
async def open_server(
    field: str,
    address: str,
    accept: Accept,
    *,
    limit: int = FRAME_BYTES,
    send_limit: int = SEND_BYTES,
    tls: ssl.SSLContext | None = None,
    guard: "ConnectionGuard | None" = None,
) -> AsyncIterator[str]:
    """Listen while the context is open; yield the address with the chosen port. Close all connections at the end.

    `field` names the settings field in error messages. `accept` returns the receiver of an admitted connection, and is
    called before this receiver gets anything. `guard` decides which TCP connections are admitted; None: all of them.

    Raises:
        StoreNotStarted: The address is invalid or in use, or this process cannot listen at it.
    """
    connections: set[_AcceptedConnection] = set()
    ended = asyncio.Event()

    def made(first: Accept) -> _AcceptedConnection:
        return _AcceptedConnection(first, connections, ended, limit=limit, send_limit=send_limit)

    async with AsyncExitStack() as listening:
        listening.push_async_callback(_end, connections, ended)
        if path := unix_path(address):
            listener = sockets.listen(field, path)
        else:
            listener = _listener(field, address)
            address = f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        if guard is not None and not path:
            await listening.enter_async_context(guard.guarding(listener, made, accept))
        else:
            await listening.enter_async_context(_open_to_all(listener, path, tls, partial(made, accept)))
        yield address


@asynccontextmanager
async def _open_to_all(
    listener: socket.socket, path: str, tls: ssl.SSLContext | None, made: Callable[[], FrameConnection]
) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    if path:
        server = await loop.create_unix_server(made, sock=listener, backlog=BACKLOG)
    else:
        server = await loop.create_server(made, sock=listener, ssl=tls, backlog=BACKLOG)
    try:
        yield
    finally:
        if path:
            # Remove the file while the socket is open: later, the path may belong to the socket of another process.
            Path(path).unlink(missing_ok=True)  # noqa: ASYNC240 - this call does not block
        stop_listening(server)
        await asyncio.sleep(0)


async def _end(connections: set["_AcceptedConnection"], ended: asyncio.Event) -> None:
    """Let connections send their waiting bytes for at most `STOP_SECONDS`, then abort them."""
    for connection in list(connections):
        connection.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            while connections:
                ended.clear()
                await ended.wait()
    for connection in list(connections):
        connection.abort()


class _AcceptedConnection(FrameConnection):
    """A connection that a server has accepted. It is in the server's set of connections until it ends."""

    def __init__(
        self,
        accept: Accept,
        connections: set["_AcceptedConnection"],
        ended: asyncio.Event,
        *,
        limit: int,
        send_limit: int,
    ):
        super().__init__(accept, limit=limit, send_limit=send_limit)
        self._connections = connections
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._ended.set()
        super().connection_lost(exc)


def _listener(field: str, address: str) -> socket.socket:
    try:
        host, port = host_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except ValueError as error:
        raise StoreNotStarted(f"{field}: {error}") from error
    except OSError as error:
        raise StoreNotStarted(f"{field}: {address} cannot be listened on: {error.strerror or error}") from error


def _family(transport: asyncio.Transport) -> int:
    opened: socket.socket = transport.get_extra_info("socket")
    return opened.family
