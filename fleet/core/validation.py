"""Validation: finds errors in a request before anything is started for it.

Field paths are those of proto/fleet/v1/inference.proto. A frontend whose clients use other names translates the path of
the rejection (`fleet.net.status_codes.rename_field`).
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol, assert_never

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from fleet.core.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    RequestRejected,
    invalid,
    split_validation_error,
    with_allowed_values,
)
from fleet.core.ids import RequestId
from fleet.core.requests import (
    TOKEN_BYTES,
    AnswerParsing,
    AnyObject,
    ChatMessage,
    ChatPrompt,
    Choice,
    GenerateRequest,
    Grammar,
    JsonSchema,
    ModelCard,
    Pattern,
    Pooling,
    PoolingTask,
    Sampling,
    StructuralTag,
    StructuredOutput,
    TextPrompt,
    TokenPrompt,
    ToolCallForm,
    ToolChoice,
)
from fleet.core.roles import Placement

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
# Maximum number of characters in the name of a session, tenant, worker or label. Such names are keys of tables.
MAX_HINT_CHARACTERS = 256
MAX_PRIORITY = 100
MAX_EXPECTED_TOKENS = 2**31 - 1
MAX_LABELS = 16
# Maximum number of characters of a schema or grammar; OpenAI accepts schemas of 120,000 characters.
MAX_STRUCTURED_OUTPUT_CHARACTERS = 131_072
MAX_REGEX_CHARACTERS = 16_384
MAX_CHOICES = 256
MAX_CHOICE_CHARACTERS = 1024
# Maximum number of token ids in each list of the sampling parameters. The router keeps them while the request runs.
MAX_NAMED_TOKENS = 1024
MAX_BIAS = 100.0
# Maximum number of forbidden strings. vLLM's sampler has room for only this number of token sequences.
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
# Maximum number of messages of a chat. Each takes several tokens of the prompt, and some microseconds to check.
MAX_MESSAGES = 16_384
MAX_IMAGES = 64  # maximum number of images in a prompt; engines have lower limits
# Maximum number of pixels of one image. A decoded image takes 3 or 4 bytes per pixel, so up to 200 MB.
MAX_PIXELS = 50_000_000
MAX_REQUEST_PIXELS = 100_000_000  # maximum number of pixels of all images of a prompt together
MAX_IMAGE_BYTES = 32 * 2**20  # maximum size of all image files of a prompt; a message to a worker has at most 64 MiB
MAX_CACHE_SALT_CHARACTERS = 128
MAX_TOOLS = 1024  # maximum number of tools that a request may offer; OpenAI accepts 128
MAX_TEMPLATE_ARGS_CHARACTERS = 16_384
MIN_INT64 = -(2**63)
MAX_INT32 = 2**31 - 1
MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1

_DEMANDING = (ToolChoice.REQUIRED, ToolChoice.NAMED)

MAX_REQUEST_ID_CHARACTERS = 128
REQUEST_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")


class _Range(Struct, frozen=True):
    """Describes a range of numbers from `low` (included only if `closed` is true) to `high` (included), without NaN."""

    low: float
    high: float
    closed: bool = True

    def __contains__(self, number: float) -> bool:
        return (self.low <= number if self.closed else self.low < number) and number <= self.high

    def __str__(self) -> str:
        if self.closed:
            return f"from {self.low} to {self.high}"
        return f"more than {self.low} and at most {self.high}"


_RANGES: dict[str, _Range] = {  # allowed range of each field of `Sampling`; the value None is not checked
    "max_tokens": _Range(0, MAX_UINT32),
    "temperature": _Range(0, 2),
    "top_p": _Range(0, 1, closed=False),
    "top_k": _Range(0, MAX_INT32),
    "min_p": _Range(0, 1),
    "seed": _Range(0, MAX_UINT64),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0, 2, closed=False),
    "min_tokens": _Range(0, MAX_UINT32),
    "logprobs": _Range(0, 20),
    "prompt_logprobs": _Range(0, 20),
    "thinking_tokens": _Range(0, MAX_INT32),
}


def is_valid_default(name: str, value: object) -> bool:
    """Return whether a value can be a model's default for a field of `Sampling` with a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value in _RANGES[name] and (name != "top_k" or isinstance(value, int))


