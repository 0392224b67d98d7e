"""Tests of the HTTP frontend with misbehaving clients on raw sockets."""

import asyncio
import gc
import json
import os
import socket
import ssl
import tracemalloc
import weakref
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import Logprobs
from fleet.frontend.openai.service import open_http_frontend
from fleet.net import connection_limits
from fleet.net.http.server import MAX_LINGERING
from fleet.net.settings import HttpSettings
from fleet.net.sockets import UNSENT_BYTES
from tests.support.frontend.frontends import Frontends, open_frontends
from tests.support.frontend.http_clients import RawHttpClient, error_of, get, post, raw_http_client
from tests.support.frontend.text_model import EOS
from tests.support.waiting import pace, turns, until, until_still

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (get("/nowhere"), 404, "nothing at /nowhere"),
        (get("/v1/v1/chat/completions"), 404, "; /v1/chat/completions exists: correct the base URL of the client"),
        (get("/chat/completions"), 404, "; /v1/chat/completions exists: correct the base URL of the client"),
        (get("//v1/completions"), 404, "; /v1/completions exists: correct the base URL of the client"),
        (get("/v1//completions"), 404, "; /v1/completions exists: correct the base URL of the client"),
        (get("/models/some"), 404, "; /v1/models/some exists: correct the base URL of the client"),
        (get("/health", "DELETE"), 405, "takes GET"),
        (get(CHAT), 405, "takes POST"),
        (post("/v1/models", b"{}"), 405, "takes GET"),
        (post(CHAT, b"{}", "content-type: text/plain"), 415, "application/json"),
        (post(CHAT, b"{}", "content-encoding: gzip"), 415, "compressed"),
        (post(CHAT, b'{"messages": '), 400, "not valid JSON"),
        (post(COMPLETIONS, b'{"prompt": "\xff\xfe"}'), 400, "not valid UTF-8"),
        (post(CHAT, b'{"messages": []}'), 400, "messages: must not be empty"),
        (post(CHAT, b""), 400, "not valid JSON"),
        (post(COMPLETIONS, {"prompt": "x", "model": "other"}), 404, "'other' is not served"),
        (post(COMPLETIONS, {"prompt": "x", "fleet": {"placement": "here"}}), 400, "fleet.placement"),
    ],
)
async def test_invalid_request_is_answered_on_a_live_connection(frontends, sent, status, said):
    async with raw_http_client(frontends) as peer:
        for _ in range(2):
            await peer.send(sent)
            answered, headers, body = await peer.answer()

            assert (answered, headers["content-type"]) == (status, "application/json")
            assert said in error_of(body)["message"]
            assert (status == 405) == ("allow" in headers)
    assert frontends.router.submitted == []


async def test_client_that_speaks_tls_is_logged(frontends, caplog):
    host, port = frontends.http.address.rsplit(":", 1)

    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(host, int(port), ssl=ssl.create_default_context())

    await until(lambda: "clients speak TLS, and this port does not" in caplog.messages)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000, 431),
        (b"GET /" + b"y" * 40_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8388609\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
    ],
)
async def test_non_http_bytes_are_answered_once_then_closed(frontends, sent, status):
    async with raw_http_client(frontends) as peer:
        await peer.send(sent)

        answered, headers, body = await peer.answer()

        assert (answered, headers["connection"]) == (status, "close")
        assert error_of(body)["type"] == "invalid_request_error"
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    ("more", "status", "kind"),
    [
        (b"content-length: 8388609\r\n\r\n", 413, "request_too_large"),
        (b"x: " + b"y" * 40_000, 431, "invalid_request_error"),
        (b"content-length: -1\r\n\r\n", 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("head", [b"POST /v1/messages HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\nanthropic-version: 1\r\n"])
async def test_malformed_message_gets_an_error_of_anthropics_form(frontends, head, more, status, kind):
    async with raw_http_client(frontends) as peer:
        await peer.send(head + b"host: x\r\nx-request-id: mine\r\n" + more)

        answered, headers, body = await peer.answer()

    assert (answered, headers["request-id"], headers["x-request-id"]) == (status, "mine", "mine")
    error = json.loads(body)
    assert (error["type"], error["error"]["type"]) == ("error", kind)


async def test_a_body_that_grows_too_large_in_chunks_is_rejected(model_dir):
    async with open_frontends(model_dir, max_body_bytes=1000) as frontends, raw_http_client(frontends) as peer:
        await peer.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            await peer.send(b"%x\r\n" % 400 + b"x" * 400 + b"\r\n")

        status, _, body = await peer.answer()

        assert status == 413
        assert "1000 bytes" in error_of(body)["message"]


async def test_client_that_keeps_sending_still_reads_the_answer(frontends):
    async with raw_http_client(frontends) as peer:
        await peer.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n")
        for _ in range(90):
            await peer.send(b"x" * 100_000)

        assert (await peer.answer())[0] == 413


async def test_a_chunked_body_is_put_together(frontends):
    frontends.will_answer("the fox")
    body = json.dumps({"prompt": "once"}).encode()
    async with raw_http_client(frontends) as peer:
        await peer.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for byte in body:
            await peer.send(b"1\r\n%c\r\n" % byte)
        await peer.send(b"0\r\n\r\n")

        status, _, answer = await peer.answer()

    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, "the fox")


CHUNKED = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n".encode()


async def test_trailers_of_a_chunked_body_change_nothing(frontends):
    frontends.will_answer("abc")
    body = b'{"prompt": "x"}'
    trailers = b"content-type: text/plain\r\nauthorization: Bearer no\r\n"
    async with raw_http_client(frontends) as peer:
        for _ in range(2):
            await peer.send(CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers))
            status, headers, _ = await peer.answer()

            assert (status, headers.get("connection")) == (200, None)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"1\r\nx\r\n0\r\n", b"x-trailer: " + b"v" * 50 + b"\r\n"),
        (b"1\r\nx\r\n0\r\nx-trailer: ", b"v" * 64),
        (b"5;", b"extension" * 8),
    ],
    ids=["trailers", "one trailer", "an extension of a chunk"],
)
async def test_chunked_body_without_content_is_bounded(model_dir, begin, more):
    async with open_frontends(model_dir, max_head_bytes=4096) as frontends, raw_http_client(frontends) as peer:
        with suppress(ConnectionError):
            await peer.send(CHUNKED + b"\r\n" + begin)
            for _ in range(200):
                await peer.send(more * 100)  # more than one read, since bytes that come with content are not counted
        status, _, body = await peer.answer()

        assert status == 431
        assert "chunk sizes and trailers" in error_of(body)["message"]
        assert await peer.rest() == b""


