"""The node's end of framed calls (`kvstore.protocol.calls`): many connections, on the event loop on which everything is decided.

Rules:

1. A request is answered at once, in the order in which it came: nothing is kept of it, and nothing waits.
2. Of the requests that came together, a connection has `TURN_REQUESTS` answered; then others have their turn.
3. What a client does not take is kept up to `SEND_BYTES`; nothing more is read from it meanwhile.
4. Who stops in the middle of a request, or does not take its answers, for `STALLED`, is cut. Quiet connections cost a
   descriptor, and there are at most `CONNECTIONS`.
5. What is no request ends the connection that it came by, and no other; it is counted.
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
TURN_REQUESTS = 8  # half a millisecond, for look-ups of a usual size

Act = Callable[[bytes], Message]
"""From the bytes of a request to its answer; raises `StoreError`, or `DecodeError` where they are none."""

log = logging.getLogger(__name__)


class FramedCallServer:
    """See the module."""

    def __init__(self, acts: Mapping[Method, Act]):
        """Serves whom `take` is given."""
        self._acts = {bytes((method,)): act for method, act in acts.items()}
        self._callers: set[_CallerConnection] = set()
        self.undecodable = 0
        """What was no request, since the node started."""

    async def take(self, accepted: socket.socket) -> None:
        """Serve a connection whose opening has been read; takes the socket over."""
        if len(self._callers) >= CONNECTIONS:
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
        """Head and body of the answer.

        Raises:
            DecodeError: That is no request.
        """
        act = self._acts.get(payload[:1])
        if act is None:
            raise DecodeError("no such method")
        try:
            return _WELL, act(payload[1:]).SerializeToString()
        except StoreError as error:
            code, field = wire.status_of(error)
            return b"", refusal_message(code, field, str(error))

    def cut_stalled(self, now: Nanos) -> None:
        """Ends connections whose other end has stopped in the middle of something. To be called now and then."""
        for caller in list(self._callers):
            caller.cut_if_stalled(now)

    def close(self) -> None:
        for caller in list(self._callers):
            caller.connection.abort()

    def _accept(self, connection: FrameConnection) -> "_CallerConnection":
        caller = _CallerConnection(self, connection)
        self._callers.add(caller)
        connection.send()  # it is taken
        return caller

    def garbled(self, error: Exception) -> None:
        """A connection brought what is no request."""
        self.undecodable += 1
        log.warning("a local connection brought what is no request; cut", extra={"reason": str(error)})

    def forget(self, caller: "_CallerConnection") -> None:
        self._callers.discard(caller)


_WELL = bytes((OK,))


class _CallerConnection:
    """A `kvstore.net.frames.FrameReceiver`: one connection."""

    def __init__(self, server: FramedCallServer, connection: FrameConnection):
        self.connection = connection
        self._server = server
        self._held_up = False  # reading, until what was answered is taken
        self._stuck_since: Nanos | None = None

    def received(self, payload: bytes) -> None:
        self._stuck_since = None
        try:
            self.connection.send(*self._server.answer(payload))
            self.connection.flush()  # before the uses are noted, which takes longer than the answer
        except DecodeError as error:
            self._server.garbled(error)
            self.connection.abort()
            return
        except ConnectionError as error:
            log.warning("a local connection was cut", extra={"reason": str(error)})
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
            self._server.garbled(cause)
        self._server.forget(self)  # clients come and go as they like

    def cut_if_stalled(self, now: Nanos) -> None:
        if not (self.connection.full or self.connection.torn):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= STALLED:
            self.connection.abort()
