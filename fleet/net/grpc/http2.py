"""gRPC server on the sockets of the event loop: HTTP/2 by libnghttp2 (`ngh2`), and gRPC on top of it.

This server takes the handlers of `grpc.aio.Server`, so services need not know which server runs. `grpc.aio.Server`
passes each message to a thread and back through a socket. Here, all messages that a connection's calls send in one
iteration of the event loop leave in one write. `fleet.net.grpc.http2_call` has the rules of calls. Rules of connections:

1. If no bytes have come from a client for `SILENCE_SECONDS`, the client gets a ping. If no bytes come for another
   `SILENCE_SECONDS`, the connection is closed. Time during which this process was stopped does not count. A connection
   is also closed if its first byte does not come within `first_byte_timeout_seconds`, or if its client reads too slowly
   (`SlowReader`).
2. libnghttp2 ends a connection that sends too many resets, settings, pings or header blocks, by the limits of
   `CONFIGURATION`.
3. The received bytes of all calls are bounded by `max_held_bytes` plus `HELD_BYTES`, and the number of calls by
   `MAX_CALLS`. Long messages may use only half of `HELD_BYTES`, so they cannot shut out ordinary calls.
4. When the server stops, or a connection gets old, clients are asked to open a new connection (GOAWAY). The calls of an
   old connection finish; the calls of a stopping server get its grace period.
5. A connection without calls may be closed at any time for a new connection (`ConnectionTable`).
"""

import asyncio
import contextlib
import random
import socket
import stat
from collections.abc import Callable, Sequence
from errno import EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT
from functools import partial
from pathlib import Path
from typing import Any, Never, cast

import grpc
import ngh2
from ngh2.events import DataReceived, RequestReceived, StreamClosed, TrailersReceived

from fleet.net.client_tls import HTTP_2, ServerCertificates, TlsPort
from fleet.net.connection_limits import (
    ConnectionSlot,
    ConnectionTable,
    SlowReader,
    WaitingFor,
    WriteBufferCounter,
    client_key,
)
from fleet.net.grpc.http2_call import CallContext
from fleet.net.limit_log import ClientLog, ConnectionLimitLog
from fleet.net.settings import DEFAULT_GRPC_LIMITS, MIB, GrpcSettings
from fleet.net.sockets import BACKLOG, configure_client_port, split_listen_address
from kvstore.net.listeners import stop_listening

# Memory for messages of ordinary calls, besides `max_held_bytes`: 4,096 messages of `fleet.net.settings.ORDINARY_BODY_BYTES`.
HELD_BYTES = 256 << 20
MAX_CALLS = 32_768  # maximum number of calls that the server runs at a time; more are refused with UNAVAILABLE
MAX_QUEUED_BYTES = 8 << 10  # number of unsent bytes of one call above which the call's `write` waits
SILENCE_SECONDS = 5.0
SWEEP_SECONDS = 1.0
SHUTDOWN_NOTICE_SECONDS = 1.0  # time after the shutdown notice in which further calls of the client are still accepted
FINAL_FLUSH_SECONDS = 1.0  # time limit of `stop` for cancelled calls to end, and then again for sending the last bytes

CONFIGURATION = ngh2.Configuration(
    auto_window_update=False,
    # Beyond these two limits the whole connection ends, and with it all calls of a gateway. Therefore a single call is
    # refused at a lower limit (`fleet.net.grpc.http2_call.LONGEST_HEAD_BYTES`).
    max_inbound_header_list_size=64 << 10,
    max_inbound_header_count=1024,
    # Maximum number of stream resets in a burst, and per second. The limit is high, because a gateway resets calls of
    # clients that left.
    stream_reset_rate_limit=(10_000, 1_000),
)
# HTTP/2 settings by id: maximum number of concurrent streams, bytes of a call's flow-control window, bytes of a head.
SETTINGS = {0x3: 8192, 0x4: 256 << 10, 0x6: 16 << 10}
WINDOW_BYTES = 4 << 20  # bytes of a connection's flow-control window


