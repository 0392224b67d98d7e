"""Reads requests of the OpenAI API: bodies, request ids and API keys.

Rules:

1. The types of known fields are checked; an error names the field as the client wrote it.
2. Unknown fields are ignored, as in other servers with this API, or refused if the settings demand it.
3. A field that would change the answer and is not supported is rejected, unless its value has no effect. docs/api.md
   lists all fields.
4. Options without an OpenAI field are in the object ``fleet``, where unknown names are rejected.
5. Tools become part of the prompt. The tool calls and the reasoning of the model are parsed out of the text of its
   answer.
6. An unusable `x-request-id` is ignored and not refused, because proxies add this header, and the client cannot correct it.

vLLM's sampling parameters are supported too, because benchmarks and evaluations send them. For structured output, the
fields of vLLM, OpenAI and SGLang are supported.
"""

import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import Reason, RequestRejected, invalid, split_validation_error, with_allowed_values
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    DEFAULT_FIELDS,
    REASONING_ALONE,
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
    StructuralTag,
    StructuredOutput,
    TextPrompt,
    TokenBytes,
    TokenPrompt,
    ToolChoice,
)
from fleet.core.validation import (
    MAX_IMAGE_BYTES,
    MAX_PRIORITY,
    MAX_REQUEST_ID_CHARACTERS,
    REQUEST_ID,
    check_message_count,
    checked_request_id,
    unsigned_seed,
)
from fleet.frontend.images.files import ImageFile, add_image, remote_images
from fleet.frontend.openai.bodies import (
    ACCEPTED_VALUES,
    COMPLETION_FIELDS,
    OPENAI_FIELD_NAMES,
    AllowedTools,
    ChatBody,
    CompletionBody,
    ContentPart,
    FleetOptions,
    ImageUrl,
    MessageBody,
    NamedFunction,
    NamedSchema,
    NamedToolChoice,
    OpenAiBody,
    ResponseFormat,
    Schema,
    StreamOptions,
    StrictChatBody,
    StrictCompletionBody,
    header_hints,
    unsupported,
)
from fleet.frontend.openai.resumable_stream import LAST_EVENT_ID, LastEventId, read_last_event_id
from fleet.frontend.openai.resumable_stream import NAMES as RESUME_NAMES
from fleet.net.http.exchange import REQUEST_ID_HEADER

Headers = Mapping[bytes, bytes]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]

BodyType = TypeVar("BodyType", bound=Struct)

_NAMED_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `(.*)`$")

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for `max_tokens` of a completion
MAX_N = 128  # OpenAI's limit for `n`, the number of answers to a prompt; a request for more is refused
MAX_PROMPTS = 1024  # vLLM's limit for the prompts of one request; a request with more is refused
MAX_BRANCHES = 1024  # maximum number of answers that are generated for one request, over all its prompts; a request for more is refused
# Limit for a chat with several answers: bytes of all its images, each counted once for every answer. A chat above it is refused.
MAX_REPEATED_IMAGE_BYTES = 16 * 2**20


class Details(Struct, frozen=True, kw_only=True):
    """Options of a request for several answers, or for more than text; `fleet.frontend.openai.branches` serves such a request."""

    more_prompts: tuple[Prompt, ...] = ()
    n: int = 1  # number of answers to each prompt
    best_of: int = 1  # number of generated answers for each prompt; the `n` best are returned
    echo: bool = False  # the prompt precedes each answer
    prompt_logprobs: bool = False  # the answer has vLLM's field of this name
    token_ids: bool = False  # the answer has the token ids of prompt and answer (vLLM's `return_token_ids`)
    token_names: bool = False  # log probabilities name tokens by their ids instead of their texts
    continuous_usage: bool = False  # each event has the usage so far


ALLOWED_TOOLS = "tool_choice.allowed_tools"  # path of a field, for errors
MAX_PARTS = 4096  # maximum number of parts of one message; a request with more is refused
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class OpenAiRequest(Struct, frozen=True, kw_only=True):
    """A request of the OpenAI API, after its body was read, checked and converted."""

    request: GenerateRequest
    stream: bool
    include_usage: bool
    return_token_ids: bool
    names: Mapping[str, str]  # the client's name of each field of the public protocol, for error messages
    details: Details | None = None  # None if the client wants one answer and uses no option of `Details`
    seen: LastEventId | None = None  # which part of a resumed answer the client has; None: the answer is new