async def test_request_sent_byte_by_byte_is_understood(frontends):
    frontends.will_answer("the fox")
    async with raw_http_client(frontends) as peer:
        for byte in post(COMPLETIONS, {"prompt": "once"}):
            await peer.send(bytes([byte]))
            await turns()

        assert (await peer.answer())[0] == 200


async def test_expect_continue_is_answered(frontends):
    frontends.will_answer("the fox")
    head, _, body = post(COMPLETIONS, {"prompt": "once"}, "expect: 100-continue").partition(b"\r\n\r\n")
    async with raw_http_client(frontends) as peer:
        await peer.send(head + b"\r\n\r\n")
        assert (await peer.head())[0] == 100
        await peer.send(body)

        assert (await peer.answer())[0] == 200


async def test_expectation_of_http_1_0_is_ignored(frontends):
    frontends.will_answer("the fox")
    asked = post(COMPLETIONS, {"prompt": "once"}, "expect: 100-continue", version="1.0")
    head, _, body = asked.partition(b"\r\n\r\n")
    async with raw_http_client(frontends) as peer:
        await peer.send(head + b"\r\n\r\n")
        await peer.send(body)

        assert (await peer.answer())[0] == 200


async def test_pipelined_requests_are_answered_in_order(frontends):
    frontends.will_answer("the fox")
    frontends.router.hold_after = 1
    async with raw_http_client(frontends) as peer:
        await peer.send(
            post(COMPLETIONS, {"prompt": "once"})
            + get("/nowhere")
            + post(COMPLETIONS, {"prompt": "x"})
            + b"BAD\r\n\r\n"
        )
        await frontends.router.until(frontends.router.submitted)
        await until(lambda: any(len(each.waiting) == 3 for each in frontends.http.connections))
        assert len(frontends.router.submitted) == 1
        frontends.router.release.set()

        statuses = [(await peer.answer())[0] for _ in range(4)]

        assert statuses == [200, 404, 200, 400]
        assert await peer.rest() == b""


@pytest.mark.parametrize("cut", [20, 9000])
async def test_hundreds_of_pipelined_requests_are_answered_in_order(frontends, cut):
    many = b"".join(get(f"/{number}") for number in range(800))
    async with raw_http_client(frontends) as peer:
        await peer.send(many[:cut])
        await peer.send(many[cut:])
        for number in range(800):
            status, _, body = await peer.answer()
            assert (status, error_of(body)["message"]) == (404, f"there is nothing at /{number}")
        await peer.send(get("/health"))
        assert (await peer.answer())[0] == 200


async def test_pipelining_client_does_not_hold_up_others(frontends):
    many = get("/nowhere", "DELETE") * 5000
    async with raw_http_client(frontends) as peer, raw_http_client(frontends) as other:
        await peer.send(many)
        await other.send(get("/health"))
        assert (await other.answer())[0] == 200

        (busy,) = [each for each in frontends.http.connections if each.unparsed]
        assert len(busy.waiting) < 500


OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.mark.parametrize("whole", [True, False])
async def test_upgrade_offer_is_served_with_http_1(frontends, whole):
    """Offer an upgrade like Java's client, and like curl with --http2."""
    frontends.will_answer("the fox")
    asked = post(COMPLETIONS, {"prompt": "x", "ignored": "y" * 20_000}, *OFFER)
    async with raw_http_client(frontends) as peer:
        await peer.send(asked if whole else asked[:-1])
        if not whole:
            await turns(10)
            await peer.send(asked[-1:])
        status, headers, body = await peer.answer()

        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["text"] == "the fox"
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\r\n".join([CHUNKED[:-2], *(line.encode() for line in OFFER), b"", b"0\r\n\r\n"]),
    ],
    ids=["a tunnel", "a body in chunks"],
)
async def test_other_protocols_are_rejected(frontends, sent):
    async with raw_http_client(frontends) as peer:
        await peer.send(sent)
        status, headers, body = await peer.answer()

        assert (status, headers["x-should-retry"]) == (501, "false")
        assert "no other protocol" in error_of(body)["message"]
        assert await peer.rest() == b""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_and_close_requests_close_the_connection(frontends, version, stream):
    frontends.will_answer("the fox")
    async with raw_http_client(frontends) as peer:
        await peer.send(post(COMPLETIONS, {"prompt": "once", "stream": stream}, "connection: close", version=version))

        status, headers, body = await peer.answer()

        assert (status, headers["connection"]) == (200, "close")
        assert body.endswith(b"data: [DONE]\n\n") == stream
        assert ("transfer-encoding" in headers) == (stream and version == "1.1")
        assert await peer.rest() == b""


async def test_http_1_0_connection_that_stays_open_says_so(frontends):
    frontends.will_answer("the fox")
    async with raw_http_client(frontends) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, {"prompt": "once"}, "connection: keep-alive", version="1.0"))
            status, headers, _ = await peer.answer()
            assert (status, headers["connection"]) == (200, "keep-alive")
        await peer.send(post(COMPLETIONS, {"prompt": "once"}, version="1.0"))
        assert (await peer.answer())[1]["connection"] == "close"
        assert await peer.rest() == b""


