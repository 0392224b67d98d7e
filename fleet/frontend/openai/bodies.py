"""Request bodies of the OpenAI API: their fields, the values that are not supported, and the errors of invalid ones."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from fleet.core.errors import Reason, RequestRejected, invalid, split_validation_error
from fleet.core.requests import Sampling
from fleet.core.roles import KvPath, Placement
from fleet.core.validation import MAX_EXPECTED_TOKENS

BodyType = TypeVar("BodyType", bound=Struct)

_NAMED_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `(.*)`$")


class FleetOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object ``fleet`` of a body; proto/fleet/v1/inference.proto has the same fields."""

    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    session: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_ms: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    return_token_ids: bool = False
    expected_tokens: Annotated[int, Meta(ge=0, le=MAX_EXPECTED_TOKENS)] = 0
    pin: str = ""
    labels: tuple[str, ...] = ()


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class MessageBody(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None


Schema = str | dict[str, Any]
"""A JSON object, or its text, which vLLM's clients may send."""


class NamedSchema(Struct, frozen=True, kw_only=True):
    """A schema in OpenAI's form; its name and description are not used."""

    schema: dict[str, Any]


class ResponseFormat(Struct, frozen=True, kw_only=True):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields for structured output; one of them is set."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class OpenAiBody(Struct, frozen=True, kw_only=True):
    """Fields of both endpoints. Null is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: ResponseFormat | None = None
    fleet: FleetOptions | None = None
    # vLLM's fields
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Not supported; see ACCEPTED_VALUES.
    n: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    logit_bias: Any = None
    functions: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    chat_template: Any = None
    documents: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    function_call: Any = None
    add_special_tokens: Any = None
    detokenize: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    cache_salt: Any = None
    prediction: Any = None
    verbosity: Any = None
    include_reasoning: Any = None


class CompletionBody(OpenAiBody, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    # Fields of chats alone: not supported.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None


class NamedFunction(Struct, frozen=True, kw_only=True):
    name: str


class NamedToolChoice(Struct, frozen=True, kw_only=True):
    """The tool that the model has to call."""

    type: str
    function: NamedFunction | None = None


class ChatBody(OpenAiBody, frozen=True, kw_only=True):
    messages: list[MessageBody]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "function_call": ("none", "auto"),
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "cache_salt": (),
    "prediction": (),
    "verbosity": (),
    "include_reasoning": (True,),
}
"""Unsupported fields, with the values that have no effect (null never has one)."""

OPENAI_FIELD_NAMES: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_args": "chat_template_kwargs",
    "parsing.tool_choice": "tool_choice",
    "parsing.function": "tool_choice.function.name",
    **{f"sampling.{field}": field for field in Sampling.__struct_fields__},
    **{field: f"fleet.{field}" for field in FleetOptions.__struct_fields__ if field != "return_token_ids"},
}
"""Field paths of the public protocol to those of the OpenAI API."""


def decode_body(decoder: "msgspec.json.Decoder[BodyType]", body: bytes) -> BodyType:
    """Return the body, as far as `decoder` reads it.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from error
    except UnicodeDecodeError as error:
        raise RequestRejected(Reason.INVALID_ARGUMENT, f"the body is not valid UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise RequestRejected(Reason.INVALID_ARGUMENT, "the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise RequestRejected(Reason.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from error


def invalid_body(error: msgspec.ValidationError, parent: str = "") -> RequestRejected:
    """Return the rejection of a value in `parent` with a wrong type or range; msgspec's message ends with its path."""
    message, path = split_validation_error(error)
    field = parent + path
    if (named := _NAMED_FIELD.search(message)) is not None:
        field += f".{named[1]}"
    message = message[0].lower() + message[1:]
    field = field.removeprefix(".")
    return invalid(field, message) if field else RequestRejected(Reason.INVALID_ARGUMENT, f"the body: {message}")
