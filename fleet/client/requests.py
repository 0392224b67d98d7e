"""Request options: defines the options of a client's requests, and converts them to protobuf messages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np
from msgspec import structs

from fleet.client.errors import InvalidRequest
from fleet.core.errors import Reason, did_you_mean
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    AnswerParsing,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Pooling,
    Prompt,
    Sampling,
    StructuredOutput,
    TextPrompt,
    TokenPrompt,
)
from fleet.core.roles import KvPath, Placement
from fleet.core.validation import prompt_field
from fleet.v1 import control_pb2
from fleet.v1 import inference_pb2 as pb
from fleet.wire.inference import encode_request

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Sequence[ChatMessage]
"""A prompt: a text, token ids, or a conversation. Each message of a conversation has ``role`` and ``content``, and may
have tool calls as in the OpenAI API."""


class Options(TypedDict, total=False):
    """Lists the keyword arguments of `generate` and `complete`; proto/fleet/v1/inference.proto explains them."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    thinking_tokens: int  # maximum number of tokens of the reasoning
    logit_bias: Mapping[int, float]  # number that is added to the logit of a token, by token id
    allowed_token_ids: Sequence[int]
    form: StructuredOutput
    tools: Sequence[Mapping[str, Any]]  # tools that the model may call, as in the OpenAI API; only for conversations
    template_args: Mapping[str, Any]  # additional variables of the chat template; only for conversations
    parsing: AnswerParsing  # if set, reasoning and tool calls are returned apart from the text
    stop: str | Sequence[str]
    include_stop_string: bool
    show_special_tokens: bool
    bad_words: Sequence[str]
    cache_salt: str
    priority: int
    session: str
    tenant: str
    placement: Placement
    kv_path: KvPath | None
    expected_tokens: int
    pin: str
    labels: Sequence[str]
    request_id: str
    timeout_seconds: float | None  # time limit for the whole answer; None means no limit


