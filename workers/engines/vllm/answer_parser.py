"""Answer parser: takes tool calls and reasoning out of answers, by giving the tokens of each answer to vLLM's own parsers.

If vLLM has a parser for the model, the router asks the worker to parse the answer. Otherwise the router itself parses,
by a response template (`fleet.frontend.text.parsed_answer`). `fleet.frontend.text.parsing_plan` decides between these
two ways.

Rules:

1. A parser gets one token at a time, even if a step of the engine has brought several. The parsed parts of an answer
   therefore depend neither on the steps nor on the worker. A worker that continues an answer first gives the answer's
   earlier tokens to its own parser, and sends the parts of the whole answer (`ParsedDelta.from_start`).
2. vLLM's own `adjust_request` decides which structured output enforces the demanded calls. Depending on the parser, it
   is a structural tag or a JSON schema.
3. If a parser fails on malformed output, it is not used any more for this answer: all text after the parser's last result
   is sent as it is.
4. Some of vLLM's older parsers find other arguments in a stream of tokens than in the whole answer. Tool calls are
   therefore streamed only if the parser is declarative (`engine_based_streaming`) or listed in `STREAMED`. With any
   other parser, the whole text of the answer is parsed at its end, and the calls are sent then.
5. The parts of a call come in order: first its name, then its arguments. A call without arguments gets an empty JSON
   object as its arguments.
"""

import json
import logging
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import AnswerParsers, CallDelta, ToolCallForm, ToolChoice, without_surrogates
from fleet.core.work import ParsedDelta, ParsingTask, Start
from fleet.frontend.text.codec import AnswerText, IncrementalDecoder
from workers.engines.parser_names import AUTO
from workers.engines.vllm import requests as vllm_requests
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.config import ModelConfig
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import Parser
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.tokenizers import TokenizerLike

log = logging.getLogger(__name__)

STREAMED = frozenset(
    {"deepseek_v3", "deepseek_v31", "granite4", "hermes", "hf", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic",
     "longcat", "openai", "pythonic", "qwen3_json"}
)  # fmt: skip
"""Older parsers that find the same calls in a stream as in the whole answer, however the text is divided into tokens. A
test checks most of them."""

# Number of tokens at the end of the prompt that a tokenizer may need to decode the first tokens of the answer.
CONTEXT_TOKENS = 16