_COMPLETION = msgspec.json.Decoder(CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_STRICT_COMPLETION = msgspec.json.Decoder(StrictCompletionBody)
_STRICT_CHAT = msgspec.json.Decoder(StrictChatBody)


def read_completion(
    body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None = None, *, strict: bool = False
) -> OpenAiRequest:
    """Read the body of ``POST /v1/completions``.

    Args:
        body: JSON.
        request_id: Id of the request if the body has no field `request_id`.
        now: Instant of arrival by the monotonic clock; the deadline is counted from it.
        headers: The request's headers if there are hints among them (`header_hints`); otherwise None.
        strict: Whether unknown fields are refused.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    completion = decode_body(_STRICT_COMPLETION, body) if strict else decode_body(_COMPLETION, body)
    _refuse_unsupported(completion, COMPLETION_FIELDS)
    for field in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"):
        if getattr(completion, field):
            raise invalid(field, "is for /v1/chat/completions")
    prompt, *more_prompts = _completion_prompts(completion.prompt, special=completion.add_special_tokens is not False)
    return _build_request(
        completion,
        request_id,
        now,
        headers,
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        echo=bool(completion.echo),
        max_tokens=COMPLETION_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens,
        logprobs=completion.logprobs,
        names=OPENAI_FIELD_NAMES,
        offsets=True,
    )


def read_chat(
    body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None = None, *, strict: bool = False
) -> OpenAiRequest:
    """Read the body of ``POST /v1/chat/completions``; the arguments are those of `read_completion`.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    chat = decode_body(_STRICT_CHAT, body) if strict else decode_body(_CHAT, body)
    _refuse_unsupported(chat)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    is_newer_name = chat.max_completion_tokens is not None
    parsing = REASONING_ALONE if not chat.tools and chat.tool_choice is None else _parsing(chat)
    tools = _allowed_tools(chat) if parsing.tool_choice is not ToolChoice.NONE else None
    by_effort = chat.reasoning_effort is not None
    check_message_count(len(chat.messages), "messages")
    images: list[ImageFile] = []
    messages = tuple([_message(index, message, images) for index, message in enumerate(chat.messages)])
    return _build_request(
        chat,
        request_id,
        now,
        headers,
        prompt=ChatPrompt(
            messages,
            tools=msgspec.json.encode(tools).decode() if tools else "",
            template_args=_template_args(chat) if by_effort or chat.chat_template_kwargs else "",
        ),
        parsing=parsing,
        images=images,
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
    """Return the options for parsing the answer, such as which tool calls it may or must have."""
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
        case NamedToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=mode)):
            if mode not in ("auto", "required"):
                raise invalid(f"{ALLOWED_TOOLS}.mode", 'must be "auto" or "required"')
            return AnswerParsing(tool_choice=ToolChoice(mode), parallel_calls=parallel_calls)
        case _:
            raise invalid(
                "tool_choice",
                'must be "none", "auto", "required", {"type": "function", "function": {"name": NAME}} or'
                ' {"type": "allowed_tools", "allowed_tools": {"mode": MODE, "tools": LIST}}',
            )


