"""Server of framed calls (`kvstore.protocol.calls`): many connections on the node's event loop.

Rules:

1. Requests of a connection are answered in the order of arrival. The answer to a request is computed at once, without
   waiting for anything else.
2. If many requests arrive together on a connection, `TURN_REQUESTS` of them are answered. Then other connections are
   served before the next requests of this one.
3. Answers that a client does not read are kept, up to `SEND_BYTES`. Meanwhile, nothing further is read from this
   client.
4. The connection of a client is closed if, for the time `STALLED`, the client does not complete a request that it has
   begun, or does not read its answers. A connection without a request stays open, because it costs only a file
   descriptor. There are at most `CONNECTIONS` connections; a further one is closed at once.
5. If a client sends bytes that are not a request, its connection is closed and counted. Other connections are not
   affected.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError, Message

from kvstore.clock import SECOND, Nanos
from kvstore.errors import StoreError
from kvstore.net.frames import FrameConnection, FrameTooLong
from kvstore.protocol import wire
from kvstore.protocol.calls import FRAME_BYTES, OK, Method, refusal_message

CONNECTIONS = 1024
SEND_BYTES = 4 * FRAME_BYTES
STALLED = Nanos(10 * SECOND)
TURN_REQUESTS = 8  # requests of one connection that are answered at a time: half a millisecond for usual look-ups

CallHandler = Callable[[bytes], Message]
"""A function that turns the bytes of a request into the answer. It raises `StoreError` if the store refuses the
request, and `DecodeError` if the bytes are not a request.
"""

log = logging.getLogger(__name__)


class FramedCallServer:
    """Answers framed calls (`kvstore.protocol.calls`), by the rules of this module."""

    def __init__(self, handlers: Mapping[Method, CallHandler]):
        self._handlers = {bytes((method,)): handler for method, handler in handlers.items()}
        self.callers: set[_CallerConnection] = set()
        self.undecodable = 0
        """Number of requests that could not be decoded since the node started."""

    async def take(self, accepted: socket.socket) -> None:
        """Serve a connection whose first bytes (the opening) the caller has read.

        From now on the server owns the socket.
        """
        if len(self.callers) >= CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: FrameConnection(
                    self._accept, limit=FRAME_BYTES, send_limit=SEND_BYTES, turn_frames=TURN_REQUESTS
                ),
                accepted,
            )
        except BaseException:
            accepted.close()
            raise

    def answer(self, payload: bytes) -> tuple[bytes, bytes]:
        """Perform a request, and return its answer in two parts.

        The first part is the status of success, and the second part is the result. If the store refuses the request,
        the first part is empty, and the second part is a refusal, which contains a status.

        Raises:
            DecodeError: The payload is not a request.
        """
        handler = self._handlers.get(payload[:1])
        if handler is None:
            raise DecodeError("no such method")
        try:
            return _WELL, handler(payload[1:]).SerializeToString()
        except StoreError as error:
            code, field = wire.status_of(error)
            return b"", refusal_message(code, field, str(error))

    def cut_stalled(self, now: Nanos) -> None:
        """Close connections whose client has stopped within a request or reads no answers (rule 4); call this periodically."""
        for caller in list(self.callers):
            caller.cut_if_stalled(now)

    def close(self) -> None:
        for caller in list(self.callers):
            caller.connection.abort()

    def _accept(self, connection: FrameConnection) -> "_CallerConnection":
        caller = _CallerConnection(self, connection)
        self.callers.add(caller)
        connection.send()  # an empty frame tells the client that the connection is accepted
        return caller

    def count_invalid(self, error: Exception) -> None:
        """Count and log a connection on which a client has sent something other than a request."""
        self.undecodable += 1
        log.warning("local connection cut: not a request", extra={"reason": str(error)})

    def forget(self, caller: "_CallerConnection") -> None:
        self.callers.discard(caller)


_WELL = bytes((OK,))


class _CallerConnection:
    """The `FrameReceiver` of one connection: answers its requests."""

    def __init__(self, server: FramedCallServer, connection: FrameConnection):
        self.connection = connection
        self._server = server
        self._held_up = False  # True while reading is paused, until the client has read its answers
        self._stuck_since: Nanos | None = None

    def received(self, payload: bytes) -> None:
        self._stuck_since = None
        try:
            self.connection.send(*self._server.answer(payload))
            # Send the answer now, before the event loop counts the use of the chain, which takes longer than the answer itself.
            self.connection.flush()
        except DecodeError as error:
            self._server.count_invalid(error)
            self.connection.abort()
            return
        except ConnectionError as error:
            log.warning("local connection cut", extra={"reason": str(error)})
            self.connection.abort()
            return
        if self.connection.full and not self._held_up:
            self._held_up = True
            self.connection.pause_reading()

    def resumed(self) -> None:
        self._stuck_since = None
        if self._held_up:
            self._held_up = False
            self.connection.resume_reading()

    def lost(self, cause: Exception | None) -> None:
        if isinstance(cause, FrameTooLong):
            self._server.count_invalid(cause)
        self._server.forget(self)  # other causes are not logged, because a client may close its connection at any time

    def cut_if_stalled(self, now: Nanos) -> None:
        if not (self.connection.full or self.connection.torn):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= STALLED:
            self.connection.abort()
