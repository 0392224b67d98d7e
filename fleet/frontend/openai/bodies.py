"""Fields of bodies and headers of the OpenAI API, and the values that are not supported.

A new field gets its type here, is converted in `fleet.frontend.openai.requests`, and its values are checked in
`fleet.core.validation`.

A hint is a header that stands for a field of the object ``fleet``, for clients that cannot send this object. Headers
with Fleet's own names and with those of other projects are read. Rules:

1. A field of the object ``fleet`` has precedence over a header, unless the field has its default value. Of several
   headers for one field, the first one in `HINT_HEADERS` is used.
2. An unusable value is refused with the name of its header.
3. In Fleet, a request with a higher priority runs earlier. In vLLM's header, a request with a lower number runs earlier,
   so the sign of the number is inverted.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from fleet.core.errors import RequestRejected, invalid
from fleet.core.requests import Sampling
from fleet.core.roles import KvPath, Placement
from fleet.core.validation import MAX_EXPECTED_TOKENS, MAX_HINT_CHARACTERS, MAX_PRIORITY
from fleet.frontend.openai.resumable_stream import LAST_EVENT_ID


class FleetOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object ``fleet`` of a body: Fleet's additions to the OpenAI API. proto/fleet/v1/inference.proto explains its fields."""

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
    resumable: bool = False  # events of the stream get ids (`resumable_stream.py`)


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's field: each event has the usage so far
    include_obfuscation: Any = None  # OpenAI's padding of events, not supported


class ImageUrl(Struct, frozen=True, kw_only=True):
    url: str
    detail: Any = None  # ignored: the model's image processor chooses the resolution


class ContentPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None


