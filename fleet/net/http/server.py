"""HTTP server: one port, its connections and a table of routes.

Each request runs in a supervised task, so an error in one request does not end the others. If the settings allow it, web
pages of other origins may call the port (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus

from fleet.core.clock import SECOND, Clock
from fleet.core.errors import RequestRejected, internal_error
from fleet.net.client_tls import HTTP_1, ServerCertificates, TlsPort
from fleet.net.connection_limits import ConnectionTable
from fleet.net.http.connection import HttpConnection, IsStranger, StreamsBody
from fleet.net.http.errors import http_error_body, send_http_error, send_rejection
from fleet.net.http.exchange import (
    ClientDisconnected,
    Exchange,
    ExchangeTask,
    HeadCache,
    HeldBodyBytes,
    HttpHead,
    HttpRequest,
    MalformedRequest,
)
from fleet.net.limit_log import ClientLog, ConnectionLimitLog
from fleet.net.settings import HttpSettings
from fleet.net.sockets import BACKLOG, bind_tcp
from kvstore.net.listeners import stop_listening

log = logging.getLogger(__name__)

ANY_ORIGIN = "*"
PREFLIGHT_SECONDS = "600"  # seconds for which browsers may cache the answer to a preflight; Safari allows no more
_HEADER_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_, "

SWEEP_SECONDS = 0.25

PLAIN_REQUEST = MalformedRequest(HTTPStatus.BAD_REQUEST, "this port speaks TLS: use https")

RouteHandler = Callable[[Exchange], Awaitable[None]]
Routes = Mapping[str, Mapping[str, RouteHandler]]
"""Handlers by path, and then by method."""


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

    def connection(self) -> HttpConnection:
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
