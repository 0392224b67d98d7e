"""Tests of the KServe frontend (Open Inference Protocol), with Triton's own client and with a misbehaving one.

Each test runs on both server libraries.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fleet.client import Client
from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected
from fleet.core.requests import Logprobs
from fleet.frontend.kserve import service as kserve_frontend
from fleet.frontend.kserve.service import KserveFrontend
from fleet.net.grpc.calls import MAX_REQUEST_BYTES
from fleet.net.settings import GrpcLibrary, GrpcSettings
from fleet.router.tenants import TenantSettings
from fleet.v1 import inference_pb2, kserve_pb2_grpc
from fleet.v1 import kserve_pb2 as pb
from tests.support.builders import token_ids
from tests.support.fleet_processes import fleet_up
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.grpc_calls import SMALL_WINDOW, details_of
from tests.support.frontend.text_model import EOS
from tests.support.frontend.triton_client import TritonClient, described_protocol
from tests.support.router.fake_router import a_model_card
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TEXT = "the quick brown fox: Größe 漢字 🎉!"
KEY = "s3cret"
KEY_SHA256 = "1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"

needs_triton = pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is not installed")


def a_kserve(frontends, max_held_bytes=1 << 30, **limits):
    limits = GrpcSettings(**limits)
    return KserveFrontend.open(
        "127.0.0.1:0", frontends.generation, frontends.clock, max_held_bytes=max_held_bytes, limits=limits
    )


@pytest.fixture(params=list(GrpcLibrary))
def grpc_library(request):
    return request.param


@pytest.fixture
async def kserve(request, frontends, grpc_library):
    async with a_kserve(frontends, library=grpc_library, **getattr(request, "param", {})) as kserve:
        yield kserve


@pytest.fixture
async def channel(kserve):
    async with grpc.aio.insecure_channel(kserve.address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return kserve_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="module")
def process():
    process = TritonClient()
    yield process
    process.close()


@pytest.fixture
def triton(process, kserve):
    async def ask(do, **arguments):
        return await asyncio.to_thread(process.ask, do, kserve.address, **arguments)

    return ask


def a_message(text="once", *, outputs=(), parameters=None, **fields) -> pb.ModelInferRequest:
    """Build a request with its contents in the tensors, as KServe clients write them."""
    tensor = pb.ModelInferRequest.InferInputTensor
    message = pb.ModelInferRequest(model_name="tiny", **fields)
    if text is not None:
        contents = pb.InferTensorContents(bytes_contents=[text.encode()])
        message.inputs.append(tensor(name="text_input", datatype="BYTES", shape=[1], contents=contents))
    message.outputs.extend(pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs)
    for name, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


def streaming(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    contents = pb.InferTensorContents(bool_contents=[True])
    message.inputs.add(name="stream", datatype="BOOL", shape=[1], contents=contents)
    return message


def outputs_of(response: pb.ModelInferResponse) -> dict[str, list]:
    fields = {"BYTES": "bytes_contents", "INT32": "int_contents"}
    return {each.name: list(getattr(each.contents, fields[each.datatype])) for each in response.outputs}


async def responses_by_request(
    call: AsyncIterator[pb.ModelStreamInferResponse],
) -> dict[str, list[pb.ModelStreamInferResponse]]:
    """Return the responses by request id."""
    responses: dict[str, list[pb.ModelStreamInferResponse]] = {}
    async for response in call:
        responses.setdefault(response.infer_response.id, []).append(response)
    return responses


@needs_triton
class TestTritonsClient:
    async def test_triton_sees_readiness_and_model_inputs(self, triton):
        heard = await triton("describe", model="tiny")

        assert (heard["live"], heard["ready"], heard["model_ready"], heard["other_ready"]) == (True, True, True, False)
        assert heard["server"]["name"] == "fleet"
        assert heard["model"]["versions"] == ["1"]
        inputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in heard["model"]["inputs"]}
        assert inputs["text_input"] == ("BYTES", ["1"])
        assert inputs["input_ids"] == ("INT32", ["-1"])
        assert {tensor["name"] for tensor in heard["model"]["outputs"]} >= {
            "text_output",
            "finish_reason",
            "output_ids",
        }

    async def test_served_messages_match_the_protocol(self, triton):
        theirs = await triton("protocol")

        ours = described_protocol(pb.DESCRIPTOR)
        assert len(ours) > 20
        assert {name: theirs.get(name) for name in ours} == ours

    async def test_triton_gets_a_whole_answer_with_usage(self, frontends, triton):
        answer = frontends.will_answer(TEXT, then=[EOS])
        frontends.router.cached_blocks = 0

        heard = await triton(
            "infer",
            text="once",
            outputs=["text_output", "output_ids", "finish_reason"],
            request_id="mine",
            parameters={"max_tokens": 60},
        )

        assert heard["text_output"] == [TEXT]
        assert heard["output_ids"] == answer
        assert heard["finish_reason"] == ["stop"]
        assert (heard["id"], heard["model"]) == ("mine", "tiny")
        (arrived,) = frontends.router.submitted
        assert heard["parameters"]["request_id"] == arrived.request_id
        assert heard["parameters"]["prompt_tokens"] == len(arrived.tokens) // 4
        assert heard["parameters"]["completion_tokens"] == len(answer)

    @pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32"])
    @pytest.mark.parametrize("ids", [[5, 6, 7], [[5, 6, 7]]])
    async def test_token_ids_may_have_any_type_with_or_without_batch(self, frontends, triton, datatype, ids):
        answer = frontends.will_answer("the fox")

        heard = await triton("infer", ids=ids, datatype=datatype, outputs=["output_ids"])

        assert token_ids(frontends.router.submitted[0].tokens) == [5, 6, 7]
        assert heard["output_ids"] == answer
        assert heard.keys() & {"text_output", "finish_reason"} == set()

    async def test_triton_request_parameters_reach_the_router(self, frontends, triton):
        frontends.will_answer("the fox")

        await triton(
            "infer",
            text="once",
            sampling={"temperature": "0.25", "top_k": 7, "stop": ["x"]},
            priority=1,
            timeout=5_000_000,
            sequence_id=77,
            sequence_start=True,
            parameters={
                "seed": 3,
                "top_p": 0.5,
                "min_p": "0.125",
                "ignore_eos": True,
                "tenant": "acme",
                "expected_tokens": 9,
                "pin": "w1",
                "labels": "fast, h100",
            },
        )

        (arrived,) = frontends.router.submitted
        sampling = arrived.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.25, 7, 0.5, 0.125)
        assert (sampling.seed, sampling.ignore_eos) == (3, True)
        assert (arrived.priority, arrived.session, arrived.tenant) == (100, "77", "acme")
        assert (arrived.expected_tokens, arrived.pin, arrived.labels) == (9, "w1", ("fast", "h100"))
        assert 0 < arrived.deadline - frontends.clock.now() < 5 * SECOND

    async def test_triton_learns_which_parameter_is_wrong(self, frontends, triton):
        heard = await triton("infer", text="once", sampling={"temperature": -1})

        assert heard["status"] == "StatusCode.INVALID_ARGUMENT"
        assert heard["error"].startswith("sampling_parameters.temperature: ")
        assert frontends.router.submitted == []

    async def test_triton_streams_steps_and_the_last_is_final(self, frontends, triton):
        answer = frontends.will_answer(TEXT, then=[EOS])

        heard = await triton(
            "stream",
            requests=[{"text": "once", "streaming": True, "outputs": ["text_output", "output_ids", "finish_reason"],
                       "parameters": {"max_tokens": 60}, "request_id": "a", "enable_empty_final_response": True}],
        )  # fmt: skip

        assert "".join(response["text_output"][0] for response in heard) == TEXT
        assert [token for response in heard for token in response["output_ids"]] == answer
        assert [response["parameters"]["triton_final_response"] for response in heard] == [False] * len(answer) + [True]
        assert [response["finish_reason"][0] for response in heard] == [""] * len(answer) + ["stop"]
        assert {response["id"] for response in heard} == {"a"}
        assert heard[-1]["parameters"]["completion_tokens"] == len(answer)

    async def test_stream_requests_run_concurrently_and_fail_alone(self, frontends, triton):
        frontends.will_answer("the quick brown fox")
        frontends.router.pause_seconds = 0.005
        good = [{"text": "once", "streaming": True, "request_id": str(number)} for number in range(8)]

        heard = await triton("stream", requests=[*good[:4], {"text": "", "request_id": "bad"}, *good[4:]])

        errors = [response["error"] for response in heard if "error" in response]
        assert len(errors) == 1
        assert errors[0].startswith("text_input: ")
        order = [response["id"] for response in heard if "error" not in response]
        switches = sum(later != earlier for earlier, later in pairwise(order))
        assert switches > len(good), "one after another"
        for request in good:
            mine = [response for response in heard if response.get("id") == request["request_id"]]
            assert "".join(response["text_output"][0] for response in mine) == "the quick brown fox"
            assert mine[-1]["parameters"]["triton_final_response"]

    async def test_request_without_stream_gets_one_response(self, frontends, triton):
        frontends.will_answer("the quick brown fox")

        (heard,) = await triton("stream", requests=[{"text": "once"}])

        assert heard["text_output"] == ["the quick brown fox"]
        assert heard["parameters"]["triton_final_response"] is True

    async def test_cancelled_triton_stream_stops_the_engine(self, frontends, triton):
        frontends.will_answer(TEXT)
        frontends.router.hold_after = 2

        await triton("stream_until_cancelled", text="once", streaming=True)

        await frontends.router.until(frontends.router.cancelled)

    async def test_key_in_headers_selects_the_tenant(self, model_dir, process, grpc_library):
        tenants = {"acme": TenantSettings(api_key_sha256=(KEY_SHA256,))}
        async with (
            open_frontends(model_dir, tenants) as frontends,
            a_kserve(frontends, library=grpc_library) as kserve,
        ):
            frontends.will_answer("the fox")

            async def ask(do, **arguments):
                return await asyncio.to_thread(process.ask, do, kserve.address, **arguments)

            without = await ask("infer", text="once")
            headers = {"authorization": f"Bearer {KEY}"}
            with_key = await ask("infer", text="once", headers=headers)
            (streamed,) = await ask("stream", requests=[{"text": "once"}], headers=headers)

        assert without["status"] == "StatusCode.UNAUTHENTICATED"
        assert with_key["text_output"] == streamed["text_output"] == ["the fox"]
        assert {arrived.tenant for arrived in frontends.router.submitted} == {"acme"}


async def test_tensor_contents_get_tensor_contents(frontends, stub):
    answer = frontends.will_answer("the fox", then=[EOS])

    response = await stub.ModelInfer(a_message(outputs=["output_ids", "text_output"]))

    assert outputs_of(response) == {"output_ids": answer, "text_output": [b"the fox"]}
    assert [output.name for output in response.outputs] == ["output_ids", "text_output"]
    assert list(response.raw_output_contents) == []


async def test_log_probabilities_come_as_json_when_they_are_asked_for(frontends, stub):
    answer = frontends.will_answer("the fox")
    frontends.router.logprobs = [Logprobs(-0.5, (token,), (-0.25,)) for token in answer]

    response = await stub.ModelInfer(a_message(parameters={"logprobs": 1}))

    listed = json.loads(outputs_of(response)["logprobs"][0])
    assert [(one["token_id"], one["logprob"]) for one in listed] == [(token, -0.5) for token in answer]
    assert listed[0]["top"] == [
        {"token_id": answer[0], "logprob": -0.25, "text": frontends.codec.token_text(answer[0])}
    ]


@pytest.mark.parametrize(
    ("message", "field", "cause"),
    [
        (a_message(parameters={"temperature": -1.0}), "temperature", ""),
        (a_message(parameters={"max_tokens": -1}), "max_tokens", ""),
        (a_message(parameters={"session": "s" * 300}), "session", ""),
        (a_message(parameters={"sequence_id": "s" * 300}), "sequence_id", ""),
        (a_message(""), "text_input", ""),
        (a_message("x " * 5000), "text_input", "context_length_exceeded"),
        (a_message(None), "text_input", ""),
        (streaming(a_message()), "stream", ""),
    ],
)
async def test_invalid_input_is_rejected_under_the_clients_name(frontends, stub, message, field, cause):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.ModelInfer(message)

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith(f"{field}: ")
    told = inference_pb2.ErrorDetail(reason="invalid_argument", field=field, cause=cause)
    assert details_of(raised.value)[0] == told
    assert frontends.router.submitted == []


async def test_an_unknown_model_is_not_found_and_not_ready(frontends, stub):
    message = a_message()
    message.model_name = "other"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.ModelInfer(message)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details().startswith("model_name: ")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.ModelMetadata(pb.ModelMetadataRequest(name="other"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND

    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="other"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="2"))).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="1"))).ready


async def test_stream_errors_name_their_request_and_retry_hint(frontends, stub):
    frontends.router.refuse = RequestRejected(Reason.QUEUE_FULL, "busy", retry_after_ms=1500, cause="pin_unknown")

    responses = await responses_by_request(stub.ModelStreamInfer([a_message(id="a"), a_message(id="b")]))

    assert responses.keys() == {"a", "b"}
    ((failed,),) = [responses["a"]]
    parameters = failed.infer_response.parameters
    assert failed.error_message == "busy"
    assert parameters["error_reason"].string_param == "queue_full"
    assert parameters["error_cause"].string_param == "pin_unknown"
    assert parameters["retry_after_ms"].int64_param == 1500
    assert parameters["triton_final_response"].bool_param


async def test_worker_lost_midway_ends_its_request_with_an_error(frontends, stub):
    frontends.will_answer("the quick brown fox")
    frontends.router.break_after = 2

    responses = (await responses_by_request(stub.ModelStreamInfer([streaming(a_message(id="a"))])))["a"]

    assert [bool(response.error_message) for response in responses] == [False, False, True]
    assert responses[-1].infer_response.parameters["error_reason"].string_param == "worker_lost"


async def test_malformed_message_is_rejected_and_the_stream_goes_on(frontends, channel):
    frontends.will_answer("the fox")
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()

    async def exchange(content: bytes) -> pb.ModelStreamInferResponse:
        await call.write(content)
        return pb.ModelStreamInferResponse.FromString(await call.read())

    assert "cannot be parsed" in (await exchange(b"\xff\xff\xff")).error_message
    assert "bytes" in (await exchange(b"\0" * (MAX_REQUEST_BYTES + 1))).error_message
    whole = (await exchange(a_message(id="a").SerializeToString())).infer_response
    assert outputs_of(whole)["text_output"] == [b"the fox"]
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_bug_ends_one_request_and_is_only_logged(frontends, stub, caplog):
    frontends.will_answer("the fox")
    frontends.router.bug = ZeroDivisionError("bug")
    call = stub.ModelStreamInfer()
    await call.write(a_message(id="a"))
    failed = await call.read()
    frontends.router.bug = None

    await call.write(a_message(id="b"))

    assert outputs_of((await call.read()).infer_response)["text_output"] == [b"the fox"]
    assert failed.infer_response.parameters["error_reason"].string_param == "internal"
    assert "bug" not in failed.error_message
    assert "ZeroDivisionError" in caplog.text


async def test_concurrent_requests_of_a_stream_are_bounded(frontends, stub, monkeypatch):
    monkeypatch.setattr(kserve_frontend, "MAX_IN_STREAM", 3)
    frontends.will_answer("the fox")
    frontends.router.hold_after = 1
    call = stub.ModelStreamInfer([streaming(a_message(id=str(number))) for number in range(10)])
    await frontends.router.until(frontends.router.submitted, 3)
    for _ in range(3):
        await call.read()  # the first steps arrived, and nothing was added meanwhile
    assert len(frontends.router.submitted) == 3

    frontends.router.release.set()

    ended = 0
    while ended < 10:
        ended += (await call.read()).infer_response.parameters["triton_final_response"].bool_param
    assert len(frontends.router.submitted) == 10


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_cancelling_a_call_cancels_all_its_requests(frontends, stub, method):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 0
    messages = 3 if method == "ModelStreamInfer" else 1
    call = stub.ModelStreamInfer([a_message()] * 3) if method == "ModelStreamInfer" else stub.ModelInfer(a_message())
    await frontends.router.until(frontends.router.submitted, messages)

    call.cancel()

    await frontends.router.until(frontends.router.cancelled, messages)


@pytest.mark.parametrize("kserve", [{"max_held_bytes": 500_000}], indirect=True)
async def test_total_size_of_running_requests_is_bounded(frontends, kserve, stub):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 1
    long = streaming(a_message(parameters={}, id="long"))
    long.inputs[0].contents.bytes_contents[0] = b"x"
    long.MergeFromString(b"\xfa\x7f\xe0\xa7\x12" + b"y" * 300_000)  # an unknown field
    assert long.ByteSize() > 300_000
    call = stub.ModelStreamInfer()
    await call.write(long)
    assert not (await call.read()).error_message
    await call.write(long)
    assert "too many long requests" in (await call.read()).error_message
    whole = pb.ModelInferRequest.FromString(long.SerializeToString())
    del whole.inputs[1:]  # the input that asks for streaming
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ModelInfer(whole)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await call.write(streaming(a_message(id="short")))
    assert (await call.read()).infer_response.id == "short", "short messages are always accepted"
    call.cancel()
    await until(lambda: kserve.memory.held_bytes == 0)


async def test_client_that_leaves_during_a_write_is_no_failure(frontends, stub, caplog):
    frontends.will_answer("the quick brown fox " * 50)
    frontends.router.pause_seconds = 0.001
    call = stub.ModelStreamInfer([streaming(a_message(parameters={"max_tokens": 500}))] * 20)
    for _ in range(30):
        await call.read()

    call.cancel()

    await frontends.router.until(frontends.router.cancelled, 20)
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


class GoneCaller:
    """A call whose other side has closed before the library notices."""

    def time_remaining(self):
        return None

    def invocation_metadata(self):
        return ()

    async def write(self, message):
        raise grpc.aio.InternalError("nobody reads")


async def test_write_to_a_gone_client_ends_its_requests_silently(frontends, kserve, caplog):
    frontends.will_answer(TEXT)
    frontends.router.refuse = RequestRejected(Reason.NO_WORKER, "none")  # the first request

    async def messages() -> AsyncIterator[bytes]:
        yield a_message().SerializeToString()
        await until(lambda: frontends.router.refused)
        frontends.router.refuse = None
        for _ in range(3):
            yield streaming(a_message()).SerializeToString()

    await kserve.model_stream_infer(messages(), GoneCaller())
    with pytest.raises(asyncio.CancelledError):
        await frontends.grpc.generate(inference_pb2.GenerateRequest(text="x").SerializeToString(), GoneCaller())

    assert caplog.records == []
    assert len(frontends.router.cancelled) == 4
    assert frontends.generation.running == 0


async def test_client_that_reads_nothing_delays_no_other(frontends, kserve, stub):
    frontends.will_answer("the quick brown fox " * 50)
    idle = stub.ModelStreamInfer([streaming(a_message(parameters={"max_tokens": 500}))] * 300)
    await frontends.router.until(frontends.router.submitted, 2)

    async with grpc.aio.insecure_channel(kserve.address) as other:
        response = await kserve_pb2_grpc.GRPCInferenceServiceStub(other).ModelInfer(a_message())

    assert outputs_of(response)["text_output"][0].startswith(b"the quick")
    idle.cancel()
    await frontends.router.until(frontends.router.cancelled)


# Waiting for each in turn would take longer than `until` allows.
@pytest.mark.parametrize("kserve", [{"write_timeout_seconds": 0.5}], indirect=True)
async def test_client_that_reads_nothing_loses_all_its_requests(frontends, kserve, caplog):
    frontends.router.answer = [300] * 4000
    asked = streaming(a_message(parameters={"max_tokens": 200, "ignore_eos": True}))
    async with grpc.aio.insecure_channel(kserve.address, options=SMALL_WINDOW) as channel:
        call = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer([asked] * 30)
        await call.read()

        await frontends.router.until(frontends.router.cancelled, 30)

        call.cancel()
    await until(lambda: frontends.generation.running == 0)
    assert caplog.records == []


async def test_earlier_deadline_of_call_and_request_counts(frontends, stub):
    frontends.will_answer("the fox")

    await stub.ModelInfer(a_message(parameters={"timeout": 100_000_000}), timeout=5000)
    await stub.ModelInfer(a_message(parameters={"timeout": 5_000_000_000}), timeout=100)
    await stub.ModelInfer(a_message())

    now = frontends.clock.now()
    deadlines = [arrived.deadline for arrived in frontends.router.submitted]
    assert all(0 < deadline - now < 101 * SECOND for deadline in deadlines[:2])
    assert deadlines[2] is None


async def test_unserved_methods_name_the_served_ones(channel):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")(b"")

    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details().startswith("ModelConfig is not served by Fleet; served: ServerLive, ")


async def test_draining_frontend_is_not_ready(frontends, kserve, stub):
    kserve.drain()

    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.ModelInfer(a_message())
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    responses = await responses_by_request(stub.ModelStreamInfer([a_message()]))
    assert responses[""][0].infer_response.parameters["error_reason"].string_param == "draining"


async def test_frontend_without_workers_is_live_but_not_ready(frontends, stub, channel):
    frontends.router.cards = ()

    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        async for told in health.Watch(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")):
            if told.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
        frontends.router.cards = (a_model_card(),)
        async for told in health.Watch(health_pb2.HealthCheckRequest()):
            if told.status == health_pb2.HealthCheckResponse.SERVING:
                break


async def test_reflection_lists_the_kserve_service(channel):
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask())
    (response,) = [response async for response in call]

    assert b"ModelStreamInfer" in response.file_descriptor_response.file_descriptor_proto[0]


async def test_port_in_use_is_rejected_with_its_address(frontends, kserve, grpc_library):
    limits = GrpcSettings(library=grpc_library)
    with pytest.raises(ConfigurationRefused, match=kserve.address):
        async with KserveFrontend.open(
            kserve.address, frontends.generation, SimpleNamespace(), max_held_bytes=1, limits=limits
        ):
            pass


@needs_triton
def test_cluster_gives_equal_tokens_over_both_protocols(tmp_path, process):
    prompt = list(range(100, 300))
    with fleet_up(tmp_path, "--kserve-port", "0") as up, Client(up.grpc) as client:
        result = client.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        request = {
            "ids": prompt,
            "sampling": {"max_tokens": 24, "temperature": 0, "ignore_eos": True},
            "outputs": ["text_output", "output_ids", "finish_reason"],
        }

        whole = process.ask("infer", up.endpoints["kserve"], **request)
        streams = [{**request, "streaming": True, "request_id": name} for name in ("a", "b", "c")]
        streamed = process.ask("stream", up.endpoints["kserve"], requests=streams)

    expected = list(result.token_ids)
    assert whole["output_ids"] == expected
    assert whole["text_output"] == [result.text]
    assert whole["finish_reason"] == ["length"]
    for name in ("a", "b", "c"):
        steps = [response for response in streamed if response["id"] == name]
        assert [token for step in steps for token in step["output_ids"]] == expected
        assert "".join(step["text_output"][0] for step in steps) == result.text
