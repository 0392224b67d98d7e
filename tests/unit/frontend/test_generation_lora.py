"""Requests for LoRA adapters, from the name in a request to the router's `Arrived`."""

import pytest
from prometheus_client import CollectorRegistry

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName
from fleet.core.requests import Admitted, Sampling, TokenPrompt
from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.core.work import LoraAdapter
from fleet.frontend.generation import Generation
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.router.tenants import Tenants
from fleet.wire.inference import decode_model, encode_model
from kvstore.block import adapter_salt, tenant_salt
from tests.support.builders import MODEL, a_prompt, a_request
from tests.support.router.fake_router import FakeRouter, a_model_card

ADA = a_model_card(name=ModelName("ada"), parent=MODEL, revision="1")


@pytest.fixture
def served(model_dir):
    """Yield a router with one model and its LoRA adapter, and the `Generation` in front of this router."""
    clock = SystemClock()
    router = FakeRouter([300], cards=[a_model_card(), ADA])
    threads = TokenizerThreads()
    yield (
        router,
        Generation(
            router,
            {MODEL: load_codec(model_dir)},
            clock=clock,
            tenants=Tenants({}, clock.now()),
            tenant_secret=b"secret",
            metrics=RouterProcessMetrics(CollectorRegistry()),
            threads=threads,
        ),
    )
    threads.close()


async def admitted(generation: Generation, **fields) -> Admitted:
    sampling = Sampling(max_tokens=1)
    request = a_request(prompt=TokenPrompt(tokens=a_prompt(10)), sampling=sampling, **fields)
    events = [event async for event in generation.generate(request)]
    return events[0]


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_lora_request_uses_base_model_with_its_own_salt(served, tenant):
    router, generation = served

    told = await admitted(generation, model=ModelName("ada"), tenant=tenant)

    (arrived,) = router.submitted
    assert told.model == "ada"
    assert (arrived.model, arrived.adapter) == (MODEL, LoraAdapter(ModelName("ada"), "1"))
    assert arrived.salt == adapter_salt("ada@1", tenant_salt(b"secret", tenant))
    assert generation.token_text(ModelName("ada"), 300) == generation.token_text(MODEL, 300)


async def test_single_model_with_loras_needs_no_name(served):
    router, generation = served

    told = await admitted(generation, model=ModelName(""))

    (arrived,) = router.submitted
    assert (told.model, arrived.model, arrived.adapter, arrived.salt) == (MODEL, MODEL, None, b"")


async def test_unknown_model_lists_served_lora_adapters(served):
    _, generation = served

    with pytest.raises(RequestRejected, match="served: ada, tiny") as refused:
        await admitted(generation, model=ModelName("eve"))
    assert refused.value.reason is Reason.MODEL_NOT_FOUND


def test_model_list_shows_the_base_model_of_a_lora():
    assert decode_model(encode_model(ADA)).parent == MODEL
    assert decode_model(encode_model(a_model_card())).parent == ""
