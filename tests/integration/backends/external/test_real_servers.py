"""Tests of two real servers of other projects behind one router, which differ for the router only by their address.

They are vLLM's own server and that of transformers, with the built-in model and without KV events.
"""

import asyncio
import json
import re
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from importlib.util import find_spec

import aiohttp
import anthropic
import openai
import pytest

from fleet.core.ids import RequestId
from tests.support.backends import openai_servers
from tests.support.backends.openai_servers import a_relay
from tests.support.backends.real_servers import real_servers
from tests.support.builders import token_ids
from tests.support.waiting import until, until_answered

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("accelerate") is None, reason="accelerate is not installed: transformers serve needs it"
    ),
]

MODEL = openai_servers.MODEL
NAMES = ("vllm", "transformers")
MESSAGES = [{"role": "user", "content": "say something about names and scopes"}]
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    *MESSAGES,
    {"role": "assistant", "content": "which ones?"},
    {"role": "user", "content": "all"},
]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def servers(folder):
    with real_servers(folder, MODEL) as servers:
        yield servers


@asynccontextmanager
async def a_client(world):
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@asynccontextmanager
async def a_router_in_front_of(folder, *servers):
    """Yield a client of a router that has the tokenizer."""
    async with a_relay(*servers, model_dir=folder / MODEL) as world, a_client(world) as client:
        yield world, client


async def test_shared_prefix_stays_on_one_server_without_kv_events(folder, servers):
    beginnings = [f"{name} " * 90 for name in ("alpha", "beta", "gamma", "delta")]
    went: dict[str, list[str]] = {beginning: [] for beginning in beginnings}
    async with a_router_in_front_of(folder, *servers.values()) as (world, client):
        for number in range(4):
            for beginning in beginnings:
                answer = await client.completions.with_raw_response.create(
                    prompt=f"{beginning} and {number}", **{**GREEDY, "max_tokens": 2}
                )
                assert answer.parse().usage.completion_tokens == 2
                request_id = RequestId(answer.headers["x-fleet-request-id"])
                placed = world.router.explain(request_id).placements[0]
                went[beginning].append(placed.decode)
                assert (placed.uncached_tokens < 64) == (number > 0), "the router believes the sent prompts cached"
        await world.settled()
        assert world.workers.knowledge()["approximate"] == 2

    assert all(len(set(places)) == 1 for places in went.values()), went
    assert {place for places in went.values() for place in places} == {"w0", "w1"}


@pytest.mark.parametrize("name", NAMES)
async def test_streams_match_whole_answers_and_carry_usage(folder, servers, name):
    async with a_router_in_front_of(folder, servers[name]) as (world, client):
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
        stream = await client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        await world.settled()

    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([text for text in texts if text]) > 1, "the answer came in pieces"
    assert "".join(texts) == whole.choices[0].message.content
    (used,) = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert used.completion_tokens == whole.usage.completion_tokens == 12
    assert used.prompt_tokens == whole.usage.prompt_tokens > 5


@pytest.mark.parametrize("name", NAMES)
async def test_departed_client_stops_the_server(folder, servers, name):
    endless = {**GREEDY, "max_tokens": 1900, "extra_body": {"ignore_eos": True} if name == "vllm" else {}}

    async def generated() -> int:
        """Return how many tokens vLLM has computed once it is idle; 0 for a server that does not count them."""

        async def idle() -> bool:
            # vLLM updates its gauges only in a step, so one that still counts the aborted request needs another.
            await client.completions.create(prompt="and then", **{**GREEDY, "max_tokens": 1})
            return not await asyncio.to_thread(vllm_metric, servers[name], "num_requests_running")

        if name != "vllm":
            return 0
        await until_answered(idle, 20)
        return await asyncio.to_thread(vllm_metric, servers[name], "generation_tokens_total")

    async with a_router_in_front_of(folder, servers[name]) as (world, client):
        loop = asyncio.get_running_loop()
        for _ in range(5):  # on a busy machine, a server may have computed all before its client goes on
            before = await generated()
            cancelled = world.router.status().counters.cancelled
            stream = await client.completions.create(prompt="once upon a time", stream=True, **endless)
            await anext(stream)
            began = loop.time()
            for _ in range(5):
                await anext(stream)
            with servers[name].suspended():  # the answer cannot end before its client leaves
                a_token = (loop.time() - began) / 5
                await stream.close()
                await until(lambda: world.router.status().active == 0)
            computed = await generated() - before
            if world.router.status().counters.cancelled > cancelled and computed < 1900:
                break
        else:
            pytest.fail("the server computed the whole answer in each attempt")
        assert name != "vllm" or computed > 5, "vLLM does not count its tokens by this name any more"

        began = loop.time()
        await client.completions.create(prompt="and then", **GREEDY)
        if name == "transformers":  # it serves one request after another
            assert loop.time() - began < 400 * a_token + 5


