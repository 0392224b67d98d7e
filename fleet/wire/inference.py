"""Public protocol (proto/fleet/v1/inference.proto): translates messages for clients and servers.

Values that cannot be translated are rejected here, with the path of their field. `fleet.core.validation` checks all other values.
"""

from collections.abc import Callable, Mapping
from typing import Any, assert_never

import numpy as np

from fleet.core.clock import Nanos
from fleet.core.errors import invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    DEFAULT_FIELDS,
    Admitted,
    AnswerParsing,
    ChatMessage,
    ChatPrompt,
    Delta,
    Finish,
    Finished,
    GenerateEvent,
    GenerateRequest,
    KvOrigin,
    KvPhase,
    KvReport,
    Logprobs,
    ModelCard,
    Pooling,
    PoolingModel,
    PoolingTask,
    Prompt,
    Resume,
    Sampling,
    Source,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
    Usage,
)
from fleet.core.roles import KvPath, Phase, Placement
from fleet.v1 import inference_pb2 as pb
from fleet.wire.pooling import decode_pooling, encode_pooling
from fleet.wire.structured_output import decode_structured_output, encode_structured_output
from fleet.wire.tool_calls import decode_call, encode_call

_PLACEMENTS: Mapping[int, Placement] = {
    pb.PLACEMENT_UNSPECIFIED: Placement.AUTO,
    pb.PLACEMENT_AGGREGATED: Placement.AGGREGATED,
    pb.PLACEMENT_DISAGGREGATED: Placement.DISAGGREGATED,
}
_KV_PATHS: Mapping[int, KvPath | None] = {
    pb.KV_PATH_UNSPECIFIED: None,
    pb.KV_PATH_STORE: KvPath.STORE,
    pb.KV_PATH_DIRECT: KvPath.DIRECT,
}
_FINISHES: Mapping[int, Finish] = {
    pb.FINISH_REASON_STOP: Finish.STOP,
    pb.FINISH_REASON_LENGTH: Finish.LENGTH,
    pb.FINISH_REASON_TOOL_CALLS: Finish.TOOL_CALLS,
}

_PLACEMENT_NUMBERS = {placement: number for number, placement in _PLACEMENTS.items()}
_KV_PATH_NUMBERS = {kv_path: number for number, kv_path in _KV_PATHS.items()}
_FINISH_NUMBERS = {finish: number for number, finish in _FINISHES.items()}

_OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "thinking_tokens",
)


def decode_request(message: pb.GenerateRequest, request_id: RequestId, deadline: Nanos | None) -> GenerateRequest:
    """Decode a client's request.

    Args:
        message: The message.
        request_id: The id of the request if the message has none.
        deadline: Deadline of the request: that of the gRPC call or that of `message.timeout_ms`, whichever is earlier; None: no deadline.

    Raises:
        RequestRejected: INVALID_ARGUMENT, because there is no prompt, or this version does not know the value of a field, such as
            `kv_path`, `parsing.tool_choice` or `sampling.form`.
    """
    if message.placement not in _PLACEMENTS:
        raise invalid("placement", f"{message.placement} is not a known value")
    if message.kv_path not in _KV_PATHS:
        raise invalid("kv_path", f"{message.kv_path} is not a known value")
    given = {field: getattr(message.sampling, field) for field in _OPTIONAL if message.sampling.HasField(field)}  # type: ignore[arg-type]  # by name
    return GenerateRequest(
        id=RequestId(message.request_id) if message.request_id else request_id,
        model=ModelName(message.model),
        prompt=_decode_prompt(message),
        sampling=_decode_sampling(message.sampling, given),
        unset=frozenset() if message.HasField("pooling") else DEFAULT_FIELDS.difference(given),
        stop=tuple(message.stop),
        priority=message.priority,
        deadline=deadline,
        session=message.session,
        tenant=message.tenant,
        placement=_PLACEMENTS[message.placement],
        kv_path=_KV_PATHS[message.kv_path],
        expected_tokens=message.expected_tokens,
        pin=message.pin,
        labels=tuple(message.labels),
        bad_words=tuple(message.bad_words),
        cache_salt=message.cache_salt,
        include_stop_string=message.include_stop_string,
        show_special_tokens=message.show_special_tokens,
        parsing=_decode_parsing(message.parsing) if message.HasField("parsing") else None,
        resumable=message.resumable,
        resume=_decode_resume(message.resume) if message.HasField("resume") else None,
        pooling=_decode_pooling(message.pooling) if message.HasField("pooling") else None,
    )


