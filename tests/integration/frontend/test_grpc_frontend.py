"""Tests of the gRPC frontend with the generated stubs, on both server libraries."""

import re
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected
from fleet.core.requests import Logprobs
from fleet.frontend.grpc.service import GrpcFrontend
from fleet.net.grpc.calls import MAX_REQUEST_BYTES
from fleet.net.settings import GrpcLibrary, GrpcSettings
from fleet.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from fleet.v1 import inference_pb2 as pb
from tests.support.builders import a_prompt, token_ids
from tests.support.frontend.grpc_calls import SMALL_WINDOW, details_of
from tests.support.frontend.text_model import EOS
from tests.support.router.fake_router import a_model_card
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TEXT = "the quick brown fox: Größe 漢字 🎉!"


@pytest.fixture(params=list(GrpcLibrary))
def grpc_library(request):
    return request.param


@pytest.fixture
async def channel(frontends):
    async with grpc.aio.insecure_channel(frontends.grpc.address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


async def collect(call: AsyncIterator[pb.GenerateResponse]) -> tuple[pb.Admitted, str, list[int], pb.Finished]:
    events = [event async for event in call]
    assert events[0].WhichOneof("event") == "admitted"
    assert events[-1].WhichOneof("event") == "finished"
    deltas = [event.delta for event in events[1:-1]]
    text = "".join(delta.text for delta in deltas) + events[-1].finished.text
    return events[0].admitted, text, [token for delta in deltas for token in delta.token_ids], events[-1].finished


@pytest.mark.parametrize(
    ("in_message", "in_metadata", "is_mine"),
    [("", "mine-2", "mine-2"), ("mine-1", "mine-2", "mine-1"), ("", "no spaces", None), ("", "x" * 129, None)],
)
async def test_metadata_names_a_request_whose_message_does_not(frontends, stub, in_message, in_metadata, is_mine):
    frontends.will_answer(TEXT, then=[EOS])
    message = pb.GenerateRequest(request_id=in_message, text="once", sampling=pb.Sampling(max_tokens=100))
    admitted, *_ = await collect(stub.Generate(message, metadata=(("x-request-id", in_metadata),)))

    if is_mine is None:
        assert re.fullmatch("[0-9a-f]{32}", admitted.request_id)
    else:
        assert admitted.request_id == is_mine
    assert frontends.router.submitted[0].request_id == admitted.request_id


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "once"},
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Größe?")])},
        {"token_ids": pb.TokenIds(ids=[1, 2, 3])},
    ],
)
async def test_an_answer_streams_for_every_kind_of_prompt(frontends, stub, prompt):
    answer = frontends.will_answer(TEXT, then=[EOS])

    admitted, text, tokens, finished = await collect(
        stub.Generate(pb.GenerateRequest(request_id="mine-1", sampling=pb.Sampling(max_tokens=100), **prompt))
    )

    assert (admitted.request_id, admitted.model) == ("mine-1", "tiny")
    assert (text, tokens) == (TEXT, answer)
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.usage.prompt_tokens == admitted.prompt_tokens == len(frontends.router.submitted[0].tokens) // 4
    assert finished.usage.completion_tokens == len(answer)
    (phase,) = finished.kv.phases
    assert (phase.phase, phase.worker_id) == ("aggregated", "w1")
    assert sum(origin.blocks for origin in phase.origins) == phase.prompt_blocks


async def test_all_request_fields_arrive(frontends, stub):
    frontends.will_answer("x")
    sampling = pb.Sampling(
        max_tokens=9, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=2**63, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, min_tokens=2, ignore_eos=True, stop_token_ids=[7], logprobs=0,
    )  # fmt: skip

    await collect(
        stub.Generate(
            pb.GenerateRequest(
                text="once", model="tiny", sampling=sampling, priority=-3, session="s", tenant="t", timeout_ms=60_000,
                placement=pb.PLACEMENT_DISAGGREGATED, kv_path=pb.KV_PATH_DIRECT,
            )
        )
    )  # fmt: skip

    arrived = frontends.router.submitted[0]
    for field in (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "min_tokens",
        "logprobs",
    ):
        assert getattr(arrived.sampling, field) == getattr(sampling, field), field
    assert arrived.sampling.stop_token_ids == (7,)
    assert (arrived.priority, arrived.session, len(arrived.salt)) == (-3, "s", 32)
    assert (arrived.placement, arrived.kv_path) == ("disaggregated", "direct")
    assert arrived.deadline is not None


