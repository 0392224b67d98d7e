"""Tests of our Python client against a frontend."""

import asyncio
import socket
import threading

import pytest

from fleet.client import (
    AsyncClient,
    Cancelled,
    Choice,
    Client,
    DeadlineExceeded,
    Delta,
    Finish,
    FleetError,
    InvalidRequest,
    ModelNotFound,
    Placement,
    RequestNotFound,
    ServerError,
    Source,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from fleet.client.errors import _CODES, _REASONS
from fleet.core.errors import Reason, RequestRejected
from fleet.core.requests import ChatMessage, Logprobs
from tests.support.builders import token_ids
from tests.support.frontend.text_model import EOS

pytestmark = pytest.mark.integration

TEXT = "the quick brown fox: Größe 漢字 🎉!"


@pytest.fixture
async def client(frontends):
    async with AsyncClient(frontends.grpc.address) as client:
        yield client


async def test_a_stream_gives_deltas_and_then_the_result(frontends, client):
    answer = frontends.will_answer(TEXT, then=[EOS])

    async with client.generate("once", max_tokens=100, request_id="mine") as stream:
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.result
        deltas = [delta async for delta in stream]

    assert all(isinstance(delta, Delta) for delta in deltas)
    assert stream.request_id == "mine"
    result = stream.result
    assert (result.text, result.token_ids, result.finish) == (TEXT, tuple(answer), Finish.STOP)
    assert (result.request_id, result.model) == ("mine", "tiny")
    assert result.usage.completion_tokens == len(answer)
    (phase,) = result.kv
    assert [(origin.source, origin.blocks) for origin in phase.report.origins] == [(Source.COMPUTED, 1)]


@pytest.mark.parametrize(
    "prompt",
    [[{"role": "user", "content": "hi"}], (ChatMessage(role="user", content="hi"),)],
    ids=["mapping", "struct"],
)
async def test_conversation_is_accepted_as_a_prompt(frontends, client, prompt):
    frontends.will_answer(TEXT)

    await client.complete(prompt)

    assert (
        "".join(map(frontends.codec.decoder().add, token_ids(frontends.router.submitted[0].tokens)))
        == "user: hiassistant: "
    )


async def test_structured_output_arrives_and_invalid_is_named(frontends, client):
    frontends.will_answer(TEXT)

    await client.complete("x", form=Choice(("a", "b")))

    assert frontends.router.submitted[0].sampling.form == Choice(("a", "b"))
    with pytest.raises(InvalidRequest, match=r"sampling\.form: must be AnyObject") as raised:
        await client.complete("x", form="[a-z]")
    assert raised.value.field == "sampling.form"


async def test_tools_arrive_or_are_rejected_by_name(frontends, client):
    frontends.will_answer(TEXT)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    with pytest.raises(InvalidRequest) as raised:
        await client.complete(conversation)
    assert raised.value.field == "chat.messages[1].tool_calls"  # this model's template supports no tool calls
    for prompt, field in ((conversation[:1], "chat.tools"), ("x", "chat.tools")):
        with pytest.raises(InvalidRequest) as raised:
            await client.complete(prompt, tools=[{"type": "function", "function": {"name": "f"}}])
        assert raised.value.field == field


async def test_token_ids_and_options_arrive(frontends, client):
    answer = frontends.will_answer("the fox")
    frontends.router.logprobs = [Logprobs(-0.5, (token,), (-0.5,)) for token in answer]

    result = await client.complete(
        [5, 6, 7],
        temperature=0,
        seed=3,
        stop="zzz",
        stop_token_ids=[9],
        logprobs=1,
        tenant="t",
        placement=Placement.AGGREGATED,
    )

    arrived = frontends.router.submitted[0]
    assert token_ids(arrived.tokens) == [5, 6, 7]
    assert (arrived.sampling.temperature, arrived.sampling.seed, arrived.sampling.logprobs) == (0, 3, 1)
    assert (arrived.placement, len(arrived.salt), 9 in arrived.sampling.stop_token_ids) == ("aggregated", 32, True)
    assert [logprobs.top_ids for logprobs in result.logprobs] == [(token,) for token in answer]


async def test_text_held_back_to_the_end_is_a_delta(frontends, client):
    frontends.will_answer("the fox")

    async with client.generate("once", stop=["x!"]) as stream:
        text = "".join([delta.text async for delta in stream])

    assert text == stream.result.text == "the fox"


async def test_models_and_status_come_from_the_router(frontends, client):
    assert [model.name for model in await client.models()] == ["tiny"]
    status = await client.status()
    assert (status.router.models, status.store) == (("tiny",), None)


async def test_leaving_a_stream_cancels_it(frontends, client):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1

    async with client.generate("once") as stream:
        await anext(stream)

    await frontends.router.until(frontends.router.cancelled)


async def test_cancelled_stream_differs_from_cancelled_task(frontends, client):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1
    stream = client.generate("once")
    await anext(stream)
    asyncio.get_running_loop().call_later(0.05, stream.cancel)
    with pytest.raises(Cancelled):
        await anext(stream)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.complete("twice"))
        await frontends.router.until(frontends.router.submitted, 2)
        task.cancel()
    assert task.cancelled()
    await frontends.router.until(frontends.router.cancelled, 2)