@pytest.mark.parametrize(
    ("name", "path", "wrong"),
    [
        ("vllm", "/v1/completions", {"prompt": "x", "temperature": -1}),
        ("vllm", "/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("transformers", "/v1/completions", {"prompt": "x", "no_such_field": 1}),
    ],
)
async def test_server_error_arrives_with_its_own_message(folder, servers, name, path, wrong):
    async with a_router_in_front_of(folder, servers[name]) as (world, _):
        status, relayed = await asyncio.to_thread(post_json, world.url + path, {"model": MODEL, **wrong})
        own_status, own = await asyncio.to_thread(post_json, servers[name].url + path, {"model": MODEL, **wrong})

        assert 400 <= status < 500
        assert (status, relayed) == (own_status, own)
        assert world.serving() == 1
        await world.settled()


async def test_tools_and_structured_output_are_left_to_the_server(folder, servers):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    async with a_router_in_front_of(folder, servers["vllm"]) as (_, client):
        answer = await client.chat.completions.create(
            messages=MESSAGES,
            response_format=form,
            extra_body={"structured_outputs": None},
            **{**GREEDY, "max_tokens": 200},
        )
        assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)
        choice = await client.completions.create(
            prompt="x", extra_body={"structured_outputs": {"choice": ["left", "right"]}}, **GREEDY
        )
        assert choice.choices[0].text in ("left", "right")
        with pytest.raises(openai.BadRequestError, match="auto"):  # the server was not started to parse tool calls
            await client.chat.completions.create(messages=MESSAGES, tools=tools, tool_choice="auto", **GREEDY)


async def test_official_clients_use_other_apis_of_vllm(folder, servers):
    async with a_router_in_front_of(folder, servers["vllm"]) as (world, client):
        chat = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
        asked = {"model": MODEL, "input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 12}
        response = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(stream=True, **asked)]
        async with anthropic.AsyncAnthropic(base_url=world.url, api_key="none", max_retries=0, timeout=60) as claude:
            asked = {"model": MODEL, "messages": MESSAGES}
            said = {"max_tokens": 12, "extra_body": {"temperature": 0}, **asked}
            message = await claude.messages.create(**said)
            pieces = [event async for event in await claude.messages.create(stream=True, **said)]
            counted = await claude.messages.count_tokens(**asked)
        await world.settled()

    assert response.usage.output_tokens == message.usage.output_tokens == 12
    assert response.output_text
    assert message.content[0].text
    assert len([each for each in events if each.type == "response.output_text.delta"]) > 1
    assert events[-1].response.usage.output_tokens == 12
    assert len([each for each in pieces if each.type == "content_block_delta"]) > 1
    assert counted.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CONVERSATION}),
        ("/v1/responses", {"instructions": CONVERSATION[0]["content"], "input": CONVERSATION[1:]}),
        ("/v1/responses", {"input": "names and scopes"}),
        ("/v1/messages", {"system": CONVERSATION[0]["content"], "messages": CONVERSATION[1:], "max_tokens": 9}),
    ],
)
async def test_router_and_vllm_see_the_same_tokens(folder, servers, path, body):
    async with a_router_in_front_of(folder, servers["vllm"]) as (world, _), aiohttp.ClientSession() as session:
        content = json.dumps({"model": MODEL, **body}).encode()
        arrived = await world.relay.arrival(path, content, RequestId("r"), "")
        async with session.post(f"{world.url}{path}/render", json={"model": MODEL, **body}) as answer:
            rendered = await answer.json()
        assert answer.status == 200, rendered

    assert token_ids(arrived.tokens) == token_ids_in(rendered)