async def test_head_and_first_event_arrive_together(frontends):
    frontends.will_answer("the fox")
    frontends.router.hold_after = 2  # each token is a step, so that something was sent before
    async with raw_http_client(frontends) as peer:
        await peer.send(post(COMPLETIONS, {"prompt": "once", "stream": True}))
        async with asyncio.timeout(60):
            first = await peer.reader.read(65536)

    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: {" in first


async def test_a_client_that_disconnects_cancels_its_request(frontends):
    frontends.will_answer("the quick brown fox")
    for stream, tokens_before in ((True, 1), (True, 0), (False, 0)):
        frontends.router.hold_after = tokens_before
        count = len(frontends.router.submitted) + 1
        async with raw_http_client(frontends) as peer:
            await peer.send(post(COMPLETIONS, {"prompt": "once", "stream": stream}))
            await frontends.router.until(frontends.router.submitted, count)
            if tokens_before:
                await peer.head()

        await frontends.router.until(frontends.router.cancelled, count)
    await until(lambda: frontends.generation.running == 0)


async def test_half_closed_client_counts_as_gone(frontends):
    frontends.will_answer("the fox")
    frontends.router.hold_after = 0
    async with raw_http_client(frontends) as peer:
        await peer.send(post(COMPLETIONS, {"prompt": "once"}))
        await frontends.router.until(frontends.router.submitted)
        peer.writer.write_eof()

        await frontends.router.until(frontends.router.cancelled)
        assert await peer.rest() == b""


async def test_half_closed_connection_gets_a_simple_answer(frontends):
    async with raw_http_client(frontends) as peer:
        peer.writer.write(get("/health"))
        peer.writer.write_eof()

        assert (await peer.answer())[0] == 200
        assert await peer.rest() == b""


@pytest.mark.parametrize("sent", [b"POST /v1/completions HT", post(COMPLETIONS, b"x" * 100)[:-50]])
async def test_incomplete_request_is_reported(frontends, sent):
    async with raw_http_client(frontends) as peer:
        await peer.send(sent)
        peer.writer.write_eof()

        status, _, body = await peer.answer()

        assert (status, error_of(body)["message"]) == (400, "the request is incomplete")
        assert await peer.rest() == b""


async def test_late_requests_are_reported(model_dir):
    limits = {"head_timeout_seconds": 0.2, "body_timeout_seconds": 0.2, "idle_timeout_seconds": 0.2}
    async with open_frontends(model_dir, **limits) as frontends:
        for sent in (b"POST /v1/completions HTTP/1.1\r\nhost", post(COMPLETIONS, b"x" * 100)[:-50]):
            async with raw_http_client(frontends) as peer:
                await peer.send(sent)
                status, _, body = await peer.answer()
                assert (status, error_of(body)["code"]) == (408, "request_timeout")
        async with raw_http_client(frontends) as peer:
            assert await peer.rest() == b""  # an idle connection gets no answer
        async with raw_http_client(frontends) as peer:
            await peer.send(get("/health"))
            await peer.answer()
            assert await peer.rest() == b""


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"x-a: b\r\n"),
        (post(COMPLETIONS, b"x" * 1000)[:-900], b"x"),
        (CHUNKED + b"\r\n", b"1\r\nx\r\n"),
    ],
    ids=["a head", "a body", "a body in chunks"],
)
async def test_dripping_bytes_extend_no_timeout(model_dir, begin, drop):
    """Drip bytes like slow-loris, which tries to hold connections for ever."""
    limits = {"head_timeout_seconds": 0.3, "body_timeout_seconds": 0.3}
    async with (
        open_frontends(model_dir, **limits) as frontends,
        raw_http_client(frontends) as peer,
        asyncio.TaskGroup() as tasks,
    ):

        async def drip():
            with suppress(ConnectionError):
                await peer.send(begin)
                while True:
                    await peer.send(drop)
                    await pace(0.02, "the client drips")

        dripping = tasks.create_task(drip())
        status, headers, body = await peer.answer()
        dripping.cancel()

    assert (status, headers["connection"]) == (408, "close")
    assert error_of(body)["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("many", "said"),
    [
        ({"stop": ["a"] * 1_000_000}, "stop: has 1000000 strings, and 16 are allowed"),
        ({"stop_token_ids": [0] * 1_000_000}, "stop_token_ids: has 1000000 ids, and 1024 are allowed"),
    ],
    ids=["strings", "tokens"],
)
async def test_million_stop_strings_are_rejected_without_leftovers(frontends, many, said):
    frontends.will_answer("the fox")
    asked = post(COMPLETIONS, {"prompt": "x", **many})
    async with raw_http_client(frontends) as peer, raw_http_client(frontends) as other:
        tracemalloc.start()
        try:
            for _ in range(2):
                await peer.send(asked)
                status, _, body = await peer.answer()
                assert (status, error_of(body)["message"]) == (400, said)
            await until(lambda: tracemalloc.get_traced_memory()[0] < 1 << 20)
        finally:
            tracemalloc.stop()
        await other.send(post(COMPLETIONS, {"prompt": "once"}))
        assert (await other.answer())[0] == 200
    assert len(frontends.router.submitted) == 1


MUCH = {
    "messages": [{"role": "user", "content": "x"}],
    "stream": True,
    "max_tokens": 4000,
    "logprobs": True,
    "top_logprobs": 20,
}


def will_answer_much(frontends: Frontends) -> int:
    """Prepare an answer larger than the sockets' buffers (10 MB); return its number of steps."""
    answer = frontends.will_answer("the quick brown fox " * 990)
    frontends.router.logprobs = [Logprobs(-1.0, tuple(range(300, 320)), (-1.234567890123456,) * 20) for _ in answer]
    return len(answer)


async def test_kernel_keeps_few_unsent_bytes_of_a_connection(frontends):
    """Otherwise a slow client would seem to read nothing for half a minute."""
    async with raw_http_client(frontends):
        await until(lambda: frontends.http.connections)
        (connection,) = frontends.http.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES


async def test_slow_client_delays_only_itself_and_memory_stays_flat(frontends):
    steps = will_answer_much(frontends)
    async with raw_http_client(frontends, limit=16 << 10) as peer:
        await peer.send(post(CHAT, MUCH))
        await peer.head()
        await until_still(lambda: frontends.router.steps_taken)
        (connection,) = frontends.http.connections

        assert frontends.router.steps_taken < steps
        assert connection.transport.get_write_buffer_size() < 256 << 10
        body = b"".join([chunk async for chunk in peer.chunks()])
        assert body.endswith(b"data: [DONE]\n\n")


async def test_client_that_never_reads_is_cut_off(model_dir):
    async with open_frontends(model_dir, write_timeout_seconds=0.3) as frontends:
        will_answer_much(frontends)
        async with raw_http_client(frontends, limit=16 << 10) as peer:
            await peer.send(post(CHAT, MUCH))

            await frontends.router.until(frontends.router.cancelled)

        await until(lambda: frontends.generation.running == 0)


