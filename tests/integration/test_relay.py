"""The router in front of foreign OpenAI-compatible servers, over real sockets, as clients and servers see it."""

import asyncio
import gc
import json
import resource
import signal
import sys
import threading
import tracemalloc
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from hashlib import sha256

import msgspec
import openai
import pytest
import zmq

from fleet.adapters import openai_workers
from fleet.adapters.text_codec import load_codec
from fleet.ids import RequestId
from fleet.router.http_settings import HttpSettings
from fleet.router.tenants import TenantSettings
from tests.builders import token_ids
from tests.integration.test_http_connections import connected, error_of, post
from tests.openai_servers import (
    EVENTS,
    MODEL,
    Answering,
    OpenAiServer,
    RelayWorld,
    a_relay,
    chunk,
    five_tokens,
    token,
    until,
)

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "say five letters"}]
ASKED = {"model": MODEL, "prompt": "say five letters", "stream": True}


@pytest.fixture
async def servers() -> AsyncIterator[list[OpenAiServer]]:
    servers = [OpenAiServer(), OpenAiServer()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(servers) -> OpenAiServer:
    return servers[0]


@asynccontextmanager
async def a_client(world: RelayWorld, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0, timeout=10) as client:
        yield client


async def texts(stream) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def hold(answering: Answering) -> None:
    """Give one token, and then nothing."""
    await answering.begin_events()
    await answering.event(token("a"))
    await asyncio.sleep(60)


async def say_nothing(answering: Answering) -> None:
    await asyncio.sleep(60)


# The official client


async def test_a_stream_arrives_as_the_server_gave_it(server):
    async with a_relay(server) as world, a_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert await texts(stream) == "abcde"
        await world.settled()


async def test_an_answer_in_one_piece_arrives_whole(server):
    async with a_relay(server) as world, a_client(world) as client:
        completion = await client.completions.create(model=MODEL, prompt="say", max_tokens=5)

        assert completion.choices[0].text == "abcde"
        assert completion.usage.completion_tokens == 5
        await world.settled()


async def test_fields_that_we_do_not_know_arrive_at_the_server(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    async with a_relay(server) as world, a_client(world) as client:
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=tools, response_format={"type": "json_object"}, logprobs=True
        )

        assert server.seen[0].json["tools"] == tools
        assert server.seen[0].json["response_format"] == {"type": "json_object"}
        assert server.seen[0].json["logprobs"] is True


async def test_the_clients_own_bytes_go_on(server):
    body = b'{ "model":"mock",\n\t"prompt" : "Gr\\u00f6\xc3\x9fe", "unknown": [1e400, {"a": 1, "a": 2}] }'
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, body, "user-agent: t/1", "connection: keep-alive, x-mine", "x-mine: 1"))
        assert (await peer.answer())[0] == 200

    assert server.seen[0].body == body
    assert server.seen[0].headers["user-agent"] == "t/1"
    assert "x-mine" not in server.seen[0].headers
    assert server.seen[0].headers["host"] == server.url.removeprefix("http://")


async def test_embeddings_pass_through(server):
    async def embed(answering: Answering) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        await answering.respond(200, json.dumps({"object": "list", "model": MODEL, "data": data}).encode())

    server.play = embed
    async with a_relay(server) as world, a_client(world) as client:
        answer = await client.embeddings.create(model=MODEL, input="x" * 1000, encoding_format="float")

        assert answer.data[0].embedding == [0.5, 0.25]
        assert server.seen[0].start == "POST /v1/embeddings HTTP/1.1"
        assert world.router.status().index_blocks == 0
        await world.settled()


async def test_models_are_listed(server):
    async with a_relay(server) as world, a_client(world) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_what_the_server_refuses_arrives_as_it_is(server):
    async def refuse(answering: Answering) -> None:
        error = {"message": "no such thing", "type": "invalid_request_error", "param": "top_k", "code": None}
        await answering.respond(422, json.dumps({"error": error}).encode())

    server.play = refuse
    async with a_relay(server) as world, a_client(world) as client:
        with pytest.raises(openai.UnprocessableEntityError, match="no such thing"):
            await client.completions.create(model=MODEL, prompt="say", extra_body={"top_k": -5})
        assert world.serving() == 1
        await world.settled()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"model": "other", "prompt": "x"}', 404, "'other' is not served here; served: mock"),
        (b'{"model": ', 400, "not valid JSON"),
        (b'{"model": 5, "prompt": "x"}', 400, "model"),
        (b'{"model": "mock", "prompt": "x", "fleet": {"priority": "high"}}', 400, "fleet.priority"),
        (b'{"model": "mock", "x": ' + b"[" * 100_000, 400, "nested too deeply"),
    ],
)
async def test_what_cannot_be_placed_is_refused_and_the_connection_lives_on(server, body, status, said):
    async with a_relay(server) as world, connected(world) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, body))
            answered, _, content = await peer.answer()

            assert answered == status
            assert said in error_of(content)["message"]
        await world.settled()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("number", [10**400, -(10**400)])
