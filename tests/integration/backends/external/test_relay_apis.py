"""Tests of the APIs of external servers besides completions and chat that the router places by their prompts."""

import asyncio
import json
from hashlib import sha256

import anthropic
import pytest

from fleet.core.ids import RequestId
from fleet.router.tenants import TenantSettings
from tests.support.backends.openai_servers import (
    CHAT,
    MODEL,
    ServerExchange,
    a_relay,
    an_openai_client,
    never_answer,
)
from tests.support.frontend.http_clients import error_of, post, raw_http_client

pytestmark = pytest.mark.integration

RESPONSES, MESSAGES_PATH = "/v1/responses", "/v1/messages"
TURNS = [{"role": "user", "content": "the quick brown fox " * 40}]
TENANTS = {"a": TenantSettings(api_key_sha256=(sha256(b"fk-1").hexdigest(),), requests_per_minute=1)}


def an_anthropic_client(world, key="none", **options):
    return anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0, timeout=60, **options)


async def named_events(exchange: ServerExchange, *events: dict) -> None:
    for event in events:
        content = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        await exchange.send(b"%x\r\n%s\r\n" % (len(content), content))


async def a_message(exchange: ServerExchange) -> None:
    """Answer as the Messages API does."""
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 5},
    }  # fmt: skip
    if not exchange.seen.json.get("stream"):
        whole = message | {"content": [{"type": "text", "text": "abcde"}], "stop_reason": "end_turn"}
        await exchange.respond(200, json.dumps(whole).encode())
        return
    await exchange.begin_events()
    await named_events(
        exchange,
        {"type": "message_start", "message": message | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": t}} for t in "abcde"),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    )
    await exchange.end()


def a_response(status: str = "completed") -> dict:
    text = {"type": "output_text", "text": "abcde", "annotations": []}
    item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": status, "tools": [],
        "output": [item] if status == "completed" else [], "parallel_tool_calls": True, "tool_choice": "auto",
        "usage": {"input_tokens": 3, "output_tokens": 5, "total_tokens": 8, "output_tokens_details": {},
                  "input_tokens_details": {"cached_tokens": 0}},
    }  # fmt: skip


async def a_streamed_response(exchange: ServerExchange, cut_off: asyncio.Event | None = None) -> None:
    """Answer with a stream; with `cut_off` end it without its last event then."""
    await exchange.begin_events()
    await named_events(
        exchange,
        {"type": "response.created", "sequence_number": 0, "response": a_response("in_progress")},
        *(
            {"type": "response.output_text.delta", "sequence_number": n, "item_id": "m", "output_index": 0,
             "content_index": 0, "delta": t, "logprobs": []}
            for n, t in enumerate("abcde", 1)
        ),
    )  # fmt: skip
    if cut_off is not None:
        await cut_off.wait()
    else:
        await named_events(exchange, {"type": "response.completed", "sequence_number": 6, "response": a_response()})
    await exchange.end()


async def test_anthropic_client_gets_messages_and_streams(server):
    server.play = a_message
    async with a_relay(server) as world, an_anthropic_client(world) as client:
        request = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        whole = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            text = await stream.get_final_text()

        assert whole.content[0].text == text == "abcde"
        assert server.seen[0].start == "POST /v1/messages HTTP/1.1"
        assert server.seen[0].headers["anthropic-version"]
        assert server.seen[0].headers["authorization"] == "Bearer none"
        await world.settled()


async def test_query_of_a_placed_request_reaches_the_server(server):
    server.play = a_message
    async with a_relay(server) as world, an_anthropic_client(world) as client:
        request = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        await client.messages.create(**request, extra_query={"beta": "true"})

    assert server.seen[0].start == "POST /v1/messages?beta=true HTTP/1.1"


async def test_errors_of_the_router_have_the_form_of_the_messages_api(server):
    server.play = a_message
    async with a_relay(server, tenants=TENANTS) as world:
        request = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with an_anthropic_client(world, "fk-2") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await stranger.messages.create(**request)
        async with an_anthropic_client(world, "fk-1") as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**{**request, "model": "other"})
            await client.messages.create(**request)
            with pytest.raises(anthropic.RateLimitError) as limited:
                await client.messages.create(**request)

    kinds = [each.value.body["error"]["type"] for each in (unknown, missing, limited)]
    assert kinds == ["authentication_error", "not_found_error", "rate_limit_error"]
    assert "x-api-key" not in server.seen[0].headers
    assert world.tenants.usage()["a"].answer_tokens == 5


async def test_key_of_the_server_goes_as_both_apis_send_it(server):
    server.play = a_message
    async with a_relay(server, api_key="sk-upstream") as world, an_anthropic_client(world) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "hi"}])

    headers = server.seen[0].headers
    assert (headers["authorization"], headers["x-api-key"]) == ("Bearer sk-upstream", "sk-upstream")


async def test_openai_client_streams_a_response(server):
    server.play = a_streamed_response
    async with a_relay(server) as world, an_openai_client(world) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]

        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "abcde"
        assert events[-1].response.usage.output_tokens == 5
        await world.settled()


