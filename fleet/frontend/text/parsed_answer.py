"""Parsed answers: the reasoning, the text and the tool calls of an answer, as its tokens arrive.

Rules:

1. A worker whose engine has parsers sends reasoning, text and calls together with its tokens (`EngineParsedAnswer`). With
   vLLM, `workers.engines.vllm.answer_parser` parses. Otherwise the router parses the text by a response template
   (`TemplateParsedAnswer`). `fleet.frontend.text.parsing_plan` decides who parses the answer of a request.
2. If output is malformed, the answer is passed on as plain text from the malformed region on.
3. If another worker continues an answer, it parses the answer from the beginning. Its result must begin with the part
   that the client already has, and this part is removed. If the result begins differently, the request fails, so that
   no client gets a mixture of two answers.
4. Neither parser says to which part of the answer a token belongs, so the tokens are counted by steps. The tokens of a step
   count as reasoning if the step adds only reasoning. If it adds other content, too, its tokens are divided in proportion to the
   numbers of characters. Tokens of a step that adds nothing, such as those of a delimiter, are counted with the next content.
5. If no content follows tokens of a step that adds nothing, the two classes count these tokens differently. `TemplateParsedAnswer`
   knows whether the answer is within reasoning, and counts tokens there at once, unless they may begin a delimiter.
   `EngineParsedAnswer` does not know this. At the end of the answer, it counts the tokens that are left as reasoning if the answer
   has nothing but reasoning.
"""

import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.core.requests import CallDelta, Delta, Logprobs, ToolCall, join_calls, merge_calls, without_surrogates
from fleet.core.work import ParsedDelta, Progress
from fleet.frontend.text.codec import AnswerText
from fleet.frontend.text.delimiters import Search
from fleet.frontend.text.response_templates import CONTENT, REASONING, TOOL_CALLS, CompiledTemplate

log = logging.getLogger(__name__)

MAX_DELIMITER_CHARACTERS = 1024
"""Maximum length of the text that the parser may hold because it may become a delimiter. Beyond it, the rest of the answer is passed on
as text (rule 2). The parser searches all held text again for each further character, so the time grows with the square of the length."""

_PARSER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError, TimeoutError)
"""Errors that Hugging Face's parser raises for malformed answers, and TimeoutError, which `LimitedPattern` raises."""

NOWHERE = ""
"""Name of the region for text that belongs to no region of the response template. Such text is dropped, as by Hugging Face's
parser."""


class EngineParsedAnswer:
    """Forwards the parts of an answer that the worker's engine has parsed."""

    def __init__(self, request_id: RequestId, *, is_single: bool = False) -> None:
        """Create an empty answer. If `is_single` is true, all tool calls except the first are dropped."""
        self._request_id = request_id
        self._is_single = is_single
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[CallDelta] = []
        self._uncounted = 0  # number of tokens that will be counted with the next content (rule 4)
        self.reasoning_tokens = 0
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
        self._uncounted += len(progress.token_ids)
        parsed = progress.parsed
        if parsed is None:
            return Delta(text="", token_ids=progress.token_ids, logprobs=progress.logprobs)
        if parsed.from_start and self.num_tokens > len(progress.token_ids):
            parsed = self._unseen(parsed)
        self.stopped = parsed.stopped
        calls = parsed.calls
        if calls:
            calls = tuple([self._identified(call) for call in calls if not (self._is_single and call.index)])
            if len(calls) > 1:
                calls = merge_calls(calls)
            self._calls += calls
        others = parsed.text or calls
        if parsed.reasoning:
            self._reasoning.append(parsed.reasoning)
            tokens = self._uncounted
            self.reasoning_tokens += (
                _reasoning_share(tokens, parsed.reasoning, parsed.text, calls) if others else tokens
            )
        if parsed.reasoning or others:
            self._uncounted = 0
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
        """Count the tokens that are left as reasoning, if the answer has nothing else (rule 5). Return an empty delta: nothing is held back."""
        if any(self._reasoning) and not any(self._texts) and not self._calls:
            self.reasoning_tokens += self._uncounted
            self._uncounted = 0
        return Delta(text="", token_ids=())

    def _identified(self, call: CallDelta) -> CallDelta:
        if not call.name or call.id:
            return call
        return CallDelta(
            index=call.index, id=call_id(self._request_id, call.index), name=call.name, arguments=call.arguments
        )

    def _unseen(self, parsed: ParsedDelta) -> ParsedDelta:
        """Remove the part that the client already has from `parsed`, which is the answer from its beginning (rule 3)."""
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