class MessageBody(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None


Schema = str | dict[str, Any]
"""A JSON schema: an object, or a text with the object, which vLLM's clients may send."""


class NamedSchema(Struct, frozen=True, kw_only=True):
    """A JSON schema in OpenAI's form. Name and description are ignored."""

    schema: dict[str, Any]


class ResponseFormat(Struct, frozen=True, kw_only=True):
    type: str
    json_schema: NamedSchema | None = None
    # Structural tags: `format` in XGrammar's form, `structures` and `triggers` in the older form.
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields for structured output. A request sets exactly one of the supported fields."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    # Fields that are not supported: a value other than null, false or an empty text is rejected.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class OpenAiBody(Struct, frozen=True, kw_only=True):
    """Fields that chats and completions share. Null means the same as an absent field."""

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
    n: int | None = None
    best_of: int | None = None
    logit_bias: dict[int, float] | None = None
    # Fields that are accepted and ignored.
    user: Any = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    stream_interval: Any = None
    # The object with Fleet's options.
    fleet: FleetOptions | None = None
    # Fields of vLLM's API.
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
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None  # -1: there is no limit
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None  # a request with a lower number runs earlier
    request_id: str | None = None
    session_id: str | None = None
    # Fields of SGLang's API.
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | None = None
    no_stop_trim: bool | None = None
    # Fields that are not supported: a value that `ACCEPTED_VALUES` does not list is rejected.
    echo: Any = None
    suffix: Any = None
    store: Any = None
    service_tier: Any = None
    functions: Any = None
    modalities: Any = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None
    prompt_embeds: Any = None
    use_beam_search: Any = None
    truncation_side: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    return_prompt_text: Any = None
    return_hidden_states: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    lora_path: Any = None
    session_params: Any = None
    stop_regex: Any = None
    custom_logit_processor: Any = None
    chat_template: Any = None
    documents: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    function_call: Any = None
    add_special_tokens: Any = None
    detokenize: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    prediction: Any = None
    verbosity: Any = None


class CompletionBody(OpenAiBody, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    # Fields of chats. A completion that sets one of them to anything but null, false or an empty value is refused.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None


class NamedFunction(Struct, frozen=True, kw_only=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    type: str
    function: NamedFunction | None = None


class AllowedTools(Struct, frozen=True, kw_only=True):
    """Names tools. With the `mode` ``auto`` the model may call them; with ``required`` it must call one of them."""

    mode: str
    tools: list[NamedTool]


class NamedToolChoice(NamedTool, frozen=True, kw_only=True):
    """Names the tool that the model must call, or the tools among which it may choose."""

    allowed_tools: AllowedTools | None = None


class ChatBody(OpenAiBody, frozen=True, kw_only=True):
    messages: list[MessageBody]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class StrictCompletionBody(CompletionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a completion, used if the settings refuse unknown fields."""


class StrictChatBody(ChatBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a chat, used if the settings refuse unknown fields."""


ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "echo": (False,),
    "include_reasoning": (True,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "return_prompt_text": (False,),
    "return_hidden_states": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "lora_path": (),
    "session_params": (),
    "stop_regex": ([],),
    "custom_logit_processor": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "function_call": ("none", "auto"),
    "add_special_tokens": (False,),
    "detokenize": (True,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "prediction": (),
    "verbosity": ("medium",),
}
"""Unsupported fields, each with the values that are accepted because they have no effect. Null is always accepted."""

COMPLETION_FIELDS = frozenset({"echo", "add_special_tokens"})
"""Fields of `ACCEPTED_VALUES` that completions do support; for chats they stay unsupported."""


def unsupported(field: str, accepted: tuple[object, ...]) -> RequestRejected:
    """Return the rejection of an unsupported value; its message lists the accepted values."""
    if not accepted:
        return invalid(field, "is not supported")
    values = [msgspec.json.encode(value).decode() for at, value in enumerate(accepted) if value not in accepted[:at]]
    return invalid(field, f"only {' or '.join(values)} is supported")


OPENAI_FIELD_NAMES: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_args": "chat_template_kwargs",
    "parsing.tool_choice": "tool_choice",
    "parsing.function": "tool_choice.function.name",
    **{f"sampling.{field}": field for field in Sampling.__struct_fields__},
    "sampling.bad_tokens": "bad_words",
    "sampling.thinking_tokens": "thinking_token_budget",
    "truncate_prompt": "truncate_prompt_tokens",
    "include_stop_string": "include_stop_str_in_output",
    "show_special_tokens": "skip_special_tokens",
    **{field: f"fleet.{field}" for field in FleetOptions.__struct_fields__ if field != "return_token_ids"},
}
"""Field paths of the OpenAI API by field paths of the public protocol (`proto/fleet/v1/inference.proto`), for error messages."""


MAX_TIMEOUT_MS = 2**32 - 1


class HintHeader(Struct, frozen=True):
    """A header that stands for a field of `FleetOptions`."""

    field: str
    project: str  # the project that uses the header's name
    sign: int = 1  # factor for a number: -1 if a lower number means a higher priority
    least: int | None = None  # lowest allowed number; None if the value is a text
    most: int = 0


HINT_HEADERS: Mapping[bytes, HintHeader] = {
    b"x-fleet-session": HintHeader("session", "Fleet"),
    b"x-session-id": HintHeader("session", "vLLM, llm-d, Ray Serve"),
    b"x-dynamo-session-id": HintHeader("session", "Dynamo"),
    b"x-smg-routing-key": HintHeader("session", "SGLang Model Gateway"),
    b"x-session-affinity": HintHeader("session", "agents"),
    b"x-fleet-priority": HintHeader("priority", "Fleet", 1, -MAX_PRIORITY, MAX_PRIORITY),
    b"x-vllm-priority": HintHeader("priority", "vLLM", -1, -MAX_PRIORITY, MAX_PRIORITY),
    b"x-fleet-timeout-ms": HintHeader("timeout_ms", "Fleet", 1, 1, MAX_TIMEOUT_MS),
    b"x-envoy-expected-rq-timeout-ms": HintHeader("timeout_ms", "Envoy", 1, 1, MAX_TIMEOUT_MS),
    b"x-fleet-expected-tokens": HintHeader("expected_tokens", "Fleet", 1, 0, MAX_EXPECTED_TOKENS),
    b"x-fleet-tenant": HintHeader("tenant", "Fleet"),
    b"x-fleet-resumable": HintHeader("resumable", "Fleet", 1, 0, 1),
}
"""Hint headers by name in lower case. Of two headers for one field, the first one in this mapping is used."""

HINT_HEADER_NAMES = frozenset(HINT_HEADERS) | {LAST_EVENT_ID}
_DEFAULT_OPTIONS = FleetOptions()


def header_hints(headers: Mapping[bytes, bytes], options: FleetOptions | None) -> tuple[FleetOptions, dict[str, str]]:
    """Return the object ``fleet`` of a request, completed by its hint headers, and the names of these headers by field.

    To save time, callers first check that one of `HINT_HEADER_NAMES` is among the headers.

    Args:
        headers: Values of the headers by name in lower case.
        options: The object ``fleet`` of the body; None if there is none.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the header's name.
    """
    given = options or _DEFAULT_OPTIONS
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for name, hint in HINT_HEADERS.items():
        if name not in headers or not (value := headers[name]) or hint.field in values:
            continue
        if getattr(given, hint.field) == getattr(_DEFAULT_OPTIONS, hint.field):
            values[hint.field], names[hint.field] = _hint_value(name, hint, value), name.decode()
    return (structs.replace(given, **values) if values else given), names


def _hint_value(name: bytes, hint: HintHeader, value: bytes) -> object:
    if hint.least is None:
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            raise _invalid_hint(name, "is not UTF-8") from error
        if len(text) > MAX_HINT_CHARACTERS:
            raise _invalid_hint(name, f"has {len(text)} characters, and {MAX_HINT_CHARACTERS} are allowed")
        return text
    try:
        number = int(value) if len(value) <= 20 else hint.most + 1
    except ValueError:
        number = hint.most + 1
    if not hint.least <= number <= hint.most:
        raise _invalid_hint(name, f"must be a whole number from {hint.least} to {hint.most}")
    return hint.sign * number


def _invalid_hint(name: bytes, message: str) -> RequestRejected:
    return invalid(name.decode(), message)