async def test_unset_fields_take_the_defaults_of_the_protocol(frontends, stub):
    frontends.will_answer(TEXT)

    await collect(stub.Generate(pb.GenerateRequest(text="once")))

    sampling = frontends.router.submitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (16, 1.0, None)


async def test_a_stop_string_ends_the_text_before_it(frontends, stub):
    frontends.will_answer(TEXT)

    _, text, tokens, finished = await collect(
        stub.Generate(pb.GenerateRequest(text="once", stop=["n f"], sampling=pb.Sampling(max_tokens=100)))
    )

    assert (text, finished.reason) == ("the quick brow", pb.FINISH_REASON_STOP)
    assert finished.usage.completion_tokens == len(tokens)
    await frontends.router.until(frontends.router.cancelled)
    assert frontends.router.cancelled == [frontends.router.submitted[0].request_id]


async def test_log_probabilities_name_their_tokens(frontends, stub):
    answer = frontends.will_answer("the fox")
    frontends.router.logprobs = [Logprobs(-0.5, (token,), (-0.5,)) for token in answer]

    events = [event async for event in stub.Generate(pb.GenerateRequest(text="once", sampling=pb.Sampling(logprobs=1)))]

    tops = [top for event in events for logprobs in event.delta.logprobs for top in logprobs.top]
    assert "".join(top.text for top in tops) == "the fox"
    assert [top.token_id for top in tops] == answer


BAD = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(text=""), "text"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
    (pb.GenerateRequest(chat=pb.ChatMessages()), "chat.messages"),
    (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="wizard")])), "chat.messages"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 10**6])), "token_ids[1]"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids(a_prompt(300)) * 20)), "token_ids"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=-1)), "sampling.top_p"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(min_tokens=99)), "sampling.min_tokens"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=2**32 - 1)), "sampling.max_tokens"),
    (pb.GenerateRequest(text="x", request_id="no spaces"), "request_id"),
    (pb.GenerateRequest(text="x", priority=1000), "priority"),
    (pb.GenerateRequest(text="x", stop=[""]), "stop[0]"),
    (pb.GenerateRequest(text="x", stop=["a"] * 1_000_000), "stop"),
    (pb.GenerateRequest(text="x", sampling=pb.Sampling(stop_token_ids=[0] * 1_000_000)), "sampling.stop_token_ids"),
    (pb.GenerateRequest(text="x", placement=9), "placement"),
    (pb.GenerateRequest(text="x", kv_path=9), "kv_path"),
]


@pytest.mark.parametrize(("message", "field"), BAD)
async def test_invalid_input_is_a_typed_error_naming_the_field(frontends, stub, message, field):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub.Generate(message))

    detail, bad_request, _ = details_of(raised.value)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (detail.reason, detail.field) == ("invalid_argument", field)
    assert bad_request.field_violations[0].field == field
    assert field in raised.value.details()
    assert frontends.router.submitted == []


async def test_an_unknown_model_is_not_found(frontends, stub):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub.Generate(pb.GenerateRequest(text="x", model="other")))

    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(raised.value)[0].reason == "model_not_found"


async def raw(channel: grpc.aio.Channel, content: bytes) -> grpc.aio.AioRpcError:
    call = channel.unary_stream("/fleet.v1.Inference/Generate", request_serializer=bytes)(content, timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    return raised.value


@pytest.mark.parametrize(
    "content",
    [b"\x1a\x02\xff\xfe", b"\xff" * 20, b"\x0a\x7f"],
    ids=["text that is not UTF-8", "no message", "a string that ends too early"],
)
async def test_malformed_message_is_reported(frontends, channel, content):
    error = await raw(channel, content)

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)[0].reason == "invalid_argument"
    assert frontends.router.submitted == []


