"""Tests of the relay between a client and an external backend: the client's own bytes, and connections on both sides."""

import asyncio
import json
from contextlib import AsyncExitStack
from hashlib import sha256

import httpx
import openai
import pytest

from fleet.backends.external import backend as openai_worker
from fleet.core.errors import RequestRejected
from fleet.core.ids import RequestId
from fleet.router.tenants import TenantSettings
from tests.support.backends.openai_servers import (
    COMPLETIONS,
    EVENTS,
    MESSAGES,
    MODEL,
    STREAMING_REQUEST,
    OpenAiServer,
    ServerExchange,
    a_relay,
    an_openai_client,
    streamed_text,
    token,
)
from tests.support.builders import a_request
from tests.support.frontend.http_clients import error_of, post, raw_http_client
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration


# The official client


async def test_stream_arrives_as_the_server_sent_it(server):
    async with a_relay(server) as world, an_openai_client(world) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)

        assert await streamed_text(stream) == "abcde"
        await world.settled()


async def test_an_answer_in_one_piece_arrives_whole(server):
    async with a_relay(server) as world, an_openai_client(world) as client:
        completion = await client.completions.create(model=MODEL, prompt="say", max_tokens=5)

        assert completion.choices[0].text == "abcde"
        assert completion.usage.completion_tokens == 5
        await world.settled()


async def test_unknown_fields_reach_the_server(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    async with a_relay(server) as world, an_openai_client(world) as client:
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=tools, response_format={"type": "json_object"}, logprobs=True
        )

        assert server.seen[0].json["tools"] == tools
        assert server.seen[0].json["response_format"] == {"type": "json_object"}
        assert server.seen[0].json["logprobs"] is True


async def test_bytes_of_the_client_are_forwarded_unchanged(server):
    body = b'{ "model":"mock",\n\t"prompt" : "Gr\\u00f6\xc3\x9fe", "unknown": [1e400, {"a": 1, "a": 2}] }'
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, body, "user-agent: t/1", "connection: keep-alive, x-mine", "x-mine: 1"))
        assert (await peer.answer())[0] == 200

    assert server.seen[0].body == body
    assert server.seen[0].headers["user-agent"] == "t/1"
    assert "x-mine" not in server.seen[0].headers
    assert server.seen[0].headers["host"] == server.url.removeprefix("http://")


async def test_embeddings_pass_through(server):
    async def embed(exchange: ServerExchange) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        await exchange.respond(200, json.dumps({"object": "list", "model": MODEL, "data": data}).encode())

    server.play = embed
    async with a_relay(server) as world, an_openai_client(world) as client:
        answer = await client.embeddings.create(model=MODEL, input="x" * 1000, encoding_format="float")

        assert answer.data[0].embedding == [0.5, 0.25]
        assert server.seen[0].start == "POST /v1/embeddings HTTP/1.1"
        assert world.router.status().index_blocks == 0
        await world.settled()


async def test_models_are_listed(server):
    async with a_relay(server) as world, an_openai_client(world) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_error_of_the_server_is_passed_on_unchanged(server):
    async def refuse(exchange: ServerExchange) -> None:
        error = {"message": "no such thing", "type": "invalid_request_error", "param": "top_k", "code": None}
        await exchange.respond(422, json.dumps({"error": error}).encode())

    server.play = refuse
    async with a_relay(server) as world, an_openai_client(world) as client:
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
async def test_unplaceable_request_is_rejected_on_a_live_connection(server, body, status, said):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, body))
            answered, _, content = await peer.answer()

            assert answered == status
            assert said in error_of(content)["message"]
        await world.settled()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("number", [10**400, -(10**400)])
async def test_number_with_any_digits_is_left_to_the_server(server, field, number):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": "x", field: number}))
            status, _, _ = await peer.answer()

            assert status == 200
        assert server.seen[0].json[field] == number
        await world.settled()


async def test_impossible_hint_is_rejected_under_the_clients_name(server):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, {"model": MODEL, "prompt": "x", "fleet": {"pin": "nobody"}}))
        status, _, body = await peer.answer()

        error = error_of(body)
        assert (status, error["param"], error["code"], error["cause"]) == (
            400,
            "fleet.pin",
            "invalid_argument",
            "pin_unknown",
        )
        await world.settled()


async def test_bug_in_a_request_still_answers_its_client(server, monkeypatch):
    async with a_relay(server) as world, an_openai_client(world) as client:

        def broken(*_: object) -> None:
            raise OverflowError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(world.reader, "read", broken)
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "abcde"
        await world.settled()


