"""Worker protocol: translates the values of `fleet.core.work` from and to proto/fleet/v1/worker.proto.

`kvstore.net.frames` puts the length before each message.

Rules:

1. Encoding never fails, because Fleet's own values are valid. Decoding checks everything that a faulty or newer peer
   could get wrong, and raises `MalformedMessage` with the field.
2. Unknown fields are ignored, as protobuf intends. An unknown message in a stream decodes to None, so that a newer peer
   may send messages that this version does not know.
3. An unknown value of an enumeration never ends a stream (ADR 44). In a message to a worker it leads to a rejection of the attempt, because
   the worker must not carry out what it understands only in part. In a message to a router it becomes a known value: blocks of an unknown
   source count as computed, an unknown reason counts as an internal error, and an unknown KV path is left out. An answer with an unknown
   finish, or with a handoff by an unknown KV path, counts as failed on this worker. Only a worker with an unknown role, pooling task or
   form of pairs, or one that sends unknown KV events, cannot be used.
4. `Step` messages are the hot path, because there is one for each decode step. The translation of one token takes a few microseconds.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from math import inf
from typing import TypeVar, assert_never

from msgspec import structs

from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import (
    MAX_VECTOR_NUMBERS,
    NUMBER_BYTES,
    AnswerParsers,
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
    StructuredOutput,
    ToolChoice,
    Vector,
)
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import (
    MAX_WANTED_ANSWERS,
    NOTHING_PULLED,
    AnswersWanted,
    Cancel,
    Draining,
    Goodbye,
    Handoff,
    KeepTrace,
    KeptAnswer,
    KeptAnswers,
    KvCleared,
    KvEvent,
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
    RouterMessage,
    Start,
    Step,
    TokenizerDigests,
    WantedAnswer,
    WorkerDescription,
    WorkerMessage,
)
from fleet.v1 import inference_pb2
from fleet.v1 import worker_pb2 as pb
from fleet.wire.pooling import decode_pooling, encode_pooling
from fleet.wire.structured_output import decode_structured_output, encode_structured_output
from fleet.wire.tool_calls import decode_call, encode_call
from kvstore.block import HASH_BYTES, SALT_BYTES, TOKEN_BYTES, HashAlgorithm, split
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.protocol.range_messages import parse_range, range_message
from kvstore.tracing.context import SPAN_ID_BYTES, TRACE_ID_BYTES, TraceContext, is_trace_state

LONGEST_TIMEOUT_MS = 2**32 - 1
"""Maximum value of `Start.timeout_ms`: 49 days. If the deadline of a client is later, only the router enforces it."""


class MalformedMessage(Exception):
    """Error: a message cannot be decoded.

    Attributes:
        field: Path of the field, such as ``start.sampling.top_k``.
        request_id: The id of the request that the message is about; empty if unknown.
    """

    def __init__(self, field: str, message: str, *, request_id: str = ""):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.request_id = RequestId(request_id)


_PHASE_TO_WIRE = {
    Phase.AGGREGATED: pb.WORK_PHASE_AGGREGATED,
    Phase.PREFILL: pb.WORK_PHASE_PREFILL,
    Phase.DECODE: pb.WORK_PHASE_DECODE,
}
_PHASE_FROM_WIRE = {wire: phase for phase, wire in _PHASE_TO_WIRE.items()}

_TOKEN_IDS = pb.Progress.DESCRIPTOR.fields_by_name["token_ids"]
_KV_PATHS, _SOURCES, _REASONS, _FINISHES = (frozenset(map(str, names)) for names in (KvPath, Source, Reason, Finish))

Name = TypeVar("Name", bound=StrEnum)


def encode_router_message(message: RouterMessage) -> pb.RouterMessage:
    """Encode a message of a router to a worker."""
    match message:
        case Start():
            return pb.RouterMessage(start=_start_to_wire(message))
        case Cancel():
            return pb.RouterMessage(cancel=pb.Cancel(request_id=message.request_id))
        case RouterHello():
            return pb.RouterMessage(
                hello=pb.Hello(router_id=message.router_id, protocols=range_message(message.protocols))
            )
        case KeepTrace():
            return pb.RouterMessage(
                keep_trace=pb.KeepTrace(
                    trace_id=message.trace_id, parent_ids=message.parent_ids, leave_room=message.leave_room
                )
            )
        case AnswersWanted():
            wanted = [pb.WantedAnswer(key=each.key, tokens=each.tokens) for each in message.answers]
            return pb.RouterMessage(answers_wanted=pb.AnswersWanted(answers=wanted))
        case _:
            assert_never(message)


def decode_router_message(message: pb.RouterMessage) -> RouterMessage | None:
    """Decode a message of a router. Return None for a message that this version does not know.

    Raises:
        MalformedMessage: A field is wrong. If the message starts an attempt, the worker must reject the attempt.
    """
    match message.WhichOneof("message"):
        case "start":
            return _start_from_wire(message.start)
        case "cancel":
            return Cancel(request_id=RequestId(_filled(message.cancel.request_id, "cancel.request_id")))
        case "hello":
            router_id = _filled(message.hello.router_id, "hello.router_id")
            return RouterHello(router_id=router_id, protocols=parse_range(message.hello))
        case "keep_trace":
            kept = message.keep_trace
            return KeepTrace(trace_id=kept.trace_id, parent_ids=tuple(kept.parent_ids), leave_room=kept.leave_room)
        case "answers_wanted":
            wanted = message.answers_wanted.answers
            if len(wanted) > MAX_WANTED_ANSWERS:
                raise MalformedMessage("answers_wanted", f"has {len(wanted)} answers, more than {MAX_WANTED_ANSWERS}")
            return AnswersWanted(answers=tuple([WantedAnswer(each.key, each.tokens) for each in wanted]))
        case _:
            return None


def encode_worker_message(message: WorkerMessage) -> pb.WorkerMessage:
    """Encode a message of a worker to a router."""
    match message:
        case Step():
            return _step_to_wire(message)
        case KvEvents():
            events = [_kv_event_to_wire(event) for event in message.events]
            return pb.WorkerMessage(kv_events=pb.KvEvents(sequence=message.sequence, events=events))
        case LoadReport():
            load = pb.Load(
                running=message.running,
                waiting=message.waiting,
                kv_blocks_used=message.kv_blocks_used,
                adapters=message.adapters,
                pulled=_pulled_to_wire(message.pulled),
            )
            return pb.WorkerMessage(load=load)
        case Rejected():
            return pb.WorkerMessage(rejected=_rejected_to_wire(message))
        case WorkerDescription():
            return pb.WorkerMessage(description=encode_description(message))
        case Draining():
            return pb.WorkerMessage(draining=pb.Draining())
        case Goodbye():
            protocols = None if message.protocols is None else range_message(message.protocols)
            return pb.WorkerMessage(goodbye=pb.Goodbye(reason=message.reason, protocols=protocols))
        case KeptAnswers():
            kept = [pb.KeptAnswer(key=each.key, tokens=each.tokens, wanted=each.wanted) for each in message.answers]
            return pb.WorkerMessage(kept_answers=pb.KeptAnswers(answers=kept))
        case _:
            assert_never(message)


def _pulled_to_wire(pulled: PulledBlocks) -> pb.PulledBlocks | None:
    """Encode the numbers of pulled blocks. Return None if there are none, so that the load reports of most workers are short."""
    if pulled == NOTHING_PULLED:
        return None
    return pb.PulledBlocks(verified=pulled.verified, corrupt=pulled.corrupt, unverified=pulled.unverified)


def decode_worker_message(message: pb.WorkerMessage) -> WorkerMessage | None:
    """Decode a message of a worker. Return None for a message that this version does not know.

    Raises:
        MalformedMessage: A field is wrong, so nothing from this worker can be trusted any more.
    """
    match message.WhichOneof("message"):
        case "step":
            return Step(progress=tuple([_progress_from_wire(progress) for progress in message.step.progress]))
        case "kv_events":
            events = message.kv_events
            decoded = tuple([_kv_event_from_wire(event) for event in events.events])
            return KvEvents(sequence=events.sequence, events=decoded)
        case "load":
            load = message.load
            return LoadReport(
                running=load.running,
                waiting=load.waiting,
                kv_blocks_used=load.kv_blocks_used,
                adapters=tuple(load.adapters),
                pulled=PulledBlocks(
                    verified=load.pulled.verified,
                    corrupt=load.pulled.corrupt,
                    unverified=load.pulled.unverified,
                )
                if load.HasField("pulled")
                else NOTHING_PULLED,
            )
        case "rejected":
            return _rejected_from_wire(message.rejected)
        case "description":
            return decode_description(message.description)
        case "draining":
            return Draining()
        case "goodbye":
            goodbye = message.goodbye
            return Goodbye(
                reason=goodbye.reason, protocols=parse_range(goodbye) if goodbye.HasField("protocols") else None
            )
        case "kept_answers":
            kept = message.kept_answers.answers
            return KeptAnswers(answers=tuple([_kept_answer_from_wire(each) for each in kept]))
        case _:
            return None


def _kept_answer_from_wire(kept: pb.KeptAnswer) -> KeptAnswer:
    if len(kept.tokens) % TOKEN_BYTES:
        raise MalformedMessage(
            "kept_answers.tokens", f"{len(kept.tokens)} bytes are not a number of {TOKEN_BYTES}-byte ids"
        )
    return KeptAnswer(kept.key, kept.tokens, kept.wanted)


def encode_description(description: WorkerDescription) -> pb.Description:
    return pb.Description(
        worker_id=description.worker_id,
        incarnation=description.incarnation,
        model=description.model,
        role=description.role.value,
        block_tokens=description.block_tokens,
        max_model_len=description.max_model_len,
        kv_blocks=description.kv_blocks,
        max_running=description.max_running,
        fingerprint=description.fingerprint,
        kv_paths=[path.value for path in description.kv_paths],
        store_id=description.store_id or "",
        engine=description.engine,
        kv=_kv_to_wire(description.kv),
        prefill_speed=description.prefill_speed,
        decode_speed=description.decode_speed,
        labels=description.labels,
        adapters=[pb.Adapter(name=each.name, revision=each.revision) for each in description.adapters],
        adapter_slots=description.adapter_slots,
        golden=_tokenizer_digests_to_wire(description.tokenizer_digests),
        keeps_forms=description.keeps_forms,
        generation=description.generation,
        start_seconds=description.start_seconds,
        sampling_fields=description.sampling_fields,
        continued_fields=description.continued_fields,
        parsers=_parsers_to_wire(description.parsers),
        pooling=_pooling_model_to_wire(description.pooling),
        protocols=None if description.protocols is None else range_message(description.protocols),
        keeps_answers=description.keeps_answers,
    )


def decode_description(description: pb.Description) -> WorkerDescription:
    """Decode a worker's description.

    Raises:
        MalformedMessage: A field is wrong.
    """
    return WorkerDescription(
        worker_id=WorkerId(_filled(description.worker_id, "description.worker_id")),
        incarnation=Incarnation(_filled(description.incarnation, "description.incarnation")),
        model=ModelName(_filled(description.model, "description.model")),
        role=_named(Role, description.role, "description.role"),
        block_tokens=_at_least_one(description.block_tokens, "description.block_tokens"),
        max_model_len=_at_least_one(description.max_model_len, "description.max_model_len"),
        kv_blocks=_at_least_one(description.kv_blocks, "description.kv_blocks"),
        max_running=_at_least_one(description.max_running, "description.max_running"),
        fingerprint=description.fingerprint,
        kv_paths=tuple(KvPath(path) for path in description.kv_paths if path in _KV_PATHS),
        store_id=StoreId(description.store_id) if description.store_id else None,
        engine=description.engine,
        kv=_known_kv(description.kv, "description.kv") if description.HasField("kv") else None,
        prefill_speed=_speed(description.prefill_speed, "description.prefill_speed"),
        decode_speed=_speed(description.decode_speed, "description.decode_speed"),
        labels=tuple(description.labels),
        adapters=tuple(
            LoraAdapter(ModelName(_filled(each.name, "description.adapters.name")), each.revision)
            for each in description.adapters
        ),
        adapter_slots=description.adapter_slots,
        tokenizer_digests=_tokenizer_digests_from_wire(description.golden) if description.HasField("golden") else None,
        keeps_forms=description.keeps_forms,
        generation=description.generation,
        start_seconds=_start_seconds(description.start_seconds),
        sampling_fields=tuple(description.sampling_fields),
        continued_fields=tuple(description.continued_fields),
        parsers=_parsers_from_wire(description.parsers) if description.HasField("parsers") else None,
        pooling=_pooling_model_from_wire(description.pooling) if description.HasField("pooling") else None,
        protocols=parse_range(description),
        keeps_answers=description.keeps_answers,
    )


def _parsers_to_wire(parsers: AnswerParsers | None) -> pb.Parsers | None:
    return None if parsers is None else pb.Parsers(**structs.asdict(parsers))


def _parsers_from_wire(parsers: pb.Parsers) -> AnswerParsers:
    return AnswerParsers(tool_calls=parsers.tool_calls, reasoning=parsers.reasoning, in_engine=parsers.in_engine)


def _pooling_model_to_wire(model: PoolingModel | None) -> pb.PoolingModel | None:
    return None if model is None else pb.PoolingModel(task=model.task.value, pairs=model.pairs.value)


def _pooling_model_from_wire(model: pb.PoolingModel) -> PoolingModel:
    return PoolingModel(
        task=_named(PoolingTask, model.task, "description.pooling.task"),
        pairs=_named(PairForm, model.pairs, "description.pooling.pairs"),
    )


def _start_seconds(seconds: float) -> float:
    if not 0 <= seconds < inf:
        raise MalformedMessage("description.start_seconds", f"must be a number from 0, not {seconds}")
    return seconds


def _tokenizer_digests_to_wire(digests: TokenizerDigests | None) -> pb.Golden | None:
    return (
        None if digests is None else pb.Golden(tokens=digests.tokens, template=digests.template, blocks=digests.blocks)
    )


def _tokenizer_digests_from_wire(golden: pb.Golden) -> TokenizerDigests:
    return TokenizerDigests(tokens=golden.tokens, template=golden.template, blocks=golden.blocks)


def _speed(value: float, field: str) -> float:
    if not 0 <= value < inf:
        raise MalformedMessage(field, f"must be a number from 0, not {value}")
    return value or 1.0


def _kv_to_wire(kv: Fingerprint | None) -> pb.KvFingerprint | None:
    if kv is None:
        return None
    return pb.KvFingerprint(**{name: getattr(kv, name) for name in kv.__struct_fields__})


def _kv_from_wire(kv: pb.KvFingerprint, path: str) -> Fingerprint:
    """Decode a fingerprint. Only the hash algorithm is checked here; the other values are checked when two fingerprints are compared."""
    algorithm = _named(HashAlgorithm, kv.hash_algorithm, f"{path}.hash_algorithm")
    values = {name: getattr(kv, name) for name in Fingerprint.__struct_fields__}
    return Fingerprint(**{**values, "hash_algorithm": algorithm})


def _known_kv(kv: pb.KvFingerprint, path: str) -> Fingerprint | None:
    """Decode the fingerprint of a worker. Return None if it has a value that this version does not know."""
    try:
        return _kv_from_wire(kv, path)
    except MalformedMessage:
        return None


# Messages from router to worker:


def _start_to_wire(start: Start) -> pb.Start:
    return pb.Start(
        request_id=start.request_id,
        phase=_PHASE_TO_WIRE[start.phase],
        tokens=start.tokens,
        sampling=_sampling_to_wire(start.sampling),
        salt=start.salt,
        handoff=None if start.handoff is None else _handoff_to_wire(start.handoff),
        priority=start.priority,
        timeout_ms=min(start.timeout_ms, LONGEST_TIMEOUT_MS),
        kv_path=start.kv_path.value if start.kv_path is not None else "",
        session=start.session,
        adapter=start.adapter,
        parsing=None if start.parsing is None else _parsing_to_wire(start.parsing, start.generated_tokens),
        generated_tokens=start.generated_tokens,
        trace=None if start.trace is None else _trace_to_wire(start.trace),
        pooling=None if start.pooling is None else encode_pooling(start.pooling),
        images=start.images,
        answer_key=start.answer_key,
    )


def _trace_to_wire(trace: TraceContext) -> pb.Trace:
    return pb.Trace(trace_id=trace.trace_id, parent_id=trace.parent_id, sampled=trace.sampled, state=trace.state)


def _trace_from_wire(trace: pb.Trace) -> TraceContext | None:
    """Decode a trace context. Return None if it is malformed, because no attempt may fail because of its trace."""
    if len(trace.trace_id) != TRACE_ID_BYTES or len(trace.parent_id) != SPAN_ID_BYTES:
        return None
    return TraceContext(
        trace_id=trace.trace_id,
        parent_id=trace.parent_id,
        sampled=trace.sampled,
        state=trace.state if is_trace_state(trace.state) else "",
    )


def _parsing_to_wire(parsing: ParsingTask, generated_tokens: int) -> pb.Parsing:
    return pb.Parsing(
        tools=parsing.tools,
        tool_choice=parsing.tool_choice.value,
        function=parsing.function,
        single_call=not parsing.parallel_calls,
        template_args=parsing.template_args,
        stop=parsing.stop,
        earlier_calls=parsing.earlier_calls,
        answered_tokens=generated_tokens,
    )


def _parsing_from_wire(parsing: pb.Parsing) -> ParsingTask:
    return ParsingTask(
        tools=parsing.tools,
        tool_choice=_named(ToolChoice, parsing.tool_choice, "start.parsing.tool_choice"),
        function=parsing.function,
        parallel_calls=not parsing.single_call,
        template_args=parsing.template_args,
        stop=tuple(parsing.stop),
        earlier_calls=parsing.earlier_calls,
    )


def _pooling_from_wire(message: inference_pb2.Pooling) -> Pooling:
    if (pooling := decode_pooling(message)) is None:
        raise MalformedMessage("start.pooling.task", f"{message.task!r} is none of {', '.join(PoolingTask)}")
    return pooling


def _start_from_wire(start: pb.Start) -> Start:
    request_id = _filled(start.request_id, "start.request_id")
    try:
        phase = _PHASE_FROM_WIRE.get(start.phase)
        if phase is None:
            raise MalformedMessage("start.phase", f"{start.phase} is no known phase of work")
        if len(start.tokens) % TOKEN_BYTES:
            raise MalformedMessage(
                "start.tokens", f"{len(start.tokens)} bytes are not a number of {TOKEN_BYTES}-byte ids"
            )
        if len(start.salt) not in (0, SALT_BYTES):
            raise MalformedMessage("start.salt", f"has 0 or {SALT_BYTES} bytes, not {len(start.salt)}")
        # Routers of earlier versions send only `answered_tokens`.
        generated = start.generated_tokens or start.parsing.answered_tokens
        if generated and generated >= (tokens := len(start.tokens) // TOKEN_BYTES):
            raise MalformedMessage(
                "start.generated_tokens", f"is {generated}, but must be less than the {tokens} tokens with the prompt"
            )
        return Start(
            request_id=RequestId(request_id),
            phase=phase,
            tokens=start.tokens,
            sampling=_sampling_from_wire(start.sampling),
            salt=start.salt,
            handoff=_handoff_from_wire(start.handoff, "start.handoff") if start.HasField("handoff") else None,
            kv_path=_named(KvPath, start.kv_path, "start.kv_path") if start.kv_path else None,
            priority=start.priority,
            timeout_ms=start.timeout_ms,
            session=start.session,
            adapter=start.adapter,
            parsing=_parsing_from_wire(start.parsing) if start.HasField("parsing") else None,
            generated_tokens=generated,
            trace=_trace_from_wire(start.trace) if start.HasField("trace") else None,
            pooling=_pooling_from_wire(start.pooling) if start.HasField("pooling") else None,
            images=tuple(start.images),
            answer_key=start.answer_key,
        )
    except MalformedMessage as error:
        error.request_id = RequestId(request_id)  # needed because the rejection has to name the request
        raise


def _sampling_to_wire(sampling: Sampling) -> pb.WorkSampling:
    message = pb.WorkSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        form=None if sampling.form is None else encode_structured_output(sampling.form),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
        thinking_tokens=sampling.thinking_tokens,
    )
    if sampling.bad_tokens:
        message.bad_tokens.extend(inference_pb2.TokenIds(ids=ids) for ids in sampling.bad_tokens)
    return message


def _sampling_from_wire(sampling: pb.WorkSampling) -> Sampling:
    return Sampling(
        max_tokens=_at_least_one(sampling.max_tokens, "start.sampling.max_tokens"),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=tuple(sampling.stop_token_ids),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        form=_structured_output_from_wire(sampling.form) if sampling.HasField("form") else None,
        logit_bias=tuple(sorted(sampling.logit_bias.items())) if sampling.logit_bias else (),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_tokens=tuple(tuple(one.ids) for one in sampling.bad_tokens if one.ids) if sampling.bad_tokens else (),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        thinking_tokens=sampling.thinking_tokens if sampling.HasField("thinking_tokens") else None,
    )


def _structured_output_from_wire(message: inference_pb2.Form) -> StructuredOutput:
    if (form := decode_structured_output(message)) is None:
        raise MalformedMessage("start.sampling.form", "is empty, or of a kind that this version does not know")
    return form


def _handoff_to_wire(handoff: Handoff) -> pb.Handoff:
    return pb.Handoff(
        kv_path=handoff.kv_path.value,
        prefill_worker_id=handoff.prefill_worker,
        fingerprint=handoff.fingerprint,
        num_tokens=handoff.num_tokens,
        params=handoff.params,
        kv=_kv_to_wire(handoff.kv),
    )


def _handoff_from_wire(handoff: pb.Handoff, path: str) -> Handoff:
    return Handoff(
        kv_path=_named(KvPath, handoff.kv_path, f"{path}.kv_path"),
        prefill_worker=WorkerId(handoff.prefill_worker_id),
        fingerprint=handoff.fingerprint,
        num_tokens=handoff.num_tokens,
        params=handoff.params,
        kv=_kv_from_wire(handoff.kv, f"{path}.kv") if handoff.HasField("kv") else None,
    )


def _known_handoff(handoff: pb.Handoff) -> Handoff | None:
    """Decode the handoff of a worker. Return None if it has a value that this version does not know."""
    try:
        return _handoff_from_wire(handoff, "step.progress.handoff")
    except MalformedMessage:
        return None


# Messages from worker to router:


def _step_to_wire(step: Step) -> pb.WorkerMessage:
    message = pb.WorkerMessage()
    message.step.SetInParent()  # without this, an empty step would not be sent
    add = message.step.progress.add
    for progress in step.progress:
        wire = add()  # the message is filled field by field, which is a quarter faster than keyword arguments
        wire.request_id = progress.request_id
        wire.token_ids.extend(progress.token_ids)
        if progress.logprobs:
            wire.logprobs.extend(
                pb.WorkLogprobs(logprob=one.chosen, top_ids=one.top_ids, top_logprobs=one.top)
                for one in progress.logprobs
            )
        if progress.prompt_logprobs:
            wire.prompt_logprobs.extend(
                pb.WorkLogprobs(logprob=one.chosen, top_ids=one.top_ids, top_logprobs=one.top)
                for one in progress.prompt_logprobs
            )
        if progress.finish is not None:
            wire.finish = progress.finish.value
        if progress.kv is not None:
            wire.kv.CopyFrom(_report_to_wire(progress.kv))
        if progress.handoff is not None:
            wire.handoff.CopyFrom(_handoff_to_wire(progress.handoff))
        if progress.parsed is not None:
            _fill_parsed(wire.parsed, progress.parsed)
        if progress.vector:
            wire.vector = progress.vector
    return message


def _fill_parsed(wire: pb.Parsed, parsed: ParsedDelta) -> None:
    wire.SetInParent()  # without this, an empty delta would not be sent
    wire.text = parsed.text
    wire.reasoning = parsed.reasoning
    wire.stopped = parsed.stopped
    wire.from_start = parsed.from_start
    for call in parsed.calls:
        wire.calls.append(encode_call(call))


def _parsed_from_wire(parsed: pb.Parsed) -> ParsedDelta:
    return ParsedDelta(
        text=parsed.text,
        reasoning=parsed.reasoning,
        calls=tuple(decode_call(call) for call in parsed.calls) if parsed.calls else (),
        stopped=parsed.stopped,
        from_start=parsed.from_start,
    )


def _progress_from_wire(progress: pb.Progress) -> Progress:
    # The most frequent case comes first: the message has new tokens and nothing else. To list the fields that are set takes half the time
    # of checking each field. The list is in the order of the field numbers, so the first of two fields is the request id.
    fields = progress.ListFields()
    if len(fields) == 2 and fields[1][0] is _TOKEN_IDS:
        token_ids = fields[1][1]
        return Progress(request_id=fields[0][1], token_ids=(token_ids[0],) if len(token_ids) == 1 else tuple(token_ids))
    if not progress.request_id:
        raise MalformedMessage("step.progress.request_id", "is empty")
    if not progress.finish:  # the attempt continues
        return Progress(
            request_id=RequestId(progress.request_id),
            token_ids=tuple(progress.token_ids),
            logprobs=_logprobs_from_wire(progress.logprobs) if progress.logprobs else (),
            prompt_logprobs=_logprobs_from_wire(progress.prompt_logprobs) if progress.prompt_logprobs else (),
            kv=_report_from_wire(progress.kv) if progress.HasField("kv") else None,
            parsed=_parsed_from_wire(progress.parsed) if progress.HasField("parsed") else None,
        )
    return Progress(
        request_id=RequestId(progress.request_id),
        token_ids=tuple(progress.token_ids),
        logprobs=_logprobs_from_wire(progress.logprobs),
        prompt_logprobs=_logprobs_from_wire(progress.prompt_logprobs) if progress.prompt_logprobs else (),
        # Treat an unknown finish as a cancellation by the worker, because then the router continues the answer on another worker.
        finish=Finish(progress.finish) if progress.finish in _FINISHES else Finish.CANCELLED,
        kv=_report_from_wire(progress.kv) if progress.HasField("kv") else None,
        handoff=_known_handoff(progress.handoff) if progress.HasField("handoff") else None,
        parsed=_parsed_from_wire(progress.parsed) if progress.HasField("parsed") else None,
        vector=_vector_from_wire(vector) if (vector := progress.vector) else b"",
    )


def _vector_from_wire(vector: Vector) -> Vector:
    if len(vector) % NUMBER_BYTES or len(vector) > MAX_VECTOR_NUMBERS * NUMBER_BYTES:
        raise MalformedMessage(
            "step.progress.vector",
            f"{len(vector)} bytes are not at most {MAX_VECTOR_NUMBERS} numbers of {NUMBER_BYTES} bytes",
        )
    return vector


def _logprobs_from_wire(logprobs: Iterable[pb.WorkLogprobs]) -> tuple[Logprobs, ...]:
    decoded = []
    for one in logprobs:
        if len(one.top_ids) != len(one.top_logprobs):
            raise MalformedMessage("step.progress.logprobs.top_logprobs", "has another length than top_ids")
        decoded.append(Logprobs(chosen=one.logprob, top_ids=tuple(one.top_ids), top=tuple(one.top_logprobs)))
    return tuple(decoded)


def _report_to_wire(report: KvReport) -> pb.KvPhaseReport:
    message = pb.KvPhaseReport(
        prompt_blocks=report.prompt_blocks, cached_tokens=report.cached_tokens, image_tokens=report.image_tokens
    )
    for origin in report.origins:
        wire = message.origins.add(
            source=origin.source.value, blocks=origin.blocks, bytes=origin.bytes, tier=origin.tier
        )
        setattr(wire, "from", origin.origin)  # `from` is a keyword of Python, so it cannot be assigned as an attribute
    return message


def _report_from_wire(report: pb.KvPhaseReport) -> KvReport:
    origins = tuple(
        KvOrigin(
            source=Source(origin.source) if origin.source in _SOURCES else Source.COMPUTED,
            origin=getattr(origin, "from"),
            blocks=origin.blocks,
            bytes=origin.bytes,
            tier=origin.tier,
        )
        for origin in report.origins
    )
    counted = sum(origin.blocks for origin in origins)
    if counted != report.prompt_blocks:
        raise MalformedMessage("step.progress.kv", f"origins add up to {counted} of {report.prompt_blocks} blocks")
    return KvReport(
        prompt_blocks=report.prompt_blocks,
        origins=origins,
        cached_tokens=report.cached_tokens,
        image_tokens=report.image_tokens,
    )


def _rejected_to_wire(rejected: Rejected) -> pb.Rejected:
    return pb.Rejected(
        request_id=rejected.request_id,
        reason=rejected.reason.value,
        message=rejected.message,
        field=rejected.field,
    )


def _rejected_from_wire(rejected: pb.Rejected) -> Rejected:
    return Rejected(
        request_id=RequestId(_filled(rejected.request_id, "rejected.request_id")),
        reason=Reason(rejected.reason) if rejected.reason in _REASONS else Reason.INTERNAL,
        message=rejected.message,
        field=rejected.field,
    )


def _kv_event_to_wire(event: KvEvent) -> pb.KvEvent:
    match event:
        case KvStored():
            return pb.KvEvent(stored=pb.KvStored(hashes=b"".join(event.hashes)))
        case KvRemoved():
            return pb.KvEvent(removed=pb.KvRemoved(hashes=b"".join(event.hashes)))
        case KvCleared():
            return pb.KvEvent(cleared=pb.KvCleared())
        case _:
            assert_never(event)


def _kv_event_from_wire(event: pb.KvEvent) -> KvEvent:
    kind = event.WhichOneof("event")
    decode = _KV_EVENTS.get(kind or "")
    if decode is None:  # an unknown event must not be skipped, because the prefix index would then be wrong
        raise MalformedMessage("kv_events.events", "one of them is of an unknown kind")
    return decode(event)


_KV_EVENTS: dict[str, Callable[[pb.KvEvent], KvEvent]] = {
    "stored": lambda event: KvStored(_hashes(event.stored.hashes, "kv_events.stored.hashes")),
    "removed": lambda event: KvRemoved(_hashes(event.removed.hashes, "kv_events.removed.hashes")),
    "cleared": lambda event: KvCleared(),  # noqa: ARG005 - all decoders have the same signature
}


# Checks of values:


def _hashes(joined: bytes, path: str) -> tuple[bytes, ...]:
    try:
        return tuple(split(joined))
    except ValueError as error:
        raise MalformedMessage(path, f"{len(joined)} bytes are not a number of {HASH_BYTES}-byte hashes") from error


def _named(names: type[Name], value: str, path: str) -> Name:
    try:
        return names(value)
    except ValueError:
        raise MalformedMessage(path, f"{value!r} is none of {', '.join(names)}") from None


def _filled(value: str, path: str) -> str:
    if not value:
        raise MalformedMessage(path, "is empty")
    return value


def _at_least_one(value: int, path: str) -> int:
    if value < 1:
        raise MalformedMessage(path, f"must be at least 1, not {value}")
    return value
