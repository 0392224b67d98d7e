"""Reads request bodies of the OpenAI API.

Rules:

1. The types of known fields are checked; an error names the field as the client wrote it.
2. Unknown fields are ignored, as OpenAI's servers do with each other's.
3. A field that would change the answer and is not supported is rejected, unless its value has no effect.
4. Options without an OpenAI field are in the object ``fleet``, where unknown names are rejected.
5. Tools become part of the prompt, and the model's calls are parsed out of its answer. The same holds for reasoning.

vLLM's sampling parameters are supported too (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`stop_token_ids`), because benchmarks send them.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    AnswerParsing,
    AnyObject,
    ChatMessage,
    ChatPrompt,
    Choice,
    GenerateRequest,
    Grammar,
    JsonSchema,
    Pattern,
    Prompt,
    Sampling,
    StructuredOutput,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
)
from fleet.frontend.openai.bodies import (
    ACCEPTED_VALUES,
    OPENAI_FIELD_NAMES,
    ChatBody,
    CompletionBody,
    FleetOptions,
    MessageBody,
    NamedFunction,
    NamedSchema,
    NamedToolChoice,
    OpenAiBody,
    ResponseFormat,
    Schema,
    decode_body,
    invalid_body,
)

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
REASONING_ALONE = AnswerParsing(tool_choice=ToolChoice.NONE)
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class OpenAiRequest(Struct, frozen=True, kw_only=True):
    """Parsed request body."""

    request: GenerateRequest
    stream: bool
    include_usage: bool
    return_token_ids: bool
    names: Mapping[str, str]  # for later rejections


_COMPLETION = msgspec.json.Decoder(CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)


def read_completion(body: bytes, request_id: RequestId, now: Nanos) -> OpenAiRequest:
    """Read the body of ``POST /v1/completions``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    completion = decode_body(_COMPLETION, body)
    _refuse_unsupported(completion)
    for field in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"):
        if getattr(completion, field):
            raise invalid(field, "is for /v1/chat/completions")
    return _build_request(
        completion,
        request_id,
        now,
        prompt=_completion_prompt(completion.prompt),
        max_tokens=COMPLETION_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens,
        logprobs=completion.logprobs,
        names=OPENAI_FIELD_NAMES,
    )