async def test_client_that_drips_is_cut_off(model_dir):
    async with open_frontends(model_dir, write_timeout_seconds=1.0) as frontends, asyncio.TaskGroup() as tasks:
        will_answer_much(frontends)
        async with raw_http_client(frontends, limit=1) as peer:
            peer.writer.transport.pause_reading()
            sock = peer.writer.get_extra_info("socket")
            await peer.send(post(CHAT, MUCH))

            async def drip():
                with suppress(ConnectionError):
                    while True:
                        with suppress(BlockingIOError):
                            os.read(sock.fileno(), 1)
                        await pace(0.01, "the client reads a byte at a time")

            dripping = tasks.create_task(drip())
            await frontends.router.until(frontends.router.cancelled)
            dripping.cancel()
        await until(lambda: frontends.generation.running == 0 and not frontends.http.connections)


@asynccontextmanager
async def with_small_buffers(frontends, size=64 << 10):
    """Connect a client whose kernel takes little before the client reads."""
    host, _, port = frontends.http.address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=16 << 10)
        try:
            yield RawHttpClient(reader, writer)
        finally:
            writer.close()


async def test_slow_client_that_takes_enough_gets_all_of_it(model_dir):
    """Read enough in each period, but not everything in one."""
    async with open_frontends(model_dir, write_timeout_seconds=1.0, min_read_bytes=1000) as frontends:
        will_answer_much(frontends)
        async with with_small_buffers(frontends) as peer:
            await peer.send(post(CHAT, {**MUCH, "stream": False}, "connection: close"))
            status, headers = await peer.head()
            left = int(headers["content-length"])
            began = asyncio.get_running_loop().time()
            while left:
                left -= len(await peer.reader.readexactly(min(left, 50_000)))
                await pace(0.02, "the client reads slowly")

            assert status == 200
            assert asyncio.get_running_loop().time() - began > 1.5
            assert await peer.rest() == b""