def encode_request(request: GenerateRequest, sampling: Mapping[str, object], timeout_ms: int) -> pb.GenerateRequest:
    """Encode a request of a client.

    Args:
        request: The request. Only the fields that `pb.GenerateRequest` has are encoded, without the sampling parameters, the
            deadline and the fields about resumption.
        sampling: Values of fields of `Sampling`, by name. For absent fields the server uses its defaults.
        timeout_ms: Limit for the whole answer in milliseconds; 0: no limit.

    Raises:
        TypeError, ValueError: A value does not fit its field.
    """
    message = pb.GenerateRequest(
        request_id=request.id,
        model=request.model,
        sampling=_encode_sampling(sampling),
        stop=request.stop,
        priority=request.priority,
        timeout_ms=timeout_ms,
        session=request.session,
        tenant=request.tenant,
        placement=_PLACEMENT_NUMBERS[request.placement],  # type: ignore[arg-type]  # the number of an enum value
        kv_path=_KV_PATH_NUMBERS[request.kv_path],  # type: ignore[arg-type]  # the number of an enum value
        expected_tokens=request.expected_tokens,
        pin=request.pin,
        labels=request.labels,
        bad_words=request.bad_words,
        cache_salt=request.cache_salt,
        include_stop_string=request.include_stop_string,
        show_special_tokens=request.show_special_tokens,
        parsing=None if request.parsing is None else _encode_parsing(request.parsing),
        pooling=None if request.pooling is None else encode_pooling(request.pooling),
    )
    match request.prompt:
        case TextPrompt(text=text):
            message.text = text
        case ChatPrompt(messages=messages, tools=tools, template_args=template_args):
            chat = [
                pb.ChatMessage(
                    role=one.role,
                    content=one.content,
                    tool_calls=one.tool_calls,
                    tool_call_id=one.tool_call_id,
                    name=one.name,
                )
                for one in messages
            ]
            message.chat.CopyFrom(pb.ChatMessages(messages=chat, tools=tools, template_args=template_args))
        case TokenPrompt(tokens=tokens):
            message.token_ids.CopyFrom(pb.TokenIds(ids=np.frombuffer(tokens, "<u4").tolist()))
        case _:
            assert_never(request.prompt)
    return message


def encode_resume(resume: Resume) -> pb.Resume:
    """Encode the part of an answer that a client has got already. The message belongs to a request that continues the answer."""
    return pb.Resume(
        token=resume.token,
        token_ids=resume.token_ids,
        text=resume.text,
        reasoning=resume.reasoning,
        calls=[encode_call(call) for call in resume.calls],
    )


def _decode_resume(message: pb.Resume) -> Resume:
    return Resume(
        token=message.token,
        token_ids=tuple(message.token_ids),
        position=len(message.token_ids),
        text=message.text,
        reasoning=message.reasoning,
        calls=tuple(decode_call(call) for call in message.calls),
    )


