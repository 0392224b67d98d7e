"""Overflow to a hosted endpoint: which refused requests it gets, what it may cost, and what clients see."""

import asyncio
import shutil
from contextlib import asynccontextmanager
from hashlib import sha256

import openai
import pytest

from fleet.client import AsyncClient, Unavailable
from fleet.core.clock import SECOND
from fleet.core.errors import Reason, RequestRejected
from fleet.router.settings.overflow import OverflowSettings
from fleet.router.tenants import TenantSettings
from tests.support.backends.openai_servers import OpenAiServer, five_tokens, metered_tokens, token
from tests.support.builders import MODEL
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.text_model import write_json
from tests.support.waiting import until, until_answered

pytestmark = pytest.mark.integration

FULL = RequestRejected(Reason.QUEUE_FULL, "all workers are busy", retry_after_ms=2000)
QUESTION = {"model": MODEL, "prompt": "A question", "max_tokens": 10}
PROMPT_DOLLARS, ANSWER_DOLLARS = 1.0, 10.0  # per million tokens
COST = (4 * PROMPT_DOLLARS + 5 * ANSWER_DOLLARS) / 1e6


@asynccontextmanager
async def an_overflow(model_dir, tmp_path, tenants=None, play=metered_tokens, **fields):
    server = OpenAiServer()
    server.play = play
    await server.start()
    key = tmp_path / "key"
    key.write_text("sk-hosted\n")
    settings = OverflowSettings(
        **{
            "url": server.url,
            "hosted_model": "big",
            "api_key_file": str(key),
            "dollars_per_hour": 1.0,
            "dollars_per_million_prompt_tokens": PROMPT_DOLLARS,
            "dollars_per_million_answer_tokens": ANSWER_DOLLARS,
            **fields,
        }
    )
    async with asyncio.timeout(90), open_frontends(model_dir, tenants, overflow={MODEL: settings}) as frontends:
        frontends.will_answer("An own answer.")
        try:
            yield frontends, server
        finally:
            await server.stop()


@asynccontextmanager
async def a_client(frontends, key="sk-own"):
    async with openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


async def status_of(frontends):
    async with AsyncClient(frontends.grpc.address, control=frontends.control) as client:
        (status,) = (await client.status()).overflow
    return status


def metrics_of(frontends):
    return {
        (sample.name, sample.labels.get("outcome", "")): sample.value
        for family in frontends.registry.collect()
        for sample in family.samples
        if sample.name.startswith("fleet_overflow")
    }


async def test_served_request_never_leaves_the_cluster(model_dir, tmp_path):
    async with an_overflow(model_dir, tmp_path) as (frontends, server), a_client(frontends) as client:
        answer = await client.completions.create(**QUESTION)
    assert answer.choices[0].text.startswith("An own")
    assert not server.seen
    assert frontends.router.submitted[0].most_wait == 5 * SECOND


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.NO_WORKER, Reason.WORKER_LOST])
async def test_request_refused_for_load_is_answered_by_the_endpoint(model_dir, tmp_path, reason):
    async with an_overflow(model_dir, tmp_path) as (frontends, server), a_client(frontends) as client:
        frontends.router.refuse = RequestRejected(reason, "not now", retry_after_ms=1000)
        for_router = {"fleet": {"priority": 1}, "priority": 2, "request_id": "mine", "session_id": "s"}
        answer = await client.completions.with_raw_response.create(**QUESTION, extra_body=for_router)
        status = await status_of(frontends)
        metrics = metrics_of(frontends)
    assert answer.parse().choices[0].text == "abcde"
    assert answer.headers["x-fleet-overflow"] == MODEL
    (seen,) = server.seen
    assert seen.headers["authorization"] == "Bearer sk-hosted"
    assert seen.json == {"model": "big", "prompt": "A question", "max_tokens": 10}
    assert (status.served, status.not_taken, status.failed, status.running) == (1, 0, 0, 0)
    assert status.spent_dollars == pytest.approx(COST)
    assert metrics["fleet_overflow_requests_total", "served"] == 1
    assert metrics["fleet_overflow_dollars_total", ""] == pytest.approx(COST)