async def test_stream_whose_client_reads_slowly_comes_whole(model_dir):
    """Refill all buffers, those of the kernel included, whenever the client has read something."""
    async with open_frontends(model_dir, write_timeout_seconds=1.0) as frontends:
        will_answer_much(frontends)
        async with with_small_buffers(frontends, 4 << 10) as peer:
            await peer.send(post(CHAT, MUCH, "connection: close"))
            loop = asyncio.get_running_loop()
            until_then = loop.time() + 4  # periods
            while loop.time() < until_then:
                await peer.reader.readexactly(10_000)
                await pace(0.02, "the client reads slowly")

            assert (await peer.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_client_cut_for_reading_slowly_is_logged_once(model_dir, caplog):
    async with open_frontends(model_dir, write_timeout_seconds=0.3) as frontends:
        will_answer_much(frontends)
        async with with_small_buffers(frontends) as peer, with_small_buffers(frontends) as other:
            for each in (peer, other):
                each.writer.transport.pause_reading()
                await each.send(post(CHAT, MUCH))
            await frontends.router.until(frontends.router.cancelled, 2)
        await until(lambda: not frontends.http.connections)

    (told,) = [each for each in caplog.records if each.message == "clients cut off because they read too slowly"]
    assert (told.listen, told.last_client, told.write_timeout_seconds) == (frontends.http.address, "127.0.0.1", 0.3)
    assert told.unread_bytes > 0


async def test_unread_answer_does_not_keep_its_connection(model_dir):
    limits = {"write_timeout_seconds": 0.5, "idle_timeout_seconds": 1.0}
    async with open_frontends(model_dir, **limits) as frontends, with_small_buffers(frontends) as peer:
        peer.writer.transport.pause_reading()
        await until(lambda: frontends.http.connections)
        (connection,) = frontends.http.connections
        while not connection.transport.get_write_buffer_size():
            idle_until = connection.deadline
            await peer.send(get("/openapi.json"))
            await until(lambda before=idle_until: connection.exchange is None and connection.deadline != before)
        assert connection.paused is None, "nothing waits for the client to read"

        await until(lambda: not frontends.http.connections)


async def test_long_bodies_share_a_bound_and_normal_ones_fit(model_dir):
    long = post(COMPLETIONS, {"prompt": "x", "ignored": "y" * 300_000})
    async with open_frontends(model_dir, max_held_bytes=1 << 20) as frontends, AsyncExitStack() as stack:
        frontends.will_answer("abc")
        peers = [await stack.enter_async_context(raw_http_client(frontends)) for _ in range(4)]
        for peer in peers[:3]:
            await peer.send(long[:-1])
        await until(lambda: frontends.http.held.bytes >= 3 * 300_000)
        await peers[3].send(long[:-1])

        status, headers, body = await peers[-1].answer()

        assert (status, headers["connection"]) == (503, "close")
        assert "too many long requests" in error_of(body)["message"]
        async with raw_http_client(frontends) as other:
            await other.send(post(COMPLETIONS, {"prompt": "x"}))
            assert (await other.answer())[0] == 200
        for peer in peers[:2]:
            await peer.send(long[-1:])
            assert (await peer.answer())[0] == 200
        async with raw_http_client(frontends) as other:
            for _ in range(4):  # the second request has a cached head
                await other.send(long)
                assert (await other.answer())[0] == 200


async def test_new_connections_are_rejected_when_all_are_served(model_dir):
    async with open_frontends(model_dir, max_connections=2) as frontends:
        frontends.will_answer("the fox")
        frontends.router.hold_after = 0
        async with raw_http_client(frontends) as one, raw_http_client(frontends) as two:
            for peer in (one, two):
                await peer.send(post(COMPLETIONS, {"prompt": "once"}))
            await frontends.router.until(frontends.router.submitted, 2)
            async with raw_http_client(frontends) as three:
                status, headers, body = await three.answer()
                assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
                assert error_of(body)["type"] == "server_error"
            frontends.router.release.set()
            assert [(await peer.answer())[0] for peer in (one, two)] == [200, 200]
        await until(lambda: not frontends.http.connections)
        async with raw_http_client(frontends) as peer:
            await peer.send(get("/health"))
            assert (await peer.answer())[0] == 200


WAITING = {
    "silent": b"",
    "a head": b"POST /v1/completions HTTP/1.1\r\nhost",
    "idle": get("/nowhere"),
    "a body": post(COMPLETIONS, b"x" * 100)[:-50],
}
"""Ways in which a connection waits, in the order in which they give way."""


async def test_waiting_connections_give_way_to_new_ones(model_dir, monkeypatch):
    monkeypatch.setattr(connection_limits, "GRACE_SECONDS", 0)
    async with open_frontends(model_dir, max_connections=5) as frontends, AsyncExitStack() as stack:
        frontends.will_answer("the fox")
        frontends.router.hold_after = 0

        async def newcomer(sent):
            peer = await stack.enter_async_context(raw_http_client(frontends))
            await peer.send(sent)
            return peer

        served = await newcomer(post(COMPLETIONS, {"prompt": "once"}))
        await frontends.router.until(frontends.router.submitted)
        peers = {name: await newcomer(sent) for name, sent in reversed(WAITING.items())}
        await peers["idle"].answer()
        await until(lambda: len(frontends.http.table) == 5)
        for count, (name, peer) in enumerate(reversed(peers.items()), 2):
            await newcomer(post(COMPLETIONS, {"prompt": "once"}))
            await frontends.router.until(frontends.router.submitted, count)
            if name != "idle":
                status, headers, body = await peer.answer()
                assert (status, headers["retry-after"]) == (503, "1")
                assert "too many connections" in error_of(body)["message"]
            assert await peer.rest() == b"", name
        frontends.http.table.check()
        frontends.router.release.set()

        assert (await served.answer())[0] == 200


@pytest.mark.parametrize("room", [0, 5])
async def test_burst_on_a_full_port_is_served_or_told_to_retry(model_dir, room):
    """Send more requests at once than a port with long answers has room for, and than it lets linger."""
    most, burst = 10, MAX_LINGERING + 100
    async with (
        open_frontends(model_dir, max_connections=most, address_share=1.0) as frontends,
        AsyncExitStack() as stack,
    ):
        frontends.will_answer("the fox")
        frontends.router.hold_after = 0
        request = post(COMPLETIONS, {"prompt": "once"})

        async def a_request():
            peer = await stack.enter_async_context(raw_http_client(frontends))
            with suppress(ConnectionError):  # the answer may be there already
                await peer.send(request)
            return peer

        served = [await a_request() for _ in range(most - room)]
        await frontends.router.until(frontends.router.submitted, most - room)
        newcomers = [asyncio.create_task(a_request()) for _ in range(burst)]
        served += [await each for each in newcomers]
        answering = [asyncio.create_task(peer.answer()) for peer in served]
        await until(lambda: sum(each.done() for each in answering) == burst - room)
        frontends.router.release.set()
        answers = [await each for each in answering]

        assert Counter(status for status, _, _ in answers) == {200: most, 503: burst - room}
        assert {headers["retry-after"] for status, headers, _ in answers if status == 503} == {"1"}


async def test_burst_of_connections_displaces_idle_ones_not_itself(model_dir):
    async with open_frontends(model_dir, max_connections=20) as frontends, AsyncExitStack() as stack:
        table = frontends.http.table
        for _ in range(18):  # as many as one address may open
            peer = await stack.enter_async_context(raw_http_client(frontends))
            await peer.send(get("/nowhere"))
            await peer.answer()
        for count in range(1, 6):
            burst = [await stack.enter_async_context(raw_http_client(frontends)) for _ in range(3)]
            await until(lambda most=3 * count: table.displaced == most)
            for peer in burst:
                await peer.send(get("/health"))
            assert [(await peer.answer())[0] for peer in burst] == [200] * 3


async def test_closed_connection_is_freed_without_the_collector(frontends):
    gc.disable()
    try:
        async with raw_http_client(frontends) as peer:
            await peer.send(get("/health"))
            assert (await peer.answer())[0] == 200
            (known,) = (weakref.ref(each) for each in frontends.http.connections)
        await until(lambda: known() is None)
    finally:
        gc.enable()


async def test_silent_clients_of_one_host_leave_room_for_others(model_dir):
    async with open_frontends(model_dir, max_connections=20, address_share=0.5) as frontends, AsyncExitStack() as stack:
        other = await stack.enter_async_context(raw_http_client(frontends, local_addr=("127.0.0.2", 0)))
        for _ in range(40):
            await stack.enter_async_context(raw_http_client(frontends))
        await until(lambda: frontends.http.table.displaced == 30)

        assert len(frontends.http.table) == 11
        await other.send(get("/health"))
        assert (await other.answer())[0] == 200


async def test_client_that_never_speaks_is_cut_before_idle_ones(model_dir):
    async with (
        open_frontends(model_dir, first_byte_timeout_seconds=0.2) as frontends,
        raw_http_client(frontends) as idle,
    ):
        await idle.send(get("/health"))
        await idle.answer()
        async with raw_http_client(frontends) as silent:
            assert await silent.rest() == b""

        await idle.send(get("/health"))
        assert (await idle.answer())[0] == 200


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", "host: is missing"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nHost: \r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: a/b\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: u@a\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: a:b\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: \xc3\xa4\r\n\r\n", "host: must be one"),
        (b"GET /health HTTP/1.1\r\nhost: [::1\r\n\r\n", "host: must be one"),
        (b"GET http://a/health HTTP/1.1\r\n\r\n", "host: is missing"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", "host: is missing"),
        (b"GET /health\r\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /health\r\n\r\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /health\r\nhost: a\r\n\r\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /health\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /health\n\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /health HTTP/0.9\r\nhost: a\r\n\r\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /health\r\n\thost: a\r\n\r\n", "the version HTTP/1.1 or HTTP/1.0"),
        (b"GET /hea\x01lth HTTP/1.1\r\nhost: a\r\n\r\n", "a target without invalid characters"),
        (b"GET /health#x HTTP/1.1\r\nhost: a\r\n\r\n", "a target without invalid characters"),
        (b"GET /health /v1\r\n", "not HTTP"),
        (b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n", "the version HTTP/1.1 or HTTP/1.0"),
    ],
)
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_requests_without_one_host_or_a_version_are_rejected(frontends, sent, said, in_pieces):
    async with raw_http_client(frontends) as peer:
        for piece in (bytes([byte]) for byte in sent) if in_pieces else (sent,):
            await peer.send(piece)
            await turns()

        status, headers, body = await peer.answer()

        assert (status, headers["connection"]) == (400, "close")
        assert said in error_of(body)["message"]
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost:\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: my_host.example:80\r\n\r\n",
        b"GET http://a:80/health?x=y HTTP/1.1\r\nhost: a:80\r\n\r\n",
        b"GET HTTPS://a/health HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
