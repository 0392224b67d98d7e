"""Tests of sampling parameters that clients leave out: the defaults of the model hold, in every API."""

import shutil
from contextlib import suppress
from dataclasses import dataclass

import anthropic
import grpc
import openai
import pytest

from fleet.app.router import load_codecs
from fleet.core.requests import PoolingModel, PoolingTask, Sampling
from fleet.frontend.kserve.service import KserveFrontend
from fleet.router.settings.router import RouterSettings
from fleet.v1 import inference_pb2 as pb
from fleet.v1 import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc
from tests.support.builders import MODEL
from tests.support.frontend.frontends import Frontends, open_frontends
from tests.support.frontend.text_model import END, EOS, write_json
from tests.support.router.fake_router import a_model_card

pytestmark = pytest.mark.integration

PENALTIES = {"presence_penalty": 0.25, "frequency_penalty": 0.5, "repetition_penalty": 1.05}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, **PENALTIES}
GIVEN = {"temperature": 0.0, "top_p": 0.5, "top_k": 3}
NEUTRAL = {name: getattr(Sampling(), name) for name in DEFAULTS}
"""The values of left-out parameters if the model has no defaults."""
TAKEN = {"responses": ("temperature", "top_p"), "messages": ("temperature", "top_p", "top_k")}
"""The sampling parameters of each API that lacks some of them."""


@dataclass(frozen=True)
class Clients:
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    grpc: inference_pb2_grpc.InferenceStub
    kserve: kserve_pb2_grpc.GRPCInferenceServiceStub

    async def ask(self, api: str, given: dict[str, float]) -> object:
        """Send one request over an API, with these sampling parameters and no others."""
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "once"}]}
        match api:
            case "chats":
                return await self.openai.chat.completions.create(**chat, extra_body=given)
            case "completions":
                return await self.openai.completions.create(model=MODEL, prompt="once", extra_body=given)
            case "responses":
                return await self.openai.responses.create(model=MODEL, input="once", extra_body=given)
            case "messages":
                return await self.anthropic.messages.create(**chat, max_tokens=9, extra_body=given)
            case "grpc":
                return [event async for event in self.grpc.Generate(pb.GenerateRequest(text="once", sampling=given))]
            case _:
                message = kserve_pb2.ModelInferRequest(model_name=MODEL)
                contents = kserve_pb2.InferTensorContents(bytes_contents=[b"once"])
                message.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents=contents)
                for name, value in given.items():
                    kind = "int64_param" if isinstance(value, int) else "double_param"
                    setattr(message.parameters[name], kind, value)
                return await self.kserve.ModelInfer(message)


@pytest.fixture
async def frontends(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    write_json(folder / "generation_config.json", {"eos_token_id": [EOS, END], **DEFAULTS})
    async with open_frontends(folder) as frontends:
        frontends.will_answer("An answer.", then=[EOS])
        yield frontends


@pytest.fixture
async def clients(frontends):
    url = frontends.url
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as open_ai,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic_,
        KserveFrontend.open("127.0.0.1:0", frontends.generation, frontends.clock, max_held_bytes=1 << 30) as kserve,
        grpc.aio.insecure_channel(frontends.grpc.address) as channel,
        grpc.aio.insecure_channel(kserve.address) as kserve_channel,
    ):
        yield Clients(
            open_ai,
            anthropic_,
            inference_pb2_grpc.InferenceStub(channel),
            kserve_pb2_grpc.GRPCInferenceServiceStub(kserve_channel),
        )


def submitted(frontends: Frontends) -> dict[str, float]:
    """Return the sampling parameters with which the only request came to the router."""
    (arrived,) = frontends.router.submitted
    return {name: pytest.approx(getattr(arrived.sampling, name)) for name in DEFAULTS}


APIS = ["chats", "completions", "responses", "messages", "grpc", "kserve"]


@pytest.mark.parametrize("api", APIS)
async def test_left_out_parameters_have_the_models_defaults(api, clients, frontends):
    await clients.ask(api, {})

    assert submitted(frontends) == DEFAULTS


@pytest.mark.parametrize("given", [GIVEN, NEUTRAL], ids=["values", "neutral values"])
@pytest.mark.parametrize("api", APIS)
async def test_given_parameters_win_over_the_models_defaults(api, given, clients, frontends):
    given = {name: value for name, value in given.items() if name in TAKEN.get(api, DEFAULTS)}

    await clients.ask(api, given)

    assert submitted(frontends) == DEFAULTS | given


@pytest.mark.parametrize("api", ["chats", "kserve"])
async def test_top_k_of_minus_one_turns_the_default_off(api, clients, frontends):
    await clients.ask(api, {"top_k": -1})

    assert submitted(frontends) == DEFAULTS | {"top_k": 0}


async def test_several_answers_have_the_models_defaults(clients, frontends):
    await clients.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "once"}], n=2)

    assert [each.sampling.temperature for each in frontends.router.submitted] == [0.6, 0.6]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_say_with_which_parameters_they_were_made(stream, clients):
    answer = await clients.openai.responses.create(model=MODEL, input="once", top_p=0.5, stream=stream)
    answers = [event.response async for event in answer if hasattr(event, "response")] if stream else [answer]

    assert [(each.temperature, each.top_p) for each in answers] == [(0.6, 0.5)] * len(answers)
    assert answers


async def test_model_without_defaults_keeps_those_of_the_api(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("An answer.", then=[EOS])
        async with openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0) as client:
            await client.completions.create(model=MODEL, prompt="once")

        assert submitted(frontends) == NEUTRAL


@pytest.mark.parametrize("is_on", [True, False])
def test_setting_of_the_router_turns_the_models_defaults_off(is_on, model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    write_json(folder / "generation_config.json", DEFAULTS)

    codecs = load_codecs(RouterSettings(models={MODEL: str(folder)}, model_defaults=is_on))

    assert codecs[MODEL].sampling_defaults == (DEFAULTS if is_on else {})


async def test_vectors_have_no_defaults_of_sampling(clients, frontends):
    frontends.router.cards = (a_model_card(pooling=PoolingModel(task=PoolingTask.EMBED)),)
    call = clients.grpc.Generate(pb.GenerateRequest(text="once", pooling=pb.Pooling(task="embed")))
    with suppress(grpc.aio.AioRpcError):
        [event async for event in call]

    assert [each.sampling.temperature for each in frontends.router.submitted] == [1.0]
