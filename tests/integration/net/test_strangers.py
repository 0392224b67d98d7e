"""Requests without a known key are refused when their head is complete, so that strangers make the router hold no bodies."""

import asyncio
import json
import socket
from hashlib import sha256

import pytest

from fleet.router.tenants import TenantSettings
from tests.support.backends.openai_servers import OpenAiServer, a_relay
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.http_clients import RawHttpClient, get, post, raw_http_client
from tests.support.waiting import turns, until, until_still

pytestmark = pytest.mark.integration

KEY = "sk-of-acme"
WRONG = "authorization: Bearer sk-wrong"
RIGHT = f"authorization: Bearer {KEY}"
TENANTS = {"acme": TenantSettings(api_key_sha256=(sha256(KEY.encode()).hexdigest(),))}
COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
READ_BYTES = 256 << 10  # size of the event loop's largest read
LONG = b'{"prompt": "' + b"x" * 400_000 + b'"}'


@pytest.fixture
async def frontends(model_dir):
    async with open_frontends(model_dir, TENANTS) as frontends:
        frontends.will_answer("the fox")
        yield frontends


def refused(frontends):
    """Return how many requests were counted as refused for their key."""
    samples = [sample for metric in frontends.registry.collect() for sample in metric.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == "fleet_requests_total" and sample.labels["outcome"] == "unauthenticated"
    )


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", MESSAGES, "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("kept", [0, 1000])
async def test_stranger_is_refused_before_the_body_has_arrived(frontends, path, kept):
    sent = post(path, LONG, WRONG)
    sent = sent[: sent.index(b"\r\n\r\n") + 4 + kept]
    async with raw_http_client(frontends) as peer:
        await peer.send(sent)
        status, headers, body = await peer.answer()
        assert frontends.http.held.bytes == 0
        assert await peer.rest() == b""
    error = json.loads(body)["error"]
    assert (status, headers["www-authenticate"], headers["connection"]) == (401, "Bearer", "close")
    assert headers["x-request-id"]
    assert error["type"] == "authentication_error"
    assert ("code" in error) == (path != MESSAGES)
    assert refused(frontends) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_early_refusal_equals_that_of_a_whole_request(frontends, path):
    content = {"model": "", "max_tokens": 4, "prompt": "once", "messages": [{"role": "user", "content": "once"}]}
    del content["messages" if path == COMPLETIONS else "prompt"]
    whole = post(path, content, WRONG)
    answers = []
    for sent in (whole, whole[:-5]):
        async with raw_http_client(frontends) as peer:
            await peer.send(sent)
            answers.append(await peer.answer())
    (status, headers, body), (early_status, early_headers, early_body) = answers
    assert (status, body) == (early_status, early_body)
    assert early_headers.keys() - {"connection"} == headers.keys()


JUDGED = [
    COMPLETIONS,
    "/v1/chat/completions",
    MESSAGES,
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/tokenize",
]
MALFORMED = [b"{", b"", b'{"model": 1}', b'{"tools": []}']


@pytest.mark.parametrize("path", JUDGED)
@pytest.mark.parametrize("body", MALFORMED)
async def test_key_is_checked_before_a_small_body_is_judged(frontends, path, body):
    async with raw_http_client(frontends) as peer:
        await peer.send(post(path, body, WRONG))
        assert (await peer.answer())[0] == 401
        await peer.send(post(path, body, WRONG, "content-type: text/plain"))
        assert (await peer.answer())[0] == 401
        await peer.send(post(path, body, RIGHT))
        assert (await peer.answer())[0] == 400
    assert refused(frontends) == 2


async def test_key_is_checked_before_a_relayed_body_is_judged():
    server = OpenAiServer()
    await server.start()
    async with a_relay(server, tenants=TENANTS) as world, raw_http_client(world) as peer:
        for path in ("/v1/chat/completions", MESSAGES, "/v1/embeddings"):
            for body in (*MALFORMED, b'{"model": "unknown"}'):
                await peer.send(post(path, body, WRONG))
                assert (await peer.answer())[0] == 401
            await peer.send(post(path, b"{", RIGHT))
            assert (await peer.answer())[0] == 400
    await server.stop()
    assert not server.seen


async def test_probe_needs_no_key(frontends):
    async with raw_http_client(frontends) as peer:
        await peer.send(post("/ping", b"{}", WRONG))
        assert (await peer.answer())[0] == 200
        head, body = post("/ping", b"{}", WRONG).split(b"\r\n\r\n")
        await peer.send(head + b"\r\n\r\n")
        await turns(10)  # the head is read before its body arrives
        await peer.send(body)
        assert (await peer.answer())[0] == 200
    assert refused(frontends) == 0


