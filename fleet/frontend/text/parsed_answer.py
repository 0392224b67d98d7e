"""Parsed answers: the reasoning, the text and the tool calls of an answer, as its tokens arrive.

Rules:

1. A worker whose engine has parsers sends reasoning, text and calls together with its tokens (`EngineParsedAnswer`). With
   vLLM, `workers.engines.vllm.answer_parser` parses. Otherwise the router parses the text by a response template
   (`TemplateParsedAnswer`). `fleet.frontend.text.parsing_plan` decides who parses the answer of a request.
2. If output is malformed, the answer is passed on as plain text from the malformed region on.
3. If another worker continues an answer, it parses the answer from the beginning. Its result must begin with the part
   that the client already has, and this part is removed. If the result begins differently, the request fails, so that
   no client gets a mixture of two answers.
"""

import importlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.core.requests import CallDelta, Delta, Logprobs, ToolCall, join_calls, without_surrogates
from fleet.core.work import ParsedDelta, Progress
from fleet.frontend.text.answer_text import AnswerText
from fleet.frontend.text.response_templates import CONTENT, REASONING, TOOL_CALLS

log = logging.getLogger(__name__)

_Match = Callable[..., re.Match[str] | None]
_LITERAL_BEGINNING = re.compile(
    r"(?:\\(\W)|([^\\.^$*+?{}()\[\]|]))(?![*+?{])(?:\\[^K]|(?!\||\(\?(?!P<|:))[^\\])*\Z", re.DOTALL
)
"""Matches regular expressions of which the first character is known, and captures that character. It refuses those with
flags, alternatives or lookarounds."""


