"""Tests of large bodies and long answers: they are converted in a thread, so that other requests are served meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator

import httpx
import pytest

from fleet.core.requests import Logprobs
from fleet.frontend.openai.requests import MAX_MESSAGES, MAX_PARTS
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


async def stays_unanswered(asking: asyncio.Task[httpx.Response]) -> None:
    """Check that a request which waits for the held thread has no answer after a second."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asking), 1.0)


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
        small = await ask(client, "/v1/completions", prompt="the fox")
        assert small.status_code == 200
        await stays_unanswered(large)
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
        await until(lambda: len(frontends.router.completed) == (2 if "n" in body or "prompt" in body else 1))
        small = await ask(client, "/v1/completions", prompt="the fox")
        assert small.status_code == 200
        await stays_unanswered(long)
    finally:
        await held.release()
    answer = (await long).json()
    for choice in answer["choices"]:
        told = choice["logprobs"]
        if "content" in told:
            assert [len(token["top_logprobs"]) for token in told["content"]] == [TOP] * len(words)
        else:
            assert len(told["top_logprobs"]) == len(words)


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
    assert "at most" in answer.json()["error"]["message"]
