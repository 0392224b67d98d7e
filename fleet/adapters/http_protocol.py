"""HTTP/1.1 on one connection: parsing by httptools, limits, keep-alive, back-pressure. Knows nothing of what is served.

Rules:

1. One request of a connection is served at a time; what a client pipelines waits, and reading stops meanwhile.
2. Whatever is wrong with a message is answered in its turn, and then the connection closes, since the two sides may no
   longer agree on where the next message begins.
3. A client that closes its sending side while an engine works for it is taken to be gone: TCP cannot tell it from one
   that closed altogether, and nobody may be worked for in vain.
4. Nothing is buffered without bound: a writer waits (`Exchange.drained`) while the client does not read, and a client
   that does not read for `write_timeout_seconds` is cut off.
5. Every stage has a deadline, looked at by the server's sweep: a timer a connection would cost more than a request.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from http import HTTPStatus
from typing import cast

import httptools

from fleet.adapters.http_messages import ClientGone, HttpRequest, HttpSettings, Malformed, response_head
from fleet.clock import SECOND, Clock, Nanos

HIGH_WATER_BYTES = 64 << 10  # unsent bytes of a connection from which on its writer waits
LINGER_SECONDS = 2.0  # how long a client that still sends is listened to, so that it sees the answer instead of a reset


class Stage(Enum):
    IDLE = auto()  # between requests
    HEAD = auto()
    BODY = auto()
    CLOSING = auto()  # nothing more is understood; whatever comes is thrown away


Serve = Callable[["Exchange"], asyncio.Task[None]]
"""Begins to serve, in a task of its own."""

ContentOf = Callable[[Malformed], bytes]
"""The body that answers a malformed message, as JSON."""


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(
        self,
        settings: HttpSettings,
        clock: Clock,
        serve: Serve,
        explain: ContentOf,
        connections: "dict[Connection, None]",
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._serve = serve
        self._explain = explain
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._stage = Stage.IDLE
        self._deadline = self._in(settings.idle_timeout_seconds)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._body = bytearray()
        self._waiting: deque[HttpRequest | Malformed] = deque()
        self._task: asyncio.Task[None] | None = None
        self._served: HttpRequest | None = None
        self._gone = False
        self._half_closed = False
        self._paused: asyncio.Future[None] | None = None  # done when the client reads again
        self._reading = True
        self._transport: asyncio.Transport

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none of asyncio's classes
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        full = len(self._connections) >= self._settings.max_connections
        self._connections[self] = None
        if full:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - its signature
        self._gone = True
        self._connections.pop(self, None)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        self._resume()

    def eof_received(self) -> bool:
        """Returns whether the connection stays open for writing."""
        self._half_closed = True
        if self._stage in (Stage.HEAD, Stage.BODY):
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is incomplete")
        if self._task is None:
            return False
        assert self._served is not None
        if self._served.method == "POST":
            self._task.cancel()
        return True

    def data_received(self, data: bytes) -> None:
        if self._stage is Stage.CLOSING:
            return
        if self._stage is not Stage.BODY:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # What follows is another protocol, which we do not speak; the request itself is answered.
            self._stage = Stage.CLOSING
        except httptools.HttpParserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request is not HTTP: {error}")
        if self._stage in (Stage.IDLE, Stage.HEAD) and self._head_bytes > self._settings.max_head_bytes:
            self._refuse_head()

    def pause_writing(self) -> None:
        if not self._gone:
            self._paused = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._resume()

    # From the parser

    def on_message_begin(self) -> None:
        if self._stage is Stage.CLOSING:
            return
        self._stage = Stage.HEAD
        self._deadline = self._in(self._settings.head_timeout_seconds)
        self._url = b""
        self._headers = {}
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        if self._stage is Stage.CLOSING:
            return
        size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers.items())
        self._head_bytes = 0
        if size > self._settings.max_head_bytes:
            self._refuse_head()
            return
        self._stage = Stage.BODY
        self._deadline = self._in(self._settings.body_timeout_seconds)
        declared = self._headers.get(b"content-length", b"0")
        if int(declared) > self._settings.max_body_bytes:
            self._refuse_body()
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._stage is Stage.CLOSING:
            return
        self._body += body
        if len(self._body) > self._settings.max_body_bytes:
            self._refuse_body()

    def on_message_complete(self) -> None:
        if self._stage is Stage.CLOSING:
            return
        self._stage = Stage.IDLE
        self._deadline = self._in(self._settings.idle_timeout_seconds)
        url = self._url.partition(b"?")[0]
        self._waiting.append(
            HttpRequest(
                method=self._parser.get_method().decode("ascii"),
                path=url.decode("latin-1"),
                headers=self._headers,
                body=bytes(self._body),
                keep_alive=self._parser.should_keep_alive(),
                chunked_answer=self._parser.get_http_version() != "1.0",
            )
        )
        self._body = bytearray()
        self._advance()

    # From the server

    def expire(self, now: Nanos) -> None:
        """End what has lasted too long."""
        if now < self._deadline or self._task is not None:
            return
        match self._stage:
            case Stage.HEAD | Stage.BODY:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")
            case Stage.IDLE:
                self._transport.close()
            case Stage.CLOSING:
                self._transport.abort()

    def abort(self) -> None:
        """Close at once, whatever is being done."""
        self._transport.abort()

    def close_when_idle(self) -> None:
        """Close now if nothing is being served; else after it."""
        if self._task is None:
            self._transport.close()
        self._stage = Stage.CLOSING

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all of it at once.

        Raises:
            ClientGone: The connection is closed.
        """
        if self._gone or self._transport.is_closing():
            raise ClientGone
        self._transport.write(b"".join(pieces))

    async def drained(self) -> None:
        """Wait while the client does not read.

        Raises:
            ClientGone: It did not read for too long, or closed.
        """
        while (paused := self._paused) is not None:
            try:
                async with asyncio.timeout(self._settings.write_timeout_seconds):
                    await asyncio.shield(paused)
            except TimeoutError as error:
                self._transport.abort()
                raise ClientGone from error
        if self._gone:
            raise ClientGone

    # Inside

    def _advance(self) -> None:
        if self._task is None and self._waiting:
            following = self._waiting.popleft()
            if isinstance(following, Malformed):
                self._waiting.clear()
                content = self._explain(following)
                self._transport.write(
                    response_head(following.status, "application/json", len(content), close=True) + content
                )
                self._hang_up()
                return
            self._served = following
            exchange = Exchange(self, following)
            self._task = self._serve(exchange)
            self._task.add_done_callback(lambda _: self._finished(keep_alive=exchange.keeps_alive))
        if self._reading and self._waiting:
            self._transport.pause_reading()
        elif not self._reading and not self._waiting:
            self._transport.resume_reading()
        self._reading = not self._waiting

    def _finished(self, *, keep_alive: bool) -> None:
        """The served request is over, whether its answer is complete or not."""
        self._task = None
        self._served = None
        if self._gone:
            return
        if self._half_closed or not keep_alive or (self._stage is Stage.CLOSING and not self._waiting):
            self._waiting.clear()
            self._hang_up()
            return
        if self._stage is Stage.IDLE:
            self._deadline = self._in(self._settings.idle_timeout_seconds)
        self._advance()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self._stage is Stage.CLOSING:
            return
        self._stage = Stage.CLOSING
        self._waiting.append(Malformed(status, message))
        self._advance()

    def _refuse_head(self) -> None:
        limit = self._settings.max_head_bytes
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request's head is larger than {limit} bytes")

    def _refuse_body(self) -> None:
        limit = self._settings.max_body_bytes
        self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request's body is larger than {limit} bytes")

    def _hang_up(self) -> None:
        """Close, after what is written was sent and what the client is still sending was thrown away."""
        self._stage = Stage.CLOSING
        if self._half_closed or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._deadline = self._in(LINGER_SECONDS)
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        self._transport.write_eof()

    def _resume(self) -> None:
        paused, self._paused = self._paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    def _in(self, seconds: float) -> Nanos:
        return Nanos(self._clock.now() + int(seconds * SECOND))