async def test_a_length_of_any_number_of_digits_is_the_servers_to_refuse(server, field, number):
    async with a_relay(server) as world, connected(world) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": "x", field: number}))
            status, _, _ = await peer.answer()

            assert status == 200
        assert server.seen[0].json[field] == number
        await world.settled()


async def test_a_hint_that_nobody_can_follow_is_refused_under_the_name_that_the_client_wrote(server):
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": "x", "fleet": {"pin": "nobody"}}))
        status, _, body = await peer.answer()

        assert (status, error_of(body)["param"]) == (400, "fleet.pin")
        await world.settled()


async def test_a_bug_in_one_request_does_not_leave_its_client_waiting(server, monkeypatch):
    async with a_relay(server) as world, a_client(world) as client:

        def broken(*_: object) -> None:
            raise OverflowError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(world.reader, "read", broken)
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "abcde"
        await world.settled()


async def test_the_api_key_of_the_worker_takes_the_place_of_the_clients(server):
    async with a_relay(server, api_key="sk-upstream") as world, a_client(world, "sk-client") as client:
        await client.completions.create(model=MODEL, prompt="say")

    assert server.seen[0].headers["authorization"] == "Bearer sk-upstream"


async def test_without_a_key_of_its_own_the_server_gets_the_clients(server):
    async with a_relay(server) as world, a_client(world, "sk-client") as client:
        await client.completions.create(model=MODEL, prompt="say")

    assert server.seen[0].headers["authorization"] == "Bearer sk-client"


async def test_keys_of_tenants_are_asked_for_and_shown_to_nobody(server):
    tenants = {"a": TenantSettings(api_key_sha256=(sha256(b"fk-1").hexdigest(),), requests_per_minute=2)}
    async with a_relay(server, tenants=tenants) as world, a_client(world, "fk-1") as client:
        await client.completions.create(model=MODEL, prompt="say")
        async with a_client(world, "fk-2") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.completions.create(model=MODEL, prompt="say")
        await client.completions.create(model=MODEL, prompt="say")
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="say")
        await world.settled()

    assert len(server.seen) == 2
    assert "authorization" not in server.seen[0].headers


# Connections