@pytest.mark.parametrize("extended", [False, True])
async def test_endpoint_gets_the_models_defaults(model_dir, tmp_path, extended):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    write_json(folder / "generation_config.json", {"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    async with an_overflow(folder, tmp_path, extended_fields=extended) as (frontends, server):
        frontends.router.refuse = FULL
        async with a_client(frontends) as client:
            await client.completions.create(**QUESTION, top_p=0.5)
    expected = {"temperature": 0.6, "top_p": 0.5} | ({"top_k": 20} if extended else {})
    assert server.seen[0].json == {"model": "big", "prompt": "A question", "max_tokens": 10} | expected


@pytest.mark.parametrize("include_usage", [True, False])
async def test_stream_is_relayed_and_usage_shown_only_if_asked_for(model_dir, tmp_path, include_usage):
    async with an_overflow(model_dir, tmp_path) as (frontends, server), a_client(frontends) as client:
        frontends.router.refuse = FULL
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        stream = await client.completions.create(**QUESTION, stream=True, **options)
        events = [event async for event in stream]
        status = await status_of(frontends)
    assert "".join(event.choices[0].text for event in events if event.choices) == "abcde"
    assert [event.usage.completion_tokens for event in events if event.usage] == ([5] if include_usage else [])
    assert all(event.choices for event in events) is not include_usage
    assert server.seen[0].json["stream_options"] == {"include_usage": True}
    assert status.spent_dollars == pytest.approx(COST)


async def test_stream_reaches_the_client_while_it_is_made(model_dir, tmp_path):
    more = asyncio.Event()

    async def slowly(exchange):
        await exchange.begin_events()
        await exchange.event(token("a", chat=False))
        await more.wait()
        await exchange.event(b"[DONE]")
        await exchange.end()

    async with an_overflow(model_dir, tmp_path, play=slowly) as (frontends, _), a_client(frontends) as client:
        frontends.router.refuse = FULL
        stream = await client.completions.create(**QUESTION, stream=True)
        first = await anext(aiter(stream))
        assert (await status_of(frontends)).running == 1
        more.set()
        rest = [event async for event in stream]
    assert first.choices[0].text == "a"
    assert rest == []


async def test_spent_limit_answers_with_the_routers_own_refusal(model_dir, tmp_path):
    limit = 2.5 * COST  # an estimate, of 10 answer tokens, is about two costs
    async with (
        an_overflow(model_dir, tmp_path, dollars_per_hour=limit) as (frontends, server),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        await client.completions.create(**QUESTION)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**QUESTION)
        status = await status_of(frontends)
        frontends.router.refuse = None
        await client.completions.create(**QUESTION)
    assert caught.value.body["code"] == "queue_full"
    assert "spending limit" in caught.value.body["message"]
    assert caught.value.response.headers["retry-after"] == "2"
    assert len(server.seen) == 1
    assert (status.served, status.not_taken) == (1, 1)
    assert status.spent_dollars <= limit
    assert frontends.router.submitted[-1].most_wait is None  # it may wait as long as without overflow


async def test_refusal_beside_an_endpoint_shows_the_tenants_limits(model_dir, tmp_path):
    tenants = {"acme": TenantSettings(api_key_sha256=(sha256(b"sk-own").hexdigest(),), requests_per_minute=7)}
    async with (
        an_overflow(model_dir, tmp_path, tenants=tenants, dollars_per_hour=1e-9) as (frontends, server),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**QUESTION)
    assert not server.seen
    assert "spending limit" in caught.value.body["message"]
    assert caught.value.response.headers["x-ratelimit-limit-requests"] == "7"


async def test_concurrent_requests_never_exceed_the_limit(model_dir, tmp_path):
    limit = 10 * 1.2e-4  # room for about ten estimates
    async with (
        an_overflow(model_dir, tmp_path, dollars_per_hour=limit) as (frontends, server),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        answers = await asyncio.gather(
            *(client.completions.create(**QUESTION) for _ in range(60)), return_exceptions=True
        )
        status = await status_of(frontends)
    served = [each for each in answers if not isinstance(each, Exception)]
    assert all(isinstance(each, openai.RateLimitError) for each in answers if isinstance(each, Exception))
    assert len(served) == len(server.seen) == status.served
    assert 5 < len(served) < 60
    assert status.spent_dollars <= limit


async def test_answer_without_usage_keeps_its_estimate(model_dir, tmp_path):
    async with (
        an_overflow(model_dir, tmp_path, play=five_tokens) as (frontends, _),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        stream = await client.completions.create(**QUESTION, stream=True)
        assert len([event async for event in stream]) == 5
        status = await status_of(frontends)
    assert status.spent_dollars >= 10 * ANSWER_DOLLARS / 1e6


@pytest.mark.parametrize(("status", "pauses"), [(401, True), (429, True), (500, True), (400, False)])
async def test_refusing_endpoint_costs_nothing_and_tells_its_status(model_dir, tmp_path, status, pauses, caplog):
    async def refuse(exchange):
        await exchange.respond(status, b'{"error": "no such key: sk-hosted"}')

    async with an_overflow(model_dir, tmp_path, play=refuse) as (frontends, server), a_client(frontends) as client:
        frontends.router.refuse = FULL
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**QUESTION)
        shown = await status_of(frontends)
    assert f"status {status}" in caught.value.body["message"]
    assert "no such key" not in caught.value.body["message"] + shown.trouble
    assert len(server.seen) == (1 if pauses else 2)
    assert bool(shown.trouble) is pauses
    excerpts = [each.excerpt for each in caplog.records if each.message == "overflow endpoint failed"]
    assert excerpts == ['{"error": "no such key: KEY"}'] * pauses
    assert shown.spent_dollars == 0


async def test_endpoint_out_of_reach_gets_requests_again_later(model_dir, tmp_path):
    async with an_overflow(model_dir, tmp_path) as (frontends, server), a_client(frontends) as client:
        frontends.router.refuse = FULL
        await server.stop()
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**QUESTION)
        assert (await status_of(frontends)).trouble
        await server.start()

        async def answered():
            try:
                return await client.completions.create(**QUESTION)
            except openai.RateLimitError:
                return None

        answer = await until_answered(answered)
    assert answer.choices[0].text == "abcde"


async def test_silent_endpoint_is_left_and_its_estimate_kept(model_dir, tmp_path):
    async def never(exchange):
        await asyncio.Event().wait()

    async with (
        an_overflow(model_dir, tmp_path, play=never, first_byte_seconds=0.3) as (frontends, _),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**QUESTION)
        status = await status_of(frontends)
    assert "no answer in time" in caught.value.body["message"]
    assert status.failed == 1
    assert status.spent_dollars > 0


async def test_stream_that_breaks_off_ends_with_a_typed_error(model_dir, tmp_path):
    async def break_off(exchange):
        await exchange.begin_events()
        await exchange.event(token("a", chat=False))
        exchange.writer.transport.abort()

    async with an_overflow(model_dir, tmp_path, play=break_off) as (frontends, _), a_client(frontends) as client:
        frontends.router.refuse = FULL
        stream = await client.completions.create(**QUESTION, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        status = await status_of(frontends)
    assert caught.value.body["code"] == "worker_lost"
    assert status.failed == 1


async def test_client_that_leaves_ends_the_request_at_the_endpoint(model_dir, tmp_path):
    async def begin_and_wait(exchange):
        await exchange.begin_events()
        await exchange.event(token("a", chat=False))
        await asyncio.Event().wait()

    async with (
        an_overflow(model_dir, tmp_path, play=begin_and_wait) as (frontends, server),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        stream = await client.completions.create(**QUESTION, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: server.cut == 1)
        assert (await status_of(frontends)).running == 0


async def test_deadline_of_the_client_holds_at_the_endpoint(model_dir, tmp_path):
    async def never(exchange):
        await asyncio.Event().wait()

    async with an_overflow(model_dir, tmp_path, play=never) as (frontends, _), a_client(frontends) as client:
        frontends.router.refuse = FULL
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(**QUESTION, extra_body={"fleet": {"timeout_ms": 300}})
    assert caught.value.body["code"] == "deadline_passed"


@pytest.mark.parametrize(
    "unlike",
    [
        {"extra_body": {"fleet": {"pin": "w1"}}},
        {"extra_body": {"fleet": {"labels": ["eu"]}}},
        {"extra_body": {"fleet": {"tenant": "private"}}},
        {"extra_body": {"top_k": 5}},
        {"extra_body": {"guided_regex": "a+"}},
        {"extra_body": {"allowed_token_ids": [5]}},
        {"extra_body": {"bad_words": ["no"]}},
        {"extra_body": {"truncate_prompt_tokens": 2}},
        {"extra_body": {"include_stop_str_in_output": True}},
        {"extra_body": {"skip_special_tokens": False}},
        {"extra_body": {"cache_salt": "s"}},
        {"logit_bias": {"5": 1}},
        {"prompt": [5, 6, 7]},
        {"max_tokens": 51},
    ],
)
async def test_request_that_no_hosted_model_answers_alike_stays(model_dir, tmp_path, unlike):
    tenants = {"private": TenantSettings()}
    async with (
        an_overflow(model_dir, tmp_path, tenants, excluded_tenants=("private",), max_answer_tokens=50) as (
            frontends,
            server,
        ),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**{**QUESTION, **unlike})
        await client.completions.create(**QUESTION)
    assert len(server.seen) == 1


async def test_tenant_limits_hold_for_requests_that_no_worker_serves(model_dir, tmp_path):
    tenants = {"acme": TenantSettings(requests_per_minute=1)}
    async with an_overflow(model_dir, tmp_path, tenants) as (frontends, server), a_client(frontends) as client:
        frontends.router.cards = ()
        asked = {**QUESTION, "extra_body": {"fleet": {"tenant": "acme"}}}
        await client.completions.create(**asked)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**asked)
    assert caught.value.body["code"] == "rate_limited"
    assert len(server.seen) == 1
    assert frontends.tenants.usage()["acme"].answer_tokens == 5


async def test_requests_at_the_endpoint_are_bounded(model_dir, tmp_path):
    more = asyncio.Event()

    async def wait(exchange):
        await more.wait()
        await metered_tokens(exchange)

    async with (
        an_overflow(model_dir, tmp_path, play=wait, max_running=2) as (frontends, server),
        a_client(frontends) as client,
    ):
        frontends.router.refuse = FULL
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(client.completions.create(**QUESTION)) for _ in range(2)]
            await until(lambda: len(server.seen) == 2)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(**QUESTION)
            more.set()
    assert all(each.result().choices[0].text == "abcde" for each in running)
    assert len(server.seen) == 2


async def test_grpc_requests_do_not_overflow(model_dir, tmp_path):
    async with an_overflow(model_dir, tmp_path) as (frontends, server):
        frontends.router.refuse = FULL
        async with AsyncClient(frontends.grpc.address) as client:
            with pytest.raises(Unavailable):
                await client.complete("A question", max_tokens=4)
    assert not server.seen


async def test_explanation_tells_reason_outcome_and_cost(model_dir, tmp_path):
    async with an_overflow(model_dir, tmp_path) as (frontends, server), a_client(frontends) as client:
        frontends.router.refuse = FULL
        answer = await client.completions.with_raw_response.create(**QUESTION)
        async with AsyncClient(frontends.grpc.address, control=frontends.control) as control:
            told = await control.explain_overflow(answer.headers["x-request-id"])
    assert (told.reason, told.message, told.outcome) == ("queue_full", "all workers are busy", "served")
    assert (told.prompt_tokens, told.answer_tokens) == (4, 5)
    assert told.url == server.url
    assert told.dollars == pytest.approx(COST)
    assert told.estimated_dollars > told.dollars


async def test_replaced_key_file_is_used_from_the_next_request_on(model_dir, tmp_path):
    async with an_overflow(model_dir, tmp_path) as (frontends, server), a_client(frontends) as client:
        frontends.router.refuse = FULL
        await client.completions.create(**QUESTION)
        (tmp_path / "key").write_text("sk-newer")
        await client.completions.create(**QUESTION)
        (tmp_path / "key").unlink()
        await client.completions.create(**QUESTION)
    keys = [each.headers["authorization"] for each in server.seen]
    assert keys == ["Bearer sk-hosted", "Bearer sk-newer", "Bearer sk-newer"]
