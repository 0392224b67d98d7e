"""Frequent calls of a client to its node: by gRPC, or by frames if the node is on the same host.

A framed call costs a tenth of a gRPC call. All other calls, such as Hello, Hold and Stats, are rare and use gRPC.

Rules:

1. A client connects to the socket of the memory handout. Its first message has the format of a request for the memory
   (`kvstore.transports.shared_memory.QUESTION`), but another magic (`CALLS`). Frames follow in both directions
   (`kvstore.net.frames`). The node's first frame is empty and confirms that the node accepts the connection.
2. A request is a method (1 byte) and its message. An answer is a status (1 byte, a gRPC code) and the message. If the
   status is not 0, the message is replaced by the offending field, a zero byte, and the reason.
3. Answers have the order of the requests. This client makes one call at a time on a connection, and has as many
   connections as threads that call at the same time. A release may return without waiting for its answer. The answer is
   then read before the next request on this connection is sent (`NodeCalls.release_soon`).
4. If a peer violates these rules, or misses a deadline within a call, the other peer closes the connection. Other
   connections are not affected.
5. Calls use gRPC if a connection for frames is not possible, for example because containers on one host share no
   sockets, or because the node has too many connections or another version. If the node does not answer by the
   deadline, the call fails. A client notices an ended connection before it sends a request, so no request is sent
   twice.
"""

import select
import socket
import struct
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.clock import Clock, Nanos, nanos, seconds
from kvstore.net.frames import HEAD
from kvstore.protocol import wire
from kvstore.transports.shared_memory import CALLS, QUESTION
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

HANDSHAKE = QUESTION.pack(CALLS, bytes(16))
ACCEPTED = HEAD.pack(0)

FRAME_BYTES = 2 << 20
"""Maximum length of a frame: the longest answer, the slots of `wire.MAX_HASHES` blocks, takes 1.3 MiB."""

REQUEST = struct.Struct("<IB")  # head of a request: number of bytes of the frame, and method
ANSWER = struct.Struct("<IB")  # head of an answer: number of bytes of the frame, and status
OK = 0

BUFFER_BYTES = 64 << 10  # size of the buffer for answers; a longer answer is rare, and gets a buffer of its own
# A message of at most this size fits into the socket buffer, so sending it does not block.
NON_BLOCKING_BYTES = 32 << 10
CLOSE_SECONDS = 0.1  # maximum time for which `NodeCalls.retire` waits for the answers to releases
# Maximum number of idle connections that a client keeps. More threads rarely make calls at the same time.
IDLE_CONNECTIONS = 8

Answer = TypeVar("Answer", bound=Message)


class Method(IntEnum):
    MATCH = 1
    RELEASE = 2
    RESERVE = 3
    PUBLISH = 4


class CallRefused(grpc.RpcError):
    """A call by frames (`kvstore.net.frames`) failed. The error has the same interface as an error of gRPC, so callers handle both alike."""

    def __init__(self, code: grpc.StatusCode, details: str, field: str = ""):
        super().__init__(details)
        self._code = code
        self._details = details
        self._field = field

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:  # a tuple of (key, value) pairs, as gRPC's errors have it
        return ((wire.FIELD_KEY, self._field),) if self._field else ()


def refusal_message(code: grpc.StatusCode, field: str, reason: str) -> bytes:
    """Return the payload of an answer that refuses the call (rule 2)."""
    return bytes((number_of(code),)) + f"{field}\0{reason}".encode()


def number_of(code: grpc.StatusCode) -> int:
    """Return the number by which a gRPC status code is sent."""
    number: int = code.value[0]
    return number


_CODES = {number_of(code): code for code in grpc.StatusCode}


