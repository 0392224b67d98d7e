"""Responses: the stateless part of OpenAI's Responses API, translated to chats and back.

Rules:

1. The router stores no response. So fields that need a stored response or conversation are rejected by name. Tools that run
   at the server are rejected too, and other unsupported fields that would change the answer. Unknown fields are ignored, or
   refused if the settings demand it.
2. Consecutive items that the model wrote (reasoning, text, calls) become one message of the assistant.
3. A stream has the same output items as the answer in one piece, with the same ids.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import invalid
from fleet.core.ids import RequestId
from fleet.core.requests import Delta, Finish, Finished, Usage
from fleet.core.system_clock import unix_seconds
from fleet.core.validation import check_message_count
from fleet.frontend.images.files import ImageFile, image_part
from fleet.frontend.openai.bodies import ACCEPTED_VALUES as CHAT_ACCEPTED_VALUES
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
from fleet.net.http.errors import RESPONSES_ERRORS


class ItemPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None  # URL of the image, for the type input_image


class InputItem(Struct, frozen=True, kw_only=True):
    """An item of the input; `type` determines which of the other fields are used."""

    type: str = "message"
    role: str = ""
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[ItemPart] | None = None


class ResponseToolBody(Struct, frozen=True, kw_only=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseNamedTool(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None


class ResponseToolChoice(ResponseNamedTool, frozen=True, kw_only=True, omit_defaults=True):
    """Names the tool that the model must call, or the tools among which it may choose (``allowed_tools``)."""

    mode: str | None = None
    tools: list[ResponseNamedTool] | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Struct, frozen=True, kw_only=True):
    """Body of ``POST /v1/responses``. Null means the same as an absent field."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseToolBody] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    # Fields that are accepted and have no effect. The answer repeats the first two.
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    access_programs: Any = None
    image: Any = None
    # The object with Fleet's options.
    fleet: FleetOptions | None = None
    # Fields that are not supported: a value that `ACCEPTED_VALUES` does not list is rejected.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    store: Any = None
    truncation: Any = None
    include: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    service_tier: Any = None
    stream_options: Any = None
    context_management: Any = None
    moderation: Any = None