async def test_head_and_first_event_arrive_in_one_piece(server):
    async def in_pieces(answering: Answering) -> None:
        await answering.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
        await asyncio.sleep(0.02)
        await answering.send(EVENTS.removeprefix(b"content-ty") + b"\r\n")
        await asyncio.sleep(0.02)
        await answering.event(token("a"))
        await asyncio.sleep(0.02)
        await answering.end()

    server.play = in_pieces
    async with a_relay(server) as world:
        loop = asyncio.get_running_loop()
        first = loop.create_future()

        class Client(asyncio.Protocol):
            def connection_made(self, transport):
                transport.write(post(COMPLETIONS, ASKED))

            def data_received(self, data):
                first.done() or first.set_result(data)

        host, _, port = world.http.address.rpartition(":")
        transport, _ = await loop.create_connection(Client, host, int(port))
        async with asyncio.timeout(10):
            data = await first
        transport.close()

    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: {" in data


async def test_connections_to_the_server_are_used_again(server):
    async with a_relay(server) as world, connected(world) as peer:
        for _ in range(20):
            await peer.send(post(COMPLETIONS, ASKED))
            assert b"[DONE]" in (await peer.answer())[2]

    assert (len(server.seen), server.connections) == (20, 1)


async def test_connections_that_a_burst_has_left_over_are_closed(server, monkeypatch):
    monkeypatch.setattr(openai_workers, "IDLE_SECONDS", 0.3)
    all_there = asyncio.Event()

    async def together(answering: Answering) -> None:
        await all_there.wait()
        await answering.respond(200, b"{}")

    server.play = together
    async with a_relay(server) as world, AsyncExitStack() as burst, connected(world) as peer:
        for _ in range(8):
            other = await burst.enter_async_context(connected(world))
            await other.send(post(COMPLETIONS, ASKED))
        await until(lambda: server.open == 8)
        all_there.set()

        while server.open > 1:  # the latest is used again and again
            await peer.send(post(COMPLETIONS, ASKED))
            assert (await peer.answer())[0] == 200
        await until(lambda: server.open == 0)

        await peer.send(post(COMPLETIONS, ASKED))
        assert (await peer.answer())[0] == 200
        assert server.cut == 0
        await world.settled()


async def test_a_connection_that_the_server_has_closed_meanwhile_costs_no_request(servers):
    async def and_close(answering: Answering) -> None:
        await answering.respond(200, b"{}")
        answering.writer.transport.close()

    for server in servers:
        server.play = and_close
    async with a_relay(*servers) as world, connected(world) as peer:
        for _ in range(20):
            await peer.send(post(COMPLETIONS, ASKED))
            assert (await peer.answer())[0] == 200
        assert world.router.status().counters.retried == 0


async def test_a_request_that_crosses_the_end_of_its_connection_is_sent_again(server):
    served: set[asyncio.StreamWriter] = set()

    async def one_each(answering: Answering) -> None:
        if answering.writer in served:
            answering.writer.transport.abort()
        else:
            served.add(answering.writer)
            await answering.respond(200, b"{}")

    server.play = one_each
    async with a_relay(server) as world, connected(world) as peer:
        for _ in range(4):
            await peer.send(post(COMPLETIONS, ASKED))
            assert (await peer.answer())[0] == 200
        assert (len(server.seen), server.connections) == (7, 4)
        assert world.router.status().counters.retried == 0
        await world.settled()


async def test_pipelined_requests_are_answered_in_order(server):
    async def echo(answering: Answering) -> None:
        await answering.respond(200, answering.seen.body)

    server.play = echo
    bodies = [{**ASKED, "n": number} for number in range(30)]
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, bodies[0]))
        assert json.loads((await peer.answer())[2]) == bodies[0]  # from here on the head is known
        await peer.send(b"".join(post(COMPLETIONS, body) for body in bodies))

        for body in bodies:
            assert json.loads((await peer.answer())[2]) == body
        await world.settled()


async def test_a_request_with_a_known_head_may_come_in_any_pieces(server):
    async def echo(answering: Answering) -> None:
        await answering.respond(200, answering.seen.body)

    server.play = echo
    request = post(COMPLETIONS, {**ASKED, "prompt": "x" * 500})
    async with a_relay(server) as world, connected(world) as peer:
        for cut in (len(request), 40, request.index(b"\r\n\r\n") + 4, request.index(b"\r\n\r\n") + 2, 300, 301):
            await peer.send(request[:cut])
            await asyncio.sleep(0.002)
            await peer.send(request[cut:] + request[:10])  # the next one begins in the same piece
            assert json.loads((await peer.answer())[2])["prompt"] == "x" * 500
            await peer.send(request[10:])
            assert json.loads((await peer.answer())[2])["prompt"] == "x" * 500
        await world.settled()
    assert {seen.body for seen in server.seen} == {request.partition(b"\r\n\r\n")[2]}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_clients_that_close_get_a_connection_that_closes(server, version):
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED, "connection: close", version=version))
        status, headers, body = await peer.answer()

        assert (status, headers["connection"]) == (200, "close")
        assert ("transfer-encoding" in headers) == (version == "1.1")
        assert body.count(b"data: ") == 6
        assert body.endswith(b"data: [DONE]\n\n")  # without the signs between chunks
        assert await peer.rest() == b""


async def test_an_answer_that_ends_with_its_connection_is_whole(server):
    async def until_close(answering: Answering) -> None:
        await answering.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{}")
        answering.writer.close()

    server.play = until_close
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        status, headers, body = await peer.answer()

        assert (status, headers["connection"], body) == (200, "close", b"{}")
        await world.settled()
        assert world.router.status().counters.completed == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 8388609\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    ],
)
async def test_what_is_no_request_or_too_large_never_gets_to_the_server(server, sent, status):
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(sent)
        assert (await peer.answer())[0] == status
        assert server.seen == []


