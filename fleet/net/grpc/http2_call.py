"""One call of `fleet.net.grpc.http2`: its messages, its deadline and its status.

Rules:

1. A call is a task. It is cancelled when its caller resets it, when its connection ends, at its deadline, and when the
   server stops.
2. `CallContext.write` waits while the caller does not read. If a caller reads too slowly (`SlowReader`), or leaves the
   final status unread, its call is reset.
3. The caller's flow-control window (HTTP/2) is not opened again while `UNREAD_MESSAGES` messages wait to be read. A
   caller that sends faster than its handler reads must therefore wait.
4. A message above the size limit is refused as soon as its length prefix has arrived. An incomplete message is refused
   after a time limit.
5. A compressed message is decompressed only when its handler reads it (`fleet.net.grpc.compression`), so a waiting
   message takes no more memory than its received bytes.
"""

import asyncio
import base64
import contextlib
import logging
import re
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Never, Protocol
from urllib.parse import quote

import grpc
import ngh2

from fleet.net.connection_limits import SlowReader
from fleet.net.grpc.compression import ENCODINGS, IDENTITY, DecompressedTooLarge, decompress_message
from fleet.net.grpc.errors import encode_status, long_message_rejection
from fleet.net.grpc.options import LONGEST_REQUEST_BYTES
from fleet.net.limit_log import ClientLog
from fleet.net.settings import ORDINARY_BODY_BYTES, GrpcSettings

log = logging.getLogger(__name__)

# Maximum total length of the names and values of a call's headers; a call with longer headers is refused.
LONGEST_HEAD_BYTES = 16 << 10

REQUEST_SECONDS = 60.0
"""Time limit for a message to arrive, counted from its first byte; then it is refused (rule 4).

If the method takes a single message, the time is counted from the start of the call.
"""

UNREAD_STATUS_SECONDS = 30.0  # time limit for the caller to read the final messages and the status (rule 2)
UNREAD_MESSAGES = 4  # number of unread messages from which on the caller's window stays closed
MESSAGE_BYTES = 64  # memory that an unread message takes besides its content