class StrictResponsesBody(ResponsesBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/responses``, used if the settings refuse unknown fields."""


ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "store": (False,),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),  # accepted, although no encrypted content is sent
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "service_tier": CHAT_ACCEPTED_VALUES["service_tier"],
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": ([],),
    "moderation": (),
}
"""Unsupported fields, each with the values that are accepted because they have no effect. Null is always accepted."""

VERBOSITIES = CHAT_ACCEPTED_VALUES["verbosity"]

WHY = {
    "previous_response_id": "is not supported: no response is stored; send the items of the conversation in `input`",
    "conversation": "is not supported: no conversation is stored; send its items in `input`",
    "background": "is not supported: no response is stored; stream the answer instead",
    "store": "is not supported: no response is stored; leave it out or send false",
}

_BODY = msgspec.json.Decoder(ResponsesBody)
_STRICT_BODY = msgspec.json.Decoder(StrictResponsesBody)
_OF_ASSISTANT = ("reasoning", "function_call")


def read_responses(
    content: bytes, request_id: RequestId, now: Nanos, headers: Headers | None = None, *, strict: bool = False
) -> TranslatedRequest:
    """Read the body of ``POST /v1/responses``; the arguments are those of `read_chat`.

    Raises:
        RequestRejected: INVALID_ARGUMENT. The error names the field as in the Responses API, or as in the Chat
            Completions API if only the translated request was found invalid.
    """
    body = decode_body(_STRICT_BODY, content) if strict else decode_body(_BODY, content)
    for field, accepted in ACCEPTED_VALUES.items():
        value = getattr(body, field)
        if value is not None and value not in accepted:
            raise invalid(field, WHY[field]) if field in WHY else unsupported(field, accepted)
    if body.text is not None and body.text.verbosity not in (None, *VERBOSITIES):
        raise unsupported("text.verbosity", VERBOSITIES)
    reasoning = body.reasoning or ReasoningOptions()
    images: list[ImageFile] = []
    chat = read_translated_chat(
        {
            "model": body.model,
            "messages": _messages(body, images),
            "stream": body.stream,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": [_tool(index, tool) for index, tool in enumerate(body.tools or ())] or None,
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": None if body.text is None else _format(body.text.format),
            "reasoning_effort": reasoning.effort,
            "fleet": body.fleet,
        },
        request_id,
        now,
        headers,
        images,
    )
    return TranslatedRequest(chat=chat, writer=lambda start: ResponseWriter(start, body))


RESPONSES_API = TranslatedApi(
    read=read_responses,
    errors=RESPONSES_ERRORS,
    letter="r",
    names={
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function.name": "tool_choice.name",
        "tool_choice.allowed_tools.mode": "tool_choice.mode",
        "tool_choice.allowed_tools.tools": "tool_choice.tools",
    },
)


# Translation of requests


def _messages(body: ResponsesBody, images: list[ImageFile]) -> list[Json]:
    """Return the chat's messages. The images of the body are appended to `images`."""
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    check_message_count(len(body.input), "input")
    turn: Json | None = None  # the assistant's message that further items extend (rule 2); None: they begin a new one
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if item.type in _OF_ASSISTANT or (item.type == "message" and item.role == "assistant"):
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, where, item)
            continue
        turn = None
        match item.type:
            case "message" if item.role in ("user", "system", "developer"):
                messages.append({"role": item.role, "content": _content(f"{where}.content", item.content, images)})
            case "message":
                raise invalid(f"{where}.role", "must be user, assistant, system or developer")
            case "function_call_output" if not item.call_id:
                raise invalid(f"{where}.call_id", "is missing; an output names the call that it answers")
            case "function_call_output":
                content = _text(f"{where}.output", item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case kind:
                raise invalid(
                    f"{where}.type", f"{kind!r} is not supported; only messages, function calls and reasoning are"
                )
    return messages


def _extend(turn: Json, where: str, item: InputItem) -> None:
    """Extend the assistant's message by an item that the model wrote in an earlier answer."""
    match item.type:
        case "reasoning":
            parts = item.content if isinstance(item.content, list) and item.content else item.summary or ()
            thoughts = "".join([part.text or "" for part in parts])
            if thoughts:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
        case "function_call":
            if not item.name:
                raise invalid(f"{where}.name", "is missing")
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        case _:
            turn["content"] += _text(f"{where}.content", item.content)


def _content(field: str, content: str | list[ItemPart] | None, images: list[ImageFile]) -> str | list[Json]:
    """Return the content of a message to the model: its text, or its parts if there are images among them."""
    if not isinstance(content, list) or all(part.type != "input_image" for part in content):
        return _text(field, content)
    parts = []
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if part.type != "input_image":
            parts.append({"type": "text", "text": _text_of(where, part)})
        elif part.image_url is None:
            raise invalid(where, "has no image_url; files are not kept here")
        else:
            parts.append(image_part(part.image_url, f"{where}.image_url", images))
    return parts


def _text(field: str, content: str | list[ItemPart] | None) -> str:
    if content is None:
        raise invalid(field, "must be a text or a list of parts")
    if isinstance(content, str):
        return content
    return "".join([_text_of(f"{field}[{index}]", part) for index, part in enumerate(content)])


def _text_of(field: str, part: ItemPart) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("input_text", "output_text", "text", "refusal") or text is None:
        raise invalid(field, f"of type {part.type!r} is not supported here; only text is, and input_image of users")
    return text


def _tool(index: int, tool: ResponseToolBody) -> Json:
    if tool.type != "function":
        raise invalid(
            f"tools[{index}].type", f"{tool.type!r} is not supported; no tool runs at the server, use function"
        )
    if not tool.name:
        raise invalid(f"tools[{index}].name", "is missing")
    function: Json = {"name": tool.name, "parameters": tool.parameters or {"type": "object", "properties": {}}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | Json | None:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case ResponseToolChoice(type="function", name=str(name)):
            return _named_tool("function", name)
        case ResponseToolChoice(type="allowed_tools", mode=str(mode), tools=list(tools)):
            allowed = {"mode": mode, "tools": [_named_tool(tool.type, tool.name) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            raise invalid(
                "tool_choice",
                'must be "none", "auto", "required", {"type": "function", "name": NAME} or'
                ' {"type": "allowed_tools", "mode": MODE, "tools": LIST}',
            )


def _named_tool(kind: str, name: str | None) -> Json:
    return {"type": kind, "function": None if name is None else {"name": name}}


def _format(wanted: TextFormat | None) -> Json | None:
    match wanted:
        case None | TextFormat(type="text"):
            return None
        case TextFormat(type="json_object"):
            return {"type": "json_object"}
        case TextFormat(type="json_schema", schema=dict(schema)):
            return {"type": "json_schema", "json_schema": {"name": wanted.name or "output", "schema": schema}}
        case _:
            raise invalid("text.format", "must be of type text, json_object, or json_schema with a schema")


# Translation of answers

_DELTAS = {
    BlockKind.TEXT: "response.output_text.delta",
    BlockKind.REASONING: "response.reasoning_text.delta",
    BlockKind.CALL: "response.function_call_arguments.delta",
}


class ResponseWriter:
    """Writes an answer in the form of the Responses API. Implements `AnswerWriter`."""

    def __init__(self, start: AnswerStart, body: ResponsesBody) -> None:
        self._start = start
        self._body = body
        self._sent = start.events
        self._blocks = AnswerBlocks()
        self._began = False
        self._status = "completed"  # the status of items that end from now on

    def chunk(self, delta: Delta) -> bytes:
        return self._written(self._blocks.add(delta))

    def last_chunks(self, finished: Finished) -> bytes:
        if finished.finish is Finish.LENGTH:
            self._status = "incomplete"
        ends = self._written(self._blocks.finish(finished.text))
        response = self._complete(finished)
        return ends + self._event({"type": f"response.{response['status']}", "response": response})

    def whole(self, finished: Finished) -> bytes:
        for _ in self._blocks.finish(finished.text):
            pass
        return msgspec.json.encode(self._complete(finished))

    def _written(self, changes: Iterable[BlockChange]) -> bytes:
        return b"".join([self._event(event) for change in changes for event in self._changed(change)])

    def _event(self, event: Json) -> bytes:
        """Return an event without the text that the client has already; return nothing if the client has the whole event.

        Before the first event, also return the events that begin the answer.
        """
        begin = b""
        if not self._began:
            self._began = True
            started = self._response("in_progress", (), None)
            begin = self._event({"type": "response.created", "response": started})
            begin += self._event({"type": "response.in_progress", "response": started})
        sent = self._sent
        if "delta" in event:
            if not (part := sent.new_part(event["delta"])):
                return begin
            event["delta"] = part
        elif not sent.is_new():
            return begin
        return begin + sent.id_line() + named_event(event | {"sequence_number": sent.sent - 1})

    def _changed(self, change: BlockChange) -> list[Json]:
        block = change.block
        item = {"item_id": self._item_id(block), "output_index": block.index}
        place = item if block.kind is BlockKind.CALL else item | {"content_index": 0}
        match change:
            case BlockBegun():
                added = {
                    "type": "response.output_item.added",
                    "output_index": block.index,
                    "item": self._item(block, None),
                }
                if block.kind is BlockKind.CALL:
                    return [added]
                return [added, {"type": "response.content_part.added", "part": _part(block, ""), **place}]
            case BlockGrown(_, piece):
                more: Json = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
                return [{"type": _DELTAS[block.kind], "delta": piece, **place, **more}]
            case BlockEnded():
                done = {
                    "type": "response.output_item.done",
                    "output_index": block.index,
                    "item": self._item(block, self._status),
                }
                return [*_ends(block, place), done]

    def _complete(self, finished: Finished) -> Json:
        cut = finished.finish is Finish.LENGTH
        blocks = self._blocks.blocks
        output = [self._item(block, "completed") for block in blocks]
        if cut and output:
            output[-1]["status"] = "incomplete"
        return self._response("incomplete" if cut else "completed", output, finished.usage)

    def _response(self, status: str, output: Sequence[Json], usage: Usage | None) -> Json:
        body = self._body
        return {
            "id": f"resp_{self._start.request_id}",
            "object": "response",
            "created_at": self._start.created,
            "completed_at": max(int(unix_seconds()), self._start.created) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._start.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or ReasoningOptions(),
            "service_tier": "default",
            "store": False,
            "temperature": self._start.sampling.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else _text_options(body.text),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self._start.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "metadata": body.metadata or {},
        }

    def _item_id(self, block: AnswerBlock) -> str:
        kind = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}[block.kind]
        return f"{kind}_{self._start.request_id}_{block.index}"

    def _item(self, block: AnswerBlock, status: str | None) -> Json:
        """Return an output item. Status None stands for an item that has just begun and has no content yet."""
        content = block.content if status is not None else ""
        parts = [] if status is None else [_part(block, content)]
        item: Json = {"id": self._item_id(block), "status": status or "in_progress"}
        match block.kind:
            case BlockKind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": parts}
            case BlockKind.REASONING:
                return item | {"type": "reasoning", "summary": [], "content": parts}
            case BlockKind.CALL:
                return item | {
                    "type": "function_call",
                    "call_id": block.call_id,
                    "name": block.name,
                    "arguments": content,
                }


def _part(block: AnswerBlock, content: str) -> Json:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": content}
    return {"type": "output_text", "text": content, "annotations": [], "logprobs": []}


def _ends(block: AnswerBlock, place: Json) -> list[Json]:
    """Return the events that end the content of a block."""
    content = block.content
    done: Json
    match block.kind:
        case BlockKind.CALL:
            return [
                {"type": "response.function_call_arguments.done", "name": block.name, "arguments": content, **place}
            ]
        case BlockKind.TEXT:
            done = {"type": "response.output_text.done", "text": content, "logprobs": [], **place}
        case BlockKind.REASONING:
            done = {"type": "response.reasoning_text.done", "text": content, **place}
    return [done, {"type": "response.content_part.done", "part": _part(block, content), **place}]


def _text_options(text: TextOptions) -> Json:
    wanted = text.format
    if wanted is None:
        return {"format": {"type": "text"}}
    fields = {"type": wanted.type, "name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
    return {"format": {name: value for name, value in fields.items() if value is not None}}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