async def test_requests_whose_host_is_well_formed_are_served(frontends, sent):
    async with raw_http_client(frontends) as peer:
        await peer.send(sent)
        assert (await peer.answer())[0] == 200


async def test_known_head_without_its_host_is_rejected(frontends):
    frontends.will_answer("abc")
    asked = post(COMPLETIONS, {"prompt": "x"})
    async with raw_http_client(frontends) as peer:
        for _ in range(2):
            await peer.send(asked)
            assert (await peer.answer())[0] == 200
        await peer.send(asked.replace(b"host: x\r\n", b""))
        assert (await peer.answer())[0] == 400


async def test_health_follows_the_workers(frontends):
    async with raw_http_client(frontends) as peer:
        await peer.send(get("/health"))
        assert (await peer.answer())[::2] == (200, b'{"status":"ok","models":["tiny"]}')
        frontends.router.cards = ()

        await peer.send(get("/health", "HEAD") + get("/health"))

        assert (await peer.head())[0] == 503
        assert (await peer.answer())[0] == 503


def through_health(frontends):
    """Connect to the listener for health and metrics."""
    return raw_http_client(SimpleNamespace(http=SimpleNamespace(address=frontends.http.health_address)))


async def test_health_listener_answers_probes_and_nothing_else(model_dir):
    async with open_frontends(model_dir, health_listen="127.0.0.1:0") as frontends, through_health(frontends) as peer:
        for path, status in (("/health", 200), ("/live", 200), ("/metrics", 200), ("/v1/models", 404)):
            await peer.send(get(path))
            assert (await peer.answer())[0] == status, path
        await peer.send(post(CHAT, {"messages": []}))
        assert (await peer.answer())[0] == 404
        frontends.router.cards = ()

        for path, status in (("/health", 503), ("/live", 200)):
            await peer.send(get(path))
            assert (await peer.answer())[0] == status, path