def encode_event(event: GenerateEvent, token_text: Callable[[int], str]) -> pb.GenerateResponse:
    """Encode an event of an answer. `token_text` returns the text of a token; it is called only for log probabilities."""
    match event:
        case Delta():
            # Fill the message field by field, because this is faster than keyword arguments, and there is a message for each token.
            response = pb.GenerateResponse()
            delta = response.delta
            delta.SetInParent()
            delta.text = event.text
            delta.token_ids.extend(event.token_ids)
            if event.logprobs:
                delta.logprobs.extend(_encode_logprobs(one, token_text) for one in event.logprobs)
            if event.prompt_logprobs:
                delta.prompt_logprobs.extend(_encode_logprobs(one, token_text) for one in event.prompt_logprobs)
            if event.reasoning:
                delta.reasoning = event.reasoning
            if event.calls:
                delta.calls.extend(encode_call(call) for call in event.calls)
            if event.resume_token:
                delta.resume_token = event.resume_token
            if event.vector:
                delta.vector = event.vector
            return response
        case Admitted():
            admitted = pb.Admitted(
                request_id=event.request_id,
                model=event.model,
                prompt_tokens=event.prompt_tokens,
                resume_token=event.resume_token,
            )
            return pb.GenerateResponse(admitted=admitted)
        case Finished():
            return pb.GenerateResponse(
                finished=pb.Finished(
                    reason=_FINISH_NUMBERS[event.finish],  # type: ignore[arg-type]  # the number of an enum value
                    usage=pb.Usage(
                        prompt_tokens=event.usage.prompt_tokens,
                        completion_tokens=event.usage.completion_tokens,
                        cached_tokens=event.usage.cached_tokens,
                    ),
                    kv=pb.KvProof(phases=[_encode_phase(phase) for phase in event.kv]),
                    text=event.text,
                )
            )
        case _:
            assert_never(event)


def decode_event(message: pb.GenerateResponse) -> GenerateEvent | None:
    """Decode an event of an answer. An unknown finish counts as a stop. Return None for a kind of event that this version does not know.

    Raises:
        ValueError: The origins of a phase do not add up to its blocks, or a phase or a source of blocks is unknown.
    """
    match message.WhichOneof("event"):
        case "delta":
            delta = message.delta
            logprobs = tuple(_decode_logprobs(one) for one in delta.logprobs)
            prompt_logprobs = tuple(_decode_logprobs(one) for one in delta.prompt_logprobs)
            return Delta(
                text=delta.text,
                token_ids=tuple(delta.token_ids),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                reasoning=delta.reasoning,
                calls=tuple(decode_call(call) for call in delta.calls),
                resume_token=delta.resume_token,
                vector=delta.vector,
            )
        case "admitted":
            admitted = message.admitted
            return Admitted(
                request_id=RequestId(admitted.request_id),
                model=ModelName(admitted.model),
                prompt_tokens=admitted.prompt_tokens,
                resume_token=admitted.resume_token,
            )
        case "finished":
            finished = message.finished
            usage = finished.usage
            return Finished(
                finish=_FINISHES.get(finished.reason, Finish.STOP),
                usage=Usage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                ),
                kv=tuple(_decode_phase(phase) for phase in finished.kv.phases),
                text=finished.text,
            )
        case None:
            return None
        case other:
            assert_never(other)


def encode_model(card: ModelCard) -> pb.Model:
    """Encode a model for the answer of `ListModels`."""
    return pb.Model(
        name=card.name,
        max_model_len=card.max_model_len,
        block_tokens=card.block_tokens,
        workers=card.workers,
        parent=card.parent,
        task="" if card.pooling is None else card.pooling.task.value,
    )


def decode_model(message: pb.Model) -> ModelCard:
    """Decode a model from the answer of `ListModels`."""
    return ModelCard(
        name=ModelName(message.name),
        max_model_len=message.max_model_len,
        block_tokens=message.block_tokens,
        workers=message.workers,
        parent=ModelName(message.parent),
        pooling=PoolingModel(task=PoolingTask(message.task)) if message.task in set(PoolingTask) else None,
    )


def _decode_prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            chat = message.chat
            return ChatPrompt(
                tuple(_decode_chat_message(one) for one in chat.messages),
                tools=chat.tools,
                template_args=chat.template_args,
            )
        case "token_ids":
            return TokenPrompt(np.fromiter(message.token_ids.ids, "<u4").tobytes())
        case None:
            raise invalid("prompt", "one of text, chat and token_ids is needed")
        case other:
            assert_never(other)