PREFIX = struct.Struct(">BI")
RESPONSE_HEADERS = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b",".join(ENCODINGS)),
)
INTERNAL_ERROR, CANCEL = 0x2, 0x8  # error codes of HTTP/2 (RFC 9113, section 7)
_NOT_METADATA = ("te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Characters of a status message that are not escaped, besides letters, digits and `_.-~`.
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class Http2ServerApi(Protocol):
    """The part of `Http2Server` that a call needs."""

    limits: GrpcSettings
    client_log: ClientLog
    # Received bytes in memory: the head of each call until the call ends, each message until its handler reads it, and then for as
    # long as the service counts it (`fleet.net.grpc.client_servers.MessageMemory`).
    held_bytes: int

    def handler(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Any: ...

    def over_memory_limit(self, *, long: bool) -> bool: ...


class Http2ConnectionApi(Protocol):
    """The part of `Http2Connection` that a call needs."""

    loop: asyncio.AbstractEventLoop
    http: ngh2.Connection

    @property
    def server(self) -> Http2ServerApi: ...

    def peer(self) -> str: ...

    def must_wait(self, stream: int) -> bool:
        """Return whether a call must wait until its caller reads, before it writes another message."""

    def wait_for_room(self, call: "CallContext") -> None:
        """Call `call.resume_writer` as soon as `must_wait` is False for this call."""

    def schedule_flush(self) -> None:
        """Send the bytes that are ready, in the next iteration of the event loop, so that all messages of this iteration leave together."""

    def acknowledge(self, call: "CallContext", amount: int) -> None:
        """Open the caller's flow-control window (HTTP/2) again by `amount` received bytes."""

    def finished(self, call: "CallContext", *, complete: bool) -> None:
        """Handle a complete answer; if the request is not `complete`, its remaining bytes are discarded."""

    def reset(self, call: "CallContext", code: int) -> None:
        """End the call at once, with this error code of HTTP/2."""


class CallContext:
    """Serves one call. Implements the part of `grpc.aio.ServicerContext` that handlers use.

    A streaming handler iterates over the object to read the caller's messages.
    """

    def __init__(self, connection: Http2ConnectionApi, stream: int, headers: Sequence[Any], *, complete: bool) -> None:
        self.stream = stream
        self.task: asyncio.Task[None] | None = None  # the task that serves the call
        self._connection = connection
        self._loop = connection.loop
        self._headers = dict(headers)
        self._pairs = headers
        self._encoding: bytes = self._headers.get(b"grpc-encoding", IDENTITY)
        self._metadata: Sequence[tuple[str, str | bytes]] = ()
        self._request_complete = complete  # True if the caller has sent its whole request
        self._headers_sent = False
        # Time at which the status was written or the caller disconnected; None: the call runs.
        self._ended_at: float | None = None
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Sequence[tuple[str, str | bytes]] = ()
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._incoming = bytearray()
        self._incoming_since: float | None = None
        # The messages that were not read yet: compression flag and content.
        self.messages: deque[tuple[int, bytes]] = deque()
        self._unacknowledged = 0  # number of received bytes for which the caller's window was not opened again yet
        self._rejection: tuple[grpc.StatusCode, str, Sequence[tuple[str, str | bytes]]] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._written = 0  # number of bytes of all messages that were written so far
        self._slow_reader: SlowReader | None = None  # created when a message has to wait for the first time
        self._deserialize: Any = None
        self._serialize: Any = None
        self._held = 0
        self._head_bytes = sum(len(name) + len(value) for name, value in headers)
        self._hold(self._head_bytes)

    # Called by services

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def peer(self) -> str:
        return self._connection.peer()

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._trailing = metadata

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> Never:
        self._code, self._details, self._trailing = code, details, trailing_metadata
        raise grpc.aio.AbortError(details)

    async def abort_with_status(self, status: Any) -> Never:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    async def write(self, message: Any) -> None:
        """Send one message, and return when the caller has read enough for another one.

        Do not call this method again before it has returned.

        Raises:
            grpc.aio.UsageError: The call has ended.
        """
        if self._ended_at is not None:
            raise grpc.aio.UsageError("the call is over")
        connection = self._connection
        content = message if self._serialize is None else self._serialize(message)
        try:
            if not self._headers_sent:
                self._headers_sent = True
                connection.http.send_response(self.stream, RESPONSE_HEADERS)
            connection.http.send_data(self.stream, PREFIX.pack(0, len(content)) + content)
            self._written += len(content)
        except ngh2.NGH2Error as error:  # the connection handles the error itself, a little later
            raise grpc.aio.UsageError("the call is over") from error
        connection.schedule_flush()
        while connection.must_wait(self.stream):
            self._writer = self._loop.create_future()
            connection.wait_for_room(self)
            await self._writer
            if self._ended_at is not None:
                raise grpc.aio.UsageError("the call is over")

    def __aiter__(self) -> "CallContext":
        return self

    async def __anext__(self) -> Any:
        if (message := await self._read()) is None:
            raise StopAsyncIteration
        return message[0]

    # Called by the connection

    def resume_writer(self) -> None:
        """Let a waiting `write` return, because the caller has read enough."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def begin(self, rejection: str) -> None:
        """Start to serve the call.

        End it at once with UNAVAILABLE if `rejection` is not empty, or with RESOURCE_EXHAUSTED if its head is too long.
        """
        if rejection:
            self._finish(grpc.StatusCode.UNAVAILABLE, rejection)
            return
        if self._head_bytes > LONGEST_HEAD_BYTES:
            message = f"the metadata has {self._head_bytes} bytes, and {LONGEST_HEAD_BYTES} are allowed"
            self._finish(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
            return
        if (match := _TIMEOUT.fullmatch(self._headers.get(b"grpc-timeout", b"").decode("latin-1"))) is not None:
            seconds = int(match[1]) * _UNITS[match[2]]
            self._deadline = self._loop.time() + seconds
            self._timer = self._loop.call_later(min(seconds, 1e7), self._deadline_passed)
        self.task = self._loop.create_task(self._serve())

    def receive(self, data: bytes, *, complete: bool) -> None:
        """Take bytes from the caller; `complete` is True if the request ends with them."""
        self._request_complete = self._request_complete or complete
        if self._ended_at is not None or self._rejection is not None:
            self._connection.acknowledge(self, len(data))
        else:
            self._unacknowledged += len(data)
            self._incoming += data
            self._hold(len(data))
            self._split_messages()
            self._incoming_since = (self._incoming_since or self._loop.time()) if self._incoming else None
            self._open_window()
        self._wake_reader()

    def check_limits(self, now: float) -> None:
        """Enforce the time limits of the call (rules 2 and 4); its deadline has a timer of its own."""
        if self._ended_at is not None:
            if now - self._ended_at > UNREAD_STATUS_SECONDS:
                self._connection.reset(self, CANCEL)
        elif (
            self._incoming_since is not None
            and now - self._incoming_since > REQUEST_SECONDS
            and self._rejection is None
        ):
            self._reject(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the message was not complete within {REQUEST_SECONDS:g} s"
            )
            self._wake_reader()
        elif self._writer is not None and self._takes_too_little(now) and self.task is not None:
            self.task.cancel()

    def cancel(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with this status."""
        if self._ended_at is None:
            self._finish(code, details)
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """Release the call after its stream has ended."""
        if self._ended_at is None:
            self._ended_at = self._loop.time()
            if self.task is not None:
                self.task.cancel()
        self._discard_input()
        self._hold(-self._held)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writer()

    # Internal

    def _hold(self, amount: int) -> None:
        self._held += amount
        self._connection.server.held_bytes += amount

    def _takes_too_little(self, now: float) -> bool:
        if self._slow_reader is None:
            limits = self._connection.server.limits
            self._slow_reader = SlowReader(limits.write_timeout_seconds, limits.min_read_bytes)
        blocked = self._writer is not None and not self._writer.done()
        waiting = self._connection.http.queued_body_size(self.stream) if blocked else 0
        slow = self._slow_reader.overdue(now, waiting, self._written)
        if slow:
            self._connection.server.client_log.note_slow(self._connection.peer(), waiting)
        return slow

    def _discard_input(self) -> None:
        """Discard unread bytes, so that the connection's window is free for other calls."""
        self._incoming.clear()
        self.messages.clear()
        self._incoming_since = None
        self._connection.acknowledge(self, self._unacknowledged)
        self._unacknowledged = 0

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _split_messages(self) -> None:
        """Split the received bytes into messages.

        Reject a message that is malformed, incomplete at the end of the request, or too long, or for which there is no
        memory.
        """
        while len(self._incoming) >= PREFIX.size:
            compressed, size = PREFIX.unpack_from(self._incoming)
            if compressed > (self._encoding != IDENTITY):
                self._reject(
                    grpc.StatusCode.INTERNAL, "a message is compressed, and grpc-encoding names no compression"
                )
                return
            if size > LONGEST_REQUEST_BYTES:
                message = f"the message has {size} bytes, and {LONGEST_REQUEST_BYTES} are allowed in one"
                self._reject(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
                return
            if len(self._incoming) < PREFIX.size + size:
                break
            self.messages.append((compressed, bytes(self._incoming[PREFIX.size : PREFIX.size + size])))
            del self._incoming[: PREFIX.size + size]
            self._incoming_since = None
            self._hold(MESSAGE_BYTES - PREFIX.size)
        if self._incoming and self._request_complete:
            self._reject(grpc.StatusCode.INTERNAL, "the last message is incomplete")
        elif (self._incoming or len(self.messages) > UNREAD_MESSAGES) and self._memory_is_full():
            too_much = encode_status(long_message_rejection())
            self._reject(too_much.code, too_much.details, too_much.trailing_metadata)

    def _memory_is_full(self) -> bool:
        """Return whether there is no memory for the arriving message; long messages are refused before ordinary ones."""
        server = self._connection.server
        if len(self._incoming) < PREFIX.size:
            return server.over_memory_limit(long=False)
        _, size = PREFIX.unpack_from(self._incoming)
        return server.over_memory_limit(long=size > ORDINARY_BODY_BYTES)

    def _reject(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        """End the call with this status after the earlier messages are read."""
        self._rejection = code, details, trailing_metadata
        self._hold(-len(self._incoming))
        self._incoming.clear()

    def _open_window(self) -> None:
        """Let the caller send as many further bytes as have arrived since the window was opened last.

        While `UNREAD_MESSAGES` or more messages wait to be read, the window stays closed.
        """
        if self._unacknowledged and len(self.messages) < UNREAD_MESSAGES:
            self._connection.acknowledge(self, self._unacknowledged)
            self._unacknowledged = 0

    async def _read(self) -> tuple[Any] | None:
        """Return the next message; None at the end of the request."""
        while not self.messages:
            if self._rejection is not None:
                await self.abort(*self._rejection)
            if self._request_complete:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        compressed, message = self.messages.popleft()
        self._hold(-len(message) - MESSAGE_BYTES)
        self._open_window()
        if compressed:
            try:
                message = decompress_message(message, self._encoding)
            except DecompressedTooLarge as error:
                await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except ValueError as error:
                await self.abort(grpc.StatusCode.INTERNAL, f"the message cannot be unpacked: {error}")
        return (message if self._deserialize is None else self._deserialize(message),)

    async def _read_single(self) -> Any:
        if not self.messages and self._incoming_since is None:
            self._incoming_since = self._loop.time()
        if (message := await self._read()) is None:
            await self.abort(grpc.StatusCode.INTERNAL, "the request has no message")
        return message[0]

    async def _serve(self) -> None:
        code = grpc.StatusCode.UNKNOWN
        details = ""
        try:
            await self._dispatch()
            code, details = self._code, self._details
        except grpc.aio.AbortError:
            code, details = self._code, self._details
        except (asyncio.CancelledError, grpc.aio.BaseError):
            if self._ended_at is None:  # `check_limits` has cancelled the task, because the caller reads too slowly
                self._ended_at = self._loop.time()
                self._connection.reset(self, CANCEL)
        except Exception:  # supervisor: any error in a handler only ends this call, with the status UNKNOWN
            log.exception("call failed")
        finally:
            if self._ended_at is None:
                self._finish(code, details)

    async def _dispatch(self) -> None:
        headers = self._headers
        if headers.get(b":method") != b"POST" or not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self._send_trailers(((b":status", b"415"),))
            return
        if self._encoding not in ENCODINGS:
            known = b", ".join(ENCODINGS).decode()
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, f"grpc-encoding: must be one of {known}")
        try:
            self._metadata = tuple(_metadata(self._pairs))
        except ValueError:
            await self.abort(grpc.StatusCode.INTERNAL, "metadata whose names end in -bin must be base64")
        method = headers.get(b":path", b"").decode("latin-1")
        handler = self._connection.server.handler(method, self._metadata)
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self._deserialize, self._serialize = handler.request_deserializer, handler.response_serializer
        request = self if handler.request_streaming else await self._read_single()
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        result = serve(request, self)
        if hasattr(result, "__aiter__"):
            async with contextlib.aclosing(result):
                async for message in result:
                    await self.write(message)
        elif (answer := await result) is not None:
            await self.write(answer)

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        trailers = [(b"grpc-status", b"%d" % code.value[0])]
        if details:
            trailers.append((b"grpc-message", quote(details, safe=_PLAIN).encode("ascii")))
        for name, value in self._trailing:
            content = value if isinstance(value, bytes) else value.encode()
            packed = base64.b64encode(content).rstrip(b"=") if name.endswith("-bin") else content
            trailers.append((name.encode(), packed))
        self._send_trailers(trailers)

    def _send_trailers(self, last: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the trailers and end the call."""
        self._ended_at = self._loop.time()
        http = self._connection.http
        try:
            if self._headers_sent:
                http.send_trailers(self.stream, last)
            elif last[0][0] == b":status":
                http.send_response(self.stream, last, end_stream=True)
            else:
                http.send_response(self.stream, (*RESPONSE_HEADERS, *last), end_stream=True)
        except ngh2.NGH2Error:  # raised if the stream has just ended
            self._connection.reset(self, INTERNAL_ERROR)
        self._discard_input()
        self._connection.finished(self, complete=self._request_complete)

    def _deadline_passed(self) -> None:
        self.cancel(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def _metadata(headers: Sequence[Any]) -> Iterator[tuple[str, str | bytes]]:
    for name, value in headers:
        key = name.decode("latin-1")
        if key.startswith(":") or key in _NOT_METADATA:
            continue
        if key.endswith("-bin"):
            for part in value.split(b","):
                plain = part.strip().rstrip(b"=")
                yield key, base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
        else:
            yield key, value.decode("latin-1")