async def test_health_listener_answers_while_frontend_drains(model_dir):
    async with open_frontends(model_dir, health_listen="127.0.0.1:0") as frontends:
        frontends.will_answer("the fox")
        frontends.router.hold_after = 1
        async with raw_http_client(frontends) as peer, asyncio.TaskGroup() as tasks:
            await peer.send(post(COMPLETIONS, {"prompt": "once"}))
            await frontends.router.until(frontends.router.submitted)
            tasks.create_task(frontends.http.drain(60))
            await until(lambda: frontends.http.draining)
            async with through_health(frontends) as probe:
                await probe.send(get("/health"))
                status, _, body = await probe.answer()
                assert (status, json.loads(body)["status"]) == (503, "draining")
                await probe.send(get("/live"))
                assert (await probe.answer())[0] == 200
            frontends.router.release.set()
            assert (await peer.answer())[0] == 200


async def test_full_http_port_leaves_the_health_listener_alone(model_dir):
    async with open_frontends(model_dir, max_connections=1, health_listen="127.0.0.1:0") as frontends:
        frontends.will_answer("the fox")
        frontends.router.hold_after = 0
        async with raw_http_client(frontends) as peer:
            await peer.send(post(COMPLETIONS, {"prompt": "once"}))
            await frontends.router.until(frontends.router.submitted)
            async with raw_http_client(frontends) as refused, through_health(frontends) as probe:
                assert (await refused.answer())[0] == 503
                await probe.send(get("/health"))
                assert (await probe.answer())[0] == 200


async def test_metrics_count_served_requests(frontends):
    frontends.will_answer("the fox", then=[EOS])
    async with raw_http_client(frontends) as peer:
        await peer.send(
            post(COMPLETIONS, {"prompt": "once", "max_tokens": 100})
            + post(COMPLETIONS, {"prompt": ""})
            + get("/metrics")
        )
        await peer.answer()
        await peer.answer()
        _, headers, body = await peer.answer()

    lines = body.decode().splitlines()
    assert headers["content-type"].startswith("text/plain")
    assert 'fleet_requests_total{model="tiny",outcome="stop",placement="aggregated"} 1.0' in lines
    assert 'fleet_requests_total{model="tiny",outcome="invalid_argument",placement="unknown"} 1.0' in lines
    assert f'fleet_completion_tokens_total{{model="tiny"}} {len(frontends.router.answer):.1f}' in lines
    assert 'fleet_kv_blocks_total{model="tiny",phase="aggregated",source="computed"} 1.0' in lines
    assert 'fleet_ttft_seconds_count{model="tiny"} 1.0' in lines


async def test_draining_finishes_requests_and_takes_no_new_ones(frontends):
    frontends.will_answer("the fox")
    frontends.router.hold_after = 1
    async with raw_http_client(frontends) as busy, raw_http_client(frontends) as idle, asyncio.TaskGroup() as tasks:
        await busy.send(post(COMPLETIONS, {"prompt": "once", "stream": True}))
        await frontends.router.until(frontends.router.submitted)

        draining = tasks.create_task(frontends.http.drain(10))

        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            async with raw_http_client(frontends):
                pass
        assert not draining.done()
        frontends.router.release.set()
        _, _, body = await busy.answer()
        assert body.endswith(b"[DONE]\n\n")
        await draining
        assert await busy.rest() == b""


async def test_bug_gives_500_and_the_next_request_is_served(frontends, caplog):
    frontends.will_answer("the fox")
    frontends.router.bug = ZeroDivisionError("bug")
    async with raw_http_client(frontends) as peer:
        await peer.send(post(COMPLETIONS, {"prompt": "once"}))
        status, _, body = await peer.answer()
        assert (status, error_of(body)["code"]) == (500, "internal")
        assert "bug" not in error_of(body)["message"]
        assert "ZeroDivisionError" in caplog.text
        frontends.router.bug = None

        await peer.send(post(COMPLETIONS, {"prompt": "once"}))

        assert (await peer.answer())[0] == 200


async def test_port_in_use_is_rejected_with_its_address(frontends):
    with pytest.raises(ConfigurationRefused, match=frontends.http.address):
        async with open_http_frontend(frontends.http.address, HttpSettings(), frontends.generation, None, None):
            pass


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:http", "127.0.0.1:65536", "host.invalid:0", ":1"])
async def test_invalid_address_is_rejected(frontends, listen):
    with pytest.raises(ConfigurationRefused, match=listen):
        async with open_http_frontend(listen, HttpSettings(), frontends.generation, None, None):
            pass
