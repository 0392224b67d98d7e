"""HTTP connections with a fake transport: relayed answers, the cache of request heads, and the lifetime of a connection."""

import httptools
import pytest

from fleet.core.clock import SECOND
from fleet.core.errors import RequestRejected
from fleet.core.system_clock import SystemClock
from fleet.net.connection_limits import ConnectionTable
from fleet.net.http.exchange import HeadCache, HeldBodyBytes, HttpHead
from fleet.net.http.server import HttpConnection
from fleet.net.limit_log import ClientLog
from fleet.net.settings import HttpSettings
from tests.support.kvstore.builders import ManualClock

CODED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %s\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Transport:
    """Fake transport of a client connection or of an upstream."""

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


def a_connection(transport, held=None, clock=None, lasts_seconds=0, streams=None):
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
        streams,
    )
    connection.connection_made(transport)
    return connection, exchanges


async def test_paused_relay_source_resumes_after_its_answer():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    (exchange,) = exchanges
    exchange.relay(source).write(b"the whole answer")
    connection.pause_writing()  # as a real transport may do during `write`
    assert not source.reading

    exchange.relayed(keep_alive=True)

    assert source.reading  # the source can be read for its next request, from another client


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
    """Send one request, answer it, and return the parsed request."""
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
    connection.data_received(whole[:-pieces])  # in some cases, the body comes later
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
    heads, unused = HeadCache(), HeadCache()  # a head is added only to the first one
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
    """Send and answer one request; return whether the connection stays open for another request."""
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


# Bodies that are read while they arrive.

UPLOAD = b"POST /upload HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n"


def a_streaming_connection(transport, clock=None):
    connection, exchanges = a_connection(transport, clock=clock, streams=lambda head: head.path == "/upload")
    return connection, exchanges


async def read_all(body):
    return b"".join([piece async for piece in body])


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"Deflate,chunked", b"gzip\r\ntransfer-encoding: chunked"])
async def test_unknown_transfer_coding_is_refused(codings):
    transport = Transport()
    connection, exchanges = a_connection(transport)

    connection.data_received(CODED % codings)

    assert not exchanges
    assert transport.written.startswith(b"HTTP/1.1 501 ")
    assert b"connection: close" in transport.written
    assert b"x-should-retry: false\r\n" in transport.written


@pytest.mark.parametrize("codings", [b"chunked", b"Chunked", b" chunked "])
async def test_chunked_body_is_taken(codings):
    connection, exchanges = a_connection(Transport())
    connection.data_received(CODED % codings)
    assert [exchange.request.body for exchange in exchanges] == [b"abc"]


@pytest.mark.parametrize("framing", [b"content-length: 6", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_streamed_body_arrives_whole_however_it_is_cut(framing, size):
    content = b"abcdef" if b"length" in framing else b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"
    data = UPLOAD % framing + content + REQUEST
    connection, exchanges = a_streaming_connection(Transport())
    for start in range(0, len(data), size):
        connection.data_received(data[start : start + size])
    (exchange,) = exchanges

    assert await read_all(exchange.request.arriving) == b"abcdef"

    exchange.respond(200, b"")
    exchange.finish()
    assert exchanges[1].request.arriving is None, "the next request is served as ever"


async def test_full_stream_stops_reading_until_it_is_read():
    transport = Transport()
    connection, exchanges = a_streaming_connection(transport)
    connection.data_received(UPLOAD % b"content-length: 1000000")
    (exchange,) = exchanges
    for _ in range(3):
        connection.data_received(bytes(30_000))
    assert not transport.reading

    assert len(await anext(exchange.request.arriving)) == 90_000

    assert transport.reading


async def test_streamed_body_has_no_limit_of_size():
    connection, exchanges = a_streaming_connection(Transport())
    connection.data_received(UPLOAD % (b"content-length: %d" % (HttpSettings().max_body_bytes + 1)))

    assert [exchange.request.path for exchange in exchanges] == ["/upload"]


async def test_slow_body_fails_its_reader_and_a_kept_rate_does_not():
    clock = ManualClock()
    connection, exchanges = a_streaming_connection(Transport(), clock)
    connection.data_received(UPLOAD % b"content-length: 1000000")
    (exchange,) = exchanges
    seconds = HttpSettings().body_timeout_seconds
    connection.data_received(bytes(HttpSettings().min_read_bytes))
    clock.move(int((seconds + 1) * SECOND))
    connection.expire(clock.now())
    await anext(exchange.request.arriving)
    connection.data_received(b"x")
    clock.move(int((seconds + 1) * SECOND))
    connection.expire(clock.now())

    with pytest.raises(RequestRejected, match="did not arrive in time"):
        await read_all(exchange.request.arriving)


async def test_malformed_chunk_fails_the_reader_of_a_body():
    connection, exchanges = a_streaming_connection(Transport())
    connection.data_received(UPLOAD % b"transfer-encoding: chunked" + b"3\r\nabc\r\nnonsense\r\n")

    with pytest.raises(RequestRejected, match="not HTTP"):
        await read_all(exchanges[0].request.arriving)


async def test_unread_body_closes_the_connection_after_the_answer():
    transport = Transport()
    connection, exchanges = a_streaming_connection(transport)
    connection.data_received(UPLOAD % b"content-length: 1000" + b"abc")
    exchanges[0].respond(413, b"")

    exchanges[0].finish()

    assert transport.closed


async def test_upload_behind_another_request_is_collected():
    connection, exchanges = a_streaming_connection(Transport())
    connection.data_received(REQUEST + UPLOAD % b"content-length: 3" + b"abc")
    exchanges[0].respond(200, b"")
    exchanges[0].finish()

    assert (exchanges[1].request.body, exchanges[1].request.arriving) == (b"abc", None)


async def test_websocket_bytes_go_to_the_stream_after_the_offer():
    connection, exchanges = a_streaming_connection(Transport())
    offer = b"GET /upload HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    connection.data_received(offer + b"\x81\x01a")
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    connection.eof_received()
    (exchange,) = exchanges

    assert await read_all(exchange.request.arriving) == b"\x81\x01aGET / HTTP/1.1\r\n\r\n"


async def test_drain_closes_connection_after_arriving_body():
    transport = Transport()
    connection, exchanges = a_streaming_connection(transport)
    connection.data_received(UPLOAD % b"content-length: 6" + b"abc")
    connection.close_when_idle()
    connection.data_received(b"def" + REQUEST)
    (exchange,) = exchanges
    assert await read_all(exchange.request.arriving) == b"abcdef"

    exchange.respond(200, b"")
    exchange.finish()

    assert transport.closed
    assert exchanges == [exchange], "no further request is taken during the drain"
