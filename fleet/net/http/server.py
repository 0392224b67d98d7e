"""HTTP/1.1 server: one port, its connections and a table of routes.

`HttpServer` listens at the port, and finds the handler of each request. `HttpConnection` handles the bytes of one client: parsing by
httptools, limits, keep-alive and back-pressure. A connection does not depend on the served API.

Rules:

1. A connection serves one request at a time. Pipelined requests wait, most of them unparsed, and reading stops
   meanwhile. One iteration of the event loop serves only a few requests of a connection, then other connections.
2. A malformed message is answered with an error, after the requests before it. Then the connection closes, because
   client and server may no longer agree where the next message begins. The same holds for a body with a transfer
   coding other than chunked, because no other coding is understood here (RFC 9112, 6.1).
3. A client that closes its sending side while its POST request is being served counts as disconnected. TCP does not show
   whether the client has closed the receiving side too, and an engine must not compute an answer that no client reads.
   The task that serves the request is cancelled, and so the request ends in the router and in the engine
   (`fleet.frontend.generation`, rule 2).
4. Every buffer is bounded. A writer waits (`Exchange.drained`) while the client does not read, and a client that reads
   too slowly is disconnected (`SlowReader`). While the client does not read, no bytes are read from the source of a
   relayed answer (`Exchange.relay`).
5. Every stage of a connection has a deadline, except while a request is being served. The server's sweep checks the deadlines. A
   timer for each connection would cost more than a request.
6. An offer of another protocol (``Upgrade``, which Java's client sends for HTTP/2) is declined, except for a WebSocket by
   rule 7. The request is then served, or refused if its method is CONNECT, its body is chunked, or an earlier request is
   being served.
7. The server may read the body of a request while it arrives (`StreamsBody`), and may let a WebSocket begin. Such a
   request is served as soon as its head is complete. Its body has no limit of size, but `min_read_bytes` of it must
   arrive in each `body_timeout_seconds`.
8. A head that equals one in the `HeadCache`, apart from the content length, is not parsed again.
9. A connection that waits for its client may be closed at any time for a new connection (`ConnectionTable`).
10. The server may refuse the bodies of some clients (`IsStranger`), such as those without a key. If the body of their request has
    not arrived together with its head, the request is served without it, and the connection then closes. While an earlier request is
    served, nothing more is read of such a body.
11. Each request runs in a supervised task, so an error in one request does not end the others.
12. If the settings allow it, web pages of other origins may call the port (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

import asyncio
import logging
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import cast

import httptools
from msgspec import structs

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, internal_error
from fleet.net.client_tls import HTTP_1, ServerCertificates, TlsPort
from fleet.net.connection_limits import (
    ORDER_SECONDS,
    ConnectionSlot,
    ConnectionTable,
    SlowReader,
    WaitingFor,
    WriteBufferCounter,
    client_key,
)
from fleet.net.http.body_stream import BodyStream
from fleet.net.http.errors import http_error_body, send_http_error, send_rejection
from fleet.net.http.exchange import (
    BAD_REQUEST_LINE,
    BodyBuffer,
    ClientDisconnected,
    Exchange,
    ExchangeTask,
    HeadCache,
    HeldBodyBytes,
    HttpHead,
    HttpRequest,
    MalformedRequest,
    RelaySource,
    StartExchange,
    answer_id,
    head_problem,
    is_anthropic,
    split_target,
)
from fleet.net.limit_log import ClientLog, ConnectionLimitLog
from fleet.net.settings import ORDINARY_BODY_BYTES, HttpSettings
from fleet.net.sockets import BACKLOG, bind_tcp, configure_client_port
from kvstore.net.listeners import stop_listening

log = logging.getLogger(__name__)

ANY_ORIGIN = "*"
PREFLIGHT_SECONDS = "600"  # seconds for which browsers may cache the answer to a preflight; Safari allows no more
_HEADER_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_, "

SWEEP_SECONDS = 0.25

PLAIN_REQUEST = MalformedRequest(HTTPStatus.BAD_REQUEST, "this port speaks TLS: use https")

HIGH_WATER_BYTES = 64 << 10  # unsent bytes above which the writer of a connection waits
CHUNKED = b"chunked"  # the only transfer coding that is understood
# A head with one of these headers is not cached, because more than the content length decides how its message is read.
_MEANINGFUL_HEADERS = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
_NO_HEADERS: Mapping[bytes, bytes] = {}
PARSE_BYTES = 8 << 10  # maximum number of bytes that are parsed at a time: about a hundred of the shortest requests
MAX_REQUESTS_PER_TURN = 16
MAX_LINGERING = (
    # maximum number of refused connections that are read until their clients have the answer; further ones are closed
    # at once
    256
)
RETRY_AFTER_SECONDS = 1  # value of Retry-After for refused connections
# Time for which bytes of a refused client are read and dropped, so that it gets the answer, not a reset.
LINGER_SECONDS = 2.0

RouteHandler = Callable[[Exchange], Awaitable[None]]
Routes = Mapping[str, Mapping[str, RouteHandler]]
"""Handlers by path, and then by method."""

ErrorBody = Callable[[MalformedRequest], bytes]
"""A function that returns the JSON body that explains a malformed request."""

StreamsBody = Callable[[HttpHead], bool]
"""A function that returns True if the server reads the body of a request with this head while it arrives, or lets the WebSocket begin
that this head asks for."""

IsStranger = Callable[[HttpHead], bool]
"""A function that returns True if the server takes no bodies from the client that sent this head."""


@asynccontextmanager
async def run_server(
    server: "HttpServer",
    listen: str,
    *,
    setting: str,
    shared: bool = False,
    certificates: ServerCertificates | None = None,
) -> AsyncIterator[None]:
    """Listen at ``host:port`` (port 0 takes a free one) until the context ends; then cancel the requests that still run.

    With `shared`, other processes may listen on the same port. Errors name the `setting` that holds the address. With
    `certificates`, the port speaks TLS.

    Raises:
        ConfigurationRefused: The address is malformed or cannot be bound.
    """
    listening, server.address = bind_tcp(listen, setting=setting, shared=shared)
    configure_client_port(listening)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        server.tasks = tasks
        if certificates is None:
            # The backlog is set, because the event loop's default is only 100 connections.
            port = await asyncio.get_running_loop().create_server(server.connection, sock=listening, backlog=BACKLOG)
            server.stop_listening = partial(stop_listening, port)
        else:
            server.stop_listening = server.tls_port(listening, certificates).close
        sweep = tasks.create_task(server.sweep())
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error  # raised after the task group, which would wrap the body's error in a group
        finally:
            server.stop_listening()
            sweep.cancel()
            server.disconnect_all()
    if failure is not None:
        raise failure


class HttpServer:
    """Serves the requests of all connections of a port, inside the context of `run_server`."""

    def __init__(self, settings: HttpSettings, clock: Clock, routes: Routes, connection_seconds: float = 0) -> None:
        """Create a server that does not listen yet.

        The first answer on a connection that is older than `connection_seconds` asks the client to reconnect; 0 sets no limit.
        """
        self.address = ""  # the address at which the server listens, with its actual port
        self.stop_listening: Callable[[], None] = lambda: None
        self.tasks: asyncio.TaskGroup
        self.draining = False
        self.streams_body: StreamsBody | None = None  # None: every body is collected before its request is served
        self.is_stranger: IsStranger | None = None  # None: bodies are taken from every client
        # Paths at which clients for whom `is_stranger` is true are served too. The handlers of these paths need no body.
        self.open_paths: Container[str] = ()
        self._settings = settings
        self._clock = clock
        self._routes = routes
        self._connection_seconds = connection_seconds
        self.connections: dict[HttpConnection, None] = {}  # all open connections, also refused ones
        self.table: ConnectionTable[HttpConnection] = ConnectionTable(settings.max_connections, settings.address_share)
        self._limit_log = ConnectionLimitLog(self.table)
        self._client_log = ClientLog(settings)
        self._heads = HeadCache()
        self.held = HeldBodyBytes()
        self._serving: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def connection(self) -> "HttpConnection":
        """Return the asyncio protocol object of a new connection."""
        return HttpConnection(
            self._settings,
            self._clock,
            self.serve,
            http_error_body,
            self.connections,
            self.table,
            self._heads,
            self.held,
            self._client_log,
            self._connection_seconds,
            self.streams_body,
            self.is_stranger,
        )

    def tls_port(self, listening: socket.socket, certificates: ServerCertificates) -> TlsPort:
        """Accept connections with TLS at a listening socket."""
        return TlsPort(
            listening,
            certificates.context(HTTP_1),
            self.connection,
            self.table,
            self._client_log,
            self._settings,
            now=lambda: self._clock.now() / SECOND,
            plaintext_answer=PLAIN_REQUEST.answer(http_error_body(PLAIN_REQUEST)),
        )

    async def finish(self, within_seconds: float, also: Callable[[], Awaitable[None]] | None) -> None:
        """Stop accepting requests, and wait at most the given time for the running requests and then for `also` (None: nothing)."""
        self.draining = True
        self.stop_listening()
        for connection in list(self.connections):
            connection.close_when_idle()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self._quiet.wait()
                if also is not None:
                    await also()

    def disconnect_all(self) -> None:
        """Close all connections and cancel their requests."""
        for connection in list(self.connections):
            connection.abort()
        for task in self._serving:
            task.cancel()

    async def sweep(self) -> None:
        """Enforce the time limits of all connections again and again, until cancelled."""
        while True:
            now = self._clock.now()
            for connection in list(self.connections):
                connection.expire(now)
            self._limit_log.log_changes(now / SECOND, self.address)
            self._client_log.log_changes(now / SECOND, self.address)
            await asyncio.sleep(SWEEP_SECONDS)

    def serve(self, exchange: Exchange) -> ExchangeTask:
        """Start to serve a request in a task of its own; `Exchange.finish` is called when the task has ended."""
        if b"origin" in exchange.request.head.headers:
            exchange.more_headers = cors_headers(exchange.request.head.headers[b"origin"], self._settings.cors_origins)
        task = self.tasks.create_task(self._supervise(exchange))
        self._serving.add(task)
        self._quiet.clear()
        task.add_done_callback(partial(self._served, exchange))
        return task

    def unserved(self, status: HTTPStatus) -> None:
        """Do nothing; subclasses may count a request that no handler takes."""

    def handlers_of(self, path: str) -> Mapping[str, RouteHandler] | None:  # noqa: ARG002 - subclasses use it
        """Return the handlers by method for a path that is not in the route table; None if there are none."""
        return None

    def fallback(self, head: HttpHead) -> RouteHandler | None:  # noqa: ARG002 - subclasses use it
        """Return a handler for a request that no route fits; None if there is none."""
        return None

    async def refuse_stranger(self, exchange: Exchange) -> None:
        """Refuse the request of a stranger (`is_stranger` is true for it). A subclass that sets `is_stranger` implements this."""
        raise NotImplementedError

    def _served(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        exchange.finish()
        if not self._serving:
            self._quiet.set()

    async def _supervise(self, exchange: Exchange) -> None:
        with suppress(ClientDisconnected):
            try:
                await self._route(exchange)
            except RequestRejected as refused:
                send_rejection(exchange, refused)
            except ClientDisconnected:
                raise
            except (
                Exception
            ):  # supervisor: any error in a handler only ends this request, with status 500 or an error event
                log.exception("request failed", extra={"path": exchange.request.path})
                send_rejection(exchange, internal_error())
            await exchange.drained()

    def _hint(self, path: str) -> str:
        """Return a hint for a client whose base URL ends with a slash or one ``/v1`` too many, or lacks ``/v1``; otherwise empty."""
        single = re.sub("/{2,}", "/", path)
        for other in (single, single.removeprefix("/v1"), f"/v1{single}"):
            if other != path and (other in self._routes or self.handlers_of(other) is not None):
                return f"; {other[:200]} exists: correct the base URL of the client"
        return ""

    def _is_refused(self, request: HttpRequest) -> bool:
        """Return whether a request is refused because of its client, whatever its body contains.

        Handlers of open paths need no body, so they also serve a request whose body was not read.
        """
        if self.is_stranger is None or request.path in self.open_paths:
            return False
        return request.unread or self.is_stranger(request.head)

    async def _route(self, exchange: Exchange) -> None:
        request = exchange.request
        methods = self._routes.get(request.path) or self.handlers_of(request.path)
        if methods is not None and request.method == "OPTIONS":
            answer_options(exchange, tuple(methods), self._settings.cors_origins)
            return
        answer = None if methods is None else methods.get("GET" if request.method == "HEAD" else request.method)
        if answer is None:
            answer = self.fallback(request.head)
        if answer is not None and request.method == "POST" and self._is_refused(request):
            await self.refuse_stranger(exchange)
        elif answer is not None:
            await answer(exchange)
        elif methods is None:
            self.unserved(HTTPStatus.NOT_FOUND)
            message = f"there is nothing at {request.path[:200]}{self._hint(request.path)}"
            send_http_error(exchange, HTTPStatus.NOT_FOUND, message)
        else:
            self.unserved(HTTPStatus.METHOD_NOT_ALLOWED)
            allowed = ", ".join(methods)
            message = f"{request.path[:200]} takes {allowed}, not {request.method}"
            send_http_error(exchange, HTTPStatus.METHOD_NOT_ALLOWED, message, allow=allowed)


def cors_headers(origin: bytes, allowed: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the CORS headers of an answer to a web page of this origin; none if the page may not read the answer."""
    if ANY_ORIGIN in allowed:
        return (("access-control-allow-origin", ANY_ORIGIN), ("access-control-expose-headers", ANY_ORIGIN))
    name = origin.decode("latin-1")
    if name not in allowed:
        return ()
    return (
        ("access-control-allow-origin", name),
        ("access-control-expose-headers", "x-request-id, retry-after"),
        ("vary", "origin"),
    )