def _decode_chat_message(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _encode_parsing(parsing: AnswerParsing) -> pb.AnswerParsing:
    return pb.AnswerParsing(
        tool_choice=parsing.tool_choice.value, function=parsing.function, single_call=not parsing.parallel_calls
    )


def _decode_parsing(message: pb.AnswerParsing) -> AnswerParsing:
    try:
        tool_choice = ToolChoice(message.tool_choice or ToolChoice.AUTO)
    except ValueError:
        raise invalid("parsing.tool_choice", f"must be one of {', '.join(ToolChoice)}") from None
    return AnswerParsing(tool_choice=tool_choice, function=message.function, parallel_calls=not message.single_call)


def _decode_pooling(message: pb.Pooling) -> Pooling:
    if (pooling := decode_pooling(message)) is None:
        raise invalid("pooling.task", f"must be one of {', '.join(PoolingTask)}")
    return pooling


def _decode_sampling(message: pb.Sampling, given: dict[str, Any]) -> Sampling:
    """Return the sampling parameters of a message; `given` has the values of those `_OPTIONAL` fields that the message has."""
    form = None
    if message.HasField("form") and (form := decode_structured_output(message.form)) is None:
        raise invalid("sampling.form", f"must be one of {', '.join(pb.Form.DESCRIPTOR.fields_by_name)}")
    return Sampling(
        stop_token_ids=tuple(message.stop_token_ids),
        form=form,
        logit_bias=tuple(sorted(message.logit_bias.items())) if message.logit_bias else (),
        allowed_token_ids=tuple(message.allowed_token_ids),
        **given,
    )


def _encode_sampling(sampling: Mapping[str, object]) -> pb.Sampling:
    given = dict(sampling)
    if (form := given.pop("form", None)) is not None:
        given["form"] = encode_structured_output(form)  # type: ignore[arg-type]  # mypy knows no types of the values
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])  # type: ignore[call-overload]  # the value is a mapping, or a sequence of pairs
    return pb.Sampling(**given)  # type: ignore[arg-type]  # protobuf checks names and types


def _encode_logprobs(logprobs: Logprobs, token_text: Callable[[int], str]) -> pb.TokenLogprobs:
    top = [
        pb.TokenLogprob(token_id=token_id, logprob=logprob, text=token_text(token_id))
        for token_id, logprob in zip(logprobs.top_ids, logprobs.top, strict=True)
    ]
    return pb.TokenLogprobs(logprob=logprobs.chosen, top=top)


def _decode_logprobs(message: pb.TokenLogprobs) -> Logprobs:
    return Logprobs(
        message.logprob,
        tuple(one.token_id for one in message.top),
        tuple(one.logprob for one in message.top),
    )


def _encode_phase(phase: KvPhase) -> pb.KvPhase:
    return pb.KvPhase(
        phase=phase.phase,
        worker_id=phase.worker_id,
        prompt_blocks=phase.report.prompt_blocks,
        cached_tokens=phase.report.cached_tokens,
        origins=[
            pb.KvOrigin(
                source=origin.source,
                blocks=origin.blocks,
                bytes=origin.bytes,
                tier=origin.tier,
                **{"from": origin.origin},
            )
            for origin in phase.report.origins
        ],
    )


def _decode_phase(message: pb.KvPhase) -> KvPhase:
    origins = tuple(
        KvOrigin(
            source=Source(origin.source),
            origin=getattr(origin, "from"),
            blocks=origin.blocks,
            bytes=origin.bytes,
            tier=origin.tier,
        )
        for origin in message.origins
    )
    if sum(origin.blocks for origin in origins) != message.prompt_blocks:
        raise ValueError(f"the origins of a phase do not add up to its {message.prompt_blocks} blocks")
    report = KvReport(prompt_blocks=message.prompt_blocks, origins=origins, cached_tokens=message.cached_tokens)
    return KvPhase(phase=Phase(message.phase), worker_id=message.worker_id, report=report)