def _reasoning_share(num_tokens: int, reasoning: str, text: str, calls: Sequence[CallDelta]) -> int:
    """Return how many tokens of a part of the answer count as reasoning (rule 4)."""
    others = len(text) + sum([len(call.name) + len(call.arguments) for call in calls])
    return round(num_tokens * len(reasoning) / max(1, len(reasoning) + others))


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
        template: CompiledTemplate,
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
        self._uncounted = 0  # number of tokens that will be counted with the next content (rule 4)
        self.reasoning_tokens = 0

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
        if regions.plain is None or regions.begun or regions.search(delta.text) is not None:  # type: ignore[misc]
            regions.add(delta.text)
            return self._taken(delta.token_ids, delta.logprobs)
        if regions.plain == CONTENT:
            self._uncounted = 0
            return delta
        self._uncounted += len(delta.token_ids)
        if regions.plain == REASONING:
            self.reasoning_tokens += self._uncounted
            self._uncounted = 0
            return Delta(text="", token_ids=delta.token_ids, logprobs=delta.logprobs, reasoning=delta.text)
        if regions.plain == TOOL_CALLS:
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
        self._uncounted += len(token_ids)
        others = text or parts
        if reasoning:
            tokens = self._uncounted
            self.reasoning_tokens += _reasoning_share(tokens, reasoning, text, parts) if others else tokens
        if reasoning or others:
            self._uncounted = 0
        return Delta(text=text, token_ids=token_ids, logprobs=logprobs, reasoning=reasoning, calls=tuple(parts))