def _allowed_tools(chat: ChatBody) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call; None if the request has no tools. The prompt names no other tools.

    Raises:
        RequestRejected: INVALID_ARGUMENT; `tool_choice` allows no tool, or one that the request does not define.
    """
    choice = chat.tool_choice
    if not isinstance(choice, NamedToolChoice) or choice.type != "allowed_tools" or choice.allowed_tools is None:
        return chat.tools
    named = list(map(_function_name, chat.tools or ()))
    allowed = set()
    for index, tool in enumerate(choice.allowed_tools.tools):
        field = f"{ALLOWED_TOOLS}.tools[{index}]"
        if tool.type != "function" or tool.function is None:
            raise invalid(field, "must name a tool of type 'function'")
        if tool.function.name not in named:
            known = ", ".join([name for name in named if name][:10]) or "there are none"
            raise invalid(field, f"{tool.function.name[:100]!r} is none of the tools: {known}")
        allowed.add(tool.function.name)
    if not allowed:
        raise invalid(f"{ALLOWED_TOOLS}.tools", 'must not be empty; "none" is the choice without calls')
    return [tool for tool in chat.tools or () if _function_name(tool) in allowed]


def _function_name(tool: dict[str, Any]) -> str:
    """Return the name of a tool; empty for a malformed one, which is refused later."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _template_args(chat: ChatBody) -> str:
    """Return the client's variables for the chat template as JSON. As in vLLM, `reasoning_effort` also sets `enable_thinking`."""
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
    headers: Headers | None,
    *,
    prompt: Prompt,
    more_prompts: tuple[Prompt, ...] = (),
    echo: bool = False,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str],
    parsing: AnswerParsing | None = None,
    images: Sequence[ImageFile] = (),
    offsets: bool = False,
) -> OpenAiRequest:
    options = body.fleet or _NO_OPTIONS
    seen = None
    if headers is not None:
        options, header_names = header_hints(headers, body.fleet)
        names = {**names, **RESUME_NAMES, **header_names}
        seen = read_last_event_id(headers)
    details = None
    if (
        more_prompts
        or echo
        or body.n not in _ONE
        or body.best_of not in _ONE
        or body.prompt_logprobs is not None
        or body.return_token_ids
        or body.return_tokens_as_token_ids
        or (body.stream_options is not None and body.stream_options.continuous_usage_stats)
    ):
        details = _details(body, more_prompts, echo=echo)
        if images:
            _check_repeated_images(images, details)
    resumable = bool(options.resumable) or seen is not None
    if resumable:
        is_plain = details is None and not options.return_token_ids and not (offsets and logprobs is not None)
        field = names.get("resumable", "fleet.resumable") if options.resumable else LAST_EVENT_ID.decode()
        _check_resumable(field, stream=bool(body.stream), is_plain=is_plain)
    if body.stream_options is not None:
        _check_stream_options(body.stream_options, stream=bool(body.stream))
    form, form_field = _structured_output(body)
    if form_field.startswith("response_format") and parsing is not None and parsing.tool_choice in _DEMANDED_CALLS:
        # The format is for the text of the answer, and an answer with demanded tool calls has no text.
        form, form_field = None, ""
    contents = tuple([each.content for each in images]) if images else ()
    values = {
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # -1 means no limit in vLLM
        "min_p": body.min_p,
        "seed": None if body.seed is None else unsigned_seed(body.seed, "seed"),
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "logprobs": logprobs,
        "form": form,
        "logit_bias": tuple(body.logit_bias.items()) if body.logit_bias else None,
        "allowed_token_ids": tuple(body.allowed_token_ids) if body.allowed_token_ids else None,
        "prompt_logprobs": _most(body.prompt_logprobs, logprobs) if echo else body.prompt_logprobs,
        "thinking_tokens": None if body.thinking_token_budget == -1 else body.thinking_token_budget,
    }
    given = {name: value for name, value in values.items() if value is not None}
    request = GenerateRequest(
        id=request_id if body.request_id is None else checked_request_id(body.request_id),
        model=ModelName(body.model or ""),
        prompt=prompt,
        sampling=Sampling(**given),  # type: ignore[arg-type]  # types unknown
        unset=DEFAULT_FIELDS.difference(given),
        fill_context=max_tokens is None,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        include_stop_string=bool(body.include_stop_str_in_output or body.no_stop_trim),
        show_special_tokens=body.skip_special_tokens is False,
        bad_words=tuple(body.bad_words or ()),
        cache_salt=body.cache_salt or "",
        truncate_prompt=body.truncate_prompt_tokens,
        priority=options.priority if body.priority is None else combined_priority(body.priority, options),
        deadline=Nanos(now + options.timeout_ms * MILLISECOND) if options.timeout_ms else None,
        session=options.session or body.session_id or "",
        tenant=options.tenant,
        placement=options.placement,
        kv_path=options.kv_path,
        expected_tokens=options.expected_tokens,
        pin=options.pin,
        labels=options.labels,
        whole=not body.stream,
        parsing=parsing,
        resumable=resumable,
        is_kept=resumable,
        # The first resume token comes with the first tokens. Translated APIs set this to False.
        late_token=resumable and seen is None,
        resume=None if seen is None else seen.resume,
        images=contents,
        remote_images=remote_images(images) if b"" in contents else (),
    )
    return OpenAiRequest(
        request=request,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        return_token_ids=options.return_token_ids,
        names={**names, "sampling.form": form_field} if form_field else names,
        details=details,
        seen=seen,
    )


_NO_OPTIONS = FleetOptions()
_ONE = (None, 1)
_DEMANDED_CALLS = (ToolChoice.REQUIRED, ToolChoice.NAMED)