def validate(
    request: GenerateRequest, card: ModelCard, prompt_tokens: int | None, *, vocab_size: int | None = None
) -> None:
    """Check a request against its model.

    Args:
        request: The request from a frontend.
        card: The model that will serve the request.
        prompt_tokens: Length of the prompt in tokens. None: it is not known yet, and the caller calls `validate_length` later.
        vocab_size: Number of token ids of the model; all valid ids are smaller. None if it is unknown; ids are then not
            checked.

    Raises:
        RequestRejected: INVALID_ARGUMENT with the first wrong field.
    """
    _check_names(request)
    _check_prompt(request, vocab_size)
    _check_sampling(request.sampling, vocab_size)
    _check_strings("stop", request.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
    if request.bad_words:
        _check_strings("bad_words", request.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        raise invalid(
            "cache_salt", f"has {len(request.cache_salt)} characters, and {MAX_CACHE_SALT_CHARACTERS} are allowed"
        )
    if request.sampling.prompt_logprobs is not None and request.placement is Placement.DISAGGREGATED:
        raise invalid("placement", "log probabilities of the prompt need one worker for all; ask for aggregated")
    if not request.fill_context and request.sampling.min_tokens > request.sampling.max_tokens:
        raise invalid(
            "sampling.min_tokens",
            f"{request.sampling.min_tokens} is more than max_tokens, {request.sampling.max_tokens}",
        )
    if prompt_tokens is not None:
        validate_length(request, card, prompt_tokens)


def validate_length(request: GenerateRequest, card: ModelCard, prompt_tokens: int) -> None:
    """Check that the prompt and the answer together fit into the model's context.

    Clients recognise these errors by the cause, or by words in the message: "prompt is too long" as in Anthropic's API, "maximum context
    length is" as in OpenAI's. They then shorten the conversation or use another model.

    Raises:
        RequestRejected: INVALID_ARGUMENT, if the prompt is empty or too long, or leaves too little room for the answer.
    """
    field = prompt_field(request)
    if prompt_tokens == 0:
        raise invalid(field, "must not be empty")
    limit = f"this model's maximum context length is {card.max_model_len} tokens"
    too_long = partial(invalid, cause=CONTEXT_LENGTH_EXCEEDED)
    if prompt_tokens > card.max_model_len:
        raise too_long(field, f"the prompt is too long: it has {prompt_tokens} tokens, and {limit}")
    if request.pooling is not None:
        return  # the answer is a vector, so the prompt may fill the whole context
    room = card.max_model_len - prompt_tokens
    if room == 0:
        raise too_long(
            field, f"the prompt is too long: it has {prompt_tokens} tokens, {limit}, and the answer needs some of them"
        )
    if request.fill_context or request.ends_with_context:
        if request.sampling.min_tokens > room:
            raise too_long(
                "sampling.min_tokens",
                f"{request.sampling.min_tokens} and the prompt's {prompt_tokens} are too many: {limit}; ask for at most {room}",
            )
    elif request.sampling.max_tokens > room:
        raise too_long(
            "sampling.max_tokens",
            f"{request.sampling.max_tokens} and the prompt's {prompt_tokens} are too many: {limit}; ask for at most {room}",
        )


def check_message_count(count: int, field: str) -> None:
    """Check the number of messages of a chat.

    Raises:
        RequestRejected: INVALID_ARGUMENT for the field; there are more than `MAX_MESSAGES`.
    """
    if count > MAX_MESSAGES:
        raise invalid(field, f"has {count:,} entries, and {MAX_MESSAGES:,} are allowed")


def validate_images(request: GenerateRequest, card: ModelCard) -> None:
    """Check that the model can serve a request with images.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the model takes no images, the images are too many or too large, or another
            field cannot be combined with images.
    """
    if not card.takes_images:
        raise invalid("chat.messages", f"{card.name!r} takes no images; send text alone, or use another model")
    if len(request.images) > MAX_IMAGES:
        raise invalid("chat.messages", f"have {len(request.images)} images, and {MAX_IMAGES} are allowed")
    if (size := sum([len(each) for each in request.images])) > MAX_IMAGE_BYTES:
        raise invalid("chat.messages", f"have {size} bytes of images, and {MAX_IMAGE_BYTES} are allowed")
    if request.sampling.prompt_logprobs is not None:
        raise invalid("sampling.prompt_logprobs", "is not supported with images")
    if request.truncate_prompt is not None:
        raise invalid("truncate_prompt", "is not supported with images")
    if request.placement is Placement.DISAGGREGATED:
        raise invalid("placement", "images need one worker for all; ask for aggregated")


def validate_pooling(request: GenerateRequest) -> None:
    """Check that a request for a vector demands nothing that only generated answers have.

    Raises:
        RequestRejected: INVALID_ARGUMENT; another field cannot be combined with `pooling`.
    """
    if isinstance(request.prompt, ChatPrompt):
        raise invalid("chat.messages", "vectors need a text or token ids")
    for field, is_set in (
        ("sampling", structs.replace(request.sampling, max_tokens=0) != Sampling(max_tokens=0)),
        ("stop", request.stop),
        ("bad_words", request.bad_words),
        ("include_stop_string", request.include_stop_string),
        ("show_special_tokens", request.show_special_tokens),
        ("parsing", request.parsing is not None),
        ("placement", request.placement is Placement.DISAGGREGATED),
        ("kv_path", request.kv_path is not None),
        ("resumable", request.resumable),
    ):
        if is_set:
            raise invalid(field, "is for answers that are generated; leave it out with pooling")


def validate_task(pooling: Pooling | None, card: ModelCard) -> None:
    """Check that a model supports the task of a request: generate tokens, embed or classify.

    Raises:
        RequestRejected: INVALID_ARGUMENT for the field ``model``; the message says what the model does, and for a
            pooling model also where to send requests.
    """
    if pooling is None and card.pooling is None:
        return
    if card.pooling is None:
        raise invalid(
            "model", f"{card.name!r} generates text, and has no vectors; a worker needs the task embed or classify"
        )
    task = card.pooling.task
    if pooling is None:
        raise invalid("model", f"{card.name!r} does not generate; its task is {task}: use {TASK_PATHS[task]}")
    if pooling.task is not task:
        raise invalid(
            "model", f"{card.name!r} has the task {task}, and this needs {pooling.task}: use {TASK_PATHS[task]}"
        )


TASK_PATHS = {
    PoolingTask.EMBED: "/v1/embeddings, /v1/score, /v1/rerank, /pooling, or pooling over gRPC",
    PoolingTask.CLASSIFY: "/classify, /v1/score, /v1/rerank, /pooling, or pooling over gRPC",
}
"""The HTTP paths and the gRPC field that serve models of each task; error messages name them."""


def prompt_field(request: GenerateRequest) -> str:
    """Return the path of the field that contains the prompt of a request, as the public gRPC protocol names it."""
    match request.prompt:
        case TextPrompt():
            return "text"
        case ChatPrompt():
            return "chat.messages"
        case TokenPrompt():
            return "token_ids"
        case _:
            assert_never(request.prompt)


def checked_request_id(request_id: str) -> RequestId:
    """Return the request id that a client has chosen, after a check that it can be written to headers and logs.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the id is empty or too long, or contains characters that are not allowed.
    """
    if not REQUEST_ID.fullmatch(request_id):
        raise invalid("request_id", "must be 1 to 128 characters of A-Z a-z 0-9 . _ -")
    return RequestId(request_id)


def unsigned_seed(seed: int, field: str) -> int | None:
    """Return a seed as a number without a sign; None for -1, which means no seed, as in vLLM.

    A negative seed is the same as the number that is 2**64 larger, as in PyTorch.

    Raises:
        RequestRejected: INVALID_ARGUMENT for `field`; the seed needs more than 64 bits.
    """
    if not MIN_INT64 <= seed <= MAX_UINT64:
        raise invalid(field, f"must be from {MIN_INT64} to {MAX_UINT64}, or -1 for no seed, not {_short(seed)}")
    return None if seed == -1 else seed % 2**64


def _check_names(request: GenerateRequest) -> None:
    checked_request_id(request.id)
    check_hints(request)


class RequestHints(Protocol):
    """Lists the hints of a request: optional fields by which the router places and queues it (`fleet.core.requests.GenerateRequest`)."""

    @property
    def session(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def pin(self) -> str: ...
    @property
    def labels(self) -> Sequence[str]: ...
    @property
    def expected_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...


def check_hints(hints: RequestHints) -> None:
    """Check that the hints of a request are small enough for the router's tables.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the exception names the wrong field.
    """
    if len(hints.labels) > MAX_LABELS:
        raise invalid("labels", f"has {len(hints.labels)} labels, and {MAX_LABELS} are allowed")
    named = (("session", hints.session), ("tenant", hints.tenant), ("pin", hints.pin))
    for field, hint in (*named, *((f"labels[{index}]", label) for index, label in enumerate(hints.labels))):
        if len(hint) > MAX_HINT_CHARACTERS:
            raise invalid(field, f"has {len(hint)} characters, and {MAX_HINT_CHARACTERS} are allowed")
    if not 0 <= hints.expected_tokens <= MAX_EXPECTED_TOKENS:
        raise invalid(
            "expected_tokens", f"must be from 0 to {MAX_EXPECTED_TOKENS}, not {_short(hints.expected_tokens)}"
        )
    if not -MAX_PRIORITY <= hints.priority <= MAX_PRIORITY:
        raise invalid("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {_short(hints.priority)}")


def _check_prompt(request: GenerateRequest, vocab_size: int | None) -> None:
    match request.prompt:
        case TextPrompt(text=text):
            if not text:
                raise invalid("text", "must not be empty")
        case ChatPrompt(messages=messages, tools=tools, template_args=template_args):
            if not messages:
                raise invalid("chat.messages", "must not be empty")
            for index, message in enumerate(messages):
                _check_message(f"chat.messages[{index}]", message)
            if tools:
                _check_tools(tools, request.parsing)
            elif request.parsing is not None and request.parsing.tool_choice in _DEMANDING:
                raise invalid("parsing.tool_choice", "demands a call, and there are no tools; send tools as well")
            if template_args:
                _check_size("chat.template_args", template_args, MAX_TEMPLATE_ARGS_CHARACTERS)
                _decoded(template_args, _OBJECT, "chat.template_args")
        case TokenPrompt(tokens=tokens):
            if not tokens:
                raise invalid("token_ids", "must not be empty")
            assert len(tokens) % TOKEN_BYTES == 0, len(tokens)
            ids = np.frombuffer(tokens, "<u4")
            if vocab_size is not None and int(ids.max()) >= vocab_size:
                index = int((ids >= vocab_size).argmax())
                raise invalid(
                    f"token_ids[{index}]", f"{ids[index]} is outside the model's vocabulary of {vocab_size} tokens"
                )
        case _:
            assert_never(request.prompt)


_JSON_SCHEMA_NAMES = {
    "additional_properties": "additionalProperties",
    "any_of": "anyOf",
    "one_of": "oneOf",
    "all_of": "allOf",
    "definitions": "$defs",
}


class SchemaShape(Struct, frozen=True, rename=_JSON_SCHEMA_NAMES):
    """Reads those parts of a JSON schema whose types are checked here. Engines check the rest, such as references."""

    type: str | list[str] | None = None
    properties: "dict[str, SchemaShape | bool] | None" = None
    required: list[str] | None = None
    enum: list[Any] | None = None
    items: "SchemaShape | bool | list[SchemaShape | bool] | None" = None
    additional_properties: "SchemaShape | bool | None" = None
    any_of: "list[SchemaShape | bool] | None" = None
    one_of: "list[SchemaShape | bool] | None" = None
    all_of: "list[SchemaShape | bool] | None" = None
    definitions: "dict[str, SchemaShape | bool] | None" = None


class ToolFunction(Struct, frozen=True):
    # The characters are those that OpenAI allows, and the length is the one that Anthropic allows.
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
    description: str | None = None
    parameters: SchemaShape | None = None


class OfferedTool(Struct, frozen=True):
    """Reads a tool in the form of the OpenAI API. Its parameters are only checked here; chat templates and engines use them."""

    type: Literal["function"]
    function: ToolFunction


class CalledFunction(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str | dict[str, Any]


class EarlierCall(Struct, frozen=True):
    """Reads a tool call of an earlier answer, in the form of the OpenAI API."""

    function: CalledFunction


_TOOLS: "msgspec.json.Decoder[list[OfferedTool]]" = msgspec.json.Decoder(list[OfferedTool])
_TOOL_CALLS: "msgspec.json.Decoder[list[EarlierCall]]" = msgspec.json.Decoder(list[EarlierCall])
_OBJECT: "msgspec.json.Decoder[dict[str, Any]]" = msgspec.json.Decoder(dict[str, Any])

_MISSING = re.compile(r"^Object missing required field `(.*)`$")


def _check_tools(tools: str, parsing: AnswerParsing | None) -> None:
    offered: list[OfferedTool] = _decoded(tools, _TOOLS, "chat.tools")
    if len(offered) > MAX_TOOLS:
        raise invalid("chat.tools", f"has {len(offered)} tools, and {MAX_TOOLS} are allowed")
    if parsing is not None and parsing.tool_choice is ToolChoice.NAMED:
        names = [tool.function.name for tool in offered]
        if parsing.function not in names:
            known = ", ".join(names[:10])
            raise invalid("parsing.function", f"{parsing.function[:100]!r} is none of the tools: {known}")


def _check_message(field: str, message: ChatMessage) -> None:
    if not message.role:
        raise invalid(f"{field}.role", "must not be empty")
    if message.tool_calls:
        _decoded(message.tool_calls, _TOOL_CALLS, f"{field}.tool_calls")


def _decoded(text: str, decoder: "msgspec.json.Decoder[Any]", field: str) -> Any:
    """Decode a text, which must be JSON of the type that the decoder expects.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the text is not JSON, is nested too deeply, or has a value of a wrong type or range.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise invalid_value(error, field, decoder.type) from error
    except RecursionError as error:
        raise invalid(field, "is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise invalid(field, f"is not valid JSON: {error}") from error


def invalid_value(error: msgspec.ValidationError, field: str, kind: Any) -> RequestRejected:
    """Return the rejection of a request whose `field`, of the type `kind`, has a value of a wrong type or range."""
    message, path = split_validation_error(error)
    message = with_allowed_values(message, kind, path)
    field += path
    if (missing := _MISSING.search(message)) is not None:
        field += f".{missing[1]}"
    return invalid(field, message[0].lower() + message[1:])


def _check_structured_output(form: StructuredOutput) -> None:
    match form:
        case AnyObject():
            pass
        case JsonSchema(schema=schema):
            _check_size("sampling.form", schema, MAX_STRUCTURED_OUTPUT_CHARACTERS)
            _decoded(schema, _OBJECT, "sampling.form")
        case Pattern(regex=regex):
            _check_size("sampling.form", regex, MAX_REGEX_CHARACTERS)
        case Grammar(text=text):
            _check_size("sampling.form", text, MAX_STRUCTURED_OUTPUT_CHARACTERS)
        case StructuralTag(text=text):
            _check_size("sampling.form", text, MAX_STRUCTURED_OUTPUT_CHARACTERS)
            _decoded(text, _OBJECT, "sampling.form")
        case Choice(strings=strings):
            if not 1 <= len(strings) <= MAX_CHOICES:
                raise invalid("sampling.form", f"has {len(strings)} choices; 1 to {MAX_CHOICES} are allowed")
            for string in strings:
                _check_size("sampling.form", string, MAX_CHOICE_CHARACTERS)
        case ToolCallForm():
            raise invalid("sampling.form", "is for routers; set parsing.tool_choice to demand tool calls")
        case _:
            assert_never(form)


def _check_size(field: str, text: str, most: int) -> None:
    if not 1 <= len(text) <= most:
        raise invalid(field, f"has {len(text)} characters; 1 to {most} are allowed")


def _check_sampling(sampling: Sampling, vocab_size: int | None) -> None:
    for name, allowed in _RANGES.items():
        number = getattr(sampling, name)
        if number is not None and number not in allowed:
            raise invalid(f"sampling.{name}", f"must be {allowed}, not {_short(number)}")
    if sampling.stop_token_ids:
        _check_tokens("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.form is not None:
        _check_structured_output(sampling.form)
    if sampling.logit_bias:
        _check_bias(sampling.logit_bias, vocab_size)
    if sampling.allowed_token_ids:
        _check_tokens("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)


def _check_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int | None) -> None:
    field = "sampling.logit_bias"
    if len(logit_bias) > MAX_NAMED_TOKENS:
        raise invalid(field, f"has {len(logit_bias)} tokens, and {MAX_NAMED_TOKENS} are allowed")
    for token_id, bias in logit_bias:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            raise invalid(field, f"{_short(token_id)} is outside the model's vocabulary")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(
                field, f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {_short(bias)}, for token {token_id}"
            )


def _check_tokens(field: str, token_ids: tuple[int, ...], vocab_size: int | None) -> None:
    if len(token_ids) > MAX_NAMED_TOKENS:
        raise invalid(field, f"has {len(token_ids)} ids, and {MAX_NAMED_TOKENS} are allowed")
    for index, token_id in enumerate(token_ids):
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            raise invalid(f"{field}[{index}]", f"{_short(token_id)} is outside the model's vocabulary")


def _check_strings(field: str, strings: tuple[str, ...], most: int, most_characters: int) -> None:
    if len(strings) > most:
        raise invalid(field, f"has {len(strings)} strings, and {most} are allowed")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= most_characters:
            raise invalid(f"{field}[{index}]", f"has {len(string)} characters; 1 to {most_characters} are allowed")


def _short(number: float) -> str:
    """Return a number as a short text for error messages, because an integer may have a million digits."""
    if isinstance(number, int) and abs(number) > MAX_UINT64:
        return "an integer beyond 64 bits"
    return f"{number}"
