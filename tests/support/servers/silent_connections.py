"""Connections without a call: TCP connections that send nothing, and HTTP/2 connections that only answer settings and pings."""

import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

from tests.support.waiting import SECONDS

HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS, PING, ACKNOWLEDGED = 4, 6, 1
FRAME_HEAD = struct.Struct(">BHBBI")  # the length in two parts, type, flags, stream


@contextmanager
def silent_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing."""
    with ExitStack() as stack:
        host, _, port = address.rpartition(":")
        yield [stack.enter_context(socket.create_connection((host, int(port)), SECONDS)) for _ in range(count)]


def ended_count(connections: list[socket.socket]) -> int:
    """Return how many connections the server has ended."""
    count = 0
    for each in connections:
        each.settimeout(0)
        try:
            count += not each.recv(1 << 16)
        except BlockingIOError:
            continue
        except ConnectionError:
            count += 1
    return count


def is_ended_while_sending(connection: socket.socket, data: bytes, pause_seconds: float = 0.05) -> bool:
    """Send the data byte by byte; return whether the server ends the connection before all bytes are sent."""
    connection.settimeout(pause_seconds)
    for byte in data:
        try:
            connection.send(bytes((byte,)))
            if not connection.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


class IdleHttp2Connections:
    """Keeps HTTP/2 connections open without calls. It acknowledges settings and pings, so that the server does not take them for dead."""

    def __init__(self) -> None:
        self.ended = 0
        self.over = Event()
        self.selector = selectors.DefaultSelector()
        self.thread = Thread(target=self._acknowledge, daemon=True)

    @classmethod
    @contextmanager
    def open(cls, address: str, count: int) -> Iterator["IdleHttp2Connections"]:
        idle = cls()
        with silent_connections(address, count) as opened:
            for each in opened:
                each.setblocking(False)
                idle.selector.register(each, selectors.EVENT_READ)
                each.send(HTTP2_GREETING)
            idle.thread.start()
            try:
                yield idle
            finally:
                idle.over.set()
                idle.thread.join()
                idle.selector.close()

    def _acknowledge(self) -> None:
        while not self.over.is_set():
            for key, _ in self.selector.select(0.1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    content = connection.recv(1 << 16)
                    for answer in acknowledgements(content):
                        connection.send(answer)
                except ConnectionError:
                    content = b""
                if not content:
                    self.selector.unregister(connection)
                    self.ended += 1


def acknowledgements(content: bytes) -> Iterator[bytes]:
    """Yield the acknowledgement of each complete frame with settings or a ping."""
    at = 0
    while at + FRAME_HEAD.size <= len(content):
        high, low, kind, flags, stream = FRAME_HEAD.unpack_from(content, at)
        body = content[at + FRAME_HEAD.size : (at := at + FRAME_HEAD.size + (high << 16) + low)]
        if kind in (SETTINGS, PING) and not flags & ACKNOWLEDGED:
            echo = body if kind == PING else b""
            yield FRAME_HEAD.pack(0, len(echo), kind, ACKNOWLEDGED, stream) + echo
