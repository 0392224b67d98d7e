"""Router streams: frames between routers and a worker. Each stream links one connection to one `RouterSession`.

Rules:

1. The first message of a router is hello. The router sends it within `HELLO_SECONDS`, and only once. If a router breaks
   this rule, or if a message cannot be decoded, the worker sends the cause and closes the stream. There is one
   exception: if a later message has the request id of an attempt, only this attempt is rejected, and the stream goes
   on. Before hello, both peers prove their identity if the worker has a secret or certificates
   (`fleet.net.streams.authentication`).
2. Hello contains the protocol versions that the router speaks, and the worker's description the versions that the
   worker speaks. Without a common version, the worker sends the message `Goodbye` with its own versions, and both peers
   log what to upgrade (`kvstore.protocol.versions`).
3. When the connection ends, for any reason, its session and its attempts end too.
4. A worker whose engine hangs accepts no more streams.
5. As long as the router reads, the worker's messages are encoded and passed to the connection at once, without a task
   in between. If the router does not read, the messages wait in the session, which keeps a limited number of them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.message import DecodeError

from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.work import Goodbye, Rejected, RouterHello, RouterMessage, WorkerMessage
from fleet.net.grpc.options import MAX_MESSAGE_BYTES
from fleet.net.streams.authentication import StreamAuthenticator
from fleet.net.streams.identity import OPEN_IDENTITY, StreamIdentity
from fleet.net.streams.proof import TO_WORKERS, is_opening
from fleet.v1 import worker_pb2 as pb
from fleet.wire.worker import MalformedMessage, decode_router_message, encode_worker_message
from kvstore.errors import StoreNotStarted
from kvstore.net.frames import Accept, FrameConnection, FrameTooLong, open_server
from kvstore.protocol.versions import NoCommonProtocol, ProtocolRange, agree, own_protocols
from workers.router_session import RouterSession
from workers.server import WorkerServer

log = logging.getLogger(__name__)

HELLO_BYTES = 64 << 10
"""The maximum length of a frame until hello has arrived. If a client wrongly begins a TLS handshake, its first bytes
are read as a greater length, so the stream is closed at once."""

HELLO_SECONDS = 10  # time limit for a router to send hello; a working router sends it in its first packet
LINGER_SECONDS = 2  # time to send a stream's last messages; then the connection is cut, even if they were not sent

UNSECURED = "hello: you want to prove a secret, and this worker has none: set credentials.secret_file of the worker"

HELLO_FIRST = "hello: the first message on a stream must be hello"
HUNG = "its engine hangs, and the process ends"


@asynccontextmanager
async def serve_routers(
    worker: WorkerServer, listen: str, identity: StreamIdentity = OPEN_IDENTITY
) -> AsyncIterator[str]:
    """Listen for routers while the context is open; yield the address with the chosen port.

    Args:
        worker: The worker, which the caller runs.
        listen: Address as host:port (port 0: any free port) or unix:path.
        identity: The credentials by which both peers prove their identity on connections over TCP.

    Raises:
        ConfigurationRefused: The address is in use or does not belong to this machine; nothing was started.
    """
    guard = None if identity.is_open else StreamAuthenticator(identity, TO_WORKERS, _goodbye, limit=MAX_MESSAGE_BYTES)
    try:
        async with open_server("listen", listen, routers_of(worker), limit=MAX_MESSAGE_BYTES, guard=guard) as address:
            yield address
    except StoreNotStarted as error:
        raise ConfigurationRefused(str(error)) from error


def routers_of(worker: WorkerServer) -> Accept:
    """Return the function that makes, for each new connection, the object that receives a router's frames."""
    return lambda connection: _RouterStream(connection, worker)


class _RouterStream:
    """One router's stream at a worker: passes the router's messages to its session, and the worker's messages to the connection.

    Implements `kvstore.net.frames.FrameReceiver` towards the router and `workers.ports.Outlet` towards the worker.
    """

    def __init__(self, connection: FrameConnection, worker: WorkerServer) -> None:
        connection.allow(HELLO_BYTES)
        self._connection = connection
        self._worker = worker
        self._session: RouterSession | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(HELLO_SECONDS, self.end, HELLO_FIRST)

    # Methods that the connection calls.
    def received(self, payload: bytes) -> None:
        try:
            message = decode_router_message(pb.RouterMessage.FromString(payload))
        except DecodeError:
            self.end(UNSECURED if is_opening(payload) else "this is not a message of fleet.v1")
        except MalformedMessage as error:
            rejected = False
            if error.request_id and self._session is not None:
                # Only this attempt is rejected; the stream and its other attempts go on.
                rejected = self._session.offer(_refusal(error))
            if not rejected:
                self.end(str(error))
        else:
            self._handle(message)

    def resumed(self) -> None:
        if self._session is not None:
            self._session.flow()

    def lost(self, cause: Exception | None) -> None:
        self._timer.cancel()
        if self._session is not None:
            self._worker.close(self._session)
        elif isinstance(cause, FrameTooLong):
            log.warning("stream refused", extra={"cause": str(cause)})

    # Methods that the worker calls.
    @property
    def full(self) -> bool:
        return self._connection.full

    def put(self, message: WorkerMessage) -> None:
        self._connection.send(encode_worker_message(message).SerializeToString())

    def end(self, why: str, protocols: ProtocolRange | None = None) -> None:
        if why:
            if self._session is None:
                log.warning("stream refused", extra={"cause": why})
            self.put(Goodbye(reason=why, protocols=protocols))
        self._connection.close()
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_SECONDS, self._connection.abort)

    def _handle(self, message: RouterMessage | None) -> None:
        if self._session is None:
            if not isinstance(message, RouterHello):
                self.end(HELLO_FIRST)
                return
            if self._worker.hung:
                # The stream is refused, because the router would otherwise believe that the worker has recovered.
                self.end(HUNG)
                return
            if not self._agrees_with(message):
                return
            self._timer.cancel()
            self._connection.allow(MAX_MESSAGE_BYTES)
            self._session = self._worker.open(message.router_id, self)
        elif isinstance(message, RouterHello):
            self.end("hello: was already said on this stream")
        elif message is not None:
            self._session.receive(message)

    def _agrees_with(self, hello: RouterHello) -> bool:
        """Return True if the router and this worker have a protocol version in common; otherwise close the stream."""
        own, name = own_protocols(), self._worker.description.worker_id
        try:
            agree(own, hello.protocols, own_name=f"worker {name}", peer_name=f"router {hello.router_id[:100]}")
        except NoCommonProtocol as error:
            self.end(str(error), own)
            return False
        return True


def _goodbye(why: str) -> bytes:
    return encode_worker_message(Goodbye(reason=why)).SerializeToString()


def _refusal(error: MalformedMessage) -> Rejected:
    return Rejected(request_id=error.request_id, reason=Reason.INVALID_ARGUMENT, message=str(error), field=error.field)
