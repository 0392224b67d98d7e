"""Answers of the OpenAI API: one object, or server-sent events.

The bytes that all events of a request share are encoded once, so a streamed token costs little.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from fleet.core.ids import ModelName
from fleet.core.requests import (
    CallDelta,
    Delta,
    Finished,
    KvPhase,
    Logprobs,
    ModelCard,
    ToolCall,
    Usage,
    join_calls,
)
from fleet.frontend.openai.requests import OpenAiRequest
from fleet.net.http.exchange import sse_event

DONE = b"data: [DONE]\n\n"
EVENT_START = b"data: "
UNKNOWN_MODEL_LENGTH = 2**31 - 1  # `ModelCard.max_model_len` of a model whose context length is unknown
# OpenAI's value for an impossible token, because JSON has no minus infinity. No lower log probability is sent.
MIN_LOGPROB = -9999.0

Json = dict[str, object]

encode = msgspec.json.encode


class TokenText(Protocol):
    """Function that returns the text of one token, for log probabilities."""

    def __call__(self, model: ModelName, token_id: int) -> str: ...


def count_entries(tokens: int, logprobs: int, alternatives: int | None) -> int:
    """Return how much work it is to format an answer, as `Generation.format_answer` counts it.

    Args:
        tokens: Number of tokens.
        logprobs: Number of tokens that have log probabilities.
        alternatives: Number of alternatives that each of these tokens has; None counts as 0.
    """
    return tokens // 8 + logprobs * (1 + (alternatives or 0))


def model_object(card: ModelCard, created: int) -> Json:
    """Return a model as ``GET /v1/models`` lists it."""
    length: Json = {} if card.max_model_len == UNKNOWN_MODEL_LENGTH else {"max_model_len": card.max_model_len}
    parent: Json = {"parent": card.parent} if card.parent else {}  # vLLM's field for the base model of a LoRA adapter
    return {"id": card.name, "object": "model", "created": created, "owned_by": "fleet", **length, **parent}


class ChoicePlace(Struct, frozen=True):
    """States where an answer is in the list `choices`, and when its stream sends events."""

    index: int
    alone: bool  # True if the request has only this answer, so its end also ends the stream
    detailed: bool = False  # True if each engine step gives an event, even without text


ALONE = ChoicePlace(0, alone=True)


class ChatFormatter:
    """Formats the answers of ``/v1/chat/completions``."""

    def __init__(
        self, parsed: OpenAiRequest, model: ModelName, token_text: TokenText, created: int, place: ChoicePlace = ALONE
    ) -> None:
        self._parsed = parsed
        self._token_text = token_text
        self._model = model
        self._place = place
        self._head = {"id": f"chatcmpl-{parsed.request.id}", "created": created, "model": model}
        self._chunk_head = (
            encode({**self._head, "object": "chat.completion.chunk"})[:-1]
            + b',"choices":[{"index":%d,"delta":{' % place.index
        )
        self._chunk_tail = b"}]" + _null_usage(parsed)
        self._first = b'"role":"assistant",'

    def resume(self) -> None:
        """Leave out the role from now on, because the client already has the first events of this stream."""
        self._first = b""

    def begin(self) -> bytes:
        """Return an event with the role and no text; empty if the client already has the role."""
        return self._content("", b"null") if self._first else b""

    @property
    def head(self) -> Json:
        """The fields that all events of a stream share with the answer in one piece, except ``object``."""
        return self._head

    def annotate(self, inside: Json, outside: Json) -> None:
        """Set the additional fields of all events until this method is called again.

        The fields of `inside` go into the choice, and those of `outside` beside the list of choices.
        """
        self._chunk_tail = _annotated(self._parsed, inside, outside)

    def chunk(self, delta: Delta, start: bytes = EVENT_START) -> bytes:
        """Return the event of new tokens; empty if there is nothing to send. `start` is the text before the event's data."""
        if delta.reasoning or delta.calls:
            return self._parsed_event(delta, start)
        if not delta.text and not delta.logprobs and not self._place.detailed:
            return b""
        logprobs = encode(self._logprobs(delta.token_ids, delta.logprobs)) if delta.logprobs else b"null"
        return self._content(delta.text, logprobs, start)

    def last_chunks(self, finished: Finished, token_ids: Sequence[int]) -> bytes:
        """Return the events that end this answer and, if the request has no other answer, the stream."""
        # If no event with the role was sent yet, `rest` is sent even without text, because it contains the role.
        rest = self._content(finished.text, b"null") if finished.text or self._first else b""
        final = b"".join(
            (EVENT_START, self._chunk_head, b'},"logprobs":null,"finish_reason":', encode(finished.finish),
             self._chunk_tail, b',"fleet":', encode(fleet_object(self._parsed, finished.kv, token_ids)), b"}\n\n")
        )  # fmt: skip
        if not self._place.alone:
            return rest + final
        return (
            rest
            + final
            + usage_chunk(self._parsed, {**self._head, "object": "chat.completion.chunk"}, finished.usage)
            + DONE
        )

    def _content(self, text: str, logprobs: bytes, start: bytes = EVENT_START) -> bytes:
        first, self._first = self._first, b""
        return b"".join(
            (start, self._chunk_head, first, b'"content":', encode(text), b'},"logprobs":', logprobs,
             b',"finish_reason":null', self._chunk_tail, b"}\n\n")
        )  # fmt: skip

    def _parsed_event(self, delta: Delta, start: bytes) -> bytes:
        """Return the event of a delta with reasoning or tool calls."""
        fields: Json = {}
        if self._first:
            self._first = b""
            fields["role"] = "assistant"
        if delta.reasoning:
            fields |= _reasoning(delta.reasoning)
        if delta.text:
            fields["content"] = delta.text
        if delta.calls:
            fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None
        return b"".join(
            (start, self._chunk_head[:-1], encode(fields), b',"logprobs":', encode(logprobs), b',"finish_reason":null',
             self._chunk_tail, b"}\n\n")
        )  # fmt: skip

    def whole(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs],
        finished: Finished,
        reasoning: str = "",
        calls: Sequence[CallDelta] = (),
    ) -> bytes:
        """Return the answer as one object."""
        return encode(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [self.choice(text, token_ids, logprobs, finished, reasoning, calls)],
                "usage": usage_object(finished.usage),
                "fleet": fleet_object(self._parsed, finished.kv, token_ids),
            }
        )

    def choice(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs | None],
        finished: Finished,
        reasoning: str = "",
        calls: Sequence[CallDelta] = (),
    ) -> Json:
        """Return the answer as one element of the list `choices`."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in join_calls(calls)]}
        return {
            "index": self._place.index,
            "message": message,
            "logprobs": self._logprobs(token_ids, logprobs)
            if self._parsed.request.sampling.logprobs is not None
            else None,
            "finish_reason": finished.finish,
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> Json:
        content = []
        for token_id, token in zip(token_ids, logprobs, strict=True):
            assert token is not None, "chats have no echo"
            top = [self._token(other, logprob) for other, logprob in zip(token.top_ids, token.top, strict=True)]
            # Each token is encoded immediately, because its JSON takes a tenth of the memory that its objects take.
            content.append(msgspec.Raw(encode({**self._token(token_id, token.chosen), "top_logprobs": top})))
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(self._model, token_id)
        return {
            "token": text,
            "logprob": max(logprob, MIN_LOGPROB),
            # None if the token is only a part of a character.
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


class CompletionFormatter:
    """Formats the answers of ``/v1/completions``."""

    def __init__(
        self, parsed: OpenAiRequest, model: ModelName, token_text: TokenText, created: int, place: ChoicePlace = ALONE
    ) -> None:
        self._parsed = parsed
        self._token_text = token_text
        self._model = model
        self._place = place
        self._offset = 0  # number of characters before the next token, in the echoed prompt and the answer
        self._head = {
            "id": f"cmpl-{parsed.request.id}",
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._chunk_head = encode(self._head)[:-1] + b',"choices":[{"index":%d,"text":' % place.index
        self._chunk_tail = b"}]" + _null_usage(parsed)

    def resume(self) -> None:
        """Do nothing.

        Only log probabilities make events depend on earlier ones, and streams that can be resumed have none.
        """

    def begin(self) -> bytes:
        """Return no event, because completions have no role."""
        return b""

    @property
    def head(self) -> Json:
        """The fields that all events of a stream share with the answer in one piece."""
        return self._head

    def annotate(self, inside: Json, outside: Json) -> None:
        """Set the additional fields of all events until this method is called again.

        The fields of `inside` go into the choice, and those of `outside` beside the list of choices.
        """
        self._chunk_tail = _annotated(self._parsed, inside, outside)

    def chunk(self, delta: Delta, start: bytes = EVENT_START) -> bytes:
        """Return the event of new tokens; empty if there is nothing to send. `start` is the text before the event's data."""
        if not delta.text and not delta.logprobs and not self._place.detailed:
            return b""
        logprobs = encode(self._logprobs(delta.token_ids, delta.logprobs)) if delta.logprobs else b"null"
        return b"".join(
            (start, self._chunk_head, encode(delta.text), b',"logprobs":', logprobs, b',"finish_reason":null',
             self._chunk_tail, b"}\n\n")
        )  # fmt: skip

    def last_chunks(self, finished: Finished, token_ids: Sequence[int]) -> bytes:
        """Return the events that end this answer and, if the request has no other answer, the stream."""
        final = b"".join(
            (EVENT_START, self._chunk_head, encode(finished.text), b',"logprobs":null,"finish_reason":', encode(finished.finish),
             self._chunk_tail, b',"fleet":', encode(fleet_object(self._parsed, finished.kv, token_ids)), b"}\n\n")
        )  # fmt: skip
        if not self._place.alone:
            return final
        return final + usage_chunk(self._parsed, self._head, finished.usage) + DONE

    def echo(self, text: str, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> bytes:
        """Return the event that repeats the prompt before the answer, with log probabilities if there are any."""
        encoded = encode(self._logprobs(token_ids, logprobs)) if logprobs else b"null"
        return b"".join(
            (EVENT_START, self._chunk_head, encode(text), b',"logprobs":', encoded, b',"finish_reason":null',
             self._chunk_tail, b"}\n\n")
        )  # fmt: skip

    def whole(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs],
        finished: Finished,
        reasoning: str = "",  # noqa: ARG002 - only chat answers have it
        calls: Sequence[CallDelta] = (),  # noqa: ARG002
    ) -> bytes:
        """Return the answer as one object."""
        return encode(
            {
                **self._head,
                "choices": [self.choice(text, token_ids, logprobs, finished)],
                "usage": usage_object(finished.usage),
                "fleet": fleet_object(self._parsed, finished.kv, token_ids),
            }
        )

    def choice(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs | None],
        finished: Finished,
        reasoning: str = "",  # noqa: ARG002 - only chat answers have it
        calls: Sequence[CallDelta] = (),  # noqa: ARG002
    ) -> Json:
        """Return the answer as one element of the list `choices`."""
        return {
            "index": self._place.index,
            "text": text,
            "logprobs": self._logprobs(token_ids, logprobs)
            if self._parsed.request.sampling.logprobs is not None
            else None,
            "finish_reason": finished.finish,
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> Json:
        """Return the object ``logprobs``. An entry of `logprobs` is None for the first token of a prompt, which has no log probability."""
        tokens: list[str] = []
        offsets: list[int] = []
        top: list[Json | None] = []
        for token_id, token in zip(token_ids, logprobs, strict=True):
            text = self._token_text(self._model, token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            if token is None:
                top.append(None)
                continue
            others: Json = {
                self._token_text(self._model, other): max(logprob, MIN_LOGPROB)
                for other, logprob in zip(token.top_ids, token.top, strict=True)
            }
            top.append(others | {text: max(token.chosen, MIN_LOGPROB)})
        return {
            "tokens": tokens,
            "token_logprobs": [None if token is None else max(token.chosen, MIN_LOGPROB) for token in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }


AnswerFormatter = ChatFormatter | CompletionFormatter


def _reasoning(text: str) -> Json:
    """Return the reasoning under two names: `reasoning_content` as in DeepSeek's API, and `reasoning` as in vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: CallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def usage_object(usage: Usage) -> Json:
    """Return the object ``usage`` of the OpenAI API. It has `completion_tokens_details` only if there are reasoning tokens."""
    details: Json = {}
    if usage.reasoning_tokens:
        details["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def _annotated(parsed: OpenAiRequest, inside: Json, outside: Json) -> bytes:
    """Return the end of an event with additional fields. If `outside` has ``usage``, the usual ``"usage": null`` is left out."""
    tail = (b"," + encode(inside)[1:-1] if inside else b"") + b"}]"
    if "usage" not in outside:
        tail += _null_usage(parsed)
    return tail + (b"," + encode(outside)[1:-1] if outside else b"")


def _null_usage(parsed: OpenAiRequest) -> bytes:
    return b',"usage":null' if parsed.include_usage else b""


def usage_chunk(parsed: OpenAiRequest, head: Mapping[str, object], usage: Usage) -> bytes:
    """Return the event with the usage of a stream; empty if the client did not ask for it."""
    if not parsed.include_usage:
        return b""
    return sse_event(encode({**head, "choices": [], "usage": usage_object(usage)}))


def fleet_object(parsed: OpenAiRequest, kv: Sequence[KvPhase], token_ids: Sequence[object]) -> Json:
    """Return the object ``fleet``: the KV report, with the fields of the gRPC message KvProof, and the token ids if requested."""
    phases: list[Json] = [
        {
            "phase": phase.phase,
            "worker_id": phase.worker_id,
            "prompt_blocks": phase.report.prompt_blocks,
            "cached_tokens": phase.report.cached_tokens,
            "origins": [
                {
                    "source": origin.source,
                    "from": origin.origin,
                    "tier": origin.tier,
                    "blocks": origin.blocks,
                    "bytes": origin.bytes,
                }
                for origin in phase.report.origins
            ],
        }
        for phase in kv
    ]
    return {"kv": phases, "token_ids": token_ids} if parsed.return_token_ids else {"kv": phases}