def check_names(settings: WorkerSettings) -> None:
    """Refuse settings that name a parser which cannot be used.

    Raises:
        ConfigurationRefused: vLLM does not have the parser, or `vllm.keeps_forms` is off, so that the engine does not
            have the tokenizer that the parser needs. The message names the setting.
    """
    if not {settings.tool_call_parser, settings.reasoning_parser} - {"", AUTO}:
        return
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415 - vLLM is loaded already
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    for setting, name, known in (
        ("tool_call_parser", settings.tool_call_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", settings.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name != AUTO and name not in known:
            raise ConfigurationRefused(f"{setting}: {name!r} is none of vLLM's parsers: {', '.join(sorted(known))}")
        if name and name != AUTO and not settings.vllm.keeps_forms:
            raise ConfigurationRefused(f"{setting}: {name!r} needs the model's tokenizer; set vllm.keeps_forms")


class VllmAnswerParsers:
    """Makes a parser for each answer of one engine. All these parsers are objects of one class of vLLM."""

    def __init__(
        self, names: AnswerParsers, tokenizer: "TokenizerLike", model_config: "ModelConfig", *, model_type: str
    ) -> None:
        """Find vLLM's class of parsers for these names.

        Raises:
            TypeError: A named parser does not fit the tokenizer; the message states the reason.
        """
        from vllm.parser import ParserManager  # noqa: PLC0415 - vLLM is loaded already

        self.names = names
        self.tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer  # every fast tokenizer has a backend tokenizer
        self._model_config = model_config
        parser = ParserManager.get_parser(
            tool_parser_name=names.tool_calls or None,
            reasoning_parser_name=names.reasoning or None,
            enable_auto_tools=True,
            is_harmony=model_type == "gpt_oss",
            tokenizer=tokenizer,
        )
        assert parser is not None, names
        self._parser_type = parser

    @staticmethod
    def fitting(
        names: AnswerParsers | None,
        settings: WorkerSettings,
        tokenizer: "TokenizerLike",
        model_config: "ModelConfig",
        *,
        model_type: str,
    ) -> "VllmAnswerParsers | None":
        """Return the parsers that fit the model, or None if no parser can be used.

        A parser that was chosen by the chat template is left out if the tokenizer does not have the special tokens of
        the parser.

        Raises:
            ConfigurationRefused: A parser that the settings name does not fit the model. The message names the setting.
        """
        if names is None or not settings.vllm.keeps_forms or not hasattr(tokenizer, "backend_tokenizer"):
            return None
        fields = {"tool_call_parser": "tool_calls", "reasoning_parser": "reasoning"}
        named = [setting for setting in fields if getattr(settings, setting) not in ("", AUTO)]
        attempts = [
            names,
            AnswerParsers(tool_calls=names.tool_calls, in_engine=True),
            AnswerParsers(reasoning=names.reasoning, in_engine=True),
        ]
        unfit: BaseException | None = None
        for attempt in attempts:
            used = [setting for setting, field in fields.items() if getattr(attempt, field)]
            if not used:
                continue
            try:
                parsers = VllmAnswerParsers(attempt, tokenizer, model_config, model_type=model_type)
            except TypeError as error:
                cause = error.__cause__ or error
                if len(used) == 1 and used[0] in named:
                    raise ConfigurationRefused(f"{used[0]}: {cause}") from error
                unfit = unfit or cause
                log.warning("parser does not fit the model", extra={"cause": str(cause)})
                continue
            if set(named) <= set(used):
                return parsers
        if named:  # the settings name both parsers, and each fits the model alone, but not both together
            raise ConfigurationRefused(f"{named[0]}: {unfit}") from unfit
        return None

    def open(self, start: Start, task: ParsingTask) -> "VllmAnswerParser":
        """Return a new parser for the answer of an attempt.

        Raises:
            ValueError: vLLM refuses the tools or the demanded calls.
        """
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415 - vLLM is loaded already

        template_args: dict[str, Any] = json.loads(task.template_args) if task.template_args else {}
        try:
            request = _chat_request(start, task, template_args)

            def new_parser() -> "Parser":
                return self._parser_type(
                    self.tokenizer,
                    request.tools,
                    chat_template_kwargs=template_args,
                    model_config=self._model_config,
                )

            parser = new_parser()
            adjusted = _constrained(parser, request, task)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            # vLLM raises these for a tool whose schema is no valid JSON schema.
            raise ValueError(f"vLLM cannot read the tools: {error!r}") from error
        whole = None if not task.tools or self._streams_calls(parser) else new_parser
        return VllmAnswerParser(start, task, parser, adjusted, self._backend, template_args, whole)

    def _streams_calls(self, parser: "Parser") -> bool:
        tool_parser = parser.tool_parser
        return self.names.tool_calls in STREAMED or tool_parser is None or tool_parser.engine_based_streaming


class VllmAnswerParser:
    """Parses the answer of one attempt with a parser of vLLM, token by token (rule 1)."""

    def __init__(
        self,
        start: Start,
        task: ParsingTask,
        parser: "Parser",
        request: "ChatCompletionRequest",
        tokenizer: "Tokenizer",
        template_args: dict[str, Any],
        whole: "Callable[[], Parser] | None",
    ) -> None:
        """Begin with the tokens of the answer that the attempt already contains (another worker has generated them).

        Args:
            start: The attempt, with its prompt and its sampling parameters.
            task: The tools of the request, and what reasoning and tool calls it demands.
            parser: A new parser.
            request: The request as vLLM's own OpenAI server would have it.
            tokenizer: The model's tokenizer.
            template_args: Variables of the chat template.
            whole: Function that makes a parser for the whole text of the answer, if calls are sent at the end of the
                answer; None if calls are streamed.
        """
        tokens = vllm_requests.token_ids(start)
        prompt = tokens[: len(tokens) - start.generated_tokens]
        self._parser = parser
        self._request = request
        self._prompt = prompt
        parser.set_prompt_token_ids(prompt)
        self.reasoning_ended = request.resolve_reasoning_ended(parser, prompt)
        self.reasoning_parser_kwargs = (
            None if parser.reasoning_parser is None else {"chat_template_kwargs": template_args}
        )
        decoder = IncrementalDecoder(tokenizer, prompt[-CONTEXT_TOKENS:], special=not request.skip_special_tokens)
        self._text = AnswerText(
            decoder,
            stop=task.stop,
            end_token_ids=frozenset(start.sampling.stop_token_ids),
            min_tokens=start.sampling.min_tokens + start.generated_tokens if start.sampling.min_tokens else 0,
        )
        self._calls = _CallParts()
        self._whole = whole
        self._answer: list[str] = []  # all pieces of the answer's text; used only if calls are sent at the end (rule 4)
        self._sent: list[str] = []  # the pieces of content that were sent to the client; used only with `_answer`
        self._token_ids: list[int] = []
        self._unparsed = ""  # text since the parser's last result; sent as it is if the parser fails (rule 3)
        self._failed = False
        self._begun = False
        self._parts: list[tuple[str, str, list[CallDelta]]] = []
        for token_id in tokens[len(prompt) :]:
            self._feed(token_id, is_last=False)

    @property
    def structured_outputs(self) -> "StructuredOutputsParams | None":
        """The structured output that the engine has to enforce, including demanded tool calls.

        It is None if any text is allowed.
        """
        return self._request.extract_structured_outputs()

    @property
    def stopped(self) -> bool:
        """True if the answer's text has reached one of the request's stop strings, which ends the answer."""
        return self._text.stopped

    def add(
        self, token_ids: Sequence[int], *, is_finished: bool, is_cut: bool = False
    ) -> tuple[int, ParsedDelta | None]:
        """Add the tokens of a step.

        Args:
            token_ids: The tokens that the step has generated.
            is_finished: True if the answer ends with these tokens.
            is_cut: True if the answer ends at its length limit, perhaps in the middle of a call.

        Returns: The number of these tokens that belong to the answer (tokens after a stop string do not), and the
        parsed parts; None instead of the parts if no part is complete yet.
        """
        taken = 0
        for token_id in token_ids:
            taken += 1
            self._feed(token_id, is_last=is_finished and taken == len(token_ids))
            if self.stopped:
                break
        if is_finished and not token_ids:
            self._parse(self._text.finish(), [], is_last=True)
        if (is_finished or self.stopped) and not is_cut:
            self._parts.append(("", "", self._calls.finish()))
        return taken, self._take()

    def _feed(self, token_id: int, *, is_last: bool) -> None:
        text = self._text.add((token_id,), ()).text
        if is_last and not self.stopped:
            text += self._text.finish()
        self._parse(text, [token_id], is_last=is_last or self.stopped)

    def _parse(self, text: str, token_ids: list[int], *, is_last: bool) -> None:
        self._unparsed += text
        message = None
        if not self._failed:
            try:
                message = self._parser.parse_delta(text, token_ids, self._request, self._prompt, finished=is_last)
            except Exception as error:  # noqa: BLE001 - supervisor: a parser may raise any exception; the text is then sent unparsed
                # Messages of parsers may contain parts of the answer, which must not be logged.
                log.warning("parser failed, passing the rest as text", extra={"cause": type(error).__name__})
                self._failed = True
        if self._failed:
            self._parts.append(("", self._unparsed, []))
            self._unparsed = ""
        elif message is not None:
            self._pass(message)
        if self._whole is not None and not self._failed:
            self._answer.append(text)
            self._token_ids += token_ids
            if is_last:
                self._parse_whole(self._whole())

    def _parse_whole(self, parser: "Parser") -> None:
        """Parse the whole answer: add its calls, and the text that was not sent because it could have been a call."""
        try:
            _, content, calls = parser.parse(
                "".join(self._answer), self._request, enable_auto_tools=True, model_output_token_ids=self._token_ids
            )
        except Exception as error:  # noqa: BLE001 - supervisor: a parser may raise any exception; the text is then sent unparsed
            log.warning("parser failed, passing the rest as text", extra={"cause": type(error).__name__})
            content, calls = "".join(self._answer), []
        for index, call in enumerate(calls or ()):
            part = CallDelta(
                index=index,
                id=call.id or "",
                name=without_surrogates(call.name),
                arguments=without_surrogates(call.arguments),
            )
            self._parts.append(("", "", [part]))
        sent = "".join(self._sent)
        if content and content.startswith(sent):
            self._parts.append(("", content[len(sent) :], []))

    def _pass(self, message: "DeltaMessage") -> None:
        if self._whole is not None:
            message.tool_calls = []
            self._sent.append(message.content or "")
        calls = [part for call in message.tool_calls or () for part in self._calls.add(call)]
        if message.reasoning or message.content or calls:
            self._parts.append((message.reasoning or "", message.content or "", calls))
            self._unparsed = ""

    def _take(self) -> ParsedDelta | None:
        parts, self._parts = self._parts, []
        first, self._begun = not self._begun, True
        reasoning = "".join([part[0] for part in parts])
        text = "".join([part[1] for part in parts])
        calls = tuple([call for part in parts for call in part[2]])
        if not (first or reasoning or text or calls or self.stopped):
            return None
        return ParsedDelta(text=text, reasoning=reasoning, calls=calls, stopped=self.stopped, from_start=first)


def _constrained(parser: "Parser", request: "ChatCompletionRequest", task: ParsingTask) -> "ChatCompletionRequest":
    """Return the request with the structured output that enforces its demanded tool calls.

    If the grammar library can enforce the schemas of the tools, the arguments follow these schemas. Otherwise only the
    syntax of the calls is enforced, as vLLM does for tools that are not strict.
    """
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel  # noqa: PLC0415 - vLLM is loaded already

    if task.tool_choice not in (ToolChoice.REQUIRED, ToolChoice.NAMED):
        return parser.adjust_request(request)
    parser.tool_strict_level = ToolStrictLevel.PARAMETER
    adjusted = parser.adjust_request(request.model_copy())
    if _is_supported(adjusted.extract_structured_outputs()):
        return adjusted
    parser.tool_strict_level = ToolStrictLevel.AUTO
    return parser.adjust_request(request)


def _is_supported(outputs: "StructuredOutputsParams | None") -> bool:
    """Return whether xgrammar, the library by which vLLM enforces grammars, can enforce a structured output."""
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - vLLM is loaded already
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar  # noqa: PLC0415

    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=copy(outputs)))
    except (TypeError, ValueError, VLLMValidationError):
        return False
    return True