def _details(body: OpenAiBody, more_prompts: tuple[Prompt, ...], *, echo: bool) -> Details:
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    for field, number in (("n", n), ("best_of", best_of)):
        if not 1 <= number <= MAX_N:
            raise invalid(field, f"must be from 1 to {MAX_N}, not {_short(number)}")
    if best_of < n:
        raise invalid("best_of", f"must be at least n, {n}, not {best_of}")
    if best_of > n and body.stream:
        raise invalid("best_of", "cannot be more than n in a stream, because the best answers are known at the end")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "are not a part of streams; leave out stream")
    if (count := (1 + len(more_prompts)) * best_of) > MAX_BRANCHES:
        raise invalid(
            "n", f"{1 + len(more_prompts)} prompts with {best_of} answers each are {count}; {MAX_BRANCHES} are allowed"
        )
    return Details(
        more_prompts=more_prompts,
        n=n,
        best_of=best_of,
        echo=echo,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        token_names=bool(body.return_tokens_as_token_ids),
        continuous_usage=body.stream_options is not None and bool(body.stream_options.continuous_usage_stats),
    )


def most_image_bytes(details: Details) -> int:
    """Return the maximum total bytes of a request's images; lower for several answers, because workers get the images once for each answer."""
    return MAX_IMAGE_BYTES if details.best_of == 1 else MAX_REPEATED_IMAGE_BYTES // details.best_of


def _check_repeated_images(images: Sequence[ImageFile], details: Details) -> None:
    """Refuse a request if its images, sent once for each of its answers, exceed `MAX_REPEATED_IMAGE_BYTES`."""
    size = details.best_of * sum([len(each.content) for each in images])
    if details.best_of > 1 and size > MAX_REPEATED_IMAGE_BYTES:
        field = "n" if details.best_of == details.n else "best_of"
        raise invalid(
            field,
            f"{details.best_of} answers about these images send {size} bytes of images to workers;"
            f" {MAX_REPEATED_IMAGE_BYTES} are allowed. Ask for fewer, or send smaller images",
        )


def _check_resumable(field: str, *, stream: bool, is_plain: bool) -> None:
    if not stream:
        raise invalid(field, "is for streams; set stream to true")
    if not is_plain:
        raise invalid(
            field,
            "is for streams of one answer without echo, token ids, prompt_logprobs, continuous usage or text offsets; leave"
            " it or those out",
        )


def _most(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _check_stream_options(options: StreamOptions, *, stream: bool) -> None:
    if not stream:
        raise invalid("stream_options", "are for streams; set stream to true")
    if options.include_obfuscation:
        raise invalid("stream_options.include_obfuscation", "only false is supported")


def combined_priority(priority: int, options: FleetOptions) -> int:
    """Return the priority in the object ``fleet``. If it is 0, return the negated value of vLLM's field `priority`.

    The sign differs, because a lower number runs earlier in vLLM, and later in Fleet.

    Raises:
        RequestRejected: INVALID_ARGUMENT, because `priority` is out of range.
    """
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise invalid("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {_short(priority)}")
    return options.priority or -priority


def _short(number: int) -> str:
    """Return a number as text for a message; if it has very many digits, return a description instead."""
    return str(number) if abs(number) < 2**63 else "an integer beyond 64 bits"


def _structured_output(body: OpenAiBody) -> tuple[StructuredOutput | None, str]:
    """Return the structured output that a body demands, and the name of the field; None and "" if it demands none."""
    demanded = dict(_structured_outputs(body))
    if len(demanded) > 1:
        first, second, *_ = demanded
        raise invalid(second, f"demands structured output, as {first} does; send one of them")
    for field, form in demanded.items():
        return form, field
    return None, ""


def _structured_outputs(body: OpenAiBody) -> Iterator[tuple[str, StructuredOutput]]:
    """Yield each field that demands structured output, with that output."""
    match body.response_format:
        case None | ResponseFormat(type="text"):
            pass
        case ResponseFormat(type="json_object"):
            yield "response_format", AnyObject()
        case ResponseFormat(type="json_schema", json_schema=None):
            raise invalid("response_format.json_schema", "is missing")
        case ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=schema)):
            yield "response_format.json_schema.schema", _schema(schema)
        case ResponseFormat(type="structural_tag") as tag:
            yield "response_format", StructuralTag(_structural_tag(tag))
        case _:
            raise invalid("response_format.type", "must be text, json_object, json_schema or structural_tag")
    if (outputs := body.structured_outputs) is not None:
        forms = list(
            _vllm_structured_outputs(
                "structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar
            )
        )
        if outputs.json_object:
            forms.append(("structured_outputs.json_object", AnyObject()))
        if outputs.structural_tag is not None:
            forms.append(("structured_outputs.structural_tag", StructuralTag(outputs.structural_tag)))
        for field in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(outputs, field):
                raise invalid(f"structured_outputs.{field}", "is not supported; leave it out")
        if not forms:
            raise invalid(
                "structured_outputs", "must say one of json, regex, choice, grammar, json_object and structural_tag"
            )
        yield from forms
    yield from _vllm_structured_outputs(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )
    if body.json_schema is not None:
        yield "json_schema", _schema(body.json_schema)
    if body.regex is not None:
        yield "regex", Pattern(body.regex)
    if body.ebnf is not None:
        yield "ebnf", Grammar(body.ebnf)


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