async def test_stream_without_its_last_event_ends_with_an_error(server):
    async with a_relay(server) as world, an_openai_client(world) as client, raw_http_client(world) as peer:
        server.play = a_streamed_response
        async for _ in await client.responses.create(model=MODEL, input="hi", stream=True):
            pass
        cut_off = asyncio.Event()
        server.play = lambda exchange: a_streamed_response(exchange, cut_off)
        await peer.send(post(RESPONSES, {"model": MODEL, "input": "hi", "stream": True}))
        status, _ = await peer.head()
        cut_off.set()
        *_, last = [chunk async for chunk in peer.chunks()]

        assert status == 200
        said = json.loads(last.removeprefix(b"event: error\ndata: "))
        assert (said["type"], said["code"]) == ("error", "worker_lost")
        await world.settled()


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (RESPONSES, lambda turns: {"input": turns, "instructions": "be brief"}),
        (MESSAGES_PATH, lambda turns: {"messages": turns, "system": [{"type": "text", "text": "be brief"}]}),
    ],
)
@pytest.mark.parametrize("with_tokenizer", [False, True])
async def test_conversation_stays_on_its_server(servers, model_dir, path, more, with_tokenizer):
    for server in servers:
        server.play = a_message
    async with a_relay(*servers, model_dir=model_dir if with_tokenizer else None) as world:
        turns, places, uncached = list(TURNS), [], []
        for number in range(4):
            async with raw_http_client(world) as peer:
                await peer.send(post(path, {"model": MODEL, **more(turns)}))
                _, headers, _ = await peer.answer()
            placed = world.router.explain(RequestId(headers["x-fleet-request-id"])).placements[0]
            places.append(placed.decode)
            uncached.append(placed.uncached_tokens)
            turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {number}?"}]
        await world.settled()

    assert len(set(places)) == 1
    assert max(uncached[1:]) < uncached[0] / 2


async def test_chat_and_other_apis_share_the_blocks_of_a_conversation(server, model_dir):
    """The server renders all of them with one chat template."""
    server.play = a_message
    system = {"role": "system", "content": "be brief"}
    async with a_relay(server, model_dir=model_dir) as world, raw_http_client(world) as peer:
        uncached = []
        for path, body in (
            (CHAT, {"messages": [system, *TURNS]}),
            (MESSAGES_PATH, {"system": "be brief", "messages": TURNS}),
        ):
            await peer.send(post(path, {"model": MODEL, **body}))
            _, headers, _ = await peer.answer()
            placed = world.router.explain(RequestId(headers["x-fleet-request-id"])).placements[0]
            uncached.append(placed.uncached_tokens)

    assert uncached[0] > 64 > max(uncached[1:])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "x", "documents": ["a", "b"]}),
        ("/rerank", {"query": "x", "documents": ["a", "b"]}),
        ("/v2/rerank", {"query": "x", "documents": ["a", "b"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
        ("/score", {"queries": "a", "documents": ["b"]}),
        ("/classify", {"input": ["a"]}),
        ("/pooling", {"input": ["a"]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": []}),
    ],
)
async def test_request_of_a_pooling_api_is_placed_and_not_cached(server, path, body):
    async def answer(exchange: ServerExchange) -> None:
        await exchange.respond(200, exchange.seen.body)

    server.play = answer
    if path == "/tokenize":
        server.tokenise = lambda _: [1, 2]  # the test server answers this path by itself
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(path, {"model": MODEL, **body}))
        status, headers, content = await peer.answer()

        assert status == 200
        if path != "/tokenize":
            assert json.loads(content) == {"model": MODEL, **body}
        assert world.router.explain(RequestId(headers["x-fleet-request-id"])).placements[0].decode == "w0"
        assert world.router.status().index_blocks == 0
        await world.settled()


async def test_silent_start_of_a_stream_is_no_answer(servers):
    """A server that only opens its streams leaves rotation like one that sends nothing."""

    async def opens(exchange: ServerExchange) -> None:
        await exchange.begin_events()
        await named_events(
            exchange, {"type": "response.created", "sequence_number": 0, "response": a_response("queued")}
        )
        await asyncio.Event().wait()

    servers[0].play = servers[1].play = a_streamed_response
    settings = {"silence_floor_seconds": 0.2, "silence_factor": 1.0, "silence_cut_seconds": 0.5, "trial_requests": True}
    async with a_relay(*servers, **settings) as world, an_openai_client(world) as client:
        for number in range(4):
            async for _ in await client.responses.create(model=MODEL, input=f"{number}" * 300, stream=True):
                pass
        for server in servers:
            server.play = lambda exchange: (
                opens(exchange) if exchange.seen.json.get("stream") else never_answer(exchange)
            )
        stream = await client.responses.create(model=MODEL, input="x", stream=True)
        events = [event async for event in stream]
        await world.settled()

    assert [event.type for event in events] == ["response.created", "error"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES_PATH, "/tokenize"])
async def test_own_models_are_served_beside_external_ones(server, path):
    server.play = a_message
    body = {"input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    if path == "/tokenize":
        body = {"prompt": "x"}
        server.tokenise = lambda _: [1]
    async with a_relay(server, only=False) as world, raw_http_client(world) as peer:
        for model, status in ((MODEL, 200), ("own", 404)):
            await peer.send(post(path, {"model": model, **body}))
            answered, headers, content = await peer.answer()
            assert answered == status
            assert ("x-fleet-request-id" in headers) == (model == MODEL)
        assert b"is not served here" in content


async def test_passage_for_an_own_model_is_refused_by_name(server):
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nown\r\n--b--\r\n'
    async with a_relay(server, only=False) as world, raw_http_client(world) as peer:
        await peer.send(post("/v1/audio/transcriptions", form, "content-type: multipart/form-data; boundary=b"))
        status, _, content = await peer.answer()

    assert (status, error_of(content)["param"]) == (404, "model")
    assert "'own'" in error_of(content)["message"]
    assert server.seen == []


async def test_model_is_named_in_the_error_of_a_placed_request(server):
    async with a_relay(server) as world, raw_http_client(world) as peer:
        await peer.send(post(RESPONSES, {"model": "other", "input": "x"}))
        status, _, content = await peer.answer()

        assert (status, error_of(content)["code"]) == (404, "model_not_found")
        await world.settled()
