"""Tests of the HTTP frontend with OpenAI's own client."""

import asyncio

import openai
import pytest

from fleet.core.errors import Reason, RequestRejected
from fleet.core.requests import Logprobs
from tests.support.builders import a_prompt, token_ids
from tests.support.frontend.frontends import Frontends
from tests.support.frontend.text_model import EOS

pytestmark = pytest.mark.integration

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Größe?"}]
TEXT = "the quick brown fox: Größe 漢字 🎉!"


@pytest.fixture
async def client(frontends: Frontends):
    async with openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_chat_is_rendered_answered_and_counted(frontends, client):
    answer = frontends.will_answer(TEXT, then=[EOS])

    completion = await client.chat.completions.create(model="tiny", messages=MESSAGES)

    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    arrived = frontends.router.submitted[0]
    assert (
        "".join(map(frontends.codec.decoder().add, token_ids(arrived.tokens)))
        == "system: be briefuser: Größe?assistant: "
    )
    prompt_tokens = len(arrived.tokens) // 4
    assert completion.usage.prompt_tokens == prompt_tokens
    assert completion.usage.completion_tokens == len(answer)
    assert completion.usage.total_tokens == prompt_tokens + len(answer)
    assert arrived.sampling.max_tokens == 4096 - prompt_tokens
    assert completion.id == f"chatcmpl-{arrived.request_id}"
    assert completion.fleet["kv"][0]["worker_id"] == "w1"


async def test_a_streamed_chat_ends_with_its_usage(frontends, client):
    answer = frontends.will_answer(TEXT, then=[EOS])

    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert len(chunks) > 10
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].fleet["kv"][0]["phase"] == "aggregated"
    assert chunks[-1].usage.completion_tokens == len(answer)
    assert chunks[-1].choices == []


async def test_accumulated_chat_stream_is_the_text(frontends, client):
    frontends.will_answer(TEXT, then=[EOS])

    async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        completion = await stream.get_final_completion()

    assert completion.choices[0].message.content == TEXT


async def test_completions_take_text_and_tokens(frontends, client):
    answer = frontends.will_answer(TEXT)
    tokens = [1, 2, 3, 400]

    by_text = await client.completions.create(model="tiny", prompt="once", max_tokens=len(answer))
    by_tokens = await client.completions.create(model="tiny", prompt=tokens, max_tokens=3)

    assert (by_text.choices[0].text, by_text.choices[0].finish_reason) == (TEXT, "length")
    assert by_tokens.usage.prompt_tokens == 4
    assert by_tokens.usage.completion_tokens == 3
    assert token_ids(frontends.router.submitted[1].tokens) == tokens


async def test_streamed_completion_arrives_in_pieces_with_its_end(frontends, client):
    frontends.will_answer(TEXT)

    stream = await client.completions.create(model="tiny", prompt="once", max_tokens=100, stream=True)
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


async def test_completions_have_16_tokens_unless_told_otherwise(frontends, client):
    frontends.will_answer(TEXT)

    completion = await client.completions.create(model="tiny", prompt="once")

    assert completion.usage.completion_tokens == 16


@pytest.mark.parametrize("stop", ["fox", ["dog", "fox"]])
async def test_a_stop_string_ends_the_text_before_it(frontends, client, stop):
    frontends.will_answer(TEXT)

    completion = await client.completions.create(model="tiny", prompt="once", max_tokens=100, stop=stop)

    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("the quick brown ", "stop")
    await frontends.router.until(frontends.router.cancelled)


async def test_sampling_and_fleets_options_arrive(frontends, client):
    frontends.will_answer("x")

    completion = await client.completions.create(
        model="tiny",
        prompt="once",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        extra_body={
            "top_k": 3,
            "fleet": {
                "placement": "aggregated",
                "tenant": "a",
                "session": "s",
                "priority": 5,
                "return_token_ids": True,
            },
        },
    )

    arrived = frontends.router.submitted[0]
    assert (arrived.sampling.temperature, arrived.sampling.top_p, arrived.sampling.seed) == (0.5, 0.9, 7)
    assert (arrived.sampling.top_k, arrived.priority, arrived.session) == (3, 5, "s")
    assert (arrived.placement, len(arrived.salt)) == ("aggregated", 32)
    assert completion.fleet["token_ids"] == frontends.router.answer


async def test_log_probabilities_match_the_engine_in_all_three_forms(frontends, client):
    answer = frontends.will_answer("the fox")
    frontends.router.logprobs = [Logprobs(-0.25, (token, 5), (-0.25, -3.0)) for token in answer]

    chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    completion = await client.completions.create(model="tiny", prompt="once", logprobs=2)
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, stream=True)
    streamed = [
        token async for chunk in stream if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
    ]

    tokens = chat.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "the fox"
    assert [len(token.top_logprobs) for token in tokens] == [2] * len(answer)
    assert [token.token for token in streamed] == [token.token for token in tokens]
    assert "".join(completion.choices[0].logprobs.tokens) == "the fox"
    assert completion.choices[0].logprobs.token_logprobs == [-0.25] * len(answer)