def token_ids_in(rendered: object) -> list[int]:
    """Return the token ids of the only prompt in an answer of vLLM's render paths."""
    if isinstance(rendered, list):
        (rendered,) = rendered
    return rendered["token_ids"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_unknown", None),
        ("POST", "/v1/responses/resp_unknown/cancel", None),
        ("POST", "/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "resp_unknown"}),
        ("POST", "/v1/messages", {"model": MODEL, "messages": []}),
        ("POST", "/v1/embeddings", {"model": MODEL, "input": "x"}),
        ("POST", "/v1/rerank", {"model": MODEL, "query": "x", "documents": ["x"]}),
        ("POST", "/score", {"model": MODEL, "text_1": "x", "text_2": "x"}),
        ("POST", "/classify", {"model": MODEL, "input": "x"}),
        ("POST", "/pooling", {"model": MODEL, "input": "x"}),
        ("POST", "/tokenize", {"model": MODEL, "prompt": "once upon a time"}),
        ("POST", "/tokenize", {"model": MODEL, "messages": MESSAGES, "return_token_strs": True}),
        ("POST", "/detokenize", {"model": MODEL, "tokens": [1, 2, 300]}),
        ("POST", "/v1/completions/render", {"model": MODEL, "prompt": "x", "request_id": "a"}),
        ("POST", "/v1/audio/transcriptions", None),
        ("POST", "/v1/no/such/path", {"a": 1}),
        ("DELETE", "/v1/models", None),
        ("PUT", "/v1/audio/transcriptions", {"a": 1}),
    ],
)
async def test_other_paths_answer_as_vllm_itself(folder, servers, method, path, body):
    server = servers["vllm"]
    async with a_router_in_front_of(folder, server) as (world, _), aiohttp.ClientSession() as session:

        async def ask(url):
            async with session.request(method, url + path, json=body) as answer:
                return answer.status, answer.content_type, without_ids(await answer.read())

        assert await ask(world.url) == await ask(server.url)
        await world.settled()


def without_ids(content: bytes) -> bytes:
    """Leave out what differs between two equal requests."""
    return re.sub(rb'"(request_id|id|created)": ?("[^"]*"|[0-9]+)', b"", content)


async def test_models_of_vllm_keep_its_fields(folder, servers):
    server = servers["vllm"]
    async with a_router_in_front_of(folder, server) as (world, _), aiohttp.ClientSession() as session:
        listed = []
        for url in (world.url, server.url):
            async with session.get(f"{url}/v1/models") as answer:
                (model,) = (await answer.json())["data"]
                listed.append({name: value for name, value in model.items() if name not in ("created", "permission")})
                assert model["permission"][0]["object"] == "model_permission"

    assert listed[0] == listed[1]
    assert listed[0]["root"] == MODEL


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/%75nload_lora_adapter", "/v1/../server_info", "/sleep"])
async def test_control_routes_of_vllm_stay_out_of_reach(folder, servers, path):
    async with a_router_in_front_of(folder, servers["vllm"]) as (world, _):
        status, content = await asyncio.to_thread(post_json, world.url + path, {"lora_name": "x", "lora_path": "/x"})

        assert status in (400, 403, 404)
        assert json.loads(content)["error"]["param"] is None, "the router answers, not the server"


def vllm_metric(server, name) -> float:
    """Return the sum of one metric of vLLM."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


def post_json(url: str, body: dict) -> tuple[int, bytes]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
