"""Redis connections: a connection is reused only if no unread bytes have arrived on it."""

import socket
from collections.abc import Iterator

import pytest

from kvstore.clock import Nanos
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.redis.connections import RedisConnections
from kvstore.tiers.redis.resp import RedisPipeline
from kvstore.tiers.redis.settings import RedisSettings
from tests.support.kvstore.builders import deadline_in

HALF_A_VALUE = b"$9064\r\nFKVR"


class Servers:
    """Redis server that accepts connections and keeps its ends of them."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.connections = RedisConnections(RedisSettings(url="redis://nowhere"), self._connect, MonotonicClock())

    def _connect(self, deadline: Nanos) -> RedisPipeline:
        near, far = socket.socketpair()
        self.ends.append(far)
        far.sendall(b"+first\r\n" if len(self.ends) == 1 else b"+second\r\n")
        return RedisPipeline(near, near.close, MonotonicClock())

    def next_status(self) -> bytes:
        return self.connections.turn(lambda pipe: pipe.status(), deadline_in(5))

    def has_closed(self, index: int) -> bool:
        self.ends[index].settimeout(5)
        try:
            return self.ends[index].recv(1) == b""
        except ConnectionResetError:  # the kernel resets a connection that is closed with unread bytes
            return True


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.connections.close()
    for end in servers.ends:
        end.close()


def test_connection_without_unread_bytes_is_reused(servers):
    def ask(pipe: RedisPipeline) -> bytes:
        pipe.send([b"request\r\n"])
        servers.ends[0].sendall(b"+again\r\n")
        return pipe.status()

    assert servers.next_status() == b"first"
    assert servers.connections.turn(ask, deadline_in(5)) == b"again"

    assert len(servers.ends) == 1


def test_extra_bytes_after_a_reply_close_the_connection(servers):
    def leave_half_a_value(pipe: RedisPipeline) -> bytes:
        servers.ends[0].sendall(HALF_A_VALUE)
        return pipe.status()

    assert servers.connections.turn(leave_half_a_value, deadline_in(5)) == b"first"
    assert servers.next_status() == b"second"

    assert servers.has_closed(0)


def test_bytes_between_two_turns_close_the_connection(servers):
    assert servers.next_status() == b"first"
    servers.ends[0].sendall(HALF_A_VALUE)

    assert servers.next_status() == b"second"

    assert servers.has_closed(0)


def test_connection_closed_by_the_server_is_replaced(servers):
    assert servers.next_status() == b"first"
    servers.ends[0].close()

    assert servers.next_status() == b"second"
