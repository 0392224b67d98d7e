"""HTTP connections with a transport made by hand: relayed answers, the cache of heads, and the lifetime."""

import httptools
import pytest

from fleet.core.clock import SECOND
from fleet.core.system_clock import SystemClock
from fleet.net.connection_table import ConnectionTable
from fleet.net.http.connection import HttpConnection
from fleet.net.http.messages import HeadCache, HeldBodyBytes, HttpHead
from fleet.net.limit_log import ClientLog
from fleet.net.settings import HttpSettings
from tests.support.kvstore.builders import ManualClock

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Transport:
    """Transport of a client or of a relay source."""

    def __init__(self):
        self.reading = True
        self.written = b""
        self.closed = False

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def write(self, data):
        self.written += data

    def set_write_buffer_limits(self, high):
        assert high > 0

    def get_extra_info(self, _name):
        return None

    def get_write_buffer_size(self):
        return len(self.written)

    def is_closing(self):
        return self.closed

    def can_write_eof(self):
        return False

    def close(self):
        self.closed = True


class Work:
    def cancel(self):
        raise AssertionError("the client is still there")


def a_connection(transport, held=None, clock=None, lasts_seconds=0):
    exchanges = []

    def serve(exchange):
        exchanges.append(exchange)
        return Work()

    connection = HttpConnection(
        HttpSettings(),
        clock or SystemClock(),
        serve,
        lambda _: b"",
        {},
        ConnectionTable(1, 1.0),
        HeadCache(),
        held or HeldBodyBytes(),
        ClientLog(HttpSettings()),
        lasts_seconds,
    )
    connection.connection_made(transport)
    return connection, exchanges


async def test_paused_relay_source_resumes_after_its_answer():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    (exchange,) = exchanges
    exchange.relay(source).write(b"the whole answer")
    connection.pause_writing()  # as the transport does during `write`
    assert not source.reading

    exchange.relayed(keep_alive=True)

    assert source.reading  # for its next request, from another client


async def test_relay_source_pauses_while_client_does_not_read():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    connection.pause_writing()
    exchanges[0].relay(source)
    assert not source.reading

    connection.resume_writing()

    assert source.reading


def served(connection, exchanges, data):
    """Send one request, answer it and return it."""
    connection.data_received(data)
    exchange = exchanges.pop()
    exchange.respond(200, b"{}")
    exchange.finish()
    return exchange.request


class CountingParser(httptools.HttpRequestParser):
    fed = 0

    def feed_data(self, data):
        CountingParser.fed += 1
        super().feed_data(data)


@pytest.mark.parametrize("pieces", [1, 2])
async def test_known_head_with_other_length_is_not_parsed_again(pieces, monkeypatch):
    monkeypatch.setattr(httptools, "HttpRequestParser", CountingParser)
    connection, exchanges = a_connection(Transport())
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nContent-Length: 3\r\n\r\nabc"
    connection.data_received(whole[:-pieces])  # the body may come later
    served(connection, exchanges, whole[-pieces:])
    parsed = CountingParser.fed

    request = served(connection, exchanges, whole.replace(b"Length: 3", b"Length: 12") + b"defghijkl")

    assert CountingParser.fed == parsed > 0
    assert request.body == b"abcdefghijkl"
    assert request.path == "/v1/completions"


async def test_known_head_with_oversized_body_is_refused():
    client = Transport()
    connection, exchanges = a_connection(client)
    served(connection, exchanges, REQUEST)
    client.written = b""

    connection.data_received(REQUEST.replace(b"length: 2", b"length: 99999999"))

    assert client.written.startswith(b"HTTP/1.1 413 ")
    assert client.closed


async def test_head_cache_ignores_only_the_content_length():
    connection, exchanges = a_connection(Transport())
    tagged = b"POST / HTTP/1.1\r\nhost: x\r\nx-content-length: 2\r\ncontent-length: 2\r\n\r\n{}"
    served(connection, exchanges, tagged)

    request = served(connection, exchanges, tagged.replace(b"x-content-length: 2", b"x-content-length: 3"))

    assert request.headers[b"x-content-length"] == b"3"


@pytest.mark.parametrize("digits", [b"", b"+2", b"-2", b" 2", b"2_0", b"0x2", b"2 ", b"2,2", b"\xb2", b"1000000000002"])
def test_latest_head_is_found_with_any_valid_length(digits):
    content = REQUEST.removesuffix(b"{}")
    heads, unused = HeadCache(), HeadCache()  # only the first one has a latest head
    head = HttpHead(method="POST", path="/", headers={}, keep_alive=True, chunked_answer=True)
    heads.add(content, head, 2)
    unused.add(content, head, 2)
    assert heads.find(content) == heads.find(content) == (head, 2)

    found = heads.find(content.replace(b"2", b"345"))
    assert found == (head, 345)
    other = content.replace(b" 2", b" " + digits)
    assert heads.find(other) == unused.find(other)
    assert heads.find(content.replace(b"POST", b"HEAD")) is None


@pytest.mark.parametrize("other", [b"x-before: 2", b"x-behind: 2"])
def test_latest_head_with_another_header_is_not_found(other):
    content = b"POST / HTTP/1.1\r\nhost: x\r\nx-before: 1\r\ncontent-length: 2\r\nx-behind: 1\r\n\r\n"
    heads, head = HeadCache(), HttpHead(method="POST", path="/", headers={}, keep_alive=True, chunked_answer=True)
    heads.add(content, head, 2)
    assert heads.find(content) == (head, 2)

    assert heads.find(content.replace(other[:-1] + b"1", other)) is None


async def test_long_body_after_known_head_is_refused_without_memory():
    client, held = Transport(), HeldBodyBytes()
    connection, exchanges = a_connection(client, held)
    served(connection, exchanges, REQUEST)
    held.bytes = others = HttpSettings().max_held_bytes
    long, ordinary = (REQUEST.replace(b"2", b"%d" % size)[:-2] + b"x" * size for size in (65537, 65536))

    assert len(served(connection, exchanges, ordinary).body) == 65536
    connection.data_received(long)

    assert exchanges == []
    assert b" 503 " in client.written
    assert held.bytes == others


def is_kept_alive(connection, client, exchanges) -> bool:
    """Send and answer one request; return whether another one may follow."""
    client.written = b""
    served(connection, exchanges, REQUEST)
    return b"connection: close" not in client.written.lower()


async def test_first_answer_after_the_lifetime_closes():
    client, clock = Transport(), ManualClock()
    connection, exchanges = a_connection(client, clock=clock, lasts_seconds=4)

    assert is_kept_alive(connection, client, exchanges)
    clock.move(4 * SECOND - 1)
    assert is_kept_alive(connection, client, exchanges)
    assert not client.closed
    clock.move(1)
    assert not is_kept_alive(connection, client, exchanges)
    assert client.closed


async def test_connection_without_lifetime_stays_open():
    client, clock = Transport(), ManualClock()
    connection, exchanges = a_connection(client, clock=clock)
    clock.move(3600 * SECOND)

    assert is_kept_alive(connection, client, exchanges)