# Failures


async def test_a_server_that_dies_before_the_first_byte_is_replaced(servers):
    async def die(answering: Answering) -> None:
        await servers[0].stop()

    servers[0].play = die
    async with a_relay(*servers) as world, a_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert await texts(stream) == "abcde"
        assert (len(servers[0].seen), len(servers[1].seen)) == (1, 1)
        await world.settled()
        await until(lambda: world.serving() == 1)


async def test_a_head_without_content_counts_as_nothing(servers):
    async def die_after_the_head(answering: Answering) -> None:
        await answering.begin_events()
        answering.writer.transport.abort()

    servers[0].play = die_after_the_head
    async with a_relay(*servers) as world, a_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert await texts(stream) == "abcde"
        assert world.router.status().counters.retried == 1
        await world.settled()


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_server_error_is_tried_elsewhere(servers, status):
    async def fail(answering: Answering) -> None:
        await answering.respond(status, b'{"error": "out of memory"}')

    servers[0].play = fail
    async with a_relay(*servers) as world, a_client(world) as client:
        assert (await client.completions.create(model=MODEL, prompt="say")).choices[0].text == "abcde"
        await world.settled()


async def test_a_server_error_everywhere_is_told(server):
    async def fail(answering: Answering) -> None:
        await answering.respond(500, b'{"error": "out of memory"}')

    server.play = fail
    async with a_relay(server) as world, a_client(world) as client:
        with pytest.raises(openai.InternalServerError, match="has failed the request"):
            await client.completions.create(model=MODEL, prompt="say")
        await world.settled()


async def test_a_stream_that_is_cut_between_events_ends_with_an_error_event(server):
    async def die(answering: Answering) -> None:
        await answering.begin_events()
        await answering.event(token("a"))
        answering.writer.transport.abort() if answering.seen.json.get("now") else answering.writer.close()

    server.play = die
    async with a_relay(server) as world, a_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="w0"):
            await anext(stream)
        await world.settled()


async def test_a_stream_that_is_cut_within_an_event_ends_with_its_connection(server):
    async def die(answering: Answering) -> None:
        await answering.begin_events()
        await answering.event(token("a"))
        await answering.send(b"400\r\ndata: {")
        answering.writer.close()

    server.play = die
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        assert (await peer.head())[0] == 200
        rest = await peer.rest()

        assert rest.endswith(b"400\r\ndata: {")
        await world.settled()


async def test_what_is_no_http_is_a_failure_of_the_server(server):
    async def babble(answering: Answering) -> None:
        await answering.send(b"hello\r\n\r\n")

    server.play = babble
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        assert (await peer.answer())[0] == 503
        await world.settled()


@pytest.mark.parametrize("size", [3, 30, None])
async def test_a_second_answer_that_nobody_asked_for_reaches_nobody(server, size):
    async def twice(answering: Answering) -> None:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
        await answering.send(answer + b"{}" + (answer + b"[]")[:size])

    server.play = twice
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        status, _, body = await peer.answer()

        assert status == 503
        assert b"[]" not in body
        await world.settled()


async def test_a_silent_server_is_given_up(server):
    server.play = say_nothing
    async with a_relay(server, silence_timeout_seconds=0.3) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        assert (await peer.answer())[0] == 503
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_a_deadline_ends_a_request_wherever_it_is(server):
    server.play = say_nothing
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, {**ASKED, "fleet": {"timeout_ms": 100}}))
        assert (await peer.answer())[0] == 504
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_a_router_without_a_socket_left_blames_no_server_and_goes_on_when_there_is_one(server):
    async with a_relay(server) as world, connected(world) as peer:
        with no_file_left():
            await peer.send(post(COMPLETIONS, ASKED))
            await asyncio.sleep(0.6)  # six questions for its health that cannot be asked
            assert world.serving() == 1
        assert (await peer.answer())[0] == 200
        await world.settled()


async def test_a_request_that_finds_no_socket_in_time_is_refused_as_one_too_many(server):
    async with a_relay(server) as world, connected(world) as peer:
        with no_file_left():
            await peer.send(post(COMPLETIONS, ASKED))
            status, headers, content = await peer.answer()
        assert (status, headers["retry-after"], error_of(content)["code"]) == (429, "1", "queue_full")
        assert "open files" in error_of(content)["message"]
        assert world.serving() == 1
        await world.settled()