def answer_options(exchange: Exchange, methods: Sequence[str], allowed: Sequence[str]) -> None:
    """Answer an OPTIONS request: the methods of a path and, to a preflight request of a browser, what its page may send.

    Raises:
        ClientDisconnected: The connection is closed.
    """
    asked = exchange.request.head.headers
    listed = ", ".join((*methods, "OPTIONS"))
    headers = [("allow", listed)]
    if cors_headers(asked.get(b"origin", b""), allowed) and b"access-control-request-method" in asked:
        wanted = asked.get(b"access-control-request-headers", b"")
        headers += [
            ("access-control-allow-methods", listed),
            ("access-control-max-age", PREFLIGHT_SECONDS),
        ]
        if wanted and not wanted.strip(_HEADER_CHARACTERS):
            headers.append(("access-control-allow-headers", wanted.decode("ascii")))
    exchange.respond(HTTPStatus.OK, b"", headers=headers)


class ConnectionStage(Enum):
    IDLE = auto()  # the connection waits for the next request
    HEAD = auto()
    BODY = auto()
    SWITCHED = auto()  # the connection has changed to another protocol, whose bytes a body stream takes
    CLOSING = auto()  # the last answer was sent or is being sent; received bytes are dropped


# These copies exist because reading a member of an enum takes longer: ten times as long in Python 3.11, and three times from 3.12 on. A
# request reads ten members.
_IDLE, _HEAD, _BODY, _SWITCHED, _CLOSING = (
    ConnectionStage.IDLE,
    ConnectionStage.HEAD,
    ConnectionStage.BODY,
    ConnectionStage.SWITCHED,
    ConnectionStage.CLOSING,
)
_WAITS_IDLE = WaitingFor.IDLE


