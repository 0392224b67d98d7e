"""Tests of passages: uploads, downloads, WebSockets and other paths of external servers, passed on byte by byte."""

import asyncio
import hashlib
import io
import json
import os
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from prometheus_client import generate_latest

from fleet.net.settings import HttpSettings
from fleet.router.tenants import TenantSettings
from tests.support.backends.api_servers import ApiServer
from tests.support.backends.openai_servers import MODEL, ServerExchange, a_relay, an_openai_client
from tests.support.frontend.http_clients import error_of, get, post, raw_http_client
from tests.support.waiting import pace, until, until_still

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

KEY = "fk-1"
TENANTS = {"a": TenantSettings(api_key_sha256=(sha256(KEY.encode()).hexdigest(),), requests_per_minute=2)}


@asynccontextmanager
async def a_world(*servers: ApiServer, **options):
    """Yield a router in front of servers, and an HTTP session that does not change what it gets."""
    async with AsyncExitStack() as opened:
        for server in servers:
            await opened.enter_async_context(server.running())
        world = await opened.enter_async_context(a_relay(*servers, **options))
        session = await opened.enter_async_context(
            aiohttp.ClientSession(world.url, auto_decompress=False, skip_auto_headers=("user-agent", "accept"))
        )
        yield world, session


# Requests and answers


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "PATCH", "DELETE", "OPTIONS"])
async def test_any_method_and_query_reach_the_server(method):
    server = ApiServer()
    async with a_world(server) as (_, session):
        async with session.request(method, "/v1/files/f%201?limit=2&after=%26") as answer:
            content = await answer.read()

        (seen,) = server.seen
        assert (seen.method, seen.target) == (method, "/v1/files/f%201?limit=2&after=%26")
        assert (answer.status, answer.content_type) == (200, "application/x-echo")
        assert content == seen.target.encode()


async def test_answer_to_head_has_the_length_and_no_body():
    server = ApiServer()
    async with a_world(server) as (_, session):
        for _ in range(2):
            async with session.head("/v1/files/f") as answer:
                assert answer.headers["content-length"] == str(len("/v1/files/f"))
                assert await answer.read() == b""


async def test_multipart_upload_arrives_byte_by_byte():
    server = ApiServer()
    boundary, audio = "0123456789abcdef", os.urandom(300_000)
    parts = (
        f"--{boundary}\r\ncontent-disposition: form-data; name=model\r\n\r\n{MODEL}\r\n--{boundary}\r\n"
        'content-disposition: form-data; name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\n'
    )
    body = parts.encode() + audio + f"\r\n--{boundary}--\r\n".encode()
    async with a_world(server) as (_, session):
        headers = {"content-type": f"multipart/form-data; boundary={boundary}", "content-encoding": "identity"}
        async with session.post("/v1/audio/transcriptions", data=body, headers=headers) as answer:
            assert await answer.read() == body

    (seen,) = server.seen
    assert seen.body == body
    assert seen.headers["content-type"] == headers["content-type"]
    assert seen.headers["content-length"] == str(len(body))


async def test_official_client_transcribes_and_speaks():
    server = ApiServer()

    async def play(request: web.Request, seen) -> web.StreamResponse:
        if request.path.endswith("speech"):
            return web.Response(body=b"\0\1\2" * 50_000, content_type="audio/mpeg")
        assert b'name="file"; filename="a.wav"' in seen.body
        return web.json_response({"text": "hello"})

    server.play = play
    async with a_world(server) as (world, _), an_openai_client(world) as client:
        said = await client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"RIFF" * 1000))
        spoken = await client.audio.speech.create(model=MODEL, voice="alloy", input="hi")

        assert said.text == "hello"
        assert spoken.content == b"\0\1\2" * 50_000