class _Regions:
    """Divides the text of an answer into regions: reasoning, text, and tool calls.

    Rules:

    1. Text in which no delimiter begins cannot end a region. The parser does not get such text, because the parser takes
       several microseconds for each piece. Without the parser, a token takes less than one microsecond. But the parser gets
       the text of a tool call at the end of the call. Where any text may begin a delimiter, the parser gets all text.
    2. The parser gets at most one delimiter at a time. If it raises an error for a piece, only the events of this piece are
       lost. So the result does not depend on how the text was cut into pieces.
    3. White space between a region and the following text is dropped.
    4. The prompt may end with the beginning of a delimiter. The parser completes it with the answer, but text of the prompt is
       never passed on as a part of the answer.
    """

    def __init__(self, compiled: CompiledTemplate, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        parsing = importlib.import_module("transformers.utils.chat_parsing")
        template = compiled.template
        self._fields = template.fields
        try:
            if template.start_anchor_re.search(prompt) is None:
                # The prompt lacks the anchor, which marks where the answer begins. The parser would treat the whole prompt like the answer.
                prompt = ""
            self._parser = parsing.ResponseParser(template, prefix=prompt, tools=tools)
        except _PARSER_ERRORS:  # parse without the prompt, which ends with a malformed call or takes too long to search
            self._parser = parsing.ResponseParser(template, prefix="", tools=tools)
        self._searches = compiled.searches
        self._outside = template.implicit  # region of the text that no delimiters enclose; None: such text is dropped
        # Finds the delimiters that matter in the region in which the parser is; None: any text may begin a delimiter.
        self.search: Search | None
        # The region that text without a delimiter belongs to (NOWHERE: it is dropped); None: only the parser can decide.
        self.plain: str | None
        self._enter(self._outside)
        self.held: list[str] = []  # text of a tool call that was not given to the parser yet
        self.begun = ""  # text, not given to the parser yet, that may be the beginning of a delimiter
        self._prompt_length = len(self._buffer)  # length of the prompt's text, with which the buffer begins
        self._position = 0  # start, in the buffer, of the text for which no event has come yet
        self._num_held = 0  # length of the text that the parser holds because it may become a delimiter
        self._update_position()
        self._call_text = ""  # text of the tool call that is not complete yet
        self._follows = False  # True if the next text directly follows another region (rule 3)
        self._malformed = False
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        for event in self._parser.initial_events:
            self._move(event)
            self._follows |= event["type"] == "region_close"
        if self._num_held:
            self.plain = None  # the parser has to complete the delimiter that the prompt begins (rule 4)

    @property
    def _buffer(self) -> str:
        """All text that the parser got."""
        return self._parser._buffer  # type: ignore[no-any-return]  # noqa: SLF001 - the parser has no public name for it

    def add(self, text: str) -> None:
        """Add text of the answer, and process it.

        Two parts wait: the last characters, if a delimiter may begin with them, and the text of a tool call, until the call ends (rule 1).
        """
        if self.plain is not None and self.search is not None:
            text, self.begun = self.begun + text, ""
            found = self.search(text)
            begin = len(text) if found is None else found.start()
            self._add_plain(self.plain, text[:begin])
            text = text[begin:]
            if found is None or found.lastindex is None:
                self.begun = text
                return
        self._feed(text)

    def finish(self) -> None:
        """Give the parser all text that it did not get yet, and end the answer."""
        text, self.begun = self.begun, ""
        self._feed(text)
        self._parse(lambda: self._parser.finalize()[1])

    def take(self) -> tuple[str, str, list[ToolCall]]:
        """Return the reasoning, the text and the tool calls that were found since this method was called last."""
        taken = "".join(self._reasoning), "".join(self._texts), self._calls
        self._reasoning, self._texts, self._calls = [], [], []
        return taken

    def _add_plain(self, region: str, text: str) -> None:
        """Add text in which no delimiter begins to the content of `region`. For the region NOWHERE, drop it."""
        if region == CONTENT:
            self._texts.append(text)
        elif region == REASONING:
            self._reasoning.append(text)
        elif region == TOOL_CALLS:
            self.held.append(text)

    def _feed(self, text: str) -> None:
        """Give the parser the text of a tool call that was held, and `text`."""
        if self.held:
            text = "".join([*self.held, text])
            self.held = []
        position = 0
        while position < len(text) and not self._malformed:
            if self._num_held > MAX_DELIMITER_CHARACTERS:
                self._give_up("the parser waits for the end of a delimiter")
                break
            end = self._piece_end(text, position)
            piece = text[position:end]
            position = end
            if self.plain == NOWHERE and not self._num_held and self.search(piece) is None:  # type: ignore[misc]
                continue
            self._parse(lambda piece=piece: self._parser.feed(piece))  # type: ignore[misc]  # the default binds this piece
        if self._malformed:
            self._texts.append(text[position:])
        elif self._num_held:
            self.plain = None
        elif self._region is None:
            self._enter(None)  # the parser has dropped what it held

    def _piece_end(self, text: str, position: int) -> int:
        """Return the end of the next piece for the parser, which begins at `position` (rule 2)."""
        if self.search is None or self._num_held:
            return position + 1
        if (found := self.search(text, position)) is None:
            return len(text)
        return found.start() if found.start() > position else found.end()

    def _move(self, event: Mapping[str, Any]) -> None:
        """Note the region in which the parser is after an event."""
        if event["type"] != "region_chunk":
            self._enter(event["field"] if event["type"] == "region_open" else self._outside)

    def _enter(self, region: str | None) -> None:
        """Note the region that the parser is in; None if it is outside of all regions."""
        self._region = region
        self.search = self._searches[region]
        self.plain = NOWHERE if region is None and self.search is not None else None

    def _update_position(self) -> None:
        """Note how far the parser has come. Its events do not tell this, because it returns no event for text that it drops."""
        self._position = self._parser._pos  # noqa: SLF001 - the parser has no public name for it
        self._num_held = len(self._buffer) - self._position

    def _parse(self, events: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        if not self._malformed:
            try:
                for event in events():
                    self._pass(event)
                self._update_position()
            except _PARSER_ERRORS as error:
                self._give_up(type(error).__name__)  # without the message, which quotes the answer

    def _give_up(self, cause: str) -> None:
        """Pass on all text that was not parsed yet, and all text that follows, as plain text.

        The cause is logged and must not quote the answer.
        """
        log.info("answer malformed, passing the rest as text", extra={"cause": cause})
        self._malformed = True
        self.plain = None
        self._texts.append(self._call_text + self._answer_text(self._position, len(self._buffer)))

    def _pass(self, event: Mapping[str, Any]) -> None:
        self._move(event)
        field = event["field"]
        if event["type"] == "region_open":
            self._consume(field, self._fields[field].open_re)
        elif event["type"] == "region_chunk":
            text, begin = event["text"], self._position
            self._position += len(text)
            self._chunk(field, text if begin >= self._prompt_length else self._answer_text(begin, self._position))
        else:
            if field == TOOL_CALLS:
                values = event["value"]
                self._calls += [_call(value) for value in (values if isinstance(values, list) else [values])]
            self._consume("", self._fields[field].close_re)
            self._call_text = ""
            self._follows = True

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
        if self.search is not None:
            self.plain = field if field in (REASONING, TOOL_CALLS) else CONTENT

    def _answer_text(self, begin: int, end: int) -> str:
        """Return a part of the buffer, without text of the prompt (rule 4)."""
        return self._buffer[max(begin, self._prompt_length) : end]

    def _consume(self, field: str, delimiter: Any) -> None:
        """Move the position past the next delimiter and the dropped text before it. Without a delimiter, do nothing."""
        if delimiter is not None and (found := delimiter.search(self._buffer, self._position)) is not None:
            if field == TOOL_CALLS:
                self._call_text = self._answer_text(*found.span())
            self._position = found.end()


def _call(value: Mapping[str, Any]) -> ToolCall:
    """Convert a tool call that the parser returned.

    Raises:
        ValueError: The value names no function, or its arguments are no JSON object.
    """
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("the call names no function")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not isinstance(json.loads(text, parse_constant=_refuse_constant), dict):
        raise ValueError("the arguments are no JSON object")  # noqa: TRY004  # the value comes from the model, so this is no TypeError
    return ToolCall(id="", name=without_surrogates(name), arguments=without_surrogates(text))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def call_id(request_id: RequestId, index: int) -> str:
    """Return the id for a tool call to which the model gave no id.

    Every process computes the same id, so a resumed answer has it too.
    """
    return f"call_{request_id}_{index}"