async def test_models_are_listed_and_found(client):
    models = [model async for model in client.models.list()]

    assert [(model.id, model.owned_by) for model in models] == [("tiny", "fleet")]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": a_prompt(1).decode() * 20_000}, openai.BadRequestError, "prompt"),
        ({"prompt": list(range(5000))}, openai.BadRequestError, "prompt[501]"),
        ({"prompt": [3] * 5000}, openai.BadRequestError, "prompt"),
        ({"prompt": ["a", 1]}, openai.BadRequestError, "prompt[1]"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"temperature": 1e300}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens"),
        ({"n": 10_000}, openai.BadRequestError, "n"),
        ({"logit_bias": {"501": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"bad_words": [""]}}, openai.BadRequestError, "bad_words[0]"),
        ({"extra_body": {"cache_salt": "s" * 129}}, openai.BadRequestError, "cache_salt"),
        ({"stop": ["a"] * 17}, openai.BadRequestError, "stop"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"extra_body": {"fleet": {"tenant": "t" * 300}}}, openai.BadRequestError, "fleet.tenant"),
    ],
)
async def test_invalid_input_is_a_typed_error_naming_the_field(frontends, client, fields, error, param):
    with pytest.raises(error) as raised:
        await client.completions.create(**{"model": "tiny", "prompt": "once", **fields})

    assert (raised.value.param, raised.value.type) == (param, "invalid_request_error")
    assert frontends.router.submitted == []


@pytest.mark.parametrize("fields", [{"prompt": [3] * 5000}, {"max_tokens": 5000}])
async def test_exceeded_context_has_the_code_of_openai(client, fields):
    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(**{"model": "tiny", "prompt": "once", **fields})

    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("reason", "error", "status"),
    [
        (Reason.QUEUE_FULL, openai.RateLimitError, 429),
        (Reason.NO_WORKER, openai.InternalServerError, 503),
        (Reason.DEADLINE_PASSED, openai.InternalServerError, 504),
        (Reason.INTERNAL, openai.InternalServerError, 500),
        (Reason.KV_MISMATCH, openai.BadRequestError, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_rejections_have_their_status_when_streaming(frontends, client, reason, error, status, stream):
    frontends.router.refuse = RequestRejected(reason, "no", retry_after_ms=1500)

    with pytest.raises(error) as raised:
        await client.completions.create(model="tiny", prompt="once", stream=stream)

    assert (raised.value.status_code, raised.value.code) == (status, reason)
    assert raised.value.response.headers["retry-after"] == "2"
    assert len(raised.value.request_id) == 32


@pytest.mark.parametrize(
    ("reason", "retry_after_ms", "requests"),
    [(Reason.DEADLINE_PASSED, 0, 1), (Reason.DEADLINE_PASSED, 1, 2), (Reason.WORKER_LOST, 1, 2)],
)
async def test_client_with_retries_does_not_repeat_passed_deadline(frontends, client, reason, retry_after_ms, requests):
    """Each repetition would have the same deadline, and perhaps compute the same part of the answer, unless there is a retry hint."""
    frontends.router.refuse = RequestRejected(reason, "no", retry_after_ms=retry_after_ms)

    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=1).completions.create(model="tiny", prompt="once")

    assert frontends.router.refused == requests


async def test_failure_during_a_stream_is_an_error_of_the_client(frontends, client):
    frontends.will_answer(TEXT)
    frontends.router.break_after = 3

    stream = await client.completions.create(model="tiny", prompt="once", max_tokens=100, stream=True)

    with pytest.raises(openai.APIError, match="its worker is gone"):
        async for _ in stream:
            pass


async def test_closing_a_stream_cancels_the_request(frontends, client):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 2
    stream = await client.completions.create(model="tiny", prompt="once", max_tokens=100, stream=True)
    await anext(aiter(stream))

    await stream.close()

    await frontends.router.until(frontends.router.cancelled)


async def test_concurrent_requests_get_an_answer_each(frontends, client):
    frontends.will_answer(TEXT)

    async def one() -> str:
        stream = await client.completions.create(model="tiny", prompt="once", max_tokens=100, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one()) for _ in range(32)]

    assert {task.result() for task in running} == {TEXT}


async def test_synchronous_client_gets_the_same(frontends):
    frontends.will_answer(TEXT)

    def use() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
            stream = client.completions.create(model="tiny", prompt="once", max_tokens=100, stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(use) == (TEXT, TEXT)


async def test_refusal_of_an_unreadable_body_names_its_request(frontends, client):
    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(
            model="tiny", prompt="once", extra_body={"n": "many"}, extra_headers={"x-request-id": "mine-1"}
        )

    assert raised.value.request_id == "mine-1"
