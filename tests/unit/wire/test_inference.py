import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    DEFAULT_FIELDS,
    Admitted,
    ChatMessage,
    ChatPrompt,
    Delta,
    Finish,
    Finished,
    GenerateRequest,
    KvOrigin,
    KvPhase,
    KvReport,
    Logprobs,
    ModelCard,
    Pooling,
    PoolingModel,
    PoolingTask,
    Sampling,
    Source,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from fleet.core.roles import KvPath, Phase, Placement
from fleet.v1 import inference_pb2 as pb
from fleet.wire.inference import decode_event, decode_model, decode_request, encode_event, encode_model, encode_request
from tests.support.builders import token_bytes
from tests.unit.wire.structured_outputs import FORMS

TEXT = st.text(max_size=8)
COUNT = st.integers(0, 2**32 - 1)
FLOAT = st.floats(-100, 100, width=32)
IDS = st.lists(COUNT, max_size=5)
MESSAGES = st.builds(ChatMessage, role=TEXT, content=TEXT, tool_calls=TEXT, tool_call_id=TEXT, name=TEXT)
PROMPTS = st.one_of(
    st.builds(TextPrompt, TEXT),
    st.builds(ChatPrompt, st.lists(MESSAGES, max_size=3).map(tuple), tools=TEXT),
    st.builds(TokenPrompt, IDS.map(token_bytes)),
)
SAMPLING = {
    "max_tokens": COUNT,
    "temperature": FLOAT,
    "top_p": FLOAT,
    "top_k": st.integers(-(2**31), 2**31 - 1),
    "min_p": FLOAT,
    "seed": st.integers(0, 2**64 - 1),
    "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT,
    "repetition_penalty": FLOAT,
    "min_tokens": COUNT,
    "ignore_eos": st.booleans(),
    "stop_token_ids": IDS.map(tuple),
    "logprobs": COUNT,
    "prompt_logprobs": COUNT,
    "thinking_tokens": COUNT,
    "logit_bias": st.dictionaries(COUNT, st.floats(width=32, allow_nan=False), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    "allowed_token_ids": IDS.map(tuple),
    "form": FORMS,
}
POOLINGS = st.builds(
    Pooling,
    task=st.sampled_from(PoolingTask),
    dimensions=COUNT,
    activation=st.sampled_from([None, True, False]),
    first_tokens=COUNT,
)
REQUESTS = st.builds(
    GenerateRequest,
    id=st.text(min_size=1, max_size=8),
    model=TEXT,
    prompt=PROMPTS,
    stop=st.lists(TEXT, max_size=3).map(tuple),
    priority=st.integers(-(2**31), 2**31 - 1),
    session=TEXT,
    tenant=TEXT,
    placement=st.sampled_from(Placement),
    kv_path=st.sampled_from([None, *KvPath]),
    expected_tokens=COUNT,
    pin=TEXT,
    labels=st.lists(TEXT, max_size=3).map(tuple),
    bad_words=st.lists(TEXT, max_size=3).map(tuple),
    cache_salt=TEXT,
    include_stop_string=st.booleans(),
    show_special_tokens=st.booleans(),
    pooling=st.none() | POOLINGS,
)
LOGPROBS = st.lists(st.tuples(COUNT, FLOAT), max_size=3).flatmap(
    lambda top: st.builds(Logprobs, FLOAT, st.just(tuple(i for i, _ in top)), st.just(tuple(p for _, p in top)))
)
ORIGINS = st.lists(
    st.builds(KvOrigin, source=st.sampled_from(Source), origin=TEXT, blocks=st.integers(0, 99), bytes=COUNT)
)
PHASES = st.tuples(st.sampled_from(Phase), TEXT, ORIGINS, COUNT).map(
    lambda drawn: KvPhase(
        phase=drawn[0],
        worker_id=drawn[1],
        report=KvReport(
            prompt_blocks=sum(origin.blocks for origin in drawn[2]), origins=tuple(drawn[2]), cached_tokens=drawn[3]
        ),
    )
)
EVENTS = st.one_of(
    st.builds(Admitted, request_id=TEXT, model=TEXT, prompt_tokens=COUNT),
    st.builds(
        Delta,
        text=TEXT,
        token_ids=IDS.map(tuple),
        logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
        prompt_logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
        vector=st.binary(max_size=8),
    ),
    st.builds(
        Finished,
        finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
        usage=st.builds(Usage, prompt_tokens=COUNT, completion_tokens=COUNT, cached_tokens=COUNT),
        kv=st.lists(PHASES, max_size=2).map(tuple),
        text=TEXT,
    ),
)


@given(request=REQUESTS, sampling=st.fixed_dictionaries({}, optional=SAMPLING), timeout_ms=COUNT)
def test_a_request_arrives_as_it_was_sent(request, sampling, timeout_ms):
    message = pb.GenerateRequest.FromString(encode_request(request, sampling, timeout_ms).SerializeToString())

    decoded = decode_request(message, RequestId("other"), None)

    assert message.timeout_ms == timeout_ms
    sent = {name: _as_float32(value) for name, value in sampling.items()}
    unset = DEFAULT_FIELDS.difference(sampling) if request.pooling is None else frozenset()
    assert decoded == GenerateRequest(**{**_fields(request), "sampling": Sampling(**sent), "unset": unset})


def _fields(struct_: object) -> dict:
    return {name: getattr(struct_, name) for name in struct_.__struct_fields__}


def _as_float32(value: object) -> object:
    return struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value


@given(event=EVENTS)
def test_an_event_arrives_as_it_was_sent(event):
    message = encode_event(event, lambda token_id: f"<{token_id}>")

    assert decode_event(pb.GenerateResponse.FromString(message.SerializeToString())) == event


@pytest.mark.parametrize("form", [pb.Form(), pb.Form(json_object=False)])
def test_empty_structured_output_is_rejected(form):
    message = pb.GenerateRequest(text="x", sampling=pb.Sampling(form=form))

    with pytest.raises(
        RequestRejected, match="must be one of json_object, json_schema, regex, grammar, choice"
    ) as refused:
        decode_request(message, RequestId("r"), None)

    assert refused.value.field == "sampling.form"


def test_unknown_kind_of_vector_is_rejected():
    message = pb.GenerateRequest(text="x", pooling=pb.Pooling(task="speak"))

    with pytest.raises(RequestRejected, match="must be one of embed, classify") as refused:
        decode_request(message, RequestId("r"), None)

    assert refused.value.field == "pooling.task"


def test_an_event_of_a_newer_server_is_skipped():
    assert decode_event(pb.GenerateResponse()) is None


def test_an_event_that_contradicts_itself_is_refused():
    phase = pb.KvPhase(phase="aggregated", prompt_blocks=3, origins=[pb.KvOrigin(source="computed", blocks=2)])

    with pytest.raises(ValueError, match="do not add up to its 3 blocks"):
        decode_event(pb.GenerateResponse(finished=pb.Finished(kv=pb.KvProof(phases=[phase]))))


def test_a_request_without_a_name_gets_the_one_made_for_it():
    assert decode_request(pb.GenerateRequest(text="x"), RequestId("made"), None).id == "made"


@pytest.mark.parametrize("pooling", [None, *(PoolingModel(task=task) for task in PoolingTask)])
def test_a_model_arrives_as_it_was_sent(pooling):
    card = ModelCard(name=ModelName("m"), max_model_len=1, block_tokens=2, workers=3, pooling=pooling)

    assert decode_model(encode_model(card)) == card