class NodeCalls:
    """Makes the frequent calls of one client to its node; the first call opens a connection. Thread-safe.

    `path` is the path of the memory handout's socket. If it is empty, all calls use gRPC. A method that makes a call
    raises `grpc.RpcError` if the call fails.
    """

    def __init__(self, stub: pb_grpc.BlockStoreStub, path: str, clock: Clock):
        self._stub = stub
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self.connections: set[_CallConnection] = set()
        self.idle: list[_CallConnection] = []
        self._closed = False

    def match(self, request: pb.MatchRequest, timeout_seconds: float) -> pb.MatchResponse:
        return self._ask(Method.MATCH, request, pb.MatchResponse, self._stub.Match, timeout_seconds)

    def release(self, request: pb.ReleaseRequest, timeout_seconds: float) -> pb.ReleaseResponse:
        return self._ask(Method.RELEASE, request, pb.ReleaseResponse, self._stub.Release, timeout_seconds)

    def release_soon(self, request: pb.ReleaseRequest, timeout_seconds: float) -> None:
        """Release leases; wait for the node's answer only if the call uses gRPC.

        The answer to a framed call is read later, by `settle` or before the next request on the same connection.
        """
        deadline = Nanos(self._clock.now() + nanos(timeout_seconds))
        connection = self._connection(deadline) if self.path else None
        if connection is None:
            self._stub.Release(request, timeout=max(seconds(deadline - self._clock.now()), 0.001))
            return
        reusable = False
        try:
            connection.submit(Method.RELEASE, request.SerializeToString(), deadline)
            reusable = True
        except OSError as error:
            raise _failed(error) from error
        finally:
            self._give_back(connection, reusable=reusable)

    def settle(self, timeout_seconds: float) -> None:
        """Wait until the node has answered the releases of `release_soon`, at most for the given time."""
        deadline = Nanos(self._clock.now() + nanos(timeout_seconds))
        with self._lock:
            waiting = [connection for connection in self.idle if connection.awaits_answer]
            self.idle = [connection for connection in self.idle if not connection.awaits_answer]
        for connection in waiting:
            self._give_back(connection, reusable=connection.settle(deadline))

    def reserve(self, request: pb.ReserveRequest, timeout_seconds: float) -> pb.ReserveResponse:
        return self._ask(Method.RESERVE, request, pb.ReserveResponse, self._stub.Reserve, timeout_seconds)

    def publish(self, request: pb.PublishRequest, timeout_seconds: float) -> pb.PublishResponse:
        return self._ask(Method.PUBLISH, request, pb.PublishResponse, self._stub.Publish, timeout_seconds)

    def retire(self) -> None:
        """Wait at most `CLOSE_SECONDS` for the answers to releases, then close the idle connections.

        Each connection in use is closed when its call has ended.
        """
        self.settle(CLOSE_SECONDS)
        with self._lock:
            self._closed = True
            idle, self.idle = self.idle, []
            self.connections.difference_update(idle)
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the idle connections, as `retire` does, and end the calls that are running."""
        self.retire()
        with self._lock:
            for connection in self.connections:
                connection.shut_down()

    def _ask(
        self,
        method: Method,
        request: Message,
        kind: type[Answer],
        by_grpc: Callable[..., Answer],
        timeout_seconds: float,
    ) -> Answer:
        deadline = Nanos(self._clock.now() + nanos(timeout_seconds))
        connection = self._connection(deadline) if self.path else None
        if connection is None:
            return by_grpc(request, timeout=max(seconds(deadline - self._clock.now()), 0.001))
        reusable = False
        try:
            status, body = connection.exchange(method, request.SerializeToString(), deadline)
            answer = kind.FromString(body) if status == OK else None
            reusable = True
        except (OSError, DecodeError) as error:
            raise _failed(error) from error
        finally:
            self._give_back(connection, reusable=reusable)
        if answer is None:
            field, _, reason = body.decode(errors="replace").partition("\0")
            raise CallRefused(_CODES.get(status, grpc.StatusCode.UNKNOWN), reason, field)
        return answer

    def _connection(self, deadline: Nanos) -> "_CallConnection | None":
        """Return a connection for one call; None if the call has to use gRPC.

        Raise CallRefused at the deadline, or if `retire` was called.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise CallRefused(grpc.StatusCode.CANCELLED, "the client has closed this session")
                if not self.idle:
                    break
                connection = self.idle.pop()
            if connection.settle(deadline) and connection.is_silent():
                return connection
            self._give_back(connection, reusable=False)
            if self._clock.now() >= deadline:
                raise CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        try:
            connection = _CallConnection(self.path, self._clock, deadline)
        except TimeoutError as error:
            raise CallRefused(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the node does not take a connection in time"
            ) from error
        except OSError:
            return None
        with self._lock:
            self.connections.add(connection)
        return connection

    def _give_back(self, connection: "_CallConnection", *, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._closed and len(self.idle) < IDLE_CONNECTIONS:
                self.idle.append(connection)
                return
            self.connections.discard(connection)
        connection.close()


def _failed(error: Exception) -> CallRefused:
    if isinstance(error, TimeoutError):
        return CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
    return CallRefused(grpc.StatusCode.UNAVAILABLE, str(error))


class _CallConnection:
    """Makes framed calls on one connection. Only one thread at a time may use it."""

    def __init__(self, path: str, clock: Clock, deadline: Nanos):
        """Connect.

        Raise TimeoutError at the deadline, or OSError if the node refuses the connection or does not run.
        """
        self._clock = clock
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self.awaits_answer = False  # True if the answer to the last `submit` has not been read yet
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._set_timeout(deadline)
            self._socket.connect(path)
            self._socket.sendall(HANDSHAKE)
            if self._socket.recv(len(ACCEPTED), socket.MSG_WAITALL) != ACCEPTED:
                raise ConnectionRefusedError(f"unix:{path} takes no calls")
        except BaseException:
            self._socket.close()
            raise
        self._events = select.poll()
        self._events.register(self._socket, select.POLLIN)

    def is_silent(self) -> bool:
        """Return True if neither bytes nor the end of the stream have arrived since the last answer."""
        return not self._events.poll(0)

    def exchange(self, method: Method, message: bytes, deadline: Nanos) -> tuple[int, bytes]:
        """Send a request; return status and body of the answer.

        Raise TimeoutError at the deadline, or OSError if the connection has ended or the answer is invalid. After an
        error, only `close` may be called.
        """
        self._send(method, message, deadline)
        if len(message) > NON_BLOCKING_BYTES:
            self._set_timeout(deadline)
        return self._answer(deadline)

    def submit(self, method: Method, message: bytes, deadline: Nanos) -> None:
        """Send a request without waiting for its answer, which `settle` reads; raise the errors of `exchange`."""
        self._send(method, message, deadline)
        self.awaits_answer = True

    def settle(self, deadline: Nanos) -> bool:
        """Read the pending answer to `submit`, if there is one; return whether the connection can still be used."""
        try:
            if self.awaits_answer:
                self._set_timeout(deadline)
                self._answer(deadline)
                self.awaits_answer = False
        except OSError:
            return False
        return True

    def _send(self, method: Method, message: bytes, deadline: Nanos) -> None:
        assert not self.awaits_answer, "two pending answers cannot be told apart"
        if len(message) >= FRAME_BYTES:
            raise ConnectionError(f"a request of {len(message)} bytes is longer than {FRAME_BYTES}")
        self._set_timeout(deadline)
        self._socket.sendall(REQUEST.pack(1 + len(message), method) + message)

    def _answer(self, deadline: Nanos) -> tuple[int, bytes]:
        buffer, filled, size = self._buffer, 0, 0
        while not size or filled < size:
            if filled:
                self._set_timeout(deadline)
            count = self._socket.recv_into(buffer[filled:])
            if not count:
                raise ConnectionResetError("the node has ended the connection")
            filled += count
            if not size and filled >= ANSWER.size:
                length, _ = ANSWER.unpack_from(buffer)
                size = length + ANSWER.size - 1
                if not 1 <= length <= FRAME_BYTES:
                    raise ConnectionError(f"an answer of {length} bytes")
                if size > len(buffer):
                    buffer = memoryview(bytearray(size))
                    buffer[:filled] = self._buffer[:filled]
        if filled > size:
            raise ConnectionError("more than an answer has come")
        return buffer[ANSWER.size - 1], bytes(buffer[ANSWER.size : size])

    def shut_down(self) -> None:
        """Shut the connection down, so that a waiting thread stops waiting."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the node has closed the connection, or the call has ended

    def close(self) -> None:
        self._socket.close()

    def _set_timeout(self, deadline: Nanos) -> None:
        """Set the timeout of the next socket operation to the time left; raise TimeoutError if the deadline has passed."""
        left = seconds(deadline - self._clock.now())
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)
