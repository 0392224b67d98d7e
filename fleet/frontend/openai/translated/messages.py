"""Messages: the Messages API of Anthropic, translated to chats and back.

Rules:

1. Fields that would change the answer and are not supported are rejected by name. Unknown fields are ignored, or refused if
   the settings demand it.
2. A tool's result becomes a separate message, before the other content of the message that contains it.
3. `cache_control` has no effect, because every prefix is cached. `cache_read_input_tokens` counts the cached tokens, and
   `input_tokens` the other prompt tokens. A stream has the right counts only in its last events.
4. A client can turn thinking off. If it turns thinking on, the model thinks as it would anyway. The engine ends the thinking
   after `budget_tokens` if every worker of the model can do that. If not, the budget has no effect, but is not refused: in
   Anthropic's API, too, it is a target and no strict limit, and many clients always send it.
5. `max_tokens` may exceed the rest of the model's context, because agents send one number for all prompts. An answer that fills
   the context then ends with the reason `model_context_window_exceeded`.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct, structs

from fleet.core.clock import Nanos
from fleet.core.errors import invalid
from fleet.core.ids import RequestId
from fleet.core.requests import Delta, Finish, Finished, Usage
from fleet.core.validation import check_message_count
from fleet.frontend.images.files import ImageFile, image_part
from fleet.frontend.openai.bodies import FleetOptions, unsupported
from fleet.frontend.openai.requests import decode_body
from fleet.frontend.openai.translated.api import (
    AnswerStart,
    Headers,
    Json,
    TranslatedApi,
    TranslatedRequest,
    named_event,
    read_translated_chat,
)
from fleet.frontend.openai.translated.blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockBegun,
    BlockChange,
    BlockEnded,
    BlockGrown,
    BlockKind,
)
from fleet.net.http.errors import ANTHROPIC_ERRORS


class ImageSource(Struct, frozen=True, kw_only=True):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


class ContentBlock(Struct, frozen=True, kw_only=True):
    """A content block of a message; `type` determines which of the other fields are used."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: "str | list[ContentBlock] | None" = None
    source: ImageSource | None = None


class TurnBody(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentBlock]


class MessageToolBody(Struct, frozen=True, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessageToolChoice(Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Struct, frozen=True, kw_only=True):
    type: str
    budget_tokens: int | None = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(Struct, frozen=True, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``: the fields that determine a prompt."""

    model: str
    messages: list[TurnBody]
    system: str | list[ContentBlock] | None = None
    tools: list[MessageToolBody] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None  # ignored (rule 3)
    # Fields that are not supported: a value that `ACCEPTED_VALUES` does not list is rejected.
    mcp_servers: Any = None
    container: Any = None
    context_management: Any = None
    speed: Any = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    fleet: FleetOptions | None = None
    metadata: Any = None  # ignored, like the next field
    diagnostics: Any = None
    service_tier: Any = None  # not supported, like the next field: only the values in `ACCEPTED_VALUES` are accepted
    inference_geo: Any = None


class StrictCountTokensBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/messages/count_tokens``, used if the settings refuse unknown fields."""


class StrictMessagesBody(MessagesBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/messages``, used if the settings refuse unknown fields."""


ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "context_management": ({}, {"edits": []}),
    "speed": ("standard",),
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
}
"""Unsupported fields, each with the values that are accepted because they have no effect. Null is always accepted."""

_MESSAGES = msgspec.json.Decoder(MessagesBody)
_STRICT_MESSAGES = msgspec.json.Decoder(StrictMessagesBody)
_COUNT = msgspec.json.Decoder(CountTokensBody)
_STRICT_COUNT = msgspec.json.Decoder(StrictCountTokensBody)


def read_messages(
    content: bytes, request_id: RequestId, now: Nanos, headers: Headers | None = None, *, strict: bool = False
) -> TranslatedRequest:
    """Read the body of ``POST /v1/messages``; the arguments are those of `read_chat`.

    Raises:
        RequestRejected: INVALID_ARGUMENT. The error names the field as in the Messages API, or as in the Chat
            Completions API if only the translated request was found invalid.
    """
    body = decode_body(_STRICT_MESSAGES, content) if strict else decode_body(_MESSAGES, content)
    images: list[ImageFile] = []
    chat = read_translated_chat(
        _prompt(body, images)
        | {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "thinking_token_budget": _budget(body),
            "fleet": body.fleet,
        },
        request_id,
        now,
        headers,
        images,
    )
    chat = structs.replace(chat, request=structs.replace(chat.request, ends_with_context=True))
    writer = partial(AnthropicWriter, max_tokens=body.max_tokens)
    return TranslatedRequest(chat=chat, writer=writer, has_optional_budget=True)


def read_count_tokens(
    content: bytes, request_id: RequestId, now: Nanos, headers: Headers | None = None, *, strict: bool = False
) -> TranslatedRequest:
    """Read the body of ``POST /v1/messages/count_tokens``, which generates nothing; the arguments are those of `read_chat`.

    Raises:
        RequestRejected: INVALID_ARGUMENT. The error names the field as in the Messages API, or as in the Chat
            Completions API if only the translated request was found invalid.
    """
    body = decode_body(_STRICT_COUNT, content) if strict else decode_body(_COUNT, content)
    images: list[ImageFile] = []
    chat = read_translated_chat(_prompt(body, images), request_id, now, headers, images)
    return TranslatedRequest(chat=chat, writer=AnthropicWriter)


NAMES = {
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
MESSAGES_NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens", **NAMES}
MESSAGES_API = TranslatedApi(read=read_messages, errors=ANTHROPIC_ERRORS, names=MESSAGES_NAMES, letter="m")
COUNT_TOKENS_API = TranslatedApi(read=read_count_tokens, errors=ANTHROPIC_ERRORS, names=NAMES)


# Translation of requests


def _prompt(body: CountTokensBody, images: list[ImageFile]) -> Json:
    """Return the chat's fields that determine its prompt. The images of the body are appended to `images`."""
    for field, accepted in ACCEPTED_VALUES.items():
        value = getattr(body, field, None)
        if value is not None and value not in accepted:
            raise unsupported(field, accepted)
    check_message_count(len(body.messages), "messages")
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _text("system", body.system)})
    for index, turn in enumerate(body.messages):
        messages += _turn(f"messages[{index}]", turn, images)
    config = body.output_config or OutputConfig()
    return {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(index, tool) for index, tool in enumerate(body.tools or ())] or None,
        "reasoning_effort": _effort(body.thinking, config.effort),
        "response_format": _format(config.format),
        **_tool_choice(body.tool_choice),
    }


