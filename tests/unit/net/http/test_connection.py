"""A connection, transport by hand: what becomes of the source of a relayed answer, and which heads are parsed."""

import pytest

from fleet.core.system_clock import SystemClock
from fleet.net.connection_table import ConnectionTable
from fleet.net.http.connection import HttpConnection
from fleet.net.http.messages import HeadCache, HeldBodyBytes, HttpHead
from fleet.net.limit_log import SlowClientLog
from fleet.net.settings import HttpSettings

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Transport:
    """To the client, or from the server."""

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


def a_connection(transport, held=None):
    exchanges = []

    def serve(exchange):
        exchanges.append(exchange)
        return Work()

    table = ConnectionTable(1, 1.0)
    connection = HttpConnection(
        HttpSettings(),
        SystemClock(),
        serve,
        lambda _: b"",
        {},
        table,
        HeadCache(),
        held or HeldBodyBytes(),
        SlowClientLog(HttpSettings()),
    )
    connection.connection_made(transport)
    return connection, exchanges


async def test_a_source_that_a_slow_client_holds_up_at_the_end_of_its_answer_is_read_again():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    (exchange,) = exchanges
    exchange.relay(source).write(b"the whole answer")
    connection.pause_writing()  # as the transport does from within `write`
    assert not source.reading

    exchange.relayed(keep_alive=True)

    assert source.reading  # for its next request, which is another client's


async def test_a_source_is_held_up_while_the_client_does_not_read():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    connection.pause_writing()
    exchanges[0].relay(source)
    assert not source.reading

    connection.resume_writing()

    assert source.reading


def served(connection, exchanges, data):
    """The request that a piece of data is, answered."""
    connection.data_received(data)
    exchange = exchanges.pop()
    exchange.respond(200, b"{}")
    exchange.over()
    return exchange.request


class Unwanted:
    """A parser that nobody is to ask."""

    def feed_data(self, data):
        raise AssertionError(f"parsed again: {bytes(data)!r}")


@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_head_is_not_parsed_again_whatever_the_length_of_its_body_is(pieces):
    connection, exchanges = a_connection(Transport())
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nContent-Length: 3\r\n\r\nabc"
    connection.data_received(whole[:-pieces])  # the body may come later
    served(connection, exchanges, whole[-pieces:])
    connection._parser = Unwanted()

    request = served(connection, exchanges, whole.replace(b"Length: 3", b"Length: 12") + b"defghijkl")

    assert request.body == b"abcdefghijkl"
    assert request.path == "/v1/completions"


async def test_a_known_head_does_not_let_in_a_body_that_is_too_long():
    client = Transport()
    connection, exchanges = a_connection(client)
    served(connection, exchanges, REQUEST)
    client.written = b""

    connection.data_received(REQUEST.replace(b"length: 2", b"length: 99999999"))

    assert client.written.startswith(b"HTTP/1.1 413 ")
    assert client.closed


async def test_only_the_header_that_gives_the_length_is_left_out_of_a_known_head():
    connection, exchanges = a_connection(Transport())
    tagged = b"POST / HTTP/1.1\r\nhost: x\r\nx-content-length: 2\r\ncontent-length: 2\r\n\r\n{}"
    served(connection, exchanges, tagged)

    request = served(connection, exchanges, tagged.replace(b"x-content-length: 2", b"x-content-length: 3"))

    assert request.headers[b"x-content-length"] == b"3"


@pytest.mark.parametrize("digits", [b"", b"+2", b"-2", b" 2", b"2_0", b"0x2", b"2 ", b"2,2", b"\xb2", b"1000000000002"])
def test_the_latest_head_is_found_with_another_length_and_with_nothing_else(digits):
    content = REQUEST.removesuffix(b"{}")
    heads, head = HeadCache(), HttpHead(method="POST", path="/", headers={}, keep_alive=True, chunked_answer=True)
    heads.add(content, head, 2)
    assert heads.find(content) == heads.find(content) == (head, 2)

    found = heads.find(content.replace(b"2", b"345"))
    assert found == (head, 345)
    other = content.replace(b" 2", b" " + digits)
    assert heads.find(other) == without_latest(heads).find(other)
    assert heads.find(content.replace(b"POST", b"HEAD")) is None


@pytest.mark.parametrize("other", [b"x-before: 2", b"x-behind: 2"])
def test_the_latest_head_is_not_found_where_another_header_differs(other):
    content = b"POST / HTTP/1.1\r\nhost: x\r\nx-before: 1\r\ncontent-length: 2\r\nx-behind: 1\r\n\r\n"
    heads, head = HeadCache(), HttpHead(method="POST", path="/", headers={}, keep_alive=True, chunked_answer=True)
    heads.add(content, head, 2)
    assert heads.find(content) == (head, 2)

    assert heads.find(content.replace(other[:-1] + b"1", other)) is None


def without_latest(heads):
    """The same heads, none of which was found."""
    others = HeadCache()
    others._known = heads._known
    return others


async def test_a_long_body_that_comes_at_once_behind_a_known_head_is_refused_where_there_is_no_room():
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