async def test_a_timeout_is_a_deadline_exceeded(frontends, client):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1

    while not frontends.router.submitted:  # a busy machine may reach the timeout before it sends the request
        with pytest.raises(DeadlineExceeded):
            await client.complete("once", timeout_seconds=0.2)

    await frontends.router.until(frontends.router.cancelled)
    with pytest.raises(DeadlineExceeded):
        await client.complete("once", timeout_seconds=-1)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "field"),
    [
        ("", {}, InvalidRequest, "text"),
        ("x", {"temperature": -1}, InvalidRequest, "sampling.temperature"),
        ("x", {"model": "other"}, ModelNotFound, "model"),
        ("x" * (8 << 20), {}, TooLarge, ""),
        ("x", {"max_tokens": -1}, InvalidRequest, "sampling.max_tokens"),
        ("x", {"max_tokens": "many"}, InvalidRequest, "sampling.max_tokens"),
        ("x", {"priority": 1 << 40}, InvalidRequest, "priority"),
        ("x", {"stop": "\ud800"}, InvalidRequest, "stop"),
        ([1, -1], {}, InvalidRequest, "token_ids"),
        ([{"role": "user"}], {}, InvalidRequest, "chat.messages[0]"),
        ([1, "a"], {}, InvalidRequest, "chat.messages[0]"),
        ("\ud800", {}, InvalidRequest, "text"),
    ],
)
async def test_invalid_request_names_the_field(frontends, client, prompt, options, error, field):
    with pytest.raises(error) as raised:
        await client.complete(prompt, **options)

    assert type(raised.value) is error
    assert raised.value.field == field
    assert raised.value.message.startswith(field)
    assert frontends.router.submitted == []


async def test_retryable_error_says_when_to_retry(frontends, client):
    frontends.router.refuse = RequestRejected(Reason.QUEUE_FULL, "busy", retry_after_ms=1500)

    with pytest.raises(Unavailable) as raised:
        await client.complete("once")

    assert (raised.value.reason, raised.value.retry_after_seconds) == (Reason.QUEUE_FULL, 1.5)


async def test_client_learns_why_no_worker_was_chosen(frontends, client):
    frontends.router.refuse = RequestRejected(Reason.NO_WORKER, "no", cause="no_label")

    with pytest.raises(Unavailable) as raised:
        await client.complete("once")

    assert (raised.value.reason, raised.value.cause) == (Reason.NO_WORKER, "no_label")


async def test_a_stream_that_breaks_raises_after_its_deltas(frontends, client):
    frontends.will_answer(TEXT)
    frontends.router.break_after = 2
    stream = client.generate("once")
    deltas = [await anext(stream), await anext(stream)]

    with pytest.raises(Unavailable) as raised:
        await anext(stream)

    assert all(delta.token_ids for delta in deltas)
    assert raised.value.reason is Reason.WORKER_LOST


async def test_absent_server_is_unavailable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(Unavailable) as raised:
                await client.complete("once", timeout_seconds=60)
            assert raised.value.reason is None
            with pytest.raises(FleetError):
                await client.models()


async def test_closing_the_client_ends_its_streams(frontends):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1
    client = AsyncClient(frontends.grpc.address)
    stream = client.generate("once")
    await anext(stream)

    await client.close()

    await frontends.router.until(frontends.router.cancelled)


async def test_synchronous_client_streams_too(frontends):
    answer = frontends.will_answer(TEXT, then=[EOS])

    def use() -> None:
        with Client(frontends.grpc.address) as client:
            with client.generate("once", max_tokens=100) as stream:
                text = "".join(delta.text for delta in stream)
            assert text == stream.result.text == TEXT
            assert client.complete([5, 6], max_tokens=100).token_ids == tuple(answer)
            assert [model.name for model in client.models()] == ["tiny"]
            assert client.status().router.models == ("tiny",)
            with pytest.raises(InvalidRequest) as raised:
                client.complete("once", top_p=5)
            assert raised.value.field == "sampling.top_p"

    await asyncio.to_thread(use)


async def test_the_synchronous_client_cancels_and_times_out(frontends):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1

    def use() -> None:
        with Client(frontends.grpc.address) as client:
            stream = client.generate("once")
            next(stream)
            threading.Timer(0.05, stream.cancel).start()
            with pytest.raises(Cancelled):
                next(stream)
            while len(frontends.router.submitted) < 2:
                with pytest.raises(DeadlineExceeded):
                    client.complete("twice", timeout_seconds=0.2)

    await asyncio.to_thread(use)
    await frontends.router.until(frontends.router.cancelled, 2)


def test_every_reason_maps_to_an_error_with_advice():
    assert set(_REASONS) == set(Reason)
    assert set(_REASONS.values()) | {ServerError} == {
        InvalidRequest,
        ModelNotFound,
        RequestNotFound,
        TooLarge,
        Unauthenticated,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        ServerError,
    }
    assert all(issubclass(error, FleetError) for error in _CODES.values())