@contextmanager
def no_file_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # below the files that are open already
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_dead_server_leaves_and_returns(servers):
    async with a_relay(*servers) as world, a_client(world) as client:
        await servers[0].stop()
        await until(lambda: world.serving() == 1)
        assert (await client.completions.create(model=MODEL, prompt="say")).choices[0].text == "abcde"

        await servers[0].start()
        await until(lambda: world.serving() == 2)
        await world.settled()


async def test_a_server_that_fails_again_and_again_gets_nothing_for_a_while(servers):
    async def fail(answering: Answering) -> None:
        await answering.respond(500, b"{}")

    servers[0].play = fail
    async with a_relay(*servers) as world, a_client(world) as client:
        for _ in range(10):
            await client.completions.create(model=MODEL, prompt="say")
        assert len(servers[0].seen) == 5
        assert world.serving() == 1
        await world.settled()


async def test_a_request_that_no_server_can_take_does_not_put_them_all_out_however_often_it_is_sent(servers):
    async def choke(answering: Answering) -> None:
        poison = "poison" in answering.seen.json["prompt"]
        await (answering.respond(500, b"{}") if poison else five_tokens(answering))

    for server in servers:
        server.play = choke
    async with a_relay(*servers) as world, a_client(world) as client:
        for number in range(12):
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model=MODEL, prompt=f"poison {number}")
        assert world.serving() >= 1
        assert (await client.completions.create(model=MODEL, prompt="say")).choices[0].text == "abcde"
        await world.settled()


async def test_a_server_that_is_not_healthy_does_not_lose_what_it_runs(server):
    go_on = asyncio.Event()

    async def slowly(answering: Answering) -> None:
        await answering.begin_events()
        while not go_on.is_set():
            await answering.event(token("a"))
            await asyncio.sleep(0.01)
        await answering.event(b"[DONE]")
        await answering.end()

    server.play = slowly
    async with a_relay(server) as world, a_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        await anext(stream)
        server.health_status = 500
        await asyncio.sleep(0.6)
        assert world.serving() == 1

        go_on.set()
        assert set(await texts(stream)) == {"a"}
        await until(lambda: world.serving() == 0)


async def test_at_twice_its_capacity_a_router_answers_429_with_a_hint_keeps_its_bound_and_grows_by_nothing(server):
    """Row R11: 2 run and 4 wait; of 12 at once the others are told when to come again, and none that nobody is there."""
    go = asyncio.Event()

    async def when_let(answering: Answering) -> None:
        await go.wait()
        await five_tokens(answering)

    async def ask(world: RelayWorld) -> tuple[int, dict[str, str]]:
        async with connected(world) as peer:
            await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": "x" * 2000}))
            status, headers, _ = await peer.answer()
            return status, headers

    server.play = when_let
    sizes = []
    tracemalloc.start()
    limits = {"oversubscribe": 1.0, "max_queued": 4, "explained_requests": 4}
    async with a_relay(server, max_running=2, limits=limits) as world:
        for _ in range(6):
            go.clear()
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(ask(world)) for _ in range(12)]
                await until(lambda: sum(each.done() for each in asking) == 6)  # noqa: B023
                assert (world.router.status().active, world.router.status().queued) == (6, 4)
                go.set()
            answers = [each.result() for each in asking]
            assert sorted(status for status, _ in answers) == [200] * 6 + [429] * 6
            assert all(int(headers["retry-after"]) >= 1 for status, headers in answers if status == 429)
            await world.settled()
            server.seen.clear()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        assert sizes[-1] - sizes[2] < 50_000

        await server.stop()
        await until(lambda: world.serving() == 0)
        assert (await ask(world))[0] == 503
    tracemalloc.stop()


async def test_no_server_is_a_refusal_that_says_so(server):
    async with a_relay(server) as world, a_client(world) as client:
        await server.stop()
        await until(lambda: world.serving() == 0)
        with pytest.raises(openai.InternalServerError, match="no worker serves"):
            await client.completions.create(model=MODEL, prompt="say")


# Clients


