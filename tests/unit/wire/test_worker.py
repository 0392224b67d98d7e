"""Worker protocol: nothing is lost, and wrong values are rejected by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import (
    MAX_VECTOR_NUMBERS,
    NUMBER_BYTES,
    AnswerParsers,
    CallDelta,
    Finish,
    KvOrigin,
    KvReport,
    Logprobs,
    PairForm,
    Pooling,
    PoolingModel,
    PoolingTask,
    Sampling,
    Source,
    ToolChoice,
)
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import (
    MAX_WANTED_ANSWERS,
    AnswersWanted,
    Cancel,
    Draining,
    Goodbye,
    Handoff,
    KeepTrace,
    KeptAnswer,
    KeptAnswers,
    KvCleared,
    KvEvents,
    KvRemoved,
    KvStored,
    LoadReport,
    LoraAdapter,
    ParsedDelta,
    ParsingTask,
    Progress,
    PulledBlocks,
    Rejected,
    RouterHello,
    Start,
    Step,
    TokenizerDigests,
    WantedAnswer,
    WorkerDescription,
)
from fleet.v1 import inference_pb2
from fleet.v1 import worker_pb2 as pb
from fleet.wire.worker import (
    MalformedMessage,
    decode_router_message,
    decode_worker_message,
    encode_router_message,
    encode_worker_message,
)
from kvstore.block import TOKEN_BYTES, HashAlgorithm
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.protocol.versions import ProtocolRange
from kvstore.tracing.context import TraceContext
from tests.support.builders import a_start, token_bytes
from tests.unit.wire.structured_outputs import FORMS

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
POSITIVE = st.integers(1, 2**32 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
NAMED = st.characters(codec="ascii", min_codepoint=33, max_codepoint=126)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.lists(U32, max_size=4).map(tuple)
protocols = st.builds(ProtocolRange, lowest=st.just(1), highest=POSITIVE, product=st.text(NAMED, max_size=20))
HASHES = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)

samplings = st.builds(
    Sampling,
    max_tokens=POSITIVE,
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=I32,
    min_p=FLOAT,
    seed=st.none() | st.integers(0, 2**64 - 1),
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    min_tokens=U32,
    ignore_eos=st.booleans(),
    stop_token_ids=IDS,
    logprobs=st.none() | U32,
    form=st.none() | FORMS,
    logit_bias=st.dictionaries(U32, FLOAT, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=IDS,
    bad_tokens=st.lists(IDS.filter(bool), max_size=2).map(tuple),
    prompt_logprobs=st.none() | U32,
    thinking_tokens=st.none() | U32,
)
fingerprints = st.builds(
    Fingerprint,
    version=U32,
    model=TEXT,
    revision=TEXT,
    lora=TEXT,
    dtype=TEXT,
    element_bytes=U32,
    block_tokens=U32,
    layers=U32,
    kv_heads=U32,
    head_dim=U32,
    layout=TEXT,
    tp=U32,
    hash_algorithm=st.sampled_from(HashAlgorithm),
)
handoffs = st.builds(
    Handoff,
    kv_path=st.sampled_from(KvPath),
    prefill_worker=TEXT.map(WorkerId),
    fingerprint=TEXT,
    num_tokens=U32,
    params=st.binary(max_size=20),
    kv=st.none() | fingerprints,
)
parsing_tasks = st.builds(
    ParsingTask,
    tools=TEXT,
    tool_choice=st.sampled_from(ToolChoice),
    function=TEXT,
    parallel_calls=st.booleans(),
    template_args=TEXT,
    stop=st.lists(TEXT, max_size=2).map(tuple),
    earlier_calls=U32,
)
traces = st.builds(
    TraceContext,
    trace_id=st.binary(min_size=16, max_size=16),
    parent_id=st.binary(min_size=8, max_size=8),
    sampled=st.booleans(),
    state=st.sampled_from(["", "a=1", "a=1,b@c=2"]),
)
poolings = st.builds(
    Pooling,
    task=st.sampled_from(PoolingTask),
    dimensions=U32,
    activation=st.none() | st.booleans(),
    first_tokens=U32,
)
starts = st.builds(
    Start,
    request_id=NAME.map(RequestId),
    phase=st.sampled_from(Phase),
    tokens=st.lists(st.binary(min_size=4, max_size=4), max_size=5).map(b"".join),
    sampling=samplings,
    salt=st.just(b"") | st.binary(min_size=32, max_size=32),
    handoff=st.none() | handoffs,
    kv_path=st.none() | st.sampled_from(KvPath),
    priority=I32,
    timeout_ms=U32,
    session=TEXT,
    adapter=TEXT,
    parsing=st.none() | parsing_tasks,
    trace=st.none() | traces,
    pooling=st.none() | poolings,
    images=st.lists(st.binary(max_size=9), max_size=2).map(tuple),
    answer_key=U64,
).map(lambda start: structs.replace(start, generated_tokens=max(0, len(start.tokens) // TOKEN_BYTES - 1)))
router_messages = (
    starts
    | st.builds(Cancel, request_id=NAME.map(RequestId))
    | st.builds(RouterHello, router_id=NAME, protocols=protocols)
    | st.builds(
        KeepTrace,
        trace_id=st.binary(max_size=20),
        parent_ids=st.lists(st.binary(max_size=9), max_size=3).map(tuple),
        leave_room=st.booleans(),
    )
    | st.builds(AnswersWanted, answers=st.lists(st.builds(WantedAnswer, key=U64, tokens=U32), max_size=3).map(tuple))
)
kept_answers = st.builds(
    KeptAnswers,
    answers=st.lists(
        st.builds(KeptAnswer, key=U64, tokens=IDS.map(token_bytes), wanted=U32),
        max_size=3,
    ).map(tuple),
)

origins = st.builds(
    KvOrigin, source=st.sampled_from(Source), origin=TEXT, blocks=st.integers(0, 1000), bytes=st.integers(0, 2**64 - 1)
)
reports = st.builds(
    lambda origins, cached, images: KvReport(
        prompt_blocks=sum(one.blocks for one in origins),
        origins=tuple(origins),
        cached_tokens=cached,
        image_tokens=images,
    ),
    st.lists(origins, max_size=4),
    U32,
    U32,
)
logprobs = st.lists(st.tuples(U32, FLOAT), max_size=3).flatmap(
    lambda top: st.builds(
        Logprobs, FLOAT, st.just(tuple(token for token, _ in top)), st.just(tuple(value for _, value in top))
    )
)
parsed_deltas = st.builds(
    ParsedDelta,
    text=TEXT,
    reasoning=TEXT,
    calls=st.lists(st.builds(CallDelta, index=U32, id=TEXT, name=TEXT, arguments=TEXT), max_size=2).map(tuple),
    stopped=st.booleans(),
    from_start=st.booleans(),
)
running = st.builds(
    Progress,
    request_id=NAME.map(RequestId),
    token_ids=IDS,
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    kv=st.none() | reports,
    prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
    parsed=st.none() | parsed_deltas,
)
finished = st.builds(
    Progress,
    request_id=NAME.map(RequestId),
    token_ids=IDS,
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    finish=st.sampled_from(Finish),
    kv=st.none() | reports,
    handoff=st.none() | handoffs,
    prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
    parsed=st.none() | parsed_deltas,
    vector=st.lists(st.binary(min_size=4, max_size=4), max_size=3).map(b"".join),
)
kv_events = st.builds(KvStored, HASHES) | st.builds(KvRemoved, HASHES) | st.builds(KvCleared)
worker_messages = (
    st.builds(Step, progress=st.lists(running | finished, max_size=4).map(tuple))
    | st.builds(KvEvents, sequence=st.integers(0, 2**64 - 1), events=st.lists(kv_events, max_size=3).map(tuple))
    | kept_answers
    | st.builds(
        LoadReport,
        running=U32,
        waiting=U32,
        kv_blocks_used=U32,
        adapters=st.lists(TEXT, max_size=2).map(tuple),
        pulled=st.builds(PulledBlocks, verified=U64, corrupt=U64, unverified=U64),
    )
    | st.builds(Rejected, request_id=NAME.map(RequestId), reason=st.sampled_from(Reason), message=TEXT, field=TEXT)
    | st.builds(
        WorkerDescription,
        protocols=protocols,
        keeps_answers=st.booleans(),
        worker_id=NAME.map(WorkerId),
        incarnation=NAME.map(Incarnation),
        model=NAME.map(ModelName),
        role=st.sampled_from(Role),
        block_tokens=POSITIVE,
        max_model_len=POSITIVE,
        kv_blocks=POSITIVE,
        max_running=POSITIVE,
        fingerprint=TEXT,
        kv_paths=st.lists(st.sampled_from(KvPath), max_size=2).map(tuple),
        store_id=st.none() | NAME.map(StoreId),
        engine=TEXT,
        kv=st.none() | fingerprints,
        prefill_speed=st.floats(0.01, 100),
        decode_speed=st.floats(0.01, 100),
        labels=st.lists(TEXT, max_size=3).map(tuple),
        adapters=st.lists(st.builds(LoraAdapter, NAME.map(ModelName), TEXT), max_size=2).map(tuple),
        adapter_slots=U32,
        tokenizer_digests=st.none() | st.builds(TokenizerDigests, tokens=TEXT, template=TEXT, blocks=TEXT),
        keeps_forms=st.booleans(),
        generation=TEXT,
        sampling_fields=st.lists(TEXT, max_size=2).map(tuple),
        continued_fields=st.lists(TEXT, max_size=2).map(tuple),
        parsers=st.none() | st.builds(AnswerParsers, tool_calls=TEXT, reasoning=TEXT, in_engine=st.booleans()),
        pooling=st.none() | st.builds(PoolingModel, task=st.sampled_from(PoolingTask), pairs=st.sampled_from(PairForm)),
    )
    | st.just(Draining())
    | st.builds(Goodbye, reason=st.text(), protocols=st.none() | protocols)
)


@given(router_messages)
def test_router_messages_survive_the_wire(message):
    wire = encode_router_message(message).SerializeToString()

    assert decode_router_message(pb.RouterMessage.FromString(wire)) == message


def test_too_many_wanted_answers_are_rejected():
    wanted = AnswersWanted(answers=(WantedAnswer(1, 1),) * (MAX_WANTED_ANSWERS + 1))
    with pytest.raises(MalformedMessage, match="answers_wanted"):
        decode_router_message(encode_router_message(wanted))


def test_kept_tokens_that_are_no_whole_ids_are_rejected():
    kept = KeptAnswers(answers=(KeptAnswer(1, b"abc"),))
    with pytest.raises(MalformedMessage, match="kept_answers"):
        decode_worker_message(encode_worker_message(kept))


@given(worker_messages)
def test_worker_messages_survive_the_wire(message):
    wire = encode_worker_message(message).SerializeToString()

    assert decode_worker_message(pb.WorkerMessage.FromString(wire)) == message


def test_a_message_of_a_newer_peer_is_skipped():
    assert decode_router_message(pb.RouterMessage()) is None
    assert decode_worker_message(pb.WorkerMessage()) is None


def a_wire_start(**changes) -> pb.Start:
    fields = {"request_id": "r", "phase": pb.WORK_PHASE_AGGREGATED, "tokens": b"\1\0\0\0"}
    return pb.Start(**{"sampling": pb.WorkSampling(max_tokens=1), **fields, **changes})


def test_the_wire_start_of_these_tests_is_sound():
    assert isinstance(decode_router_message(pb.RouterMessage(start=a_wire_start())), Start)


@pytest.mark.parametrize(
    "trace",
    [pb.Trace(), pb.Trace(trace_id=b"t" * 16), pb.Trace(trace_id=b"t" * 15, parent_id=b"p" * 8)],
)
def test_malformed_trace_is_ignored_and_the_attempt_started(trace):
    start = decode_router_message(pb.RouterMessage(start=a_wire_start(trace=trace)))
    assert isinstance(start, Start)
    assert start.trace is None


def test_malformed_state_of_a_trace_is_dropped():
    trace = pb.Trace(trace_id=b"t" * 16, parent_id=b"p" * 8, state="\0")
    start = decode_router_message(pb.RouterMessage(start=a_wire_start(trace=trace)))
    assert start.trace == TraceContext(trace_id=b"t" * 16, parent_id=b"p" * 8)


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (a_wire_start(request_id=""), "start.request_id"),
        (a_wire_start(phase=pb.WORK_PHASE_UNSPECIFIED), "start.phase"),
        (a_wire_start(phase=99), "start.phase"),
        (a_wire_start(tokens=b"\1\0\0"), "start.tokens"),
        (a_wire_start(salt=b"short"), "start.salt"),
        (a_wire_start(kv_path="pigeon"), "start.kv_path"),
        (a_wire_start(sampling=pb.WorkSampling()), "start.sampling.max_tokens"),
        (a_wire_start(sampling=pb.WorkSampling(max_tokens=1, form=inference_pb2.Form())), "start.sampling.form"),
        (a_wire_start(handoff=pb.Handoff(kv_path="pigeon")), "start.handoff.kv_path"),
        (a_wire_start(parsing=pb.Parsing(tool_choice="perhaps")), "start.parsing.tool_choice"),
        (a_wire_start(parsing=pb.Parsing(tool_choice="auto", answered_tokens=1)), "start.generated_tokens"),
        (a_wire_start(generated_tokens=1), "start.generated_tokens"),
        (
            a_wire_start(handoff=pb.Handoff(kv_path="store", kv=pb.KvFingerprint(hash_algorithm="md4"))),
            "start.handoff.kv.hash_algorithm",
        ),
    ],
)
def test_a_malformed_start_is_refused_by_field_and_request(start, field):
    with pytest.raises(MalformedMessage) as refused:
        decode_router_message(pb.RouterMessage(start=start))

    assert refused.value.field == field
    assert refused.value.request_id == start.request_id


def test_older_routers_tell_the_begun_answer_with_its_parsing():
    told = a_wire_start(tokens=bytes(12), parsing=pb.Parsing(tool_choice="auto", answered_tokens=2))

    start = decode_router_message(pb.RouterMessage(start=told))

    assert isinstance(start, Start)
    assert start.generated_tokens == 2


def test_older_workers_learn_the_begun_answer_with_its_parsing():
    start = a_start(tokens=3, parsing=ParsingTask(), generated_tokens=2)

    assert encode_router_message(start).start.parsing.answered_tokens == 2


def a_wire_description(**changes) -> pb.Description:
    sizes = {"block_tokens": 32, "max_model_len": 64, "kv_blocks": 9, "max_running": 1}
    return pb.Description(worker_id="w", incarnation="1", model="m", role="both", **sizes, **changes)


def a_wire_vector(vector: bytes) -> pb.WorkerMessage:
    return pb.WorkerMessage(step=pb.Step(progress=[pb.Progress(request_id="r", finish="stop", vector=vector)]))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.WorkerMessage(step=pb.Step(progress=[pb.Progress()])), "step.progress.request_id"),
        (a_wire_vector(b"12345"), "step.progress.vector"),
        (a_wire_vector(bytes((MAX_VECTOR_NUMBERS + 1) * NUMBER_BYTES)), "step.progress.vector"),
        (
            pb.WorkerMessage(description=a_wire_description(pooling=pb.PoolingModel(task="paint", pairs="none"))),
            "description.pooling.task",
        ),
        (
            pb.WorkerMessage(
                step=pb.Step(
                    progress=[pb.Progress(request_id="r", finish="stop", kv=pb.KvPhaseReport(prompt_blocks=2))]
                )
            ),
            "step.progress.kv",
        ),
        (
            pb.WorkerMessage(
                step=pb.Step(progress=[pb.Progress(request_id="r", logprobs=[pb.WorkLogprobs(top_ids=[1])])])
            ),
            "step.progress.logprobs.top_logprobs",
        ),
        (
            pb.WorkerMessage(kv_events=pb.KvEvents(events=[pb.KvEvent(stored=pb.KvStored(hashes=b"x" * 15))])),
            "kv_events.stored.hashes",
        ),
        (pb.WorkerMessage(kv_events=pb.KvEvents(events=[pb.KvEvent()])), "kv_events.events"),
        (pb.WorkerMessage(description=pb.Description(worker_id="w", incarnation="1")), "description.model"),
        (pb.WorkerMessage(description=a_wire_description(adapters=[pb.Adapter()])), "description.adapters.name"),
        (
            pb.WorkerMessage(description=pb.Description(worker_id="w", incarnation="1", model="m", role="cook")),
            "description.role",
        ),
        (
            pb.WorkerMessage(description=pb.Description(worker_id="w", incarnation="1", model="m", role="both")),
            "description.block_tokens",
        ),
    ],
)
def test_a_malformed_message_of_a_worker_is_refused_by_field(message, field):
    with pytest.raises(MalformedMessage) as refused:
        decode_worker_message(message)

    assert refused.value.field == field


def test_late_deadline_is_sent_as_the_longest_timeout():
    wire = encode_router_message(a_start(timeout_ms=2**40))

    assert decode_router_message(wire) == a_start(timeout_ms=2**32 - 1)