async def test_too_large_message_is_reported(frontends, channel):
    error = await raw(channel, pb.GenerateRequest(text="x" * MAX_REQUEST_BYTES).SerializeToString())

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)[0].reason == "too_large"


def junk(size: int) -> bytes:
    """Return an unknown field, which messages keep."""
    content = pb.GenerateRequest(text="y" * size).SerializeToString()
    assert content[0] >> 3 < 16
    return b"\xfa\x7f" + content[1:]  # number 2047


@pytest.mark.parametrize("frontends", [{"grpc_max_held_bytes": 1_000_000}], indirect=True)
async def test_total_size_of_running_requests_is_bounded(frontends, stub, channel):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1
    long = pb.GenerateRequest(text="x").SerializeToString() + junk(300_000)
    generate = channel.unary_stream("/fleet.v1.Inference/Generate")
    calls = [generate(long) for _ in range(3)]
    for call in calls:
        await call.read()

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(long).read()

    detail, *_, retry = details_of(refused.value)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (detail.reason, retry.retry_delay.ToMilliseconds()) == ("queue_full", 1000)
    ordinary = stub.Generate(pb.GenerateRequest(text="x"))
    assert await ordinary.read(), "short messages are always accepted"
    calls[0].cancel()
    await frontends.router.until(frontends.router.cancelled)
    await until(lambda: frontends.grpc.memory.held_bytes < 700_000)
    another = generate(long)
    assert await another.read()
    for call in (*calls, ordinary, another):
        call.cancel()
    await until(lambda: frontends.grpc.memory.held_bytes == 0)


async def test_rejections_carry_a_retry_hint(frontends, stub):
    frontends.router.refuse = RequestRejected(Reason.QUEUE_FULL, "busy", retry_after_ms=1500)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub.Generate(pb.GenerateRequest(text="x")))

    detail, _, retry = details_of(raised.value)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (detail.reason, detail.retry_after_ms, retry.retry_delay.ToMilliseconds()) == ("queue_full", 1500, 1500)


async def test_a_deadline_in_the_past_starts_nothing(frontends, stub):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub.Generate(pb.GenerateRequest(text="x"), timeout=-1))

    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert frontends.router.submitted == []


async def test_the_deadline_of_a_call_reaches_the_router_and_ends_it(frontends, stub):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1

    while not frontends.router.submitted:  # a busy machine may reach the timeout before it sends the request
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(stub.Generate(pb.GenerateRequest(text="x", timeout_ms=60_000), timeout=0.3))
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    await frontends.router.until(frontends.router.cancelled)
    assert frontends.router.submitted[0].deadline - frontends.clock.now() < 1_000_000_000


async def test_cancelling_a_call_cancels_the_request(frontends, stub):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1
    call = stub.Generate(pb.GenerateRequest(text="x"))
    await call.read()

    call.cancel()

    await frontends.router.until(frontends.router.cancelled)


@pytest.mark.parametrize("frontends", [{"grpc": GrpcSettings(write_timeout_seconds=0.2)}], indirect=True)
async def test_caller_that_reads_nothing_is_cut_off(frontends, caplog):
    frontends.router.answer = [300] * 4000
    asked = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=3900, ignore_eos=True))
    async with grpc.aio.insecure_channel(frontends.grpc.address, options=SMALL_WINDOW) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(asked)
        await call.read()

        await frontends.router.until(frontends.router.cancelled)

        async with grpc.aio.insecure_channel(
            frontends.grpc.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            short = pb.GenerateRequest(text="y", sampling=pb.Sampling(max_tokens=1))
            assert await collect(inference_pb2_grpc.InferenceStub(other).Generate(short))
        call.cancel()
    await until(lambda: frontends.generation.running == 0)
    assert caplog.records == []


async def test_a_bug_is_internal_and_the_next_call_is_served(frontends, stub, caplog):
    frontends.will_answer("the fox")
    frontends.router.bug = ZeroDivisionError("bug")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub.Generate(pb.GenerateRequest(text="x")))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "bug" not in raised.value.details()
    assert "ZeroDivisionError" in caplog.text
    frontends.router.bug = None

    assert (await collect(stub.Generate(pb.GenerateRequest(text="x"))))[1] == "the fox"