@pytest.mark.parametrize("play", [say_nothing, hold])
async def test_a_client_that_goes_takes_its_request_with_it(server, play):
    server.play = play
    async with a_relay(server) as world:
        async with connected(world) as peer:
            await peer.send(post(COMPLETIONS, ASKED))
            await until(lambda: len(server.seen) == 1)
            assert world.running("w0") == 1
        await until(lambda: server.cut == 1)
        await world.settled()
        assert world.router.status().counters.cancelled == 1


async def test_a_client_that_closes_its_side_is_taken_to_be_gone(server):
    server.play = hold
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        await peer.head()
        peer.writer.write_eof()
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_a_client_that_does_not_read_stops_the_server_and_memory_stays_flat(server):
    sent = 0

    async def flood(answering: Answering) -> None:
        nonlocal sent
        answering.writer.transport.set_write_buffer_limits(high=0)
        await answering.begin_events()
        for _ in range(2000):
            await answering.send(chunk(b"data: " + b"x" * 50_000 + b"\n\n"))
            sent += 1
        await answering.end()

    server.play = flood
    async with a_relay(server) as world, connected(world, limit=1000) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        await peer.head()
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 400  # 20 MB: what the kernel's buffers of four sockets take at most

        received = 0
        async for each in peer.chunks():
            received += len(each)
        assert received == 2000 * 50_008
        await world.settled()


async def test_a_client_that_never_reads_is_cut_off(server):
    async def flood(answering: Answering) -> None:
        await answering.begin_events()
        while True:
            await answering.send(chunk(b"data: " + b"x" * 50_000 + b"\n\n"))

    server.play = flood
    async with a_relay(server, http=HttpSettings(write_timeout_seconds=0.3)) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        await until(lambda: server.cut == 1)
        await world.settled()


async def test_what_came_before_a_router_drains_and_is_served_after_is_refused_for_that(server):
    go_on = asyncio.Event()

    async def when_told(answering: Answering) -> None:
        await go_on.wait()
        await answering.respond(200, b"{}")

    server.play = when_told
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED) + post("/v1/embeddings", {"model": MODEL, "input": "x"}))
        await until(lambda: len(server.seen) == 1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.http.drain(10))
            await asyncio.sleep(0)
            go_on.set()
            assert (await peer.answer())[0] == 200
            status, _, content = await peer.answer()
        assert (status, error_of(content)["code"]) == (503, "draining")
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("method", "headers", "status"), [("POST", ("content-type: text/plain",), 415), ("GET", (), 405)]
)
async def test_embeddings_that_cannot_be_relayed_are_refused_for_what_is_wrong(server, method, headers, status):
    async with a_relay(server) as world, connected(world) as peer:
        sent = post("/v1/embeddings", {"model": MODEL, "input": "x"}, *headers)
        await peer.send(sent.replace(b"POST", method.encode(), 1))
        assert (await peer.answer())[0] == status
        assert server.seen == []


# Placement


async def test_a_prompt_whose_reading_fails_after_its_client_has_gone_is_no_news(server, model_dir, caplog):
    reading, go_on = threading.Event(), threading.Event()

    def broken(*_: object) -> None:
        reading.set()
        go_on.wait(10)
        raise OverflowError("a bug")

    async with a_relay(server, model_dir=model_dir) as world, connected(world) as peer:
        world.reader.inline_bytes = 10
        world.reader.read = broken
        long = [{"role": "user", "content": "the quick brown fox " * 500}]
        await peer.send(post(CHAT, {"model": MODEL, "messages": long}))
        assert await asyncio.to_thread(reading.wait, 10)
        peer.writer.close()
        await until(lambda: not world.http._connections)
        go_on.set()
        await asyncio.to_thread(lambda: None)
    gc.collect()  # where asyncio says what nobody has asked about
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_long_prompt_is_read_elsewhere_and_placed_all_the_same(server, model_dir):
    async with a_relay(server, model_dir=model_dir) as world, a_client(world) as client, connected(world) as peer:
        world.reader.inline_bytes = 10
        answers = [client.completions.create(model=MODEL, prompt="the quick brown fox " * 500) for _ in range(5)]
        for answer in answers:
            assert (await answer).choices[0].text == "abcde"
        assert world.router.status().index_blocks > 10

        await peer.send(post(COMPLETIONS, {**ASKED, "prompt": "the quick brown fox " * 50_000}))
        peer.writer.close()
        await world.settled()
        assert world.registry.get_sample_value("fleet_relayed_requests_total", {"outcome": "served"}) == 5