class HttpConnection(asyncio.Protocol):
    """Handles the connection of one client: parses its requests, and has them served one after the other."""

    # The class has slots, because CPython reads the attributes of an object slowly if it has more than 30 without slots.
    __slots__ = (
        "__weakref__",
        "_arriving",
        "_body",
        "_body_seen",
        "_buffer",
        "_client_log",
        "_clock",
        "_closes_after_body",
        "_connections",
        "_declined_head",
        "_expires_at",
        "_explain",
        "_half_closed",
        "_head_bytes",
        "_headers",
        "_heads",
        "_held",
        "_held_bytes",
        "_idle_nanos",
        "_is_stranger",
        "_known_head",
        "_lost",
        "_overhead_bytes",
        "_parser",
        "_raw_head",
        "_reading",
        "_serve",
        "_served",
        "_serving",
        "_settings",
        "_slot",
        "_slow_reader",
        "_source",
        "_stage",
        "_starting",
        "_streams",
        "_table",
        "_takes_body",
        "_turn_scheduled",
        "_url",
        "deadline",
        "exchange",
        "paused",
        "transport",
        "unparsed",
        "waiting",
    )

    def __init__(
        self,
        settings: HttpSettings,
        clock: Clock,
        serve: StartExchange,
        explain: ErrorBody,
        connections: "dict[HttpConnection, None]",
        table: "ConnectionTable[HttpConnection]",
        heads: HeadCache,
        held: HeldBodyBytes,
        client_log: ClientLog,
        lasts_seconds: float = 0,
        streams: StreamsBody | None = None,
        is_stranger: IsStranger | None = None,
    ) -> None:
        """Create the protocol of a connection.

        The first answer after `lasts_seconds` demands a new connection from the client (`connection: close`); 0 sets no
        limit.
        """
        self._streams = streams
        self._is_stranger = is_stranger
        # False until it is known that the server takes the body of the present request from its client (rule 10).
        self._takes_body = is_stranger is None
        # The body that is read while it arrives (rule 7); None: there is no such body.
        self._arriving: BodyStream | None = None
        self._body_seen = 0  # number of bytes of the arriving body at the latest check of its rate
        self._closes_after_body = False  # True: no request follows the one whose body is arriving (`close_when_idle`)
        self._settings = settings
        self._clock = clock
        self._expires_at = self._deadline_in(lasts_seconds) if lasts_seconds else None
        self._serve = serve
        self._explain = explain
        self._connections = connections
        self._table = table
        # The slot in the table. None: the table was full, or the connection has ended.
        self._slot: ConnectionSlot[HttpConnection] | None = None
        self._heads = heads
        self._held = held
        self._client_log = client_log
        self._held_bytes = 0  # number of bytes of request bodies that this connection has in memory
        self._parser = httptools.HttpRequestParser(self)
        self._stage = _IDLE
        self._idle_nanos = int(settings.idle_timeout_seconds * SECOND)
        self.deadline = self._deadline_in(settings.first_byte_timeout_seconds)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._overhead_bytes = 0  # bytes of chunk sizes and trailers since the last piece of the body
        self._body = BodyBuffer()
        # Raw bytes under which the parsed head may be cached (`HeadCache`); None: it is not cached. They are usable only if the whole
        # head was in the bytes that were received first.
        self._raw_head: bytes | None = None
        # Head and content length of the present request if its body bypasses the parser, because the head was cached (rule 8) or
        # an offer was declined (rule 6); None: the parser parses the body.
        self._known_head: tuple[HttpHead, int] | None = None
        self.waiting: deque[HttpRequest | MalformedRequest] = deque()
        self.unparsed = b""  # received bytes that were not parsed yet; they follow the waiting requests
        self._served = 0  # approximate number of requests that were served in this iteration of the event loop
        self._turn_scheduled = False
        # Head of a request that offers another protocol, until the offer is taken (rule 7) or declined (rule 6).
        self._declined_head: HttpHead | None = None
        self.exchange: Exchange | None = None  # the exchange that is being served; None: no request is being served
        self._serving: ExchangeTask | None = None
        self._starting = False
        self._source: RelaySource | None = None
        self._lost = False
        self._half_closed = False
        self.paused: asyncio.Future[None] | None = None  # set while the client does not read; done when it reads again
        self._slow_reader = SlowReader(settings.write_timeout_seconds * SECOND, settings.min_read_bytes)
        self._buffer = WriteBufferCounter()
        self._reading = True
        self.transport: asyncio.Transport

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is needed, because uvloop's transports are not asyncio's classes.
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._connections[self] = None
        address = client_key(transport.get_extra_info("peername"))
        admission = self._table.admit(self, address, self._clock.now() / SECOND)
        if admission.displaced is not None:
            admission.displaced.displace(silent=admission.displaced_silent)
        self._slot = admission.slot
        if self._slot is None:
            self._refuse_connection("too many connections; retry later")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature of asyncio.Protocol
        self._lost = True
        self._connections.pop(self, None)
        if self._slot is not None:
            self._table.remove(self._slot)
            self._slot = None  # breaks a reference cycle
        self._hold(-self._held_bytes)
        self._drop_waiting()
        del self._parser  # breaks a reference cycle
        self._source = self._arriving = None
        if self._serving is not None:
            self._serving.cancel()
        self._resume()

    def eof_received(self) -> bool:
        """Handle the end of the bytes from the client (rule 3); return whether the connection stays open for writing."""
        self._half_closed = True
        if self._stage is _SWITCHED and self._arriving is not None:
            self._arriving.end()
            return self.transport.can_write_eof()
        if self._stage in (_HEAD, _BODY):
            self._reject(HTTPStatus.BAD_REQUEST, "the request is incomplete")
        if self.exchange is None:
            return False
        if self.exchange.request.method == "POST" and self._serving is not None:
            self._serving.cancel()
        return self.transport.can_write_eof()  # False for TLS, which has no half-closed connections

    def data_received(self, data: bytes) -> None:
        if self.unparsed:
            self.unparsed += data
            return
        stage = self._stage
        begin = 0  # start of the bytes that are not handled yet
        if stage is _IDLE and self.exchange is None and self.paused is None:
            end = data.find(b"\r\n\r\n") + 4
            content = data[:end]
            known = self._heads.find(content)
            if known is not None and known[1] <= self._settings.max_body_bytes:
                head, body_bytes = known
                if len(data) - end == body_bytes <= ORDINARY_BODY_BYTES:
                    self._hold(body_bytes)
                    self._start(HttpRequest(head, data[end:]))
                    return
                self._known_head = known
                self._body = BodyBuffer()
                self._takes_body = self._is_stranger is None
                self._stage = _BODY
                self.deadline = self._deadline_in(self._settings.body_timeout_seconds)
                begin = end
            else:
                self._raw_head = content
        elif stage is _CLOSING:
            return
        elif stage is _SWITCHED:
            self._take_switched(data)
            return
        self._handle_bytes(data, begin)
        self._note_waiting()

    def _handle_bytes(self, data: bytes, begin: int) -> None:
        """Handle the received bytes from `begin` on: first those of a body that bypasses the parser, then parse the others."""
        if self._known_head is not None:
            data = self._take_known_body(data, begin)
            if not data or self._stage is _CLOSING:
                return
        self._served = 0
        if self._stage is _BODY:
            self._overhead_bytes += len(data)
        else:
            self._head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade as offered:
            self._raw_head = None
            self._answer_offer(data[offered.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._client_log.note_bytes(client_key(self.transport.get_extra_info("peername")), data)
            bad_line = isinstance(error, httptools.HttpParserInvalidURLError) or self._is_http_0_9(b"")
            self._reject(HTTPStatus.BAD_REQUEST, BAD_REQUEST_LINE if bad_line else f"the request is not HTTP: {error}")
        if self._stage in (_IDLE, _HEAD) and self._head_bytes > self._settings.max_head_bytes:
            self._reject_head()
        elif self._stage is _BODY and self._overhead_bytes > self._settings.max_head_bytes:
            self._reject_overhead()
        elif self._stage is _BODY:
            if not self._takes_body:
                self._refuse_body_of_stranger()
        elif self._is_http_0_9(data):
            self._reject(HTTPStatus.BAD_REQUEST, BAD_REQUEST_LINE)

    def pause_writing(self) -> None:
        if self._lost:
            return
        self._buffer.paused(self.transport)
        self.paused = asyncio.get_running_loop().create_future()
        if self._source is not None:
            self._source.pause_reading()

    def resume_writing(self) -> None:
        self._buffer.resumed(self.transport)
        self._resume()
        if self._source is not None:
            self._source.resume_reading()
        self._advance()

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._stage is _CLOSING:
            return
        self._stage = _HEAD
        self.deadline = self._deadline_in(self._settings.head_timeout_seconds)
        self._url = b""
        self._headers = {}
        self._body = BodyBuffer()
        self._takes_body = self._is_stranger is None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage is not _HEAD:
            return  # a trailer, which may be ignored (RFC 9110, 6.5.1)
        name = name.lower()
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        if self._stage is _CLOSING:
            return
        size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers.items())
        self._head_bytes = 0
        if size > self._settings.max_head_bytes:
            self._reject_head()
            return
        if (problem := head_problem(self._parser.get_http_version(), self._url, self._headers)) is not None:
            self._reject(HTTPStatus.BAD_REQUEST, problem)
            return
        if self._headers.get(b"transfer-encoding", CHUNKED).strip().lower() != CHUNKED:
            self._reject(
                HTTPStatus.NOT_IMPLEMENTED,
                "transfer-encoding: only chunked is understood; send the body without another coding",
            )
            return
        self._stage = _BODY
        self._overhead_bytes = 0
        self.deadline = self._deadline_in(self._settings.body_timeout_seconds)
        if self._streams is not None and self._begin_body_stream(self._streams):
            return
        declared = self._headers.get(b"content-length", b"0")
        if int(declared) > self._settings.max_body_bytes:
            self._reject_body()
        elif self._expects_continue() and self.exchange is None:
            if not self._takes_body:
                self._refuse_body_of_stranger()
            if self._stage is _BODY:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._stage is _CLOSING:
            return
        if self._arriving is not None:
            self._overhead_bytes = 0
            self._arriving.add(body)
            if self._arriving.full:
                self._advance()
            return
        self._body.add(body)
        self._overhead_bytes = 0
        self._hold(len(body))
        if self._body.size > self._settings.max_body_bytes:
            self._reject_body()
        elif self._memory_is_full():
            self._reject_long()

    def on_message_complete(self) -> None:
        if self._stage is _CLOSING:
            return
        self._stage = _IDLE
        self.deadline = self._deadline_in(self._settings.idle_timeout_seconds)
        if self._arriving is not None:
            if self._closes_after_body:
                self._stage = _CLOSING
            arriving, self._arriving = self._arriving, None
            arriving.end()
            return
        offered = self._parser.should_upgrade()
        path, query = split_target(self._url)
        head = HttpHead(
            method=self._parser.get_method().decode("ascii"),
            path=path,
            query=query,
            headers=self._headers,
            keep_alive=self._parser.should_keep_alive() and not offered,
            chunked_answer=self._parser.get_http_version() != "1.0",
        )
        if offered:
            self._declined_head = head
            return
        body = self._body.whole()
        self._body = BodyBuffer()
        if (content := self._raw_head) is not None:
            self._raw_head = None  # valid for this request only
            self._cache_head(content, head, body)
        self.waiting.append(HttpRequest(head, body))
        self._advance()

    # Called by the server

    @property
    def is_expired(self) -> bool:
        return self._expires_at is not None and self._clock.now() >= self._expires_at

    def expire(self, now: Nanos) -> None:
        """Enforce the deadline of the present stage (rule 5) and the limit for slow readers (rule 4)."""
        waiting = 0
        # Bytes that wait during a request are normal, and count only if the client does not read.
        if self.paused is not None or self.exchange is None:
            waiting = self.transport.get_write_buffer_size()
        if self._slow_reader.overdue(now, waiting, self._buffer.written):
            self._client_log.note_slow(client_key(self.transport.get_extra_info("peername")), waiting)
            self.transport.abort()
            return
        if now < self.deadline:
            return
        if self._arriving is not None and self._stage is _BODY:
            self._check_body_rate(self._arriving)
        if self.exchange is not None:
            return
        match self._stage:
            case ConnectionStage.HEAD | ConnectionStage.BODY:
                self._reject(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")
            case ConnectionStage.IDLE:
                self.transport.close()
            case ConnectionStage.CLOSING:
                self.transport.close()  # unlike `abort`, it sends the remaining bytes first
            case ConnectionStage.SWITCHED:
                self.transport.abort()  # the exchange that used the other protocol has ended

    def displace(self, *, silent: bool) -> None:
        """Close the connection, because the table needs its slot. No request is being served.

        A client that has sent a part of a request, or nothing yet, may wait for an answer, and gets an error. A client
        between two requests gets no answer.
        """
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read
        elif silent:
            self._refuse_connection("too many connections; retry later")
        elif self._stage in (_HEAD, _BODY):
            self._refuse_connection("too many connections, and the request was not complete; retry later")
        else:
            self._stage = _CLOSING
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once, even while a request is being served."""
        self.transport.abort()

    def close_when_idle(self) -> None:
        """Close the connection now if no request is being served, otherwise after this request and the parsed ones that wait behind it."""
        if self.exchange is None:
            self.transport.close()
        if self._arriving is None:
            self._stage = _CLOSING
        else:  # a request that reads its arriving body still needs further bytes
            self._closes_after_body = True

    def relay(self, source: RelaySource) -> asyncio.Transport:
        if self._lost or self.transport.is_closing():
            raise ClientDisconnected
        self._source = source
        if self.paused is not None:
            source.pause_reading()
        return self.transport

    def write(self, pieces: Sequence[bytes]) -> None:
        if self._lost or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(b"".join(pieces))

    async def drained(self) -> None:
        while (paused := self.paused) is not None:  # ends when the client reads, or when `expire` disconnects it
            await asyncio.shield(paused)
        if self._lost:
            raise ClientDisconnected

    # Internal

    def _parse(self, data: bytes) -> None:
        """Parse the bytes in pieces of at most `PARSE_BYTES`.

        If a complete request waits to be served after a piece, the remaining bytes stay in `unparsed` (rule 1).
        """
        if len(data) <= PARSE_BYTES:
            self._parser.feed_data(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), PARSE_BYTES):
            try:
                self._parser.feed_data(view[start : start + PARSE_BYTES])
            except httptools.HttpParserUpgrade as offered:
                raise httptools.HttpParserUpgrade(start + offered.args[0]) from None
            if self.waiting:
                self.unparsed = data[start + PARSE_BYTES :]
                return

    def _parse_rest(self) -> None:
        if self._lost or self.waiting:
            return
        data, self.unparsed = self.unparsed, b""
        if data:
            self.data_received(data)
        self._advance()

    def _begin_body_stream(self, streams: StreamsBody) -> bool:
        """Serve the request whose head is complete, if the server reads its body while it arrives (rule 7).

        Return whether the request is being served. The body of a request that has to wait for an earlier one is collected in
        memory instead.
        """
        headers = self._headers
        if self.exchange is not None or self.waiting or b"upgrade" in headers:
            return False
        if b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0":
            return False
        head = self._parsed_head(keep_alive=self._parser.should_keep_alive())
        if not streams(head):
            return False
        self._raw_head = None
        self._body_seen = 0
        body = self._arriving = BodyStream(self._body_was_read)
        if self._expects_continue():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._start(HttpRequest(head, b"", body))
        return True

    def _expects_continue(self) -> bool:
        """Return whether the client waits for status 100. HTTP/1.0 has no such status (RFC 9110, 10.1.1)."""
        expects = self._headers.get(b"expect", b"").lower() == b"100-continue"
        return expects and self._parser.get_http_version() != "1.0"

    def _parsed_head(self, *, keep_alive: bool) -> HttpHead:
        path, query = split_target(self._url)
        return HttpHead(
            method=self._parser.get_method().decode("ascii"),
            path=path,
            query=query,
            headers=self._headers,
            keep_alive=keep_alive,
            chunked_answer=self._parser.get_http_version() != "1.0",
        )

    def _refuse_body_of_stranger(self) -> None:
        """If the client is a stranger, serve its request now without the body that is arriving; otherwise take the body (rule 10).

        A request behind an earlier one cannot be served yet. `_advance` then stops reading, and calls this method again when the
        earlier request has ended.
        """
        if self._is_stranger is None or self._arriving is not None:
            self._takes_body = True
            return
        if not self._reading:  # nothing was read for a while, so the time limit for the body begins again
            self.deadline = self._deadline_in(self._settings.body_timeout_seconds)
        if self.exchange is not None or self.waiting or self.paused is not None:
            self._advance()
            return
        if self._known_head is None:
            head = self._parsed_head(keep_alive=False)
        else:
            head = structs.replace(self._known_head[0], keep_alive=False)
        if not self._is_stranger(head):
            self._takes_body = True
            return
        self._hold(-self._body.size)
        self._body, self._known_head, self._raw_head = BodyBuffer(), None, None
        self._stage = _CLOSING
        self._start(HttpRequest(head, b"", unread=True))

    def _body_was_read(self) -> None:
        if not self._lost:
            self._advance()

    def _check_body_rate(self, body: BodyStream) -> None:
        """Reject a body if too few of its bytes have arrived since the last check, except if its consumer reads too slowly."""
        if body.full or body.received - self._body_seen >= self._settings.min_read_bytes:
            self._body_seen = body.received
            self.deadline = self._deadline_in(self._settings.body_timeout_seconds)
        else:
            self._reject(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")

    def _answer_offer(self, rest: bytes) -> None:
        """Let a WebSocket begin if the server wants it (rule 7), or decline the offer of another protocol (rule 6)."""
        head = self._declined_head
        if (
            head is None
            or self._streams is None
            or self.exchange is not None
            or self.waiting
            or head.method != "GET"
            or head.headers.get(b"upgrade", b"").lower() != b"websocket"
            or not self._streams(head)
        ):
            self._decline_upgrade(rest)
            return
        self._declined_head = None
        self._stage = _SWITCHED
        body = self._arriving = BodyStream(self._body_was_read)
        if rest:
            body.add(rest)
        self._start(HttpRequest(head, b"", body))

    def _take_switched(self, data: bytes) -> None:
        if self._arriving is not None:
            self._arriving.add(data)
            if self._arriving.full:
                self._advance()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers another protocol, but keep HTTP/1.1 (rule 6). The bytes `rest` follow its head.

        The connection closes after the answer, because the client may already have switched to the other protocol.
        """
        head, self._declined_head = self._declined_head, None
        if head is None:
            return  # the request was rejected meanwhile
        if head.method == "CONNECT" or b"transfer-encoding" in head.headers or self.exchange is not None:
            self._reject(
                HTTPStatus.NOT_IMPLEMENTED, "no other protocol is spoken here; send the request without an upgrade"
            )
            return
        self._known_head = (head, int(head.headers.get(b"content-length", b"0")))
        self._stage = _BODY
        self.deadline = self._deadline_in(self._settings.body_timeout_seconds)
        self._take_known_body(rest, 0)

    def _next_turn(self) -> None:
        self._served, self._turn_scheduled = 0, False
        if not self._lost:
            self._advance()

    def _drop_waiting(self) -> None:
        self.waiting.clear()
        self.unparsed = b""

    def _cache_head(self, content: bytes, head: HttpHead, body: bytes) -> None:
        """Cache the head if only the content length determines where the body ends."""
        if self._streams is not None and self._streams(head):
            return
        if head.keep_alive and head.chunked_answer and not head.headers.keys() & _MEANINGFUL_HEADERS:
            self._heads.add(content, head, len(body))

    def _take_known_body(self, data: bytes, begin: int) -> bytes:
        """Add bytes from `begin` on to a body whose head is known; return the bytes after the body."""
        assert self._known_head is not None
        head, body_bytes = self._known_head
        end = begin + body_bytes - self._body.size
        piece = memoryview(data)[begin:end]
        self._body.add(piece)
        self._hold(len(piece))
        if self._memory_is_full():
            self._reject_long()
            return b""
        if self._body.size < body_bytes:
            if not self._takes_body:
                self._refuse_body_of_stranger()
            return b""
        body, self._body = self._body.whole(), BodyBuffer()
        self._known_head = None
        self._stage = _IDLE if head.keep_alive else _CLOSING
        self._start(HttpRequest(head, body))
        return data[end:]

    def _start(self, request: HttpRequest) -> None:
        """Start to serve a request. The caller has checked that no other request is being served."""
        if self._slot is not None:
            self._slot.served = True
        exchange = self.exchange = Exchange(self, request)
        self._starting = True
        serving = self._serve(exchange)
        self._starting = False
        if self.exchange is exchange:  # False if the exchange has ended already
            self._serving = serving

    def _advance(self) -> None:
        while self.exchange is None and self.waiting and self.paused is None:
            if self._served >= MAX_REQUESTS_PER_TURN:
                if not self._turn_scheduled:
                    self._turn_scheduled = True
                    asyncio.get_running_loop().call_soon(self._next_turn)
                break
            self._served += 1
            following = self.waiting.popleft()
            if isinstance(following, MalformedRequest):
                self._drop_waiting()
                self.transport.write(following.answer(self._explain(following)))
                self._linger()
                return
            self._start(following)
        if self.unparsed and not self.waiting:
            asyncio.get_running_loop().call_soon(self._parse_rest)
        undecided = self._stage is _BODY and not self._takes_body and self._arriving is None
        if undecided and self.exchange is None and not self.waiting and self.paused is None:
            self._refuse_body_of_stranger()
            undecided = False
        behind = bool(
            undecided or self.waiting or self.unparsed or (self._arriving is not None and self._arriving.full)
        )
        if self._reading and behind:
            self.transport.pause_reading()
        elif not self._reading and not behind:
            self.transport.resume_reading()
        self._reading = not behind

    def finished(self, *, keep_alive: bool) -> None:
        if self._source is not None and self.paused is not None:
            self._source.resume_reading()  # the source may be used for another client next, so it must read again
        if self.exchange is not None and not self._lost:
            self._hold(-len(self.exchange.request.body))
        self.exchange = self._serving = self._source = None
        if self._lost:
            return
        if self._arriving is not None:  # the remaining bytes of the body have no consumer
            self._arriving, keep_alive = None, False
        if self._half_closed or not keep_alive or (self._stage is _CLOSING and not self.waiting):
            self._drop_waiting()
            self._linger()
            return
        waits = not (self.waiting or self.unparsed)
        if self._stage is _IDLE:
            now = self._clock.now()
            self.deadline = Nanos(now + self._idle_nanos)
            slot = self._slot
            if waits and slot is not None:
                if slot.group is _WAITS_IDLE and now / SECOND - slot.since < ORDER_SECONDS:
                    slot.served = False  # `mark_waiting` would do nothing else here
                else:
                    self._table.mark_waiting(slot, _WAITS_IDLE, now / SECOND)
        elif waits:
            self._note_waiting()
        # If the exchange ended within `_start`, the caller of `_start` continues with the next request.
        if not ((waits and self._reading) or self._starting):
            self._advance()

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        self._held.bytes += size

    def _memory_is_full(self) -> bool:
        """Return whether the arriving body is a long one and the memory for bodies is full."""
        return self._body.size > ORDINARY_BODY_BYTES and self._held.bytes > self._settings.max_held_bytes

    def _refuse_connection(self, message: str) -> None:
        """Answer with an error, and close the connection, which has no slot in the table."""
        refusal = self._refusal(HTTPStatus.SERVICE_UNAVAILABLE, message, RETRY_AFTER_SECONDS)
        self._hold(-self._body.size)
        self._body = BodyBuffer()
        self._drop_waiting()
        self.transport.write(refusal.answer(self._explain(refusal)))
        if len(self._connections) - len(self._table) <= MAX_LINGERING:
            self._linger()
        else:
            self._stage = _CLOSING
            self.transport.close()

    def _reject_long(self) -> None:
        self._reject_for_now("too many long requests are being taken in; retry later")

    def _reject_for_now(self, message: str) -> None:
        self._reject(HTTPStatus.SERVICE_UNAVAILABLE, message, RETRY_AFTER_SECONDS)

    def _note_waiting(self) -> None:
        """Record in the table what the connection waits for, unless a request is being served or waits to be served."""
        if self.exchange is not None or self.waiting or self.unparsed:
            return
        if self._stage is _IDLE:
            group = WaitingFor.IDLE
        elif self._stage is _HEAD:
            group = WaitingFor.HEAD
        elif self._stage is _BODY:
            group = WaitingFor.BODY
        else:
            group = WaitingFor.CLOSING
        if self._slot is not None:
            self._table.mark_waiting(self._slot, group, self._clock.now() / SECOND)

    def _is_http_0_9(self, data: bytes) -> bool:
        """Return whether a request line has ended without a version; `data` is its latest part.

        The parser notices this only with the next byte. So it would wait for further lines of a head, which a client of
        HTTP/0.9 never sends.
        """
        if self._stage is not _HEAD or not self._url:
            return False
        version = self._parser.get_http_version()
        return version == "0.9" or (version == "0.0" and data.endswith(b"\n"))

    def _refusal(self, status: HTTPStatus, message: str, retry_after_seconds: int) -> MalformedRequest:
        """Return the error for the request that is arriving. It depends on the path and the headers, as far as they are known."""
        path, headers = "", _NO_HEADERS
        if self._stage in (_HEAD, _BODY):
            if self._known_head is None:
                path, headers = split_target(self._url)[0], self._headers
            else:
                path, headers = self._known_head[0].path, self._known_head[0].headers
        return MalformedRequest(
            status, message, retry_after_seconds, answer_id(headers), is_anthropic=is_anthropic(path, headers)
        )

    def _reject(self, status: HTTPStatus, message: str, retry_after_seconds: int = 0) -> None:
        if self._stage is _CLOSING:
            return
        refusal = self._refusal(status, message, retry_after_seconds)
        self._hold(-self._body.size)
        self._body = BodyBuffer()
        self._stage = _CLOSING
        if self._arriving is not None:
            # The request was started before its body was complete. The reader of the body gets this error, and answers.
            self._arriving.fail(RequestRejected(Reason.INVALID_ARGUMENT, message))
            return
        self.waiting.append(refusal)
        self._advance()

    def _reject_head(self) -> None:
        limit = self._settings.max_head_bytes
        self._reject(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's head is larger than {limit} bytes (setting http.max_head_bytes)",
        )

    def _reject_overhead(self) -> None:
        limit = self._settings.max_head_bytes
        message = (
            f"the request's body has more than {limit} bytes of chunk sizes and trailers (setting http.max_head_bytes)"
        )
        self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _reject_body(self) -> None:
        limit = self._settings.max_body_bytes
        self._reject(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request's body is larger than {limit} bytes (setting http.max_body_bytes)",
        )

    def _linger(self) -> None:
        """Close the connection after the client has had time to read the answer; meanwhile drop the remaining bytes of its request.

        Close it at once if the client has closed its sending side, or if the connection uses TLS, which has no
        half-closed connections.
        """
        self._stage = _CLOSING
        if self._slot is not None:
            self._table.mark_waiting(self._slot, WaitingFor.CLOSING, self._clock.now() / SECOND)
        if self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.deadline = self._deadline_in(LINGER_SECONDS)
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        self.transport.write_eof()

    def _resume(self) -> None:
        paused, self.paused = self.paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    def _deadline_in(self, seconds: float) -> Nanos:
        return Nanos(self._clock.now() + int(seconds * SECOND))