async def test_draining_frontend_takes_no_new_requests(frontends, stub):
    frontends.grpc.drain()

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub.Generate(pb.GenerateRequest(text="x")))

    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(raised.value)[0].reason == "draining"


async def test_models_and_status_are_served(frontends, stub):
    frontends.router.cards = (a_model_card(), a_model_card(name="big", max_model_len=9))

    models = await stub.ListModels(pb.ListModelsRequest())
    async with grpc.aio.insecure_channel(frontends.control) as control:
        status = await control_pb2_grpc.ClusterStub(control).Status(control_pb2.StatusRequest())

    assert [(model.name, model.max_model_len) for model in models.models] == [("tiny", 4096), ("big", 9)]
    assert [pool.model for pool in status.pools] == ["tiny", "big"]
    assert list(status.router.models) == ["tiny", "big"]
    assert not status.HasField("store")


async def test_health_follows_the_workers(frontends, channel):
    health = health_pb2_grpc.HealthStub(channel)
    states = health_pb2.HealthCheckResponse
    watch = health.Watch(health_pb2.HealthCheckRequest(service="fleet.v1.Inference"))
    assert (await watch.read()).status == states.SERVING

    frontends.router.cards = ()

    assert (await watch.read()).status == states.NOT_SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == states.NOT_SERVING
    watch.cancel()


@pytest.mark.parametrize(
    "ask",
    [
        lambda channel: channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff"),
        lambda channel: channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff").read(),
        lambda channel: channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )([b"\xff\xff"]).read(),
    ],
    ids=["check", "watch", "reflection"],
)  # fmt: skip
async def test_standard_services_reject_garbage_without_logging(channel, caplog, ask):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.records == []


async def test_reflection_lists_the_services(channel):
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask())
    (response,) = [response async for response in call]

    names = {service.name for service in response.list_services_response.service}
    assert {"fleet.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= names
    assert "fleet.v1.Cluster" not in names


async def test_reflection_v1_answers_as_v1alpha_does(channel):
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="fleet.v1.Inference")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection")

    answers = []
    for version in ("v1alpha", "v1"):
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers.append([response async for response in call(ask())])

    assert answers[0] == answers[1]
    own, reflected = (answer.file_descriptor_response.file_descriptor_proto for answer in answers[1])
    assert any(b"fleet/v1/inference.proto" in each for each in own)
    assert any(b"grpc.reflection.v1" in each for each in reflected)


def a_frontend(listen, frontends, library):
    limits = GrpcSettings(library=library)
    return GrpcFrontend.open(listen, frontends.generation, frontends.clock, max_held_bytes=1, limits=limits)


async def test_port_in_use_is_rejected_with_its_address(frontends, grpc_library):
    with pytest.raises(ConfigurationRefused, match=frontends.grpc.address):
        async with a_frontend(frontends.grpc.address, frontends, grpc_library):
            pass


@pytest.mark.parametrize("listen", ["50051", "127.0.0.1", "127.0.0.1:99999"])
async def test_invalid_address_is_rejected_with_an_example(frontends, grpc_library, listen):
    with pytest.raises(ConfigurationRefused, match=f"^grpc_listen: cannot listen on {listen}: must be host:port$"):
        async with a_frontend(listen, frontends, grpc_library):
            pass


async def test_clients_and_operators_have_separate_ports(frontends):
    async with (
        grpc.aio.insecure_channel(frontends.grpc.address) as public,
        grpc.aio.insecure_channel(frontends.control) as inner,
    ):
        asked = control_pb2.StatusRequest()
        assert (await control_pb2_grpc.ClusterStub(inner).Status(asked)).router.models == ["tiny"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.ClusterStub(public).Status(asked)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await inference_pb2_grpc.InferenceStub(public).ListModels(pb.ListModelsRequest())).models
        with pytest.raises(grpc.aio.AioRpcError) as hidden:
            await inference_pb2_grpc.InferenceStub(inner).ListModels(pb.ListModelsRequest())
        assert hidden.value.code() is grpc.StatusCode.UNIMPLEMENTED