def _effort(thinking: ThinkingBody | None, effort: str | None) -> str | None:
    """Return the chat's `reasoning_effort`: "none" if thinking is turned off, otherwise `effort`, which may be None (rule 4)."""
    match None if thinking is None else thinking.type:
        case None | "adaptive" | "enabled":
            return effort
        case "disabled":
            return "none"
        case _:
            raise invalid("thinking.type", "must be enabled, disabled or adaptive")


def _budget(body: MessagesBody) -> int | None:
    """Return the chat's limit of the reasoning; None if the client does not turn thinking on with a budget below `max_tokens`."""
    if body.thinking is None or body.thinking.type != "enabled" or (budget := body.thinking.budget_tokens) is None:
        return None
    if budget < 1:
        raise invalid("thinking.budget_tokens", "must be above 0")
    return budget if budget < body.max_tokens else None  # a budget of max_tokens or more would limit nothing


def _format(wanted: OutputFormat | None) -> Json | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise invalid("output_config.format", "must be of type json_schema, with a schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema}}


def _tool(index: int, tool: MessageToolBody) -> Json:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise invalid(f"tools[{index}]", "must be of type custom, with an input_schema; no tool runs at the server")
    if not tool.name:
        raise invalid(f"tools[{index}].name", "must not be empty")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: MessageToolChoice | None) -> Json:
    if choice is None:
        return {}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    match choice:
        case MessageToolChoice(type="auto" | "none" as kind):
            return {"tool_choice": kind, **parallel}
        case MessageToolChoice(type="any"):
            return {"tool_choice": "required", **parallel}
        case MessageToolChoice(type="tool", name=str(name)):
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
        case _:
            raise invalid("tool_choice", "must be of type auto, any, none, or tool with a name")


