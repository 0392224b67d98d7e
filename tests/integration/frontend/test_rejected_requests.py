"""Tests that rejected and abandoned requests leave no reference cycles, which would keep bodies of up to 8 MiB in memory."""

import gc
from contextlib import asynccontextmanager

import grpc
import pytest

from fleet.core.errors import RequestRejected
from fleet.core.requests import GenerateRequest
from fleet.frontend.kserve.service import KserveFrontend
from fleet.frontend.openai.relay import RelayedRequest
from fleet.v1 import inference_pb2 as pb
from fleet.v1 import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc
from tests.support.backends.openai_servers import MODEL, OpenAiServer, a_relay
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.http_clients import post, raw_http_client
from tests.support.waiting import until

pytestmark = pytest.mark.integration

KEPT = (RequestRejected, GenerateRequest, RelayedRequest)


def collectable_objects():
    """Return the objects made since the collector was stopped."""
    return [each for each in gc.get_objects(generation=0) if isinstance(each, KEPT)]


@asynccontextmanager
async def without_collector():
    """Check that everything rejected inside is freed without the collector."""
    gc.collect()
    gc.disable()
    try:
        yield
        await until(lambda: not collectable_objects())
    finally:
        gc.enable()


WRONG = [{"stop": [""]}, {"model": "other"}, {"prompt": ""}, {"temperature": -1}, {"fleet": {"priority": 1000}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", WRONG, ids=[next(iter(each)) for each in WRONG])
async def test_rejected_http_request_leaves_no_cycle(model_dir, wrong, stream):
    async with open_frontends(model_dir) as frontends, raw_http_client(frontends) as peer, without_collector():
        await peer.send(post("/v1/completions", {"prompt": "x", "stream": stream, **wrong}))
        assert (await peer.answer())[0] in (400, 404)


@pytest.mark.parametrize(
    "wrong",
    [{"model": "other"}, {"fleet": {"priority": 1000}}, {"fleet": {"pin": "nobody"}}],
    ids=["model", "fleet", "pin"],
)
async def test_rejected_relay_request_leaves_no_cycle(wrong):
    server = OpenAiServer()
    await server.start()
    async with a_relay(server) as world, raw_http_client(world) as peer, without_collector():
        await peer.send(post("/v1/completions", {"prompt": "x", "model": MODEL, **wrong}))
        assert (await peer.answer())[0] >= 400
    await server.stop()


@pytest.mark.parametrize("asked", [{"stop": [""]}, {"model": "other"}, {"text": ""}], ids=["stop", "model", "text"])
async def test_rejected_grpc_request_leaves_no_cycle(model_dir, asked):
    async with open_frontends(model_dir) as frontends, grpc.aio.insecure_channel(frontends.grpc.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        async with without_collector():
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in stub.Generate(pb.GenerateRequest(**{"text": "x", **asked})):
                    pass


@pytest.mark.parametrize("name", ["tiny", "other"])
async def test_rejected_kserve_request_leaves_no_cycle(model_dir, name):
    tensor = kserve_pb2.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents=kserve_pb2.InferTensorContents(bytes_contents=[b""]),
    )
    message = kserve_pb2.ModelInferRequest(model_name=name, inputs=[tensor])
    async with (
        open_frontends(model_dir) as frontends,
        KserveFrontend.open("127.0.0.1:0", frontends.generation, frontends.clock, max_held_bytes=1 << 30) as kserve,
        grpc.aio.insecure_channel(kserve.address) as channel,
    ):
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        async with without_collector():
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ModelInfer(message)
            answers = [each async for each in stub.ModelStreamInfer(iter([message]))]
            assert answers[0].error_message


@pytest.mark.parametrize("stream", [False, True])
async def test_abandoned_http_request_leaves_no_cycle(model_dir, stream):
    async with open_frontends(model_dir) as frontends, without_collector():
        frontends.will_answer("the fox")
        frontends.router.hold_after = 1
        async with raw_http_client(frontends) as peer:
            await peer.send(post("/v1/completions", {"prompt": "x", "stream": stream}))
            await frontends.router.until(frontends.router.submitted)
        await frontends.router.until(frontends.router.cancelled)


@pytest.mark.parametrize("seconds", [None, 1.0], ids=["cancelled", "late"])
async def test_cancelled_grpc_request_leaves_no_cycle(model_dir, seconds):
    async with open_frontends(model_dir) as frontends, grpc.aio.insecure_channel(frontends.grpc.address) as channel:
        frontends.will_answer("the fox")
        frontends.router.hold_after = 1
        async with without_collector():
            call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=seconds)
            await call.read()
            if seconds is None:
                call.cancel()
            await frontends.router.until(frontends.router.cancelled)