async def test_api_key_of_the_worker_replaces_that_of_the_client(server):
    async with a_relay(server, api_key="sk-upstream") as world, an_openai_client(world, "sk-client") as client:
        await client.completions.create(model=MODEL, prompt="say")

    assert server.seen[0].headers["authorization"] == "Bearer sk-upstream"


async def test_server_without_a_key_gets_the_key_of_the_client(server):
    async with a_relay(server) as world, an_openai_client(world, "sk-client") as client:
        await client.completions.create(model=MODEL, prompt="say")

    assert server.seen[0].headers["authorization"] == "Bearer sk-client"


@pytest.mark.parametrize("allowed", [False, True])
async def test_key_crosses_plain_network_only_if_settings_allow_it(server, monkeypatch, caplog, allowed):
    # The system connects 0.0.0.0 to this host, but the router does not count it as loopback.
    monkeypatch.setattr(type(server), "url", property(lambda each: f"http://0.0.0.0:{each.port}"))
    async with a_relay(server, insecure=allowed) as world, an_openai_client(world, "sk-client") as client:
        for _ in range(2):
            await client.completions.create(model=MODEL, prompt="say", extra_headers={"x-api-key": "sk-client"})

    keys = [(seen.headers.get("authorization"), seen.headers.get("x-api-key")) for seen in server.seen]
    assert keys == [("Bearer sk-client", "sk-client") if allowed else (None, None)] * 2
    logged = [each.remedy for each in caplog.records if each.message == "client keys not passed on"]
    assert len(logged) == (0 if allowed else 1)
    assert all("openai_workers.insecure" in remedy for remedy in logged)


async def test_request_without_key_causes_no_warning_of_keys(server, monkeypatch, caplog):
    monkeypatch.setattr(type(server), "url", property(lambda each: f"http://0.0.0.0:{each.port}"))
    async with a_relay(server) as world, httpx.AsyncClient() as client:
        answer = await client.post(f"{world.url}{COMPLETIONS}", json={"model": MODEL, "prompt": "say"})

    assert answer.status_code == 200
    assert "client keys not passed on" not in [each.message for each in caplog.records]


async def test_tenant_keys_are_required_and_not_forwarded(server):
    tenants = {"a": TenantSettings(api_key_sha256=(sha256(b"fk-1").hexdigest(),), requests_per_minute=2)}
    async with a_relay(server, tenants=tenants) as world, an_openai_client(world, "fk-1") as client:
        answers = [await client.completions.with_raw_response.create(model=MODEL, prompt="say five letters")]
        async with an_openai_client(world, "fk-2") as stranger:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await stranger.completions.create(model=MODEL, prompt="say five letters")
        answers.append(
            await client.completions.with_raw_response.create(model=MODEL, prompt="say five letters", stream=True)
        )
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model=MODEL, prompt="say five letters")
        await world.settled()

    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert unknown.value.response.headers["www-authenticate"] == "Bearer"
    assert 0 < int(limited.value.response.headers["retry-after"]) <= 30
    assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"

    assert len(server.seen) == 2
    assert "authorization" not in server.seen[0].headers
    usage = world.tenants.usage()["a"]
    assert (usage.requests, usage.prompt_tokens) == (2, 2 * 4)
    assert usage.answer_tokens == 5 + 6, "usage of the server, or the number of events"


async def test_answer_carries_the_request_id(server):
    async with a_relay(server) as world, an_openai_client(world) as client:
        answer = await client.completions.with_raw_response.create(model=MODEL, prompt="say")
        request_id = answer.headers["x-fleet-request-id"]
        assert answer.headers["x-request-id"] == answer.parse()._request_id == request_id
        assert world.router.explain(RequestId(request_id)).placements[0].decode == "w0"

        async def with_names_of_its_own(exchange: ServerExchange) -> None:
            await exchange.respond(200, b"{}", "X-Request-Id: theirs", "x-ratelimit-limit-requests: 7")

        server.play = with_names_of_its_own
        answer = await client.completions.with_raw_response.create(model=MODEL, prompt="say")
        assert answer.headers.get_list("x-request-id") == ["theirs"]
        assert answer.headers.get_list("x-ratelimit-limit-requests") == ["7"]
        assert answer.headers["x-fleet-request-id"] != request_id