def _structural_tag(tag: ResponseFormat) -> str:
    given = {
        name: value
        for name, value in (("format", tag.format), ("structures", tag.structures), ("triggers", tag.triggers))
        if value is not None
    }
    if given.keys() not in ({"format"}, {"structures", "triggers"}):
        raise invalid("response_format", "a structural_tag needs format, or structures and triggers")
    return msgspec.json.encode({"type": "structural_tag", **given}).decode()


def _schema(schema: Schema) -> JsonSchema:
    return JsonSchema(schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())


def _refuse_unsupported(body: OpenAiBody, supported: Collection[str] = ()) -> None:
    for field, accepted in ACCEPTED_VALUES.items():
        value = getattr(body, field, None)
        if value is not None and value not in accepted and field not in supported:
            raise unsupported(field, accepted)


def _completion_prompts(prompt: str | list[Any], *, special: bool) -> list[Prompt]:
    """Return the prompts of a completion, at least one. Each is a text or a list of token ids."""
    match prompt:
        case str():
            return [TextPrompt(prompt, special)]
        case [str() | list(), *_] if len(prompt) > MAX_PROMPTS:
            raise invalid("prompt", f"has {len(prompt)} prompts, and {MAX_PROMPTS} are allowed")
        case [str() | list()]:
            return [_listed_prompt(prompt[0], "prompt", special=special)]
        case [str() | list(), *_]:
            return [_listed_prompt(one, f"prompt[{index}]", special=special) for index, one in enumerate(prompt)]
        case _:
            return [_token_prompt(prompt, "prompt")]


def _listed_prompt(prompt: object, field: str, *, special: bool) -> Prompt:
    match prompt:
        case str():
            return TextPrompt(prompt, special)
        case list():
            return _token_prompt(prompt, field)
        case _:
            raise invalid(field, "must be a text or a list of token ids, as the first prompt")


def _token_prompt(ids: list[Any], field: str) -> Prompt:
    return TokenPrompt(read_token_ids(ids, field))


def read_token_ids(ids: list[Any], field: str) -> TokenBytes:
    """Return token ids that a client has sent in a field.

    Raises:
        RequestRejected: INVALID_ARGUMENT; an element of `ids` is no token id.
    """
    try:
        checked = msgspec.convert(ids, list[TokenId])
    except msgspec.ValidationError as error:
        raise invalid_body(error, field) from error
    return np.asarray(checked, "<u4").tobytes()


