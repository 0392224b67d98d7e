"""Tests of tenants at both frontends: keys, limits, and the messages about them."""

import asyncio
import json
from hashlib import sha256
from urllib.request import urlopen

import httpx
import openai
import pytest

from fleet.client import AsyncClient, Unauthenticated, Unavailable
from fleet.core.errors import Reason, RequestRejected
from fleet.frontend.metrics.router import TenantMetrics
from fleet.router.tenants import TenantSettings
from tests.support.builders import MODEL
from tests.support.frontend.frontends import open_frontends

pytestmark = pytest.mark.integration

KEY = "sk-of-acme"
TENANTS = {"acme": TenantSettings(api_key_sha256=(sha256(KEY.encode()).hexdigest(),), requests_per_minute=2)}


@pytest.fixture
async def frontends(model_dir):
    async with open_frontends(model_dir, TENANTS) as frontends:
        frontends.will_answer("An answer.")
        yield frontends


def openai_client(frontends, api_key=KEY):
    return openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key=api_key, max_retries=0, timeout=60)


def page(url: str) -> bytes:
    with urlopen(url, timeout=60) as answer:
        return answer.read()


async def ask(client, **options):
    return await client.completions.with_raw_response.create(model=MODEL, prompt="A question", max_tokens=4, **options)


async def test_http_requires_a_known_key(frontends):
    async with openai_client(frontends, "sk-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(client)
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert caught.value.body["code"] == "unauthenticated"
    assert not frontends.router.submitted


async def test_http_status_needs_a_key_and_probes_need_none(frontends):
    """Answer 401 without a key, like OpenAI's API. Metrics and probes stay open and name no model."""
    async with openai_client(frontends, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.retrieve(MODEL)
    async with openai_client(frontends) as client:
        assert [each.id async for each in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
    assert json.loads(await asyncio.to_thread(page, f"{frontends.url}/health")) == {"status": "ok"}
    assert await asyncio.to_thread(page, f"{frontends.url}/metrics")


async def test_http_answers_show_limits_and_429_says_when_to_retry(frontends):
    async with openai_client(frontends) as client:
        whole = await ask(client)
        streamed = await ask(client, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (whole, streamed)] == ["1", "0"]
    assert whole.headers["x-ratelimit-limit-requests"] == "2"
    headers = caught.value.response.headers
    assert 25 <= int(headers["retry-after"]) <= 30
    assert [headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")] == ["2", "0"]
    assert 55 <= float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert caught.value.body["code"] == "rate_limited"
    assert len(frontends.router.submitted) == 2


async def test_all_apis_show_limits_with_429(frontends):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "A question"}], "max_tokens": 4}
    bodies = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"model": MODEL, "prompt": ["one", "other"], "max_tokens": 4},
        "/v1/responses": {"model": MODEL, "input": "A question"},
        "/v1/messages": {**chat, "stream": True},
    }
    async with openai_client(frontends) as client, httpx.AsyncClient(base_url=frontends.url, timeout=60) as http:
        for _ in range(2):
            await ask(client)
        http.headers["authorization"] = f"Bearer {KEY}"
        for path, body in bodies.items():
            answer = await http.post(path, json=body)
            left = [answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")]
            assert (answer.status_code, left) == (429, ["2", "0"]), path


async def test_rejection_after_admission_shows_limits_too(frontends):
    frontends.router.refuse = RequestRejected(Reason.QUEUE_FULL, "too many requests wait", retry_after_ms=1000)
    async with openai_client(frontends) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
    assert caught.value.body["code"] == "queue_full"
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "1"


async def test_usage_of_a_tenant_is_recorded(frontends):
    async with openai_client(frontends) as client:
        usages = [(await ask(client)).parse().usage for _ in range(2)]
        with pytest.raises(openai.RateLimitError):
            await ask(client)

    record = {
        (sample.labels["tenant"], sample.labels.get("of", "requests")): sample.value
        for family in TenantMetrics(frontends.tenants.usage).collect()
        for sample in family.samples
    }
    prompts, answers = (
        sum(each) for each in zip(*((u.prompt_tokens, u.completion_tokens) for u in usages), strict=True)
    )
    assert record == {("acme", "requests"): 2, ("acme", "prompts"): prompts, ("acme", "answers"): answers}
    assert min(prompts, answers) > 2


async def test_grpc_enforces_keys_and_limits_too(frontends):
    async with AsyncClient(frontends.grpc.address) as stranger:
        with pytest.raises(Unauthenticated) as refused:
            await stranger.complete("A question", max_tokens=4)
        with pytest.raises(Unauthenticated):
            await stranger.models()
    assert refused.value.field == "authorization"
    async with AsyncClient(frontends.grpc.address, api_key=KEY) as client:
        for _ in range(2):
            await client.complete("A question", max_tokens=4)
        with pytest.raises(Unavailable) as limited:
            await client.complete("A question", max_tokens=4)
        assert [model.name for model in await client.models()] == [MODEL]
    assert limited.value.reason is Reason.RATE_LIMITED
    assert 0 < limited.value.retry_after_seconds <= 30
    assert [arrived.tenant for arrived in frontends.router.submitted] == ["acme", "acme"]
