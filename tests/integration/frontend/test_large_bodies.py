"""Tests of large bodies and long answers: they are converted in a thread, so that other requests are served meanwhile."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest

from fleet.core.requests import Logprobs
from fleet.core.validation import MAX_MESSAGES
from fleet.frontend.generation import INLINE_BODY_BYTES
from fleet.frontend.openai.requests import MAX_PARTS
from fleet.v1 import inference_pb2 as pb
from fleet.v1.inference_pb2_grpc import InferenceStub
from tests.support.builders import token_ids
from tests.support.frontend.frontends import Frontends
from tests.support.waiting import until

pytestmark = pytest.mark.integration

LONG = "the quick brown fox jumps " * 4000  # more bytes than a body that is read on the event loop
TOP = 20


@pytest.fixture
async def client(frontends: Frontends) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=frontends.url, timeout=60) as client:
        yield client


class HeldThread:
    """Occupies the thread for conversions until the test releases it."""

    def __init__(self, frontends: Frontends) -> None:
        self.go = threading.Event()
        self._held = frontends.threads.convert(self._wait)

    def _wait(self) -> None:
        assert self.go.wait(60)

    async def release(self) -> None:
        self.go.set()
        await self._held


async def ask(client: httpx.AsyncClient, path: str, **body: object) -> httpx.Response:
    return await client.post(path, json={"model": "tiny", "max_tokens": 4, **body})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/tokenize", {"prompt": LONG}),
        ("/detokenize", {"tokens": [3] * 40_000}),
        ("/v1/embeddings", {"input": LONG}),
    ],
)
async def test_small_request_passes_a_large_body(frontends, client, path, body):
    frontends.will_answer("once")
    held = HeldThread(frontends)
    try:
        large = asyncio.create_task(client.post(path, json={"model": "tiny", **body}))
        await until(lambda: frontends.threads.waiting_conversions == 1)
        small = await ask(client, "/v1/completions", prompt="the fox")
        assert small.status_code == 200
    finally:
        await held.release()
    answer = await large
    assert answer.status_code in {200, 400}, answer.text
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": TOP},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": TOP, "n": 2},
        ),
        ("/v1/completions", {"prompt": ["x", "y"], "logprobs": TOP}),
    ],
)
async def test_small_answer_passes_a_long_one(frontends, client, path, body):
    words = frontends.will_answer("the quick brown fox jumps over the lazy dog " * 10)
    each = Logprobs(-1.0, tuple(range(3, 3 + TOP)), tuple(-1.0 - number for number in range(TOP)))
    frontends.router.in_turn = [(words, [each] * len(words))] * 2
    held = HeldThread(frontends)
    try:
        long = asyncio.create_task(ask(client, path, **body | {"max_tokens": len(words)}))
        await until(lambda: frontends.threads.waiting_conversions == 1)
        small = await ask(client, "/v1/completions", prompt="the fox")
        assert small.status_code == 200
    finally:
        await held.release()
    answer = (await long).json()
    for choice in answer["choices"]:
        told = choice["logprobs"]
        if "content" in told:
            assert [len(token["top_logprobs"]) for token in told["content"]] == [TOP] * len(words)
        else:
            assert len(told["top_logprobs"]) == len(words)


async def test_long_answer_of_plain_text_needs_no_thread(frontends, client):
    words = frontends.will_answer("the quick brown fox jumps over the lazy dog " * 200)
    held = HeldThread(frontends)
    try:
        answer = await ask(client, "/v1/completions", prompt="x", max_tokens=len(words))
    finally:
        await held.release()
    assert answer.json()["usage"]["completion_tokens"] == len(words) > 1024


async def test_streamed_log_probabilities_of_a_prompt_are_whole(frontends, client):
    prompt = "the quick brown fox jumps over the lazy dog " * 10
    frontends.will_answer("once")
    told = Logprobs(-1.0, tuple(range(3, 3 + TOP)), tuple(-1.0 - number for number in range(TOP)))
    tokens = len(token_ids(frontends.codec.encode(prompt)))
    frontends.router.prompt_logprobs = [told] * (tokens - 1)
    held = HeldThread(frontends)
    try:
        body = {"prompt": prompt, "logprobs": TOP, "echo": True, "n": 2, "stream": True}
        streamed = asyncio.create_task(ask(client, "/v1/completions", **body))
        await until(lambda: frontends.threads.waiting_conversions == 1)
    finally:
        await held.release()
    events = [json.loads(line[6:]) for line in (await streamed).text.splitlines() if line.startswith("data: {")]
    echoed = [
        each
        for event in events
        for each in event["choices"]
        if each["logprobs"] and each["text"].startswith("the quick")
    ]
    assert sorted(each["index"] for each in echoed) == [0, 1]
    assert all(len(each["logprobs"]["tokens"]) >= tokens for each in echoed)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_request_id_taken_while_a_body_is_read_is_replaced(frontends, client, path):
    frontends.will_answer("once")
    asked = {"model": "tiny", "prompt" if path == "/v1/completions" else "input": "the fox"}
    body = json.dumps(asked).encode() + b" " * INLINE_BODY_BYTES
    headers = {"x-request-id": "same", "content-type": "application/json"}
    held = HeldThread(frontends)
    frontends.router.hold_after = 0
    try:
        asking = [asyncio.create_task(client.post(path, content=body, headers=headers)) for _ in range(2)]
        await until(lambda: frontends.threads.waiting_conversions == 2)
    finally:
        await held.release()
    await frontends.router.until(frontends.router.submitted, 2)
    frontends.router.release.set()
    answers = [await each for each in asking]
    assert [each.status_code for each in answers] == [200, 200], [each.text for each in answers]
    assert sorted(each.headers["x-request-id"] == "same" for each in answers) == [False, True]


async def test_message_with_many_chat_messages_is_refused_over_grpc(frontends):
    messages = [pb.ChatMessage(role="user", content="x")] * (MAX_MESSAGES + 1)
    async with grpc.aio.insecure_channel(frontends.grpc.address) as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(chat=pb.ChatMessages(messages=messages)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat.messages" in refused.value.details()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "input"),
    ],
)
async def test_too_many_translated_messages_are_refused(client, path, body, field):
    answer = await ask(client, path, **body)

    assert answer.status_code == 400
    assert f"{field}: has {MAX_MESSAGES + 1:,} entries" in answer.text


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS + 1)}], "messages[0].content"),
    ],
)
async def test_too_many_messages_or_parts_are_refused(client, messages, field):
    answer = await ask(client, "/v1/chat/completions", messages=messages)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "are allowed" in answer.json()["error"]["message"]