async def test_client_may_name_a_relayed_request(server):
    headers = {"x-request-id": "mine-1"}
    async with a_relay(server) as world, an_openai_client(world) as client:
        for _ in range(2):  # the name is free again after the first
            answer = await client.completions.with_raw_response.create(model=MODEL, prompt="say", extra_headers=headers)
            assert answer.headers["x-fleet-request-id"] == "mine-1"
        assert world.router.explain(RequestId("mine-1")).placements[0].decode == "w0"

        unusable = {"x-request-id": "no spaces"}
        answer = await client.completions.with_raw_response.create(model=MODEL, prompt="say", extra_headers=unusable)
        assert answer.headers["x-fleet-request-id"] not in {"no spaces", "mine-1"}


def held_back(server: OpenAiServer) -> tuple[asyncio.Event, asyncio.Event]:
    """Let the server hold back its answers; return an event that a request has begun, and one that lets them go."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def waits(exchange: ServerExchange) -> None:
        begun.set()
        await may_end.wait()
        await exchange.respond(200, b"{}")

    server.play = waits
    return begun, may_end


async def test_name_of_a_running_relayed_request_is_not_given_twice(server):
    begun, may_end = held_back(server)
    headers = {"x-request-id": "mine-1"}
    async with a_relay(server) as world, an_openai_client(world) as client, asyncio.TaskGroup() as tasks:

        async def ask():
            return await client.completions.with_raw_response.create(model=MODEL, prompt="say", extra_headers=headers)

        first = tasks.create_task(ask())
        await begun.wait()
        second = tasks.create_task(ask())
        await until(lambda: len(server.seen) == 2)
        may_end.set()
        names = {(await each).headers["x-fleet-request-id"] for each in (first, second)}
    assert len(names) == 2
    assert "mine-1" in names


async def test_own_request_gets_no_name_of_a_running_relayed_one(server):
    """A header of such a name is passed over; a body that insists on it is refused."""
    begun, may_end = held_back(server)
    headers = {"x-request-id": "mine-1"}
    async with (
        a_relay(server, only=False) as world,
        an_openai_client(world) as client,
        httpx.AsyncClient(base_url=world.url, timeout=60) as own,
    ):

        async def ask_own(**fields) -> httpx.Response:
            return await own.post("/v1/embeddings", json={"model": "own", "input": "say"} | fields, headers=headers)

        relayed = asyncio.create_task(client.completions.create(model=MODEL, prompt="say", extra_headers=headers))
        await begun.wait()
        own_answer = await ask_own()
        with pytest.raises(RequestRejected, match="a running request has the same id"):
            await anext(world.generation.generate(a_request(id="mine-1")))
        may_end.set()
        await relayed
        await world.settled()

        assert own_answer.headers["x-request-id"] != "mine-1"
        assert (await ask_own()).headers["x-request-id"] == "mine-1"


# Connections


async def test_head_and_first_event_arrive_in_one_piece(server):
    async def in_pieces(exchange: ServerExchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
        await turns(10)
        await exchange.send(EVENTS.removeprefix(b"content-ty") + b"\r\n")
        await turns(10)
        await exchange.event(token("a"))
        await turns(10)
        await exchange.end()

    server.play = in_pieces
    async with a_relay(server) as world:
        loop = asyncio.get_running_loop()
        first = loop.create_future()

        class Client(asyncio.Protocol):
            def connection_made(self, transport):
                transport.write(post(COMPLETIONS, STREAMING_REQUEST))

            def data_received(self, data):
                first.done() or first.set_result(data)

        host, _, port = world.http.address.rpartition(":")
        transport, _ = await loop.create_connection(Client, host, int(port))
        async with asyncio.timeout(60):
            data = await first
        transport.close()

    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: {" in data


async def test_connections_to_the_server_are_reused(server):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(20):
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            assert b"[DONE]" in (await peer.answer())[2]

    assert (len(server.seen), server.connections) == (20, 1)


async def test_surplus_connections_after_a_burst_are_closed(server, monkeypatch):
    monkeypatch.setattr(openai_worker, "IDLE_SECONDS", 0.3)
    all_there = asyncio.Event()

    async def together(exchange: ServerExchange) -> None:
        await all_there.wait()
        await exchange.respond(200, b"{}")

    server.play = together
    async with a_relay(server) as world, AsyncExitStack() as burst, raw_http_client(world) as peer:
        for _ in range(8):
            other = await burst.enter_async_context(raw_http_client(world))
            await other.send(post(COMPLETIONS, STREAMING_REQUEST))
        await until(lambda: server.open == 8)
        all_there.set()

        while server.open > 1:  # the latest connection is used again and again
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            assert (await peer.answer())[0] == 200
        await until(lambda: server.open == 0)

        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        assert (await peer.answer())[0] == 200
        assert server.cut == 0
        await world.settled()


async def test_connection_closed_by_the_server_costs_no_request(servers):
    async def and_close(exchange: ServerExchange) -> None:
        await exchange.respond(200, b"{}")
        exchange.writer.transport.close()

    for server in servers:
        server.play = and_close
    async with a_relay(*servers) as world, raw_http_client(world) as peer:
        for _ in range(20):
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            assert (await peer.answer())[0] == 200
        assert world.router.status().counters.retried == 0


async def test_request_that_meets_a_closing_connection_is_resent(server):
    served: set[asyncio.StreamWriter] = set()

    async def one_each(exchange: ServerExchange) -> None:
        if exchange.writer in served:
            exchange.writer.transport.abort()
        else:
            served.add(exchange.writer)
            await exchange.respond(200, b"{}")

    server.play = one_each
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(4):
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
            assert (await peer.answer())[0] == 200
        assert (len(server.seen), server.connections) == (7, 4)
        assert world.router.status().counters.retried == 0
        await world.settled()


async def test_pipelined_requests_are_answered_in_order(server):
    async def echo(exchange: ServerExchange) -> None:
        await exchange.respond(200, exchange.seen.body)

    server.play = echo
    bodies = [{**STREAMING_REQUEST, "n": number} for number in range(30)]
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, bodies[0]))
        assert json.loads((await peer.answer())[2]) == bodies[0]  # from here on the head is cached
        await peer.send(b"".join(post(COMPLETIONS, body) for body in bodies))

        for body in bodies:
            assert json.loads((await peer.answer())[2]) == body
        await world.settled()


async def test_request_with_a_cached_head_may_come_in_pieces(server):
    async def echo(exchange: ServerExchange) -> None:
        await exchange.respond(200, exchange.seen.body)

    server.play = echo
    request = post(COMPLETIONS, {**STREAMING_REQUEST, "prompt": "x" * 500})
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for cut in (len(request), 40, request.index(b"\r\n\r\n") + 4, request.index(b"\r\n\r\n") + 2, 300, 301):
            await peer.send(request[:cut])
            await turns(10)
            await peer.send(request[cut:] + request[:10])  # the next request begins in the same piece
            assert json.loads((await peer.answer())[2])["prompt"] == "x" * 500
            await peer.send(request[10:])
            assert json.loads((await peer.answer())[2])["prompt"] == "x" * 500
        await world.settled()
    assert {seen.body for seen in server.seen} == {request.partition(b"\r\n\r\n")[2]}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_connection_close_of_a_client_is_honoured(server, version):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST, "connection: close", version=version))
        status, headers, body = await peer.answer()

        assert (status, headers["connection"]) == (200, "close")
        assert ("transfer-encoding" in headers) == (version == "1.1")
        assert body.count(b"data: ") == 6
        assert body.endswith(b"data: [DONE]\n\n")  # without chunk framing
        assert await peer.rest() == b""


async def test_sized_answer_keeps_the_connection_of_an_old_client(server):
    async def sized(exchange: ServerExchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    played, server.play = server.play, sized
    async with a_relay(server) as world, raw_http_client(world) as peer:
        for _ in range(2):
            await peer.send(post(COMPLETIONS, STREAMING_REQUEST, "connection: keep-alive", version="1.0"))
            status, headers, body = await peer.answer()
            assert (status, headers["connection"], body) == (200, "keep-alive", b"{}")
        server.play = played  # answers in chunks, which this client does not understand
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST, "connection: keep-alive", version="1.0"))
        status, headers, body = await peer.answer()

        assert (status, headers["connection"]) == (200, "close")
        assert body.endswith(b"data: [DONE]\n\n")
        await world.settled()


async def test_answer_without_length_ends_with_its_connection(server):
    async def until_close(exchange: ServerExchange) -> None:
        await exchange.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{}")
        exchange.writer.close()

    server.play = until_close
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(COMPLETIONS, STREAMING_REQUEST))
        status, headers, body = await peer.answer()

        assert (status, headers["connection"], body) == (200, "close", b"{}")
        await world.settled()
        assert world.router.status().counters.completed == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8388609\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    ],
)
async def test_malformed_or_oversized_request_never_reaches_a_server(server, sent, status):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(sent)
        assert (await peer.answer())[0] == status
        assert server.seen == []
