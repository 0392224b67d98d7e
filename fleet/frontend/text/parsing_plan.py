"""Parsing plan: whether the engine or the router parses an answer into reasoning, text and tool calls.

Rules:

1. The answer to a request with tools that may be called is parsed, or the request is refused. The answer is never passed
   on as text that a client could take for an answer without calls.
2. The answer to a request without tools, or with `tool_choice` "none", is parsed if a parser of its reasoning is known.
   Otherwise it is treated as plain text.
3. The parsers of the workers' engine are preferred. Otherwise the router parses by the response template of the model,
   or by a built-in template for the parser names in the workers' settings.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from fleet.core.errors import RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    AnswerParsing,
    ChatPrompt,
    GenerateRequest,
    ModelCard,
    Sampling,
    TokenBytes,
    ToolCallForm,
    ToolChoice,
)
from fleet.core.work import ParsingTask
from fleet.frontend.text.codec import AnswerText
from fleet.frontend.text.parsed_answer import EngineParsedAnswer, TemplateParsedAnswer
from fleet.frontend.text.response_templates import (
    REASONING,
    TOOL_CALL_FIELDS,
    TOOL_CALLS,
    CompiledTemplate,
    ResponseTemplates,
)
from fleet.router.ports import TextCodec

log = logging.getLogger(__name__)

PREFIX_BYTES = 256 * 4  # bytes of the last 256 tokens of the prompt, in which a chat template may begin the answer


class ParsingPlan(Struct, frozen=True, kw_only=True):
    """Describes how the answer of one request is parsed, and creates the object that collects the parsed answer."""

    task: ParsingTask
    tools: list[Mapping[str, Any]]
    template: CompiledTemplate | None  # None if the engine parses
    # True if structured output must enforce tool calls or their form: the client demands calls, forbids parallel calls, or
    # has strict tools.
    is_demanded: bool

    def constrained(self, sampling: Sampling) -> Sampling:
        """Return the sampling parameters, with structured output added if it must enforce tool calls or their form."""
        return structs.replace(sampling, form=ToolCallForm()) if self.is_demanded else sampling

    def answer(
        self, request_id: RequestId, text: AnswerText, codec: TextCodec, tokens: TokenBytes
    ) -> TemplateParsedAnswer:
        """Create the answer that the router parses. Call this only if there is a template.

        Args:
            request_id: Id of the request.
            text: Decodes the answer.
            codec: Decodes the end of the prompt.
            tokens: Tokens of the prompt.
        """
        assert self.template is not None
        return TemplateParsedAnswer(
            request_id,
            text,
            self.template,
            prompt=codec.decode(tokens[-PREFIX_BYTES:]),
            tools=self.tools,
            is_single=not self.task.parallel_calls,
        )

    def engine_answer(self, request_id: RequestId) -> EngineParsedAnswer:
        """Create the answer that the engine parses. Call this only if there is no template."""
        return EngineParsedAnswer(request_id, is_single=not self.task.parallel_calls)


class ParsingPlans:
    """Decides for each request of one router process how its answer is parsed."""

    def __init__(self) -> None:
        self.templates = ResponseTemplates()
        self._warned: dict[ModelName, str] = {}  # the latest cause that was logged for each model

    def plan(
        self, request: GenerateRequest, parsing: AnswerParsing, card: ModelCard, codec: TextCodec
    ) -> ParsingPlan | None:
        """Return the plan for a request; None if its answer is plain text, which is not parsed.

        Raises:
            RequestRejected: INVALID_ARGUMENT; no parser of tool calls is known for the model (field ``chat.tools``), the
                request demands both tool calls and other structured output, the router's parser is missing or has another
                version, the model's response template is invalid, or the engine parses and the request wants the stop string
                in the text.
        """
        prompt, parsers = request.prompt, card.parsers
        tools, template_args = (prompt.tools, prompt.template_args) if isinstance(prompt, ChatPrompt) else ("", "")
        with_calls = bool(tools) and parsing.tool_choice is not ToolChoice.NONE
        if parsers is not None and parsers.in_engine:
            template, parses_calls, parses_reasoning = None, bool(parsers.tool_calls), bool(parsers.reasoning)
        else:
            template = self._template(card, codec, is_needed=with_calls)
            fields = () if template is None else template.fields
            parses_calls, parses_reasoning = TOOL_CALLS in fields, REASONING in fields
        if with_calls and not parses_calls:
            raise _unknown_parser(card)
        if not with_calls and not parses_reasoning:
            return None
        if template is None and request.stop and request.include_stop_string:
            raise invalid("include_stop_string", "is not supported for answers that the engine parses; leave it out")
        decoded: list[Mapping[str, Any]] = json.loads(tools) if with_calls else []
        is_demanded = with_calls and parsing.tool_choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)
        if is_demanded and request.sampling.form is not None:
            raise invalid(
                "parsing.tool_choice", "demands tool calls, which excludes other structured output; leave one out"
            )
        is_limited = with_calls and (not parsing.parallel_calls or any(map(_is_strict, decoded)))
        return ParsingPlan(
            task=ParsingTask(
                tools=tools if with_calls else "",
                tool_choice=parsing.tool_choice if with_calls else ToolChoice.NONE,
                function=parsing.function,
                parallel_calls=parsing.parallel_calls,
                template_args=template_args,
                stop=request.stop,
                earlier_calls=_earlier_calls(prompt) if isinstance(prompt, ChatPrompt) else 0,
            ),
            tools=decoded,
            template=template,
            is_demanded=is_demanded or (is_limited and request.sampling.form is None),
        )

    def _template(self, card: ModelCard, codec: TextCodec, *, is_needed: bool) -> CompiledTemplate | None:
        """Return the compiled response template of a model; None if there is none.

        If the template is unusable, this raises `RequestRejected` if `is_needed`, and otherwise returns None.
        """
        try:
            return self.templates.compiled(card.name, codec.response_template, card.parsers)
        except RequestRejected as refused:
            if is_needed:
                raise
            if self._warned.get(card.name) != refused.message:  # log a cause once, and not for each request
                self._warned[card.name] = refused.message
                log.warning("reasoning stays in the text", extra={"model": card.name, "cause": refused.message})
            return None


def _unknown_parser(card: ModelCard) -> Exception:
    named = "" if card.parsers is None else card.parsers.tool_calls
    if named:
        return invalid(
            "chat.tools",
            f"the workers of {card.name!r} do not parse, and the router knows no parser {named!r}; set their"
            f" tool_call_parser to one of {', '.join(TOOL_CALL_FIELDS)}",
        )
    return invalid(
        "chat.tools",
        f"no parser of tool calls is known for {card.name!r}; set tool_call_parser of its workers (fleet up"
        " --tool-call-parser NAME) to the name of vLLM's parser for this model, or leave the tools out",
    )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool.get("strict") or tool["function"].get("strict"))


def _earlier_calls(prompt: ChatPrompt) -> int:
    """Return the number of tool calls in the conversation so far."""
    return sum(len(json.loads(message.tool_calls)) for message in prompt.messages if message.tool_calls)