class Exchange:
    """A request and the answer to it."""

    def __init__(self, connection: Connection, request: HttpRequest) -> None:
        self._connection = connection
        self.request = request
        self._keep_alive = request.keep_alive
        self._began = False
        self._complete = False

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow; not after an answer that was cut off, so that the client can tell."""
        return self._keep_alive and self._complete

    @property
    def began(self) -> bool:
        """Whether the answer's head is out, so that no other answer can be given."""
        return self._began

    def respond(
        self,
        status: HTTPStatus | int,
        content: bytes,
        *,
        content_type: str = "application/json",
        headers: Sequence[tuple[str, str]] = (),
        close: bool = False,
    ) -> None:
        """Give the whole answer.

        Raises:
            ClientGone: The connection is closed.
        """
        assert not self._began
        self._keep_alive = self._keep_alive and not close
        head = response_head(status, content_type, len(content), close=not self._keep_alive, headers=headers)
        self._began = self._complete = True
        self._connection.write((head, b"" if self.request.method == "HEAD" else content))

    def send(
        self, content: bytes, *, content_type: str, headers: Sequence[tuple[str, str]] = (), last: bool = False
    ) -> None:
        """Give the next piece of a streamed answer; its head goes out together with the first.

        Raises:
            ClientGone: The connection is closed.
        """
        assert not self._complete
        pieces = []
        if not self._began:
            self._keep_alive = self._keep_alive and self.request.chunked_answer
            pieces.append(
                response_head(
                    HTTPStatus.OK,
                    content_type,
                    None,
                    close=not self._keep_alive,
                    chunked=self.request.chunked_answer,
                    headers=headers,
                )
            )
            self._began = True
        if not self.request.chunked_answer:
            pieces.append(content)
        else:
            if content:
                pieces += (b"%x\r\n" % len(content), content, b"\r\n")
            if last:
                pieces.append(b"0\r\n\r\n")
        self._complete = last
        self._connection.write(pieces)

    async def drained(self) -> None:
        """Wait while the client does not read.

        Raises:
            ClientGone: It did not read for too long, or closed.
        """
        await self._connection.drained()