def _turn(field: str, turn: TurnBody, images: list[ImageFile]) -> Iterator[Json]:
    """Yield the chat's messages for one message of this API (rule 2). Its images are appended to `images`."""
    if turn.role not in ("user", "assistant", "system"):
        raise invalid(f"{field}.role", "must be user, assistant or system")
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    if not turn.content and turn.role != "assistant":
        raise invalid(f"{field}.content", "must not be empty")
    texts: list[str] = []
    parts: list[Json] = []  # texts and images of a user's message
    calls: list[Json] = []
    thoughts: list[str] = []
    for position, block in enumerate(turn.content):
        where = f"{field}.content[{position}]"
        match block.type, turn.role:
            case "text", _:
                texts.append(_text_of(where, block))
                parts.append({"type": "text", "text": texts[-1]})
            case "image", "user":
                parts.append(_image(where, block, images))
            case "tool_use", "assistant":
                if not block.name:
                    raise invalid(f"{where}.name", "is missing")
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result", "user" if not block.tool_use_id:
                raise invalid(f"{where}.tool_use_id", "is missing; a result names the tool use that it answers")
            case "tool_result", "user":
                content = _text(f"{where}.content", block.content or "")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case "thinking", "assistant":
                thoughts.append(block.thinking or "")
            case "redacted_thinking", "assistant":
                pass  # skipped: thinking that only Anthropic's servers can decrypt
            case kind, role:
                raise invalid(where, f"of type {kind!r} is not supported in a message of role {role}")
    if turn.role == "assistant":
        message: Json = {"role": "assistant", "content": "".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        yield message
    elif len(parts) > len(texts):  # there are images
        yield {"role": turn.role, "content": parts}
    elif texts:
        yield {"role": turn.role, "content": "".join(texts)}


def _image(field: str, block: ContentBlock, images: list[ImageFile]) -> Json:
    match block.source:
        case ImageSource(type="base64", media_type=kind, data=data):
            return image_part(f"data:{kind};base64,{data}", f"{field}.source", images)
        case ImageSource(type="url", url=url):
            return image_part(url, f"{field}.source.url", images)
        case _:
            raise invalid(f"{field}.source", "must be of type base64 or url; files are not kept here")


def _text(field: str, content: str | list[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join([_text_of(f"{field}[{index}]", block) for index, block in enumerate(content)])


def _text_of(field: str, block: ContentBlock) -> str:
    if block.type != "text" or block.text is None:
        raise invalid(field, f"of type {block.type!r} is not supported; only text is, and images of users")
    return block.text


# Translation of answers

_STOP_REASONS = {Finish.LENGTH: "max_tokens", Finish.TOOL_CALLS: "tool_use"}
_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class AnthropicWriter:
    """Writes an answer in the form of the Messages API. Implements `AnswerWriter`."""

    def __init__(self, start: AnswerStart, max_tokens: int = 0) -> None:
        """Start an empty answer; `max_tokens` is the limit that the client has sent (0: it has sent none)."""
        self._start = start
        self._max_tokens = max_tokens
        self._sent = start.events
        self._blocks = AnswerBlocks()
        self._began = False

    def chunk(self, delta: Delta) -> bytes:
        return self._events(self._blocks.add(delta))

    def last_chunks(self, finished: Finished) -> bytes:
        ends = self._events(self._blocks.finish(finished.text))
        reason: Json = {"type": "message_delta", "delta": self._stop(finished), "usage": _usage(finished.usage)}
        return ends + self._event(reason) + self._event({"type": "message_stop"})

    def whole(self, finished: Finished) -> bytes:
        for _ in self._blocks.finish(finished.text):
            pass
        content = [_whole_block(block) for block in self._blocks.blocks]
        return msgspec.json.encode(self._message(content, _usage(finished.usage)) | self._stop(finished))

    def _events(self, changes: Iterable[BlockChange]) -> bytes:
        return b"".join([self._changed(change) for change in changes])

    def _changed(self, change: BlockChange) -> bytes:
        begin = b""
        if not self._began:
            self._began = True
            usage = Usage(prompt_tokens=self._start.prompt_tokens, completion_tokens=0, cached_tokens=0)
            begin = self._event({"type": "message_start", "message": self._message([], _usage(usage))})
        index = change.block.index
        match change:
            case BlockBegun(block):
                start = {"type": "content_block_start", "index": index, "content_block": _empty_block(block)}
                return begin + self._event(start)
            case BlockGrown(block, piece):
                if not (part := self._sent.new_part(piece)):
                    return begin
                kind, field = _DELTAS[block.kind]
                grown = {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: part}}
                return begin + self._sent.id_line() + named_event(grown)
            case BlockEnded():
                return begin + self._event({"type": "content_block_stop", "index": index})

    def _event(self, event: Json) -> bytes:
        """Return an event that is no piece of text; empty if the client has it."""
        return self._sent.id_line() + named_event(event) if self._sent.is_new() else b""

    def _stop(self, finished: Finished) -> Json:
        """Return why the answer ended. If the length limit has ended it before `max_tokens`, the model's context was full (rule 5)."""
        match finished.finish:
            case Finish.STOP if finished.stop_string:
                return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
            case Finish.LENGTH if finished.usage.completion_tokens < self._max_tokens:
                return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
            case finish:
                return {"stop_reason": _STOP_REASONS.get(finish, "end_turn"), "stop_sequence": None}

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": f"msg_{self._start.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._start.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _empty_block(block: AnswerBlock) -> Json:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole_block(block: AnswerBlock) -> Json:
    """Return a complete block for the answer as one object.

    If the answer ended within the arguments of a tool call, the arguments are no valid JSON, and are left out.
    """
    empty = _empty_block(block)
    match block.kind:
        case BlockKind.TEXT:
            return empty | {"text": block.content}
        case BlockKind.REASONING:
            return empty | {"thinking": block.content}
        case BlockKind.CALL:
            try:
                return empty | {"input": msgspec.json.decode(block.content, type=dict[str, Any])}
            except msgspec.DecodeError:
                return empty


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