@pytest.mark.parametrize("chunked", [True, False])
async def test_long_bodies_stream_in_both_directions(chunked):
    """The limit of collected bodies is one eighth of the body."""
    server = ApiServer()
    size, piece = 8 << 20, os.urandom(1 << 16)
    limits = HttpSettings(max_body_bytes=1 << 20, max_held_bytes=1 << 20)

    async def pieces():
        for _ in range(size // len(piece)):
            yield piece

    async with a_world(server, http=limits) as (_, session):
        data = pieces() if chunked else io.BytesIO(piece * (size // len(piece)))
        async with session.post("/v1/uploads", data=data) as answer:
            received = hashlib.sha256()
            async for part in answer.content.iter_any():
                received.update(part)

    assert len(server.seen[0].body) == size
    assert ("content-length" in server.seen[0].headers) != chunked
    assert received.digest() == hashlib.sha256(piece * (size // len(piece))).digest()


async def test_slow_client_stops_a_long_download():
    server = ApiServer()
    sent = 0

    async def endless(request: web.Request, _) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(256):
            await answer.write(bytes(1 << 20))
            sent += 1
        return answer

    server.play = endless
    patience = 0.5  # seconds, less than the client pauses: the server is not to blame
    async with (
        a_world(server, silence_timeout_seconds=patience) as (world, _),
        raw_http_client(world, limit=1 << 16) as peer,
    ):
        await peer.send(get("/v1/files/f/content"))
        await peer.head()
        await until_still(lambda: sent, 1.0)
        assert sent < 64, "MiB fit into the buffers of four sockets"
        total = 0
        async for chunk in peer.chunks():
            total += len(chunk)
        assert total == 256 << 20


async def test_server_that_does_not_read_stops_the_upload():
    server = ApiServer()
    release = asyncio.Event()
    taken = 0

    async def refuse(_: web.Request, __) -> web.StreamResponse:
        await release.wait()
        return web.Response(status=413, text="too long")

    async def pieces():
        nonlocal taken
        for _ in range(256):
            yield bytes(1 << 20)
            taken += 1

    server.play = refuse
    async with a_world(server) as (_, session), asyncio.TaskGroup() as tasks:

        async def upload():
            async with session.post("/v1/files/unread", data=pieces()) as answer:
                return answer.status, await answer.text()

        uploading = tasks.create_task(upload())
        await until_still(lambda: taken, 1.0)
        assert taken < 64
        release.set()
        assert await uploading == (413, "too long"), "an early answer ends the upload"


async def test_headers_of_one_connection_stay_there():
    server = ApiServer()

    async def play(_: web.Request, __) -> web.StreamResponse:
        headers = {"keep-alive": "timeout=5", "x-theirs": "1", "location": f"{server.url}/v1/files/g?x=1"}
        return web.Response(status=307, headers=headers)

    server.play = play
    async with a_world(server) as (_, session):
        sent = {"connection": "keep-alive, x-mine", "x-mine": "1", "te": "trailers", "x-other": "2"}
        async with session.get("/v1/files", headers=sent, allow_redirects=False) as answer:
            assert answer.status == 307
            assert answer.headers["x-theirs"] == "1"
            assert answer.headers["location"] == "/v1/files/g?x=1", "the address of the server stays inside"
            assert "keep-alive" not in answer.headers
            assert answer.headers["x-fleet-request-id"] == answer.headers["x-request-id"]

    received = server.seen[0].headers
    assert received["x-other"] == "2"
    assert not received.keys() & {"x-mine", "te"}
    assert received["host"] == server.url.removeprefix("http://")


async def test_errors_of_the_server_are_its_own():
    server = ApiServer()

    async def play(request: web.Request, _) -> web.StreamResponse:
        return web.Response(status=int(request.query["status"]), body=b"\xff theirs")

    server.play = play
    async with a_world(server) as (world, session):
        for status in (400, 404, 405, 429, 500, 503):
            async with session.put(f"/v1/anything?status={status}") as answer:
                assert (answer.status, await answer.read()) == (status, b"\xff theirs")
        assert world.serving() == 1


async def test_unknown_paths_are_as_the_server_says():
    server = ApiServer()
    async with a_world(server) as (_, session):
        async with session.get("/versions") as unknown, session.get("/v1/versions") as known:
            assert (unknown.status, known.status) == (404, 200)
        assert [seen.target for seen in server.seen] == ["/v1/versions"]


async def test_client_without_chunks_gets_the_plain_content():
    server = ApiServer()

    async def play(request: web.Request, _) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in (b"one ", b"two ", b"three"):
            await answer.write(piece)
        return answer

    server.play = play
    async with a_world(server) as (world, _), raw_http_client(world) as peer:
        await peer.send(b"GET /v1/files/f/content HTTP/1.0\r\n\r\n")
        head, _, content = (await peer.rest()).partition(b"\r\n\r\n")

        assert b"transfer-encoding" not in head.lower()
        assert content == b"one two three"


async def test_sized_passage_keeps_the_connection_of_an_old_client():
    async with a_world(ApiServer()) as (world, _), raw_http_client(world) as peer:
        for _ in range(2):
            await peer.send(b"GET /v1/files/f HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            status, headers = await peer.head()
            body = await peer.reader.readexactly(int(headers["Content-Length"]))
            assert (status, headers["connection"], body) == (200, "keep-alive", b"/v1/files/f")
        await peer.send(b"GET /v1/files/f HTTP/1.0\r\n\r\n")
        head, _, body = (await peer.rest()).partition(b"\r\n\r\n")

        assert b"\r\nconnection: close" in head
        assert body == b"/v1/files/f"


# Paths and keys


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/../sleep", 400),
        ("/v1/%2e%2e/sleep", 400),
        ("/v1/x/..%2f..%2fsleep", 400),
        ("/v1//sleep", 400),
        ("/v1/load_lora_adapter", 403),
        ("/v1/%6coad_lora_adapter", 403),
        ("/v1/unload_lora_adapter/", 403),
        ("/sleep", 404),
        ("/collective_rpc", 404),
        ("http://elsewhere/sleep", 404),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_control_routes_and_path_tricks_reach_no_server(target, status, method):
    server = ApiServer()
    async with a_world(server) as (world, _), raw_http_client(world) as peer:
        for _ in range(2):
            await peer.send(get(target, method))
            answered, _, content = await peer.answer()
            assert (answered, error_of(content)["type"]) == (status, "invalid_request_error")
        assert server.seen == []


@pytest.mark.parametrize("target", ["/v1//completions", "/v1/v1//chat/completions", "/v1//models"])
async def test_path_with_doubled_slash_gets_a_hint(target):
    server = ApiServer()
    async with a_world(server) as (world, _), raw_http_client(world) as peer:
        await peer.send(get(target, "POST"))
        status, _, content = await peer.answer()

        assert status == 400
        said = error_of(content)["message"]
        assert "empty segments" in said
        exists = target.replace("//", "/").replace("/v1/v1", "/v1")
        assert said.endswith(f"; {exists} exists: correct the base URL of the client")


async def test_listed_control_route_is_relayed():
    server = ApiServer()
    paths = ("/v1/*", "/v1/load_lora_adapter", "/sleep")
    async with a_world(server, limits={"external_paths": paths}) as (_, session):
        for path in ("/v1/load_lora_adapter", "/sleep?level=1"):
            async with session.post(path, json={"lora_name": "x"}) as answer:
                assert answer.status == 200

    assert [seen.target for seen in server.seen] == ["/v1/load_lora_adapter", "/sleep?level=1"]


async def test_keys_and_request_limits_hold_for_passages():
    server = ApiServer()
    async with a_world(server, tenants=TENANTS) as (world, session):
        async with session.get("/v1/files") as stranger:
            assert (stranger.status, stranger.headers["www-authenticate"]) == (401, "Bearer")
        for header in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            async with session.get("/v1/files", headers=header) as answer:
                assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        async with session.get("/v1/files", headers=header) as limited:
            assert (limited.status, (await limited.json())["error"]["code"]) == (429, "rate_limited")
            assert limited.headers["x-ratelimit-remaining-requests"] == "0"

        assert len(server.seen) == 2
        assert not any(seen.headers.keys() & {"authorization", "x-api-key"} for seen in server.seen)
        assert world.tenants.usage()["a"].requests == 2
        counted = generate_latest(world.registry).decode()
    for outcome, model, times in (
        ("served", MODEL, 2),
        ("unauthenticated", "unknown", 1),
        ("rate_limited", "unknown", 1),
    ):
        assert f'fleet_relayed_passages_total{{model="{model}",outcome="{outcome}"}} {times}.0' in counted


async def test_key_of_the_server_replaces_that_of_the_client():
    server = ApiServer()
    keys = {"authorization": "Bearer sk-client", "x-api-key": "k"}
    for own in ("sk-upstream", ""):
        async with a_world(server, api_key=own) as (_, session), session.get("/v1/files", headers=keys) as answer:
            assert answer.status == 200

    replaced, passed = (seen.headers for seen in server.seen)
    assert (replaced["authorization"], replaced.get("x-api-key")) == ("Bearer sk-upstream", None)
    assert (passed["authorization"], passed["x-api-key"]) == ("Bearer sk-client", "k")


@pytest.mark.parametrize("allowed", [False, True])
async def test_key_of_passage_crosses_plain_network_only_if_allowed(monkeypatch, caplog, allowed):
    # The system connects 0.0.0.0 to this host, but the router does not count it as loopback.
    monkeypatch.setattr(ApiServer, "url", property(lambda each: f"http://0.0.0.0:{each.port}"))
    server = ApiServer()
    keys = {"authorization": "Bearer sk-client", "x-api-key": "k", "api-key": "k", "x-goog-api-key": "k"}
    async with a_world(server, insecure=allowed) as (_, session), session.get("/v1/files", headers=keys) as answer:
        assert answer.status == 200

    (seen,) = server.seen
    assert len(seen.headers.keys() & keys.keys()) == (4 if allowed else 0)
    assert [each.message for each in caplog.records].count("client keys not passed on") == (0 if allowed else 1)


# WebSockets


async def test_websocket_passes_messages_both_ways_until_it_ends():
    server = ApiServer()
    async with a_world(server) as (world, session):
        async with session.ws_connect(f"/v1/realtime?model={MODEL}", protocols=("realtime",)) as socket:
            assert socket.protocol == "realtime"
            await socket.send_str("hello")
            assert await socket.receive_str() == "HELLO"
            await socket.send_bytes(bytes(range(256)) * 4096)
            assert await socket.receive_bytes() == bytes(reversed(range(256))) * 4096
            await socket.send_str("close")
            ended = await socket.receive()
            assert (ended.type, ended.data, ended.extra) == (aiohttp.WSMsgType.CLOSE, 4001, "as asked")
        await until(lambda: server.sockets == 0)
        assert server.seen[0].target == f"/v1/realtime?model={MODEL}"
        await until(
            lambda: (
                f'passages_total{{model="{MODEL}",outcome="served"}} 1.0'.encode() in generate_latest(world.registry)
            )
        )


async def test_departed_websocket_client_frees_the_server():
    server = ApiServer()
    async with a_world(server) as (_, session):
        socket = await session.ws_connect("/v1/realtime")
        await until(lambda: server.sockets == 1)
        await socket.close()
        await until(lambda: server.sockets == 0)


async def test_refused_websocket_gets_the_answer_of_the_server():
    server = ApiServer()

    async def refuse(_: web.Request, __) -> web.StreamResponse:
        return web.Response(status=403, text="no")

    server.talk = lambda request: refuse(request, None)
    async with a_world(server) as (_, session):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/realtime")

        assert refused.value.status == 403


# Failures


async def test_unreachable_server_passes_its_turn_to_another_one():
    gone, server = ApiServer(), ApiServer()
    async with AsyncExitStack() as opened:
        leaving = await opened.enter_async_context(AsyncExitStack())
        await leaving.enter_async_context(gone.running())
        world, session = await opened.enter_async_context(a_world(server, probe_seconds=60.0))
        del world
        async with session.get("/v1/files") as answer:
            assert answer.status == 200


async def test_stored_objects_are_found_on_the_server_that_has_them():
    servers = [ApiServer() for _ in range(3)]

    def having(name: str):
        async def play(request: web.Request, seen) -> web.StreamResponse:
            return web.json_response({}, status=200 if request.path.endswith(name) else 404)

        return play

    for index, server in enumerate(servers):
        server.play = having(f"resp_{index}")
    async with a_world(*servers) as (_, session):
        for index in range(3):
            async with session.get(f"/v1/responses/resp_{index}") as found:
                assert found.status == 200
            async with session.post(f"/v1/responses/resp_{index}/cancel") as absent:
                assert absent.status == 404, "no server has it"
        before = sum(len(server.seen) for server in servers)
        async with session.post("/v1/batches", json={"a": 1}) as sent_once:
            assert sent_once.status == 404
        assert sum(len(server.seen) for server in servers) == before + 1


async def test_server_that_stops_in_its_answer_ends_the_connection():
    server = ApiServer()

    async def play(request: web.Request, _) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"half")
        request.transport.abort()
        return answer

    server.play = play
    async with a_world(server) as (world, session):
        async with session.get("/v1/files/f/content") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await until(
            lambda: (
                f'passages_total{{model="{MODEL}",outcome="worker_lost"}} 1.0'.encode()
                in generate_latest(world.registry)
            )
        )


@pytest.mark.parametrize(
    "length", [b"200 OK\r\ncontent-length: 2\r\n\r\nok", b"204 No Content\r\ncontent-length: 46\r\n\r\n"]
)
async def test_second_answer_of_a_server_reaches_no_client(server, length):
    """A client would take it for the answer to its next request."""
    second = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"

    async def play(exchange: ServerExchange) -> None:
        await exchange.send(b"HTTP/1.1 " + length + second)

    server.play = play
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(2):
            await peer.send(post("/v1/files", b"x", "content-type: text/plain"))
            status, _, content = await peer.answer()
            assert (status, error_of(content)["code"]) == (503, "worker_lost")


async def test_silent_server_is_given_up():
    server = ApiServer()

    async def play(*_) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    server.play = play
    async with a_world(server, silence_timeout_seconds=0.3) as (_, session), session.get("/v1/files") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "worker_lost")


async def test_departed_client_ends_the_request_at_the_server():
    server = ApiServer()
    ended = asyncio.Event()

    async def play(request: web.Request, _) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x")
                await pace(0.01, "the server needs this time for a byte")
        finally:
            ended.set()

    server.play = play
    async with a_world(server) as (world, _):
        async with raw_http_client(world) as peer:
            await peer.send(get("/v1/files"))
            await peer.head()
        async with asyncio.timeout(30):
            await ended.wait()


async def test_upload_that_breaks_off_never_looks_whole_to_the_server():
    server = ApiServer()
    async with a_world(server) as (world, _):
        async with raw_http_client(world) as peer:
            await peer.send(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + bytes(70_000))
        async with raw_http_client(world) as peer:
            await peer.send(
                b"POST /v1/files HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nx\r\n"
            )
            assert (await peer.answer())[0] == 400
        await until(
            lambda: (
                f'passages_total{{model="{MODEL}",outcome="invalid_argument"}}'.encode()
                in generate_latest(world.registry)
            )
        )
        assert server.seen == []


async def test_draining_router_ends_the_running_passage():
    server = ApiServer()
    release = asyncio.Event()

    async def play(_: web.Request, __) -> web.StreamResponse:
        await release.wait()
        return web.Response(text="done")

    server.play = play
    async with a_world(server) as (world, session), asyncio.TaskGroup() as tasks:

        async def ask():
            async with session.get("/v1/files") as answer:
                return await answer.text()

        running = tasks.create_task(ask())
        await until(lambda: len(server.seen) == 1)
        draining = tasks.create_task(world.http.drain(30))
        await until(lambda: world.http.draining)
        release.set()
        assert await running == "done"
        await draining


# Models


async def test_listed_models_keep_the_fields_of_their_server():
    server = ApiServer()
    theirs = {"id": MODEL, "object": "model", "created": 7, "owned_by": "vllm", "root": "/m", "permission": [{"a": 1}]}
    server.models = [
        theirs | {"max_model_len": 2048},
        {"id": "lora", "parent": MODEL, "created": 8},
        {"id": "other"},
        {},
    ]
    async with a_world(server, adapters=("lora", "absent")) as (world, session):
        async with session.get("/v1/models") as answer:
            listed = {each["id"]: each for each in (await answer.json())["data"]}
        async with session.get(f"/v1/models/{MODEL}") as answer:
            assert await answer.json() == theirs | {"max_model_len": 2048}
        async with an_openai_client(world) as client:
            assert {model.id async for model in client.models.list()} == {MODEL, "lora", "absent"}

    assert listed[MODEL] == theirs | {"max_model_len": 2048}
    assert (listed["lora"]["created"], listed["lora"]["owned_by"]) == (8, "fleet")
    assert listed["absent"]["parent"] == MODEL
    assert "other" not in listed, "the router would refuse it"


@pytest.mark.parametrize(("created", "year"), [(1_750_000_000, 2025), ("nonsense", 1970), (10**18, 1970), (-1, 1970)])
async def test_external_models_are_listed_in_anthropics_form(created, year):
    server = ApiServer()
    server.models = [{"id": MODEL, "created": created, "owned_by": "vllm", "max_model_len": 2048}]
    async with (
        a_world(server, adapters=("lora",)) as (world, _),
        anthropic.AsyncAnthropic(base_url=world.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        listed = {each.id: each async for each in client.models.list()}
        one = await client.models.retrieve(MODEL)

    assert listed.keys() == {MODEL, "lora"}
    assert listed[MODEL] == one
    assert (one.type, one.display_name, one.created_at.year, one.max_input_tokens) == ("model", MODEL, year, 2048)


async def test_models_are_listed_without_the_help_of_a_server():
    server = ApiServer()
    server.models = "nonsense"
    async with a_world(server) as (_, session), session.get("/v1/models") as answer:
        assert [each["id"] for each in (await answer.json())["data"]] == [MODEL]


async def test_unreachable_servers_leave_a_clear_refusal():
    server = ApiServer()
    async with AsyncExitStack() as opened:
        running = await opened.enter_async_context(AsyncExitStack())
        await running.enter_async_context(server.running())
        world = await opened.enter_async_context(a_relay(server, probe_seconds=60.0))
        await running.aclose()
        async with aiohttp.ClientSession(world.url) as session:
            for _ in range(2):
                async with session.get("/v1/files") as answer:
                    said = json.loads(await answer.read())["error"]
                    assert (answer.status, said["type"]) == (503, said["type"])
                    assert said["code"] in ("worker_lost", "no_worker")


async def test_compressed_answers_stay_compressed():
    server = ApiServer()

    async def play(_: web.Request, seen) -> web.StreamResponse:
        assert seen.headers["accept-encoding"] == "gzip"
        answer = web.Response(text="a" * 1000)
        answer.enable_compression(web.ContentCoding.gzip)
        return answer

    server.play = play
    async with a_world(server) as (_, session), session.get("/v1/files", headers={"accept-encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert (await answer.read())[:2] == b"\x1f\x8b"


async def test_unsupported_function_is_the_word_of_the_server(server):
    async def refuse(exchange) -> None:
        await exchange.respond(501, b'{"error": {"message": "no pooling here"}}')

    server.play = refuse
    async with a_relay(server) as world, an_openai_client(world) as client:
        with pytest.raises(openai.InternalServerError, match="no pooling here") as said:
            await client.embeddings.create(model=MODEL, input="x")
        assert said.value.status_code == 501
        assert world.serving() == 1
        await world.settled()