class _CallParts:
    """Puts the parts of an answer's tool calls in order (rule 5), and numbers the calls as their names arrive."""

    def __init__(self) -> None:
        # Number of each call within the answer, by the number that the parser gives it.
        self._numbers: dict[int, int] = {}
        # Arguments that arrived before the name of their call, by the parser's number of the call.
        self._early: dict[int, str] = {}
        self._empty: set[int] = set()  # numbers of the calls that have no arguments so far

    def add(self, call: Any) -> list[CallDelta]:
        """Take a ``DeltaToolCall`` of vLLM's parser, and return the parts of calls that can be sent now."""
        function = call.function
        name = without_surrogates((function.name if function is not None else None) or "")
        arguments = without_surrogates((function.arguments if function is not None else None) or "")
        number = self._numbers.get(call.index)
        if number is None:
            arguments = self._early.pop(call.index, "") + arguments
            if not name:
                self._early[call.index] = arguments
                return []
            number = self._numbers[call.index] = len(self._numbers)
            if not arguments:
                self._empty.add(number)
            return [CallDelta(index=number, id=call.id or "", name=name, arguments=arguments)]
        if not arguments:
            return []
        self._empty.discard(number)
        return [CallDelta(index=number, arguments=arguments)]

    def finish(self) -> list[CallDelta]:
        """Return the missing arguments at the end of an answer: an empty object for each call that has none."""
        empty, self._empty = sorted(self._empty), set()
        return [CallDelta(index=number, arguments="{}") for number in empty]


def _chat_request(start: Start, task: ParsingTask, template_args: dict[str, Any]) -> "ChatCompletionRequest":
    """Return the request as vLLM's own server would have it, with the fields that its parsers read."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415 - vLLM is loaded already

    form = start.sampling.form
    fields: dict[str, Any] = {
        "messages": [_EARLIER_CALL] * task.earlier_calls,
        "chat_template_kwargs": template_args,
        "stream": True,
    }
    if form is not None and not isinstance(form, ToolCallForm):
        fields["structured_outputs"] = vllm_requests.structured_outputs(form)
    if task.tools:
        named = {"type": "function", "function": {"name": task.function}}
        fields["tools"] = json.loads(task.tools)
        fields["tool_choice"] = named if task.tool_choice is ToolChoice.NAMED else task.tool_choice.value
        fields["parallel_tool_calls"] = task.parallel_calls
    return ChatCompletionRequest.model_validate(fields)


_EARLIER_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "call", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