def _message(index: int, message: MessageBody, images: list[ImageFile]) -> ChatMessage:
    """Return a message of the chat. Its images are appended to `images`."""
    field = f"messages[{index}]"
    if message.function_call:
        raise invalid(f"{field}.function_call", "is not supported; write it into tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(f"{field}.tool_call_id", "is missing; a tool message names the call that it answers")
    parts: tuple[str | None, ...] = ()
    match message.content:
        case str(content):
            pass
        case None if message.role == "assistant":
            # The content is null if the earlier answer had only tool calls, or was cut off within its reasoning.
            content = message.refusal or ""
        case None:
            raise invalid(f"{field}.content", "must not be null")
        case given:
            if len(given) > MAX_PARTS:
                raise invalid(f"{field}.content", f"has {len(given):,} entries, and {MAX_PARTS:,} are allowed")
            found = [_part(f"{field}.content[{position}]", part, images) for position, part in enumerate(given)]
            content = "".join([part for part in found if part is not None])
            parts = tuple(found) if None in found else ()
    return ChatMessage(
        role=message.role,
        content=content,
        parts=parts,
        tool_calls=msgspec.json.encode(message.tool_calls).decode() if message.tool_calls else "",
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _part(field: str, part: ContentPart, images: list[ImageFile]) -> str | None:
    """Return the text of a part, or None for an image, which is appended to `images`."""
    match part:
        case ContentPart(type="text", text=str(text)) | ContentPart(type="refusal", refusal=str(text)):
            return text
        case ContentPart(type="image_url", image_url=str(url)):
            add_image(url, f"{field}.image_url", images)
        case ContentPart(type="image_url", image_url=ImageUrl(url=url)):
            add_image(url, f"{field}.image_url.url", images)
        case _:
            raise invalid(
                field, "only parts of type text, with a text, and of type image_url, with a URL, are supported"
            )
    return None


def decode_body(decoder: "msgspec.json.Decoder[BodyType]", body: bytes) -> BodyType:
    """Decode a body with `decoder`.

    Raises:
        RequestRejected: INVALID_ARGUMENT. If one field is wrong, the error names it as the client wrote it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_body(error, kind=decoder.type) from error
    except UnicodeDecodeError as error:
        raise RequestRejected(Reason.INVALID_ARGUMENT, f"the body is not valid UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise RequestRejected(Reason.INVALID_ARGUMENT, "the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise RequestRejected(Reason.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from error


def invalid_body(error: msgspec.ValidationError, parent: str = "", kind: Any = None) -> RequestRejected:
    """Return the rejection of a value with a wrong type or range.

    Args:
        error: The error of msgspec.
        parent: Path of the field that was decoded; empty for the whole body.
        kind: Type to which the value was decoded; the message lists its allowed values. None: the message lists no values.
    """
    message, path = split_validation_error(error)
    message = with_allowed_values(message, kind, path)
    field = parent + path.partition("[...]")[0]  # msgspec does not say which key of a dictionary has the wrong value
    if (named := _NAMED_FIELD.search(message)) is not None:
        field += f".{named[1]}"
    message = message[0].lower() + message[1:]
    field = field.removeprefix(".")
    return invalid(field, message) if field else RequestRejected(Reason.INVALID_ARGUMENT, f"the body: {message}")


def new_request_id(
    headers: Mapping[bytes, bytes], is_running: Callable[[RequestId], bool], otherwise: RequestId | None = None
) -> RequestId:
    """Return the request id that the client sent; `otherwise` or a random id if the client sent no usable id.

    The id of a running request counts as unusable: a proxy may send a request again under the same id while the first
    request still runs.
    """
    if REQUEST_ID_HEADER in headers:
        chosen = RequestId(headers[REQUEST_ID_HEADER].decode("latin-1"))
        if REQUEST_ID.fullmatch(chosen) and not is_running(chosen):
            return chosen
    return RequestId(uuid.uuid4().hex) if otherwise is None else otherwise


def unused_id(request: GenerateRequest, chosen: RequestId, is_running: Callable[[RequestId], bool]) -> GenerateRequest:
    """Return the request, under a new id if another request has begun under the id `chosen` since `new_request_id` chose it."""
    if request.id != chosen or not is_running(chosen):
        return request
    return structs.replace(request, id=RequestId(uuid.uuid4().hex))


def numbered_request_id(request_id: RequestId, number: int, is_running: Callable[[RequestId], bool]) -> RequestId:
    """Return the id for one of the requests into which the router divides an HTTP request.

    `number` is the index of this request; the one with index 0 keeps the id of the HTTP request. A very long id is shortened. The new id
    differs from the ids of running requests, which clients may have chosen.
    """
    if not number:
        return request_id
    chosen = _with_suffix(request_id, f"-{number}")
    return _with_suffix(request_id, f"-{number}-{uuid.uuid4().hex}") if is_running(chosen) else chosen


def _with_suffix(request_id: RequestId, suffix: str) -> RequestId:
    return RequestId(request_id[: MAX_REQUEST_ID_CHARACTERS - len(suffix)] + suffix)


def bearer_of_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return ``Bearer KEY`` for the key in the header ``x-api-key``, which Anthropic's clients send; empty without this header."""
    key = headers.get(b"x-api-key", b"")
    return b"Bearer " + key if key else b""


def authorization_of(headers: Mapping[bytes, bytes]) -> str:
    """Return ``Bearer KEY`` from the header ``authorization``, or else from ``x-api-key``.

    Return an empty string if neither header is there.
    """
    return (headers.get(b"authorization") or bearer_of_key(headers)).decode("latin-1")