def read_chat(body: bytes, request_id: RequestId, now: Nanos) -> OpenAiRequest:
    """Read the body of ``POST /v1/chat/completions``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    chat = decode_body(_CHAT, body)
    _refuse_unsupported(chat)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    is_newer_name = chat.max_completion_tokens is not None
    parsing = REASONING_ALONE if not chat.tools and chat.tool_choice is None else _parsing(chat)
    tools = chat.tools if parsing.tool_choice is not ToolChoice.NONE else None
    by_effort = chat.reasoning_effort is not None
    return _build_request(
        chat,
        request_id,
        now,
        prompt=ChatPrompt(
            tuple(_message(index, message) for index, message in enumerate(chat.messages)),
            tools=msgspec.json.encode(tools).decode() if tools else "",
            template_args=_template_args(chat) if by_effort or chat.chat_template_kwargs else "",
        ),
        parsing=parsing,
        max_tokens=chat.max_completion_tokens if is_newer_name else chat.max_tokens,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        names={
            **OPENAI_FIELD_NAMES,
            "sampling.logprobs": "top_logprobs",
            "sampling.max_tokens": "max_completion_tokens" if is_newer_name else "max_tokens",
            **({"chat.template_args": "reasoning_effort"} if by_effort and not chat.chat_template_kwargs else {}),
        },
    )


def _parsing(chat: ChatBody) -> AnswerParsing:
    """Return which tool calls the answer may have."""
    parallel_calls = chat.parallel_tool_calls is not False
    match chat.tool_choice:
        case None:
            return AnswerParsing(parallel_calls=parallel_calls)
        case "none":
            return REASONING_ALONE
        case "auto" if not chat.tools:
            return REASONING_ALONE
        case "auto" | "required" as choice:
            return AnswerParsing(tool_choice=ToolChoice(choice), parallel_calls=parallel_calls)
        case NamedToolChoice(type="function", function=NamedFunction(name=name)):
            return AnswerParsing(tool_choice=ToolChoice.NAMED, function=name, parallel_calls=parallel_calls)
        case _:
            raise invalid(
                "tool_choice", 'must be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
            )


def _template_args(chat: ChatBody) -> str:
    """Return the variables of the chat template as JSON. Efforts also turn reasoning on or off, as in vLLM."""
    args: dict[str, Any] = {}
    if chat.reasoning_effort is not None:
        if chat.reasoning_effort not in REASONING_EFFORTS:
            raise invalid("reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")
        args["reasoning_effort"] = chat.reasoning_effort
        args["enable_thinking"] = chat.reasoning_effort != "none"
    return msgspec.json.encode(args | (chat.chat_template_kwargs or {})).decode()


def _build_request(
    body: OpenAiBody,
    request_id: RequestId,
    now: Nanos,
    *,
    prompt: Prompt,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str],
    parsing: AnswerParsing | None = None,
) -> OpenAiRequest:
    options = body.fleet or FleetOptions()
    form, form_field = _structured_output(body)
    values = {
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else body.top_k,  # -1 turns it off in vLLM
        "min_p": body.min_p,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "logprobs": logprobs,
        "form": form,
    }
    request = GenerateRequest(
        id=request_id,
        model=ModelName(body.model or ""),
        prompt=prompt,
        sampling=Sampling(**{name: value for name, value in values.items() if value is not None}),  # type: ignore[arg-type]  # by name
        fill_context=max_tokens is None,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        priority=options.priority,
        deadline=Nanos(now + options.timeout_ms * MILLISECOND) if options.timeout_ms else None,
        session=options.session,
        tenant=options.tenant,
        placement=options.placement,
        kv_path=options.kv_path,
        expected_tokens=options.expected_tokens,
        pin=options.pin,
        labels=options.labels,
        whole=not body.stream,
        parsing=parsing,
    )
    return OpenAiRequest(
        request=request,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=options.return_token_ids,
        names={**names, "sampling.form": form_field} if form_field else names,
    )


def _structured_output(body: OpenAiBody) -> tuple[StructuredOutput | None, str]:
    """Return the structured output and the field that demands it."""
    demanded = dict(_structured_outputs(body))
    if len(demanded) > 1:
        first, second, *_ = demanded
        raise invalid(second, f"demands structured output, as {first} does; send one of them")
    for field, form in demanded.items():
        return form, field
    return None, ""


def _structured_outputs(body: OpenAiBody) -> Iterator[tuple[str, StructuredOutput]]:
    """Yield all demanded structured outputs by field."""
    match body.response_format:
        case None | ResponseFormat(type="text"):
            pass
        case ResponseFormat(type="json_object"):
            yield "response_format", AnyObject()
        case ResponseFormat(type="json_schema", json_schema=None):
            raise invalid("response_format.json_schema", "is missing")
        case ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=schema)):
            yield "response_format.json_schema.schema", _schema(schema)
        case _:
            raise invalid("response_format.type", "must be text, json_object or json_schema")
    if (outputs := body.structured_outputs) is not None:
        forms = list(
            _vllm_structured_outputs(
                "structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar
            )
        )
        if outputs.json_object:
            forms.append(("structured_outputs.json_object", AnyObject()))
        if not forms:
            raise invalid("structured_outputs", "must say one of json, regex, choice, grammar and json_object")
        yield from forms
    yield from _vllm_structured_outputs(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _vllm_structured_outputs(
    before: str, schema: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, StructuredOutput]]:
    if schema is not None:
        yield f"{before}json", _schema(schema)
    if regex is not None:
        yield f"{before}regex", Pattern(regex)
    if choice is not None:
        yield f"{before}choice", Choice(tuple(choice))
    if grammar is not None:
        yield f"{before}grammar", Grammar(grammar)


def _schema(schema: Schema) -> JsonSchema:
    return JsonSchema(schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())


def _refuse_unsupported(body: OpenAiBody) -> None:
    for field, accepted in ACCEPTED_VALUES.items():
        value = getattr(body, field)
        if value is not None and value not in accepted:
            raise invalid(
                field,
                "is not supported"
                if not accepted
                else f"only {msgspec.json.encode(accepted[0]).decode()} is supported",
            )


def _completion_prompt(prompt: str | list[Any]) -> Prompt:
    match prompt:
        case str():
            return TextPrompt(prompt)
        case [str() as text]:
            return TextPrompt(text)
        case [list() as ids]:
            return _token_prompt(ids)
        case [str() | list(), *_]:
            raise invalid("prompt", f"{len(prompt)} prompts in one request are not supported; send one request each")
        case _:
            return _token_prompt(prompt)


def _token_prompt(ids: list[Any]) -> Prompt:
    try:
        checked = msgspec.convert(ids, list[TokenId])
    except msgspec.ValidationError as error:
        raise invalid_body(error, "prompt") from error
    return TokenPrompt(np.asarray(checked, "<u4").tobytes())


def _message(index: int, message: MessageBody) -> ChatMessage:
    field = f"messages[{index}]"
    if message.function_call:
        raise invalid(f"{field}.function_call", "is not supported; write it into tool_calls")
    return ChatMessage(
        role=message.role,
        content=_content(field, message),
        tool_calls=msgspec.json.encode(message.tool_calls).decode() if message.tool_calls else "",
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _content(field: str, message: MessageBody) -> str:
    match message.content:
        case str(content):
            return content
        case None if message.tool_calls:
            return ""
        case None:
            raise invalid(f"{field}.content", "must not be null")
        case parts:
            texts = []
            for position, part in enumerate(parts):
                if part.type != "text" or part.text is None:
                    raise invalid(f"{field}.content[{position}]", "only parts of type text, with a text, are supported")
                texts.append(part.text)
            return "".join(texts)