class _CallDetails:
    """The method and the metadata of a call, by which its handler is found. Implements `grpc.HandlerCallDetails`."""

    def __init__(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self.method = method
        self.invocation_metadata = metadata


class Http2Server:
    """Serves gRPC calls over HTTP/2. Implements `fleet.net.grpc.client_servers.ClientServer`."""

    def __init__(
        self,
        *,
        shared: bool = False,
        connection_seconds: float = 0,
        limits: GrpcSettings = DEFAULT_GRPC_LIMITS,
        max_held_bytes: int = 1024 * MIB,
        certificates: ServerCertificates | None = None,
    ) -> None:
        """Create a server; `add_insecure_port` binds and `start` begins to serve.

        Args:
            shared: True if other processes may listen on the same port.
            connection_seconds: Seconds, varied by up to a tenth, after which a client is asked to reconnect; 0 sets no
                limit.
            limits: Limits of connections.
            max_held_bytes: Number of bytes of the messages that arrive or are being served, beyond which long messages
                are refused.
            certificates: The certificates of a TCP port that speaks TLS; None if it does not.
        """
        self.limits = limits
        self.max_held_bytes = max_held_bytes
        self.table: ConnectionTable[Http2Connection] = ConnectionTable(limits.max_connections, limits.address_share)
        self.connection_seconds = connection_seconds
        self.connections: dict[Http2Connection, None] = {}
        self.calls = 0
        self.held_bytes = 0
        self.closing = False
        self._shared = shared
        self._handlers: list[Any] = []
        self._sockets: list[socket.socket] = []
        self._paths: list[Path] = []
        self._stop_listening: list[Callable[[], None]] = []
        self._certificates = certificates
        self._sweep: asyncio.Task[Never] | None = None
        self._limit_log = ConnectionLimitLog(self.table)
        self.client_log = ClientLog(limits)
        self._listen = ""
        self._left = asyncio.Event()  # set when the last connection has ended

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing. Generated code calls this method too, but its handlers are also added as generic handlers."""

    def add_insecure_port(self, listen: str) -> int:
        """Bind ``host:port`` (at all addresses of the host) or ``unix:/path``; return the port, or 1 for a Unix socket.

        Raises:
            RuntimeError: The address is malformed or cannot be bound.
        """
        self._listen = listen
        try:
            if listen.startswith("unix:"):
                path = Path(listen.removeprefix("unix:"))
                self._sockets.append(_bind_path(path))
                self._paths.append(path)
                return 1
            bound = _bind_host(listen, shared=self._shared)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"cannot listen on {listen}: {error}") from error
        self._sockets += bound
        return int(bound[0].getsockname()[1])

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for bound in self._sockets:
            if self._certificates is not None and bound.family != socket.AF_UNIX:
                self._stop_listening.append(self._tls_port(bound, self._certificates).close)
                continue
            make = loop.create_unix_server if bound.family == socket.AF_UNIX else loop.create_server
            server = await make(lambda: Http2Connection(self), sock=bound, backlog=BACKLOG)
            self._stop_listening.append(partial(stop_listening, server))
        self._sweep = loop.create_task(self._sweep_forever())

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, let running calls finish for `grace` seconds (None or 0: not at all), then cancel the remaining calls."""
        self.closing = True
        for stop in self._stop_listening:
            stop()
        await asyncio.sleep(0)
        for bound in self._sockets:
            bound.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        for connection in list(self.connections):
            connection.go_away(at_once=True)
        if grace and (tasks := self._tasks()):
            await asyncio.wait(tasks, timeout=grace)
        tasks = self._tasks()
        for connection in list(self.connections):
            connection.cancel_calls()
        if tasks:
            await asyncio.wait(tasks, timeout=FINAL_FLUSH_SECONDS)
        for connection in list(self.connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_FLUSH_SECONDS):
                while self.connections:
                    self._left.clear()
                    await self._left.wait()
        for connection in list(self.connections):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()
        await asyncio.sleep(0)

    def handler(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Any:
        """Return the handler of a method; None if there is none."""
        called = _CallDetails(method, metadata)
        return next((found for each in self._handlers if (found := each.service(called)) is not None), None)

    def rejection(self) -> str:
        """Return why the server refuses new calls now; empty if it accepts them."""
        if self.closing:
            return "the server is going away"
        if self.calls > MAX_CALLS or self.over_memory_limit(long=False):
            return "too many calls run at once; retry later"
        return ""

    def over_memory_limit(self, *, long: bool) -> bool:
        """Return whether so many received bytes are in memory that no further message may arrive.

        `long` is true for a message of more than `fleet.net.settings.ORDINARY_BODY_BYTES`. Services reject complete long messages by
        `max_held_bytes`; this higher limit holds while messages arrive.
        """
        return self.held_bytes > self.max_held_bytes + (HELD_BYTES // 2 if long else HELD_BYTES)

    def connection_closed(self, connection: "Http2Connection") -> None:
        self.connections.pop(connection, None)
        if connection.slot is not None:
            self.table.remove(connection.slot)
            connection.slot = None  # breaks a reference cycle
        if not self.connections:
            self._left.set()

    def _tls_port(self, bound: socket.socket, certificates: ServerCertificates) -> TlsPort:
        bound.listen(BACKLOG)
        return TlsPort(
            bound,
            certificates.context(HTTP_2),
            lambda: Http2Connection(self),
            self.table,
            self.client_log,
            self.limits,
            now=asyncio.get_running_loop().time,
        )

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [
            call.task
            for connection in self.connections
            for call in connection.calls.values()
            if call.task is not None and not call.task.done()
        ]

    async def _sweep_forever(self) -> Never:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            # Yield once more, because uvloop wakes sleeping tasks before it reads sockets. So bytes that came while this process
            # was stopped are read before the silence of clients is judged.
            await asyncio.sleep(0)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                connection.check_limits(now)
            self._limit_log.log_changes(now, self._listen)
            self.client_log.log_changes(now, self._listen)


class Http2Connection(asyncio.Protocol):
    """Handles the connection of one client. Implements `fleet.net.grpc.http2_call.Http2ConnectionApi`."""

    def __init__(self, server: Http2Server) -> None:
        self.server = server
        self.loop = asyncio.get_running_loop()
        self.http = ngh2.Connection(ngh2.Role.SERVER, CONFIGURATION)
        self.calls: dict[int, CallContext] = {}
        # The slot in the table. None: the table was full, or the connection has ended.
        self.slot: ConnectionSlot[Http2Connection] | None = None
        self._waiting: dict[CallContext, None] = {}  # calls whose writers wait for their callers to read
        self._ending: dict[CallContext, None] = {}  # answered calls whose callers have not ended their requests
        self.transport: asyncio.Transport
        self._flushing = False
        self.paused = False
        self._slow_reader = SlowReader(server.limits.write_timeout_seconds, server.limits.min_read_bytes)
        self._buffer = WriteBufferCounter()
        self._has_spoken = False
        self._gone = False
        self._shutdown_at: float | None = None
        self._goaway_sent = False  # True after the final GOAWAY, from which on the client's new calls are refused
        self._began_at = self._received_at = self.loop.time()
        self.pinged_at: float | None = None  # time at which the unanswered ping was sent; None if there is none
        seconds = server.connection_seconds
        self._old_at = self._received_at + seconds * random.uniform(0.9, 1.1) if seconds else float("inf")

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self.server.closing:
            self.transport.abort()
            return
        address = client_key(transport.get_extra_info("peername"))
        admission = self.server.table.admit(self, address, self.loop.time())
        if admission.displaced is not None:
            admission.displaced.displace(silent=admission.displaced_silent)
        self.slot = admission.slot
        if self.slot is None:
            self.transport.abort()
            return
        self.server.connections[self] = None
        self.http.initiate_connection(SETTINGS)
        self.http.set_local_window_size(WINDOW_BYTES)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - required by the protocol
        self._gone = True
        for call in list(self.calls.values()):
            self._end(call)
        self.server.connection_closed(self)

    def data_received(self, data: bytes) -> None:
        self._received_at = self.loop.time()
        self.pinged_at = None
        if not self._has_spoken:
            self._has_spoken = True
            self._note_idle()
        try:
            self.http.receive_data(data)
        except ngh2.NGH2Error:
            self.server.client_log.note_bytes(self.peer(), data)
            self._handle_events()
            self.flush()  # sends the library's error frame
            self.transport.close()
            return
        self._handle_events()
        self.flush()

    def pause_writing(self) -> None:
        self._buffer.paused(self.transport)
        self.paused = True

    def resume_writing(self) -> None:
        self._buffer.resumed(self.transport)
        self.paused = False
        self.flush()

    # Called by the calls of this connection (`Http2ConnectionApi`)

    def peer(self) -> str:
        name = self.transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unix:"
        return f"ipv4:{name[0]}:{name[1]}" if len(name) == 2 else f"ipv6:[{name[0]}]:{name[1]}"

    def must_wait(self, stream: int) -> bool:
        return self.paused or self.http.queued_body_size(stream) > MAX_QUEUED_BYTES

    def schedule_flush(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self.flush)

    def wait_for_room(self, call: CallContext) -> None:
        self._waiting[call] = None

    def finished(self, call: CallContext, *, complete: bool) -> None:
        if not complete:
            self._ending[call] = None
        self.schedule_flush()

    def acknowledge(self, call: CallContext, amount: int) -> None:
        if amount and not self._gone:
            with contextlib.suppress(ngh2.NGH2Error):  # raised if the connection is about to end
                self.http.acknowledge_received_data(amount, call.stream)
            self.schedule_flush()

    def reset(self, call: CallContext, code: int) -> None:
        if call.stream in self.calls:
            with contextlib.suppress(ngh2.NGH2Error):  # raised if the stream has just ended
                self.http.reset_stream(call.stream, code)
            self.schedule_flush()

    # Called by the server

    def check_limits(self, now: float) -> None:
        """Enforce the time limits of the connection (rules 1 and 4) and of its calls."""
        waiting = self.transport.get_write_buffer_size() if self.paused else 0
        silent = not self._has_spoken and now - self._began_at > self.server.limits.first_byte_timeout_seconds
        unanswered = self.pinged_at is not None and now - self.pinged_at > SILENCE_SECONDS
        slow = self._slow_reader.overdue(now, waiting, self._buffer.written)
        if slow:
            self.server.client_log.note_slow(self.peer(), waiting)
        if silent or unanswered or slow:
            self.transport.abort()
            return
        try:
            if now - self._received_at > SILENCE_SECONDS and self.pinged_at is None:
                self.pinged_at = now
                self.http.ping(b"are you?")
                self.schedule_flush()
            if now >= self._old_at:
                self.go_away()
            if self._shutdown_at is not None and now - self._shutdown_at > SHUTDOWN_NOTICE_SECONDS:
                self._send_goaway()
        except ngh2.NGH2Error:  # raised if the connection is ending already
            self.transport.abort()
            return
        for call in list(self.calls.values()):
            call.check_limits(now)

    def displace(self, *, silent: bool) -> None:
        """Close the connection at once, because the table needs the slot.

        No calls are running; a `silent` client has never sent a byte.
        """
        if not silent and not self._goaway_sent:
            with contextlib.suppress(ngh2.NGH2Error):  # raised if the connection is ending already
                self.http.send_goaway()
            self.flush()
        if self.paused or silent:
            self.transport.abort()
        else:
            self.transport.close()

    def go_away(self, *, at_once: bool = False) -> None:
        """Ask the client to open a new connection; `at_once` refuses further calls on this one immediately."""
        if self._gone:
            return
        with contextlib.suppress(ngh2.NGH2Error):  # raised if the connection is ending already
            if self._shutdown_at is None:
                self._shutdown_at = self.loop.time()
                self.http.send_shutdown_notice()
            if at_once:
                self._send_goaway()
        self.flush()

    def cancel_calls(self) -> None:
        for call in list(self.calls.values()):
            call.cancel(grpc.StatusCode.UNAVAILABLE, "the server is going away")

    def close(self) -> None:
        """Send the remaining bytes and close the connection."""
        if not self._gone:
            self.flush()
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    # Internal

    def flush(self) -> None:
        """Write the bytes that are ready to the transport, and resume the calls that waited because too many of their bytes were unsent."""
        self._flushing = False
        if self.paused or self._gone or self.transport.is_closing():
            return
        try:
            content = self.http.data_to_send()
        except ngh2.NGH2Error:  # raised if the client does not speak HTTP/2
            self.transport.abort()
            return
        if content:
            self.transport.write(content)
            self._handle_events()  # there are events of streams that ended with this write
        for call in list(self._ending):
            if not self.http.queued_body_size(call.stream):
                del self._ending[call]
                self.reset(call, 0)  # further messages of the caller are not needed
        for call in list(self._waiting):
            if not self.must_wait(call.stream):
                del self._waiting[call]
                call.resume_writer()
        if not self.http.want_read and not self.http.want_write:
            self.transport.close()

    def _handle_events(self) -> None:
        new = []
        for event in self.http.events():
            match event:
                case DataReceived():
                    call = self.calls.get(event.stream_id)
                    if call is None:
                        with contextlib.suppress(ngh2.NGH2Error):  # raised if the connection is about to end
                            self.http.acknowledge_received_data(len(event.data), event.stream_id)
                    else:
                        call.receive(event.data, complete=event.end_stream)
                case RequestReceived():
                    call = CallContext(self, event.stream_id, event.headers, complete=event.end_stream)
                    if self.slot is not None:
                        self.slot.served = True
                    self.calls[event.stream_id] = call
                    self.server.calls += 1
                    new.append(call)
                case TrailersReceived():
                    if (ended := self.calls.get(event.stream_id)) is not None:
                        ended.receive(b"", complete=True)
                case StreamClosed():
                    if (ended := self.calls.get(event.stream_id)) is not None:
                        self._end(ended)
                case _:
                    pass
        for call in new:
            if call.stream in self.calls:  # a later event of this batch may have ended the call already
                call.begin(self.server.rejection())

    def _end(self, call: CallContext) -> None:
        del self.calls[call.stream]
        if not self.calls:
            self._note_idle()
        self._waiting.pop(call, None)
        self._ending.pop(call, None)
        self.server.calls -= 1
        call.close()

    def _note_idle(self) -> None:
        """Record in the table that the connection has no calls."""
        if self.slot is not None:
            self.server.table.mark_waiting(self.slot, WaitingFor.IDLE, self.loop.time())

    def _send_goaway(self) -> None:
        if not self._goaway_sent:
            self._goaway_sent = True
            self.http.send_goaway()
            self.schedule_flush()
        if not self.calls and not self.server.closing:
            self.transport.close()


def _bind_host(listen: str, *, shared: bool) -> list[socket.socket]:
    host, port = split_listen_address(listen)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, _, _, _, address in found:
            each: socket.socket | None = None
            try:
                each = socket.socket(family)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if shared:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if len(found) == 1 else 1)
                configure_client_port(each)
                each.bind((address[0], bound[0].getsockname()[1] if bound else address[1], *address[2:]))
                if not shared:
                    # Listen now: two servers can bind the same address, and the second one fails only when it begins to listen.
                    each.listen(BACKLOG)
            except OSError as error:
                if each is not None:
                    each.close()
                if error.errno not in (EADDRNOTAVAIL, EAFNOSUPPORT):
                    raise
                missing = error  # this address does not exist here, for example ::1 of localhost if IPv6 is off
            else:
                bound.append(each)
    except OSError:
        for each in bound:
            each.close()
        raise
    if not bound:
        assert missing is not None
        raise missing
    return bound


def _bind_path(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            # The socket is in use, or a killed process has left it behind.
            with socket.socket(socket.AF_UNIX) as asking:
                if asking.connect_ex(str(path)) == 0:
                    raise OSError(EADDRINUSE, "somebody listens there")
            path.unlink()
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound
