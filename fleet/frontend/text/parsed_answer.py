"""Parsed answers: the reasoning, the text and the tool calls of an answer, as its tokens arrive.

Rules:

1. A worker whose engine has parsers sends what its tokens mean (`EngineParsedAnswer`); with vLLM, the parsing itself is
   in `workers.engines.vllm.answer_parser`. Otherwise the router parses the text by a response template
   (`TemplateParsedAnswer`). `fleet.frontend.text.parsing_plan` decides which of them a request gets.
2. Malformed output is text: from the malformed region on, the rest of the answer is passed on as the model wrote it.
3. Another worker that continues an answer parses it from the beginning. What the client has is removed from the result,
   and must be its beginning; otherwise the request fails, so that no client gets a mixture of two answers.
"""

import importlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.core.requests import CallDelta, Delta, Logprobs, ToolCall, join_calls
from fleet.core.work import ParsedDelta, Progress
from fleet.frontend.text.answer_text import AnswerText
from fleet.frontend.text.response_templates import CONTENT, REASONING, TOOL_CALLS

log = logging.getLogger(__name__)


class EngineParsedAnswer:
    """The answer of a worker that parses."""

    def __init__(self, request_id: RequestId, *, is_single: bool = False) -> None:
        """Begin an answer; `is_single` leaves out all calls but the first."""
        self._request_id = request_id
        self._is_single = is_single
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[CallDelta] = []
        self.num_tokens = 0
        self.stopped = False  # True after a stop string
        self.stop_string = ""  # workers do not tell which one

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def resume(self, num_tokens: int, text: str, reasoning: str, calls: Sequence[CallDelta]) -> None:
        """Begin with what the client has of an answer that another router began."""
        self.num_tokens = num_tokens
        self._texts, self._reasoning, self._calls = [text], [reasoning], list(calls)

    def take(self, progress: Progress) -> Delta:
        """Add the tokens of a step.

        Raises:
            RequestRejected: WORKER_LOST; another worker continues the answer and parses its beginning differently.
        """
        self.num_tokens += len(progress.token_ids)
        parsed = progress.parsed
        if parsed is None:
            return Delta(text="", token_ids=progress.token_ids, logprobs=progress.logprobs)
        if parsed.from_start and self.num_tokens > len(progress.token_ids):
            parsed = self._unseen(parsed)
        self.stopped = parsed.stopped
        calls = parsed.calls
        if calls:
            calls = tuple([self._identified(call) for call in calls if not (self._is_single and call.index)])
            self._calls += calls
        if parsed.reasoning:
            self._reasoning.append(parsed.reasoning)
        if parsed.text:
            self._texts.append(parsed.text)
        return Delta(
            text=parsed.text,
            token_ids=progress.token_ids,
            logprobs=progress.logprobs,
            reasoning=parsed.reasoning,
            calls=calls,
        )

    def finish(self) -> Delta:
        """Return the rest of the answer; a worker keeps none."""
        return Delta(text="", token_ids=())

    def _identified(self, call: CallDelta) -> CallDelta:
        if not call.name or call.id:
            return call
        return CallDelta(
            index=call.index, id=call_id(self._request_id, call.index), name=call.name, arguments=call.arguments
        )

    def _unseen(self, parsed: ParsedDelta) -> ParsedDelta:
        """Return what the client does not have yet of `parsed`, which is the answer from its beginning."""
        known = dict(enumerate(join_calls(self._calls)))
        calls = []
        for index, call in enumerate(join_calls(parsed.calls)):
            if (seen := known.pop(index, None)) is None:
                calls.append(CallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments))
            elif seen.name != call.name:
                raise _differs()
            elif rest := _after(call.arguments, seen.arguments):
                calls.append(CallDelta(index=index, arguments=rest))
        if known:
            raise _differs()
        return ParsedDelta(
            text=_after(parsed.text, "".join(self._texts)),
            reasoning=_after(parsed.reasoning, "".join(self._reasoning)),
            calls=tuple(calls),
            stopped=parsed.stopped,
        )


def _after(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise _differs()
    return text[len(beginning) :]


def _differs() -> RequestRejected:
    return RequestRejected(
        Reason.WORKER_LOST,
        "the worker was lost, and another one parses the beginning of the answer differently; send the request again",
    )


class TemplateParsedAnswer:
    """The answer of a worker that does not parse, parsed here by a response template."""

    def __init__(
        self,
        request_id: RequestId,
        text: AnswerText,
        template: Any,
        *,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        is_single: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            request_id: The request, from which the ids of calls are derived.
            text: The text of the answer, special tokens included.
            template: The template, as `ResponseTemplates.compiled` returns it.
            prompt: The end of the prompt's text; the template may begin the answer in it.
            tools: The tools of the request, by whose schemas arguments are cast.
            is_single: Whether all calls but the first are left out.
        """
        self._is_single = is_single
        self.request_id = request_id
        self._text = text
        self._regions = _Regions(template, prompt, tools)
        self._calls = 0

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def stop_string(self) -> str:
        return self._text.stop_string

    @property
    def has_calls(self) -> bool:
        return self._calls > 0

    def take(self, progress: Progress) -> Delta:
        """Add the tokens of a step."""
        delta = self._text.add(progress.token_ids, progress.logprobs)
        regions = self._regions
        if regions.plain is None or regions.find_delimiter(delta.text) is not None:
            regions.add(delta.text)
            return self._taken(delta.token_ids, delta.logprobs)
        if regions.plain == CONTENT:
            return delta
        if regions.plain == REASONING:
            return Delta(text="", token_ids=delta.token_ids, logprobs=delta.logprobs, reasoning=delta.text)
        regions.held.append(delta.text)
        return Delta(text="", token_ids=delta.token_ids, logprobs=delta.logprobs)

    def finish(self) -> Delta:
        """Return the rest of the answer, when no more tokens come."""
        self._regions.add(self._text.finish())
        self._regions.finish()
        return self._taken((), ())

    def _taken(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> Delta:
        reasoning, text, calls = self._regions.take()
        parts = []
        for call in calls[: 1 - self._calls] if self._is_single else calls:
            identity = call_id(self.request_id, self._calls)
            parts.append(CallDelta(index=self._calls, id=identity, name=call.name, arguments=call.arguments))
            self._calls += 1
        return Delta(text=text, token_ids=token_ids, logprobs=logprobs, reasoning=reasoning, calls=tuple(parts))


class _Regions:
    """The regions of an answer: reasoning, text, and tool calls.

    Rules:

    1. Text without the first character of a delimiter cannot end a region. Such text does not go through the parser,
       which takes several microseconds for each piece.
    2. The parser gets at most one delimiter at a time. If it refuses a region, it loses the events of that piece alone,
       so the result does not depend on how the text was cut into pieces.
    3. White space between a region and the text after it is not text.
    """

    def __init__(self, template: Any, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        parsing = importlib.import_module("transformers.utils.chat_parsing")
        if template.start_anchor_re.search(prompt) is None:
            prompt = ""  # the parser would take the whole prompt for the answer
        self._fields = template.fields
        self._parser = parsing.ResponseParser(template, prefix=prompt, tools=tools)
        first, last = _delimiter_characters(template)
        self._pieces = re.compile(f"[^{last}]*[{last}]|[^{last}]+")
        self.find_delimiter = re.compile(f"[{first}]").search
        self.plain: str | None = None  # the region of all text without a delimiter; None: the parser has to decide
        self.held: list[str] = []  # text of a tool call that the parser does not need yet
        self._unparsed = ""  # text that the parser's events do not cover yet
        self._call_text = ""  # the beginning of a call that is not complete
        self._follows = False  # the next text follows another region (rule 3)
        self._malformed = False
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        for event in self._parser.initial_events:
            self._follows |= event["type"] == "region_close"

    def add(self, text: str) -> None:
        """Add text."""
        if self.held:
            text = "".join([*self.held, text])
            self.held = []
        for piece in self._pieces.findall(text):
            self._unparsed += piece
            self._parse(lambda piece=piece: self._parser.feed(piece))  # type: ignore[misc]  # bound as a default
        if self._unparsed:
            self.plain = None

    def finish(self) -> None:
        """Add nothing more."""
        self.add("")
        self._parse(lambda: self._parser.finalize()[1])

    def take(self) -> tuple[str, str, list[ToolCall]]:
        """Return the reasoning, the text and the calls since the last call."""
        taken = "".join(self._reasoning), "".join(self._texts), self._calls
        self._reasoning, self._texts, self._calls = [], [], []
        return taken

    def _parse(self, events: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        if not self._malformed:
            try:
                for event in events():
                    self._pass(event)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                # The message of the error has parts of the answer, which belong in no log.
                log.info("answer malformed, passing the rest as text", extra={"cause": type(error).__name__})
                self._malformed = True
                self.plain = None
                self._unparsed = self._call_text + self._unparsed
        if self._malformed:
            self._texts.append(self._unparsed)
            self._unparsed = ""

    def _pass(self, event: Mapping[str, Any]) -> None:
        field = event["field"]
        if event["type"] == "region_open":
            self._consume(field, self._fields[field].open_re)
        elif event["type"] == "region_chunk":
            text = event["text"]
            self._unparsed = self._unparsed[len(text) :]
            self._chunk(field, text)
        else:
            if field == TOOL_CALLS:
                values = event["value"]
                self._calls += [_call(value) for value in (values if isinstance(values, list) else [values])]
            self._consume("", self._fields[field].close_re)
            self._call_text = ""
            self._follows = True
            self.plain = None

    def _chunk(self, field: str, text: str) -> None:
        if field == TOOL_CALLS:
            self._call_text += text
        elif field == REASONING:
            self._reasoning.append(text)
        elif text := text.lstrip() if self._follows else text:
            self._follows = False
            self._texts.append(text)
        else:
            return
        self.plain = field

    def _consume(self, field: str, delimiter: Any) -> None:
        """Remove a delimiter from the text that is not covered yet."""
        if delimiter is not None and (found := delimiter.match(self._unparsed)) is not None:
            if field == TOOL_CALLS:
                self._call_text = found[0]
            self._unparsed = self._unparsed[found.end() :]


def _call(value: Mapping[str, Any]) -> ToolCall:
    """Return a call of the parser.

    Raises:
        ValueError: It is not a call.
    """
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("the call names no function")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id="", name=name, arguments=text)


def _delimiter_characters(template: Any) -> tuple[str, str]:
    """Return the first and the last characters of a template's delimiters, for character classes."""
    first, last = set(), set()
    for field in template.fields.values():
        for literals, pattern in ((field.open_literals, field.open_re), (field.close_literals, field.close_re)):
            for literal in literals if literals is not None else [] if pattern is None else [pattern.pattern]:
                first.add(literal[0])
                last.add(literal[-1])
    return re.escape("".join(sorted(first))), re.escape("".join(sorted(last)))


def call_id(request_id: RequestId, index: int) -> str:
    """Return the id of a call for which the model gave none; it is the same wherever the answer is parsed."""
    return f"call_{request_id}_{index}"