def api_key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return gRPC metadata that contains the API key; empty if there is no key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def tune_request(thresholds: Mapping[str, float]) -> control_pb2.TuneRequest:
    """Build the message that sets thresholds of a router.

    Raises:
        InvalidRequest: A name or number is invalid.
    """
    message = control_pb2.TuneRequest()
    for name, value in thresholds.items():
        try:
            setattr(message, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            cause = "there is no such threshold" if isinstance(error, AttributeError) else error
            raise InvalidRequest(f"{name}: {cause}", Reason.INVALID_ARGUMENT, field=name) from error
    return message


def refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse names of options that do not exist. Python itself does not check them, because `Unpack` is only a type hint.

    Raises:
        InvalidRequest: A name is not in `known`. If a known name is similar, the message proposes it.
    """
    for name in given:
        if name not in known:
            message = f"{name}: there is no such option{did_you_mean(name, known)}"
            raise InvalidRequest(message, Reason.INVALID_ARGUMENT, field=name)


def build_message(prompt: PromptLike, options: Options, pooling: Pooling | None = None) -> pb.GenerateRequest:
    """Build the message of a request; `pooling` demands a vector instead of generated tokens.

    Raises:
        InvalidRequest: An option does not exist, or a value does not fit its field; nothing was sent.
    """
    refuse_unknown(options, Options.__annotations__)
    stop = options.get("stop", ())
    request = GenerateRequest(
        id=RequestId(options.get("request_id", "")),
        model=ModelName(options.get("model", "")),
        prompt=_prompt(prompt, options.get("tools", ()), options.get("template_args", {})),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        priority=options.get("priority", 0),
        session=options.get("session", ""),
        tenant=options.get("tenant", ""),
        placement=options.get("placement", Placement.AUTO),
        kv_path=options.get("kv_path"),
        expected_tokens=options.get("expected_tokens", 0),
        pin=options.get("pin", ""),
        labels=tuple(options.get("labels", ())),
        bad_words=tuple(options.get("bad_words", ())),
        cache_salt=options.get("cache_salt", ""),
        include_stop_string=options.get("include_stop_string", False),
        show_special_tokens=options.get("show_special_tokens", False),
        parsing=options.get("parsing"),
        pooling=pooling,
    )
    sampling = {name: options[name] for name in Sampling.__struct_fields__ if name in options}  # type: ignore[literal-required]  # the options are read by name
    if not isinstance(options.get("form"), StructuredOutput | None):
        message = "sampling.form: must be AnyObject, JsonSchema, Pattern, Grammar, Choice or StructuralTag"
        raise InvalidRequest(message, Reason.INVALID_ARGUMENT, field="sampling.form")
    try:
        return encode_request(request, sampling, timeout_ms=0)
    except (TypeError, ValueError) as error:
        field = _type_error(request, sampling)
        raise InvalidRequest(f"{field}: {error}", Reason.INVALID_ARGUMENT, field=field) from error


def _type_error(request: GenerateRequest, sampling: Mapping[str, object]) -> str:
    """Return the path of the field whose value has a wrong type, because protobuf's error does not name the field."""
    own = (
        *("model", "stop", "priority", "session", "tenant", "expected_tokens", "pin", "labels"),
        *("bad_words", "cache_salt", "include_stop_string", "show_special_tokens"),
    )
    given: dict[str, object] = {"request_id": request.id} | {name: getattr(request, name) for name in own}
    for name, value in given.items():
        if not _fits_field(pb.GenerateRequest, name, value):
            return name
    for name, value in sampling.items():
        if name != "form" and not _fits_field(pb.Sampling, name, value):
            return f"sampling.{name}"
    if request.pooling is not None:
        for name, value in structs.asdict(request.pooling).items():
            if value is not None and not _fits_field(pb.Pooling, name, value):
                return f"pooling.{name}"
    return prompt_field(request)  # all other fields are right, so the prompt is wrong


def _fits_field(message: type[pb.GenerateRequest | pb.Sampling | pb.Pooling], name: str, value: object) -> bool:
    try:
        message(**{name: value})  # type: ignore[arg-type]  # the field is set by name; protobuf checks the type
    except (TypeError, ValueError):
        return False
    return True


def _prompt(prompt: PromptLike, tools: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]) -> Prompt:
    if (tools or template_args) and (isinstance(prompt, str) or not prompt or isinstance(prompt[0], int | np.integer)):
        name = "tools" if tools else "template_args"
        raise InvalidRequest(f"{name}: only for conversations", Reason.INVALID_ARGUMENT, field=f"chat.{name}")
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if all(isinstance(item, int | np.integer) for item in prompt):
        try:
            return TokenPrompt(np.asarray(prompt, "<u4").tobytes())
        except OverflowError as error:
            message = f"token_ids: {error}"
            raise InvalidRequest(message, Reason.INVALID_ARGUMENT, field="token_ids") from error
    messages = []
    for index, item in enumerate(prompt):
        match item:
            case ChatMessage():
                messages.append(item)
            case {"role": str(role), "content": str(content), **more}:
                messages.append(
                    ChatMessage(
                        role=role,
                        content=content,
                        tool_calls=_json(more.get("tool_calls"), f"chat.messages[{index}].tool_calls"),
                        tool_call_id=str(more.get("tool_call_id", "")),
                        name=str(more.get("name", "")),
                    )
                )
            case _:
                field = f"chat.messages[{index}]"
                message = f"{field}: must have the texts role and content"
                raise InvalidRequest(message, Reason.INVALID_ARGUMENT, field=field)
    return ChatPrompt(
        tuple(messages),
        tools=_json(tools, "chat.tools"),
        template_args=_json(template_args, "chat.template_args"),
    )


def _json(value: object, field: str) -> str:
    """Encode a value as JSON; return an empty text for None or an empty value."""
    if not value:
        return ""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: {error}", Reason.INVALID_ARGUMENT, field=field) from error