@pytest.mark.parametrize("known", [False, True])
async def test_body_of_a_strangers_probe_is_not_held(frontends, known):
    async with raw_http_client(frontends) as peer:
        if known:  # the head is then found in the cache
            await peer.send(post("/ping", b"{}", WRONG))
            assert (await peer.answer())[0] == 200
        await peer.send(post("/ping", LONG, WRONG)[:-10])
        assert (await peer.answer())[0] == 200
        assert frontends.http.held.bytes == 0
        assert await peer.rest() == b""
    assert refused(frontends) == 0


async def test_stranger_is_not_asked_for_a_body(frontends):
    sent = post(COMPLETIONS, LONG, WRONG, "expect: 100-continue")
    async with raw_http_client(frontends) as peer:
        await peer.send(sent[: -len(LONG)])
        assert (await peer.answer())[0] == 401


@pytest.mark.parametrize("chunked", [False, True])
async def test_stranger_with_a_known_head_or_chunks_is_refused(frontends, chunked):
    async with raw_http_client(frontends) as peer:
        for _ in range(2):  # the second head is found in the cache
            await peer.send(post(COMPLETIONS, {"prompt": "once"}, WRONG))
            assert (await peer.answer())[0] == 401
        sent = post(COMPLETIONS, LONG, WRONG)[:-10]
        if chunked:
            sent = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{WRONG}\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab".encode()
        await peer.send(sent)
        assert (await peer.answer())[0] == 401
        await until(lambda: frontends.http.held.bytes == 0)


async def test_stranger_behind_another_request_is_refused_in_turn(frontends):
    async with raw_http_client(frontends) as peer:
        await peer.send(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" + post(COMPLETIONS, LONG, WRONG)[: -len(LONG)])
        assert (await peer.answer())[0] in (200, 503)
        await peer.send(LONG[:1000])
        assert (await peer.answer())[0] == 401


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/models", 405)])
async def test_stranger_gets_other_errors_without_the_body(frontends, path, status):
    async with raw_http_client(frontends) as peer:
        await peer.send(post(path, LONG, WRONG)[:-10])
        assert (await peer.answer())[0] == status
        assert await peer.rest() == b""


async def test_bodies_of_tenants_are_taken_in_pieces(frontends):
    sent = post(COMPLETIONS, {"prompt": "once", "max_tokens": 4}, RIGHT)
    continued = post(COMPLETIONS, {"prompt": "once", "max_tokens": 4}, RIGHT, "expect: 100-continue")
    head = len(continued.partition(b"\r\n\r\n")[0]) + 4
    async with raw_http_client(frontends) as peer:
        for _ in range(3):  # the head of the later ones is found in the cache
            await peer.send(sent[:-9])
            await until(lambda: frontends.http.held.bytes > 0)
            await peer.send(sent[-9:])
            assert (await peer.answer())[0] == 200
        await peer.send(continued[:head])
        assert (await peer.head())[0] == 100
        await peer.send(continued[head:])
        assert (await peer.answer())[0] == 200


@pytest.mark.parametrize("unread", [2, 8])  # answers of 63 kB: with 2, all requests are served, with 8, some wait
async def test_body_of_a_stranger_behind_unread_answers_is_not_read(frontends, unread):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = frontends.http.address.rpartition(":")
        sock.connect((host, int(port)))
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        peer = RawHttpClient(reader, writer)
        body = b"x" * 4_000_000
        writer.write(get("/openapi.json") * unread)
        writer.write(post(COMPLETIONS, body, WRONG)[:-1])

        await until_still(lambda: (frontends.http.held.bytes, writer.transport.get_write_buffer_size()))
        assert frontends.http.held.bytes <= READ_BYTES
        for _ in range(unread):
            assert (await peer.answer())[0] == 200
        assert (await peer.answer())[0] == 401
        assert frontends.http.held.bytes == 0
        writer.transport.abort()


async def test_body_of_a_tenant_behind_another_request_is_read_in_turn(frontends):
    sent = post(COMPLETIONS, {"prompt": "once " * 50, "max_tokens": 4}, RIGHT)
    async with raw_http_client(frontends) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, {"prompt": "once", "max_tokens": 4}, RIGHT) + sent[:-200])
            assert (await peer.answer())[0] == 200
            await peer.send(sent[-200:])
            assert (await peer.answer())[0] == 200
