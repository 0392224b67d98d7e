"""Tests of request hints over both protocols."""

import openai
import pytest

from fleet.client import AsyncClient
from tests.support.builders import MODEL
from tests.support.frontend.frontends import open_frontends

pytestmark = pytest.mark.integration

HINTS = {"session": "s1", "priority": 3, "expected_tokens": 500, "pin": "w1", "labels": ["fast", "near"]}


@pytest.fixture
async def frontends(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("An answer.")
        yield frontends


def submitted_request(frontends):
    (arrived,) = frontends.router.submitted
    return {name: getattr(arrived, name) for name in HINTS} | {"labels": list(arrived.labels)}


async def test_hints_reach_the_router_over_grpc(frontends):
    async with AsyncClient(frontends.grpc.address) as client:
        await client.complete("A question", max_tokens=4, **HINTS)
    assert submitted_request(frontends) == HINTS


async def test_hints_reach_the_router_over_http(frontends):
    async with openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0) as client:
        await client.completions.create(model=MODEL, prompt="A question", max_tokens=4, extra_body={"fleet": HINTS})
    assert submitted_request(frontends) == HINTS


async def test_invalid_hint_is_rejected_under_the_clients_name(frontends):
    async with openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0) as client:
        for hint, value in (("labels", ["l"] * 17), ("expected_tokens", -1), ("pin", 7)):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=MODEL, prompt="A", extra_body={"fleet": {hint: value}})
            assert caught.value.body["param"] == f"fleet.{hint}"