@pytest.mark.parametrize(
    ("made", "tokenises"),
    [
        (lambda ids: ids, "alike"),
        (lambda ids: ids[1:], "alike"),  # llama.cpp sets the first one later
        (lambda ids: [token + 1 for token in ids], "otherwise"),
        (lambda ids: "nonsense", "unknown"),
        (None, "unknown"),
    ],
    ids=["the same", "without the first", "others", "no tokens", "not served"],
)
async def test_what_a_server_makes_of_the_golden_prompts_is_compared_before_it_joins(
    server, model_dir, made, tokenises, caplog
):
    """Row B10, of servers that are not Fleet's."""
    codec = load_codec(model_dir)
    server.tokenise = made and (lambda text: made(token_ids(codec.encode(text))))
    async with a_relay(server, model_dir=model_dir) as world, a_client(world) as client:
        assert {name for name, count in world.workers.tokenizers().items() if count} == {tokenises}
        assert [record.levelname for record in caplog.records] == ["ERROR"] * (tokenises == "otherwise")
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "abcde"


async def test_prompts_that_begin_alike_go_to_the_same_server(servers, model_dir):
    beginnings = [f"{name} " * 60 for name in ("alpha", "beta", "gamma", "delta")]
    async with a_relay(*servers, model_dir=model_dir) as world, connected(world) as peer:
        went: dict[str, set[int]] = {}
        for number in range(20):
            for beginning in beginnings:
                before = len(servers[0].seen)
                await peer.send(post(COMPLETIONS, {**ASKED, "prompt": f"{beginning} and {number}"}))
                await peer.answer()
                went.setdefault(beginning, set()).add(len(servers[0].seen) - before)
        await world.settled()

    assert all(len(places) == 1 for places in went.values()), went
    assert {place for places in went.values() for place in places} == {0, 1}


async def test_no_more_is_believed_to_be_cached_than_there_is_room_for(server):
    async with a_relay(server, kv_blocks=400) as world, connected(world) as peer:
        for number in range(40):
            await peer.send(post(COMPLETIONS, {**ASKED, "prompt": f"{number} " * 2000}))
            await peer.answer()
            assert world.router.status().index_blocks <= 100
        assert world.router.status().index_blocks >= 50
        assert world.router.status().index_overflowed == 0
        await world.settled()


async def test_what_was_sent_long_ago_is_believed_to_be_gone(server):
    async with a_relay(server, cache_ttl_seconds=0.2) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, {**ASKED, "prompt": "x" * 10_000}))
        await peer.answer()
        assert world.router.status().index_blocks > 10
        await until(lambda: world.router.status().index_blocks == 0)


async def test_an_answer_that_grows_weighs_more(server):
    async def many(answering: Answering) -> None:
        await answering.begin_events()
        for _ in range(100):
            await answering.event(token("a"))
        await asyncio.sleep(60)

    server.play = many
    async with a_relay(server) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        await until(lambda: world.router.status().pools[0].workers[0].booked_blocks > 1)


async def test_metrics_count_what_was_relayed(server):
    async with a_relay(server) as world, a_client(world) as client:
        await client.completions.create(model=MODEL, prompt="say")
        with suppress(openai.NotFoundError):
            await client.completions.create(model="other", prompt="say")
        await world.settled()
        assert world.registry.get_sample_value("fleet_relayed_requests_total", {"outcome": "served"}) == 1
        assert world.registry.get_sample_value("fleet_relayed_ttft_seconds_count") == 1


async def test_what_a_server_tells_of_its_cache_is_known_by_token(servers, model_dir):
    prompt = "the quick brown fox jumps over the lazy dog " * 10
    ids = token_ids(load_codec(model_dir).encode(prompt))
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        hashes = list(range(100, 100 + len(ids) // 16))
        stored = {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": 16,
            "token_ids": ids[: 16 * len(hashes)], "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        events = {"kv_events": f"tcp://127.0.0.1:{port}", "kv_blocks": 1000}
        async with a_relay(servers[0], model_dir=model_dir, **events) as world, connected(world) as peer:
            number = 0
            while world.router.status().index_blocks < len(hashes):  # a subscription takes its time
                payload = msgspec.msgpack.encode([0.0, [stored], 0])
                publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
                number += 1
                await asyncio.sleep(0.01)
            assert world.router.status().index_blocks == len(hashes)

            await peer.send(post(COMPLETIONS, {**ASKED, "prompt": prompt}))
            assert (await peer.answer())[0] == 200
            request_id = RequestId("t-1")
            explanation = world.router.explain(request_id)
            assert explanation.placements[0].uncached_tokens == max(1, len(ids) - 16 * len(hashes))

            removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
            copies = [removed] * number
            publisher.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, copies, 0])])
            await until(lambda: world.router.status().index_blocks == 0)
            publisher.send_multipart([b"", (number + 1).to_bytes(8, "big"), b"\xc1 no msgpack"])
            await asyncio.sleep(0.2)
            assert world.serving() == 1