class EngineParsedAnswer:
    """Forwards the parts of an answer that the worker's engine has parsed."""

    def __init__(self, request_id: RequestId, *, is_single: bool = False) -> None:
        """Create an empty answer; `is_single` drops all tool calls except the first."""
        self._request_id = request_id
        self._is_single = is_single
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[CallDelta] = []
        self.num_tokens = 0
        self.stopped = False  # True once a stop string has ended the answer
        self.stop_string = ""  # always empty, because workers do not report which stop string ended the answer

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def resume(self, num_tokens: int, text: str, reasoning: str, calls: Sequence[CallDelta]) -> None:
        """Set the part of a resumed answer that the client already has."""
        self.num_tokens = num_tokens
        self._texts, self._reasoning, self._calls = [text], [reasoning], list(calls)

    def take(self, progress: Progress) -> Delta:
        """Add the tokens of an engine step; return what the client gets for them.

        Raises:
            RequestRejected: WORKER_LOST; a worker that continues the answer parses its beginning differently (rule 3).
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
        """Return an empty delta, because nothing is held back here."""
        return Delta(text="", token_ids=())

    def _identified(self, call: CallDelta) -> CallDelta:
        if not call.name or call.id:
            return call
        return CallDelta(
            index=call.index, id=call_id(self._request_id, call.index), name=call.name, arguments=call.arguments
        )

    def _unseen(self, parsed: ParsedDelta) -> ParsedDelta:
        """Remove from `parsed`, the answer from its beginning, what the client already has (rule 3)."""
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
    """Parses an answer by a response template, for workers whose engine does not parse answers."""

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
        """Create an empty answer.

        Args:
            request_id: Id of the request, from which the ids of calls are derived.
            text: Decodes the answer, with special tokens.
            template: Response template, compiled by `ResponseTemplates.compiled`.
            prompt: Text of the prompt's last tokens, because a chat template may begin the answer there.
            tools: Tools of the request; their schemas determine the types of arguments.
            is_single: Whether all tool calls except the first are dropped.
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
        """Add the tokens of an engine step; return what the client gets for them."""
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
        """Return the parts that were held back, when no more tokens come."""
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
    """Divides the text of an answer into regions: reasoning, text, and tool calls.

    Rules:

    1. Text that cannot begin a delimiter cannot end a region. Such text is not given to the parser, which takes several
       microseconds for each piece; without it, a token takes less than one. If the template has a regular expression of
       which the first character is not known, any text can begin a delimiter, and the parser gets all text.
    2. The parser gets at most one delimiter at a time. If it raises an error for a piece, only the events of this piece are
       lost. So the result does not depend on how the text was cut into pieces.
    3. White space between a region and the following text is dropped.
    """

    def __init__(self, template: Any, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        parsing = importlib.import_module("transformers.utils.chat_parsing")
        if template.start_anchor_re.search(prompt) is None:
            prompt = ""  # without an anchor, the parser would take the whole prompt as a part of the answer
        self._fields = template.fields
        self._parser = parsing.ResponseParser(template, prefix=prompt, tools=tools)
        self.find_delimiter, self._piece, self._plain_piece = _delimiters(template)
        # The region that text without a delimiter belongs to; None: only the parser can decide.
        self.plain: str | None = None
        self.held: list[str] = []  # text of a tool call that was not given to the parser yet
        self._unparsed = ""  # text for which the parser has not returned an event yet
        self._call_text = ""  # text of the tool call that is not complete yet
        self._follows = False  # True if the next text directly follows another region (rule 3)
        self._malformed = False
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        for event in self._parser.initial_events:
            self._follows |= event["type"] == "region_close"

    def add(self, text: str) -> None:
        """Add text of the answer and parse it."""
        if self.held:
            text = "".join([*self.held, text])
            self.held = []
        if self._malformed:
            self._texts.append(text)
            return
        position = 0
        while position < len(text):
            match_piece = self._piece if self.plain is None or self._unparsed else self._plain_piece
            piece = match_piece(text, position)[0]  # type: ignore[index]  # it matches at every position
            position += len(piece)
            self._unparsed += piece
            self._parse(lambda piece=piece: self._parser.feed(piece))  # type: ignore[misc]  # bound as a default
        if self._unparsed:
            self.plain = None

    def finish(self) -> None:
        """End the answer."""
        self.add("")
        self._parse(lambda: self._parser.finalize()[1])

    def take(self) -> tuple[str, str, list[ToolCall]]:
        """Return the reasoning, the text and the tool calls that were found since this method was called last."""
        taken = "".join(self._reasoning), "".join(self._texts), self._calls
        self._reasoning, self._texts, self._calls = [], [], []
        return taken

    def _parse(self, events: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        if not self._malformed:
            try:
                for event in events():
                    self._pass(event)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                # Log only the type of the error: its message quotes the answer, and answers must not be logged.
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
        """Remove a delimiter from the beginning of `_unparsed`, if there is one."""
        if delimiter is not None and (found := delimiter.match(self._unparsed)) is not None:
            if field == TOOL_CALLS:
                self._call_text = found[0]
            self._unparsed = self._unparsed[found.end() :]


def _call(value: Mapping[str, Any]) -> ToolCall:
    """Convert a tool call that the parser returned.

    Raises:
        ValueError: The value names no function.
    """
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("the call names no function")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id="", name=without_surrogates(name), arguments=without_surrogates(text))


def _delimiters(template: Any) -> tuple[_Match, _Match, _Match]:
    """Return how to find a template's delimiters in a text.

    Returns:
        A search for text that may begin a delimiter, a match of the next piece for the parser, and a match of the next
        piece while no delimiter has begun. A piece contains the end of at most one delimiter.
    """
    first: set[str] = set()
    last: set[str] = set()
    patterns: list[str] = []
    for field in template.fields.values():
        for literals, pattern in ((field.open_literals, field.open_re), (field.close_literals, field.close_re)):
            if literals is not None:
                first.update(literal[0] for literal in literals)
                last.update(literal[-1] for literal in literals)
            elif pattern is not None:
                patterns.append(pattern.pattern)
    beginnings = [_LITERAL_BEGINNING.match(pattern) for pattern in patterns]
    first.update(found[1] or found[2] for found in beginnings if found is not None)
    begins, ends = (re.escape("".join(sorted(characters))) for characters in (first, last))
    one, rest = re.compile(".", re.DOTALL), re.compile(".+", re.DOTALL)
    if None in beginnings:
        return one.search, one.match, one.match
    if patterns:  # any character may be the last one of a delimiter
        return re.compile(f"[{begins}]").search, one.match, re.compile(f"[^{begins}]+|.", re.DOTALL).match
    if not first:
        return re.compile("(?!)").search, rest.match, rest.match
    piece = re.compile(f"[^{ends}]*[{ends}]|[^{ends}]+")
    return re.compile(f"[{begins}]").search, piece.match, piece.match


def call_id(request_id: RequestId, index: int) -> str:
    """Return the id for a tool call to which the model gave no id; every process computes the same id."""
    return f"call_{request_id}_{index}"