async def test_models_of_other_workers_are_served_beside(server):
    async with a_relay(server, only=False) as world, connected(world) as peer:
        await peer.send(post(COMPLETIONS, ASKED))
        assert (await peer.answer())[0] == 200
        await peer.send(post(COMPLETIONS, {**ASKED, "model": "own"}))
        status, _, content = await peer.answer()

        assert (status, error_of(content)["code"]) == (404, "model_not_found")  # as the other front says it
        assert len(server.seen) == 1
        await world.settled()


async def test_the_command_serves_foreign_servers_until_it_is_told_to_stop(servers, model_dir, tmp_path):
    file = tmp_path / "router.toml"
    sections = [
        f'[[openai_workers]]\nworker_id = "w{index}"\nurl = "{server.url}"\nmodel = "mock"\ntokenizer = "{model_dir}"\n'
        for index, server in enumerate(servers)
    ]
    listening = 'http_listen = "127.0.0.1:0"\ngrpc_listen = "127.0.0.1:0"\nhttp.max_body_bytes = 4096\n'
    file.write_text(listening + "".join(sections))
    command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        async with asyncio.timeout(30):
            url = f"http://{json.loads(await process.stdout.readline())['http']}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=20, timeout=10) as client:
                stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                assert await texts(stream) == "abcde"
                with pytest.raises(openai.APIStatusError) as refused:  # as the settings have it
                    await client.with_options(max_retries=0).completions.create(model=MODEL, prompt="x" * 5000)
                assert refused.value.status_code == 413
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("drain_timeout_ms", [50, 60_000])
async def test_answers_go_on_after_sigterm_for_as_long_as_the_settings_say(
    server, model_dir, tmp_path, drain_timeout_ms
):
    told_to_end = asyncio.Event()

    async def until_told(answering: Answering) -> None:
        await answering.begin_events()
        await answering.event(token("a"))
        await told_to_end.wait()
        await answering.event(token("b"))
        await answering.event(b"[DONE]")
        await answering.end()

    server.play = until_told
    own = {"worker_id": "w", "url": server.url, "model": "mock", "tokenizer": str(model_dir)}
    settings = {"openai_workers": [own], "drain_timeout_ms": drain_timeout_ms}
    settings |= dict.fromkeys(("http_listen", "grpc_listen"), "127.0.0.1:0")
    file = tmp_path / "router.json"
    file.write_text(json.dumps(settings))
    command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        async with asyncio.timeout(30):
            address = json.loads(await process.stdout.readline())["http"]
            async with openai.AsyncOpenAI(
                base_url=f"http://{address}/v1", api_key="none", max_retries=20, timeout=20
            ) as client:
                stream = aiter(await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
                assert (await anext(stream)).choices[0].delta.content == "a"
                process.send_signal(signal.SIGTERM)
                if drain_timeout_ms < 1000:
                    async with asyncio.timeout(8):  # less than it would be given by itself
                        assert await process.wait() == 0
                    return
                while await listens(address):
                    await asyncio.sleep(0.01)
                told_to_end.set()
                assert (await anext(stream)).choices[0].delta.content == "b"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_the_command_refuses_what_it_cannot_obey_in_one_line(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text('[[openai_workers]]\nworker_id = "w0"\nurl = "http://x"\nmodel = "m"\ntokenizer = "/nowhere"\n')
    command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
    async with asyncio.timeout(30):
        _, errors = await process.communicate()

    assert process.returncode == 3
    (line,) = errors.decode().splitlines()
    assert line.startswith("fleet: tokenizer of w0 in openai_workers: /nowhere: is not a folder")
