"""Scripts: texts that the simulated engine writes instead of random text, for structured output, tools and reasoning.

Rules:

1. Of the structured outputs, the engine supports any JSON object, a JSON schema and a choice. It refuses a regular
   expression and a grammar.
2. Demanded tool calls are written as the worker's parser expects them, with arguments that the tool's schema allows.
   The engine calls the tool that the request names. If the request demands a call but names no tool, the engine calls
   the tools of the conversation in turn: the first tool in the first call, the second tool in the second call, and so
   on. If there are more calls than tools, the last tool is called again. So an agent that goes on until a certain tool
   is called ends at some time. If the request leaves the decision to the model, the engine calls the first tool only
   once in a conversation, so that an agent does not go on for ever.
3. If the worker has a reasoning parser, each answer that has to be parsed (`Start.parsing`) begins with a sentence of
   reasoning, unless the prompt has ended the reasoning. The sentence is cut where the request limits the tokens of the
   reasoning.
4. All other text of an answer is the model's random text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer

from fleet.core.requests import TOKEN_BYTES, AnswerParsers, AnyObject, Choice, JsonSchema, ToolCallForm, ToolChoice
from fleet.core.work import ParsingTask, Start
from workers.engines.simulated.schema_values import value_of

REASONING = "A short thought."
# Number of bytes at the end of the prompt in which the script writer looks for the beginning of the reasoning.
PROMPT_BYTES = 64 * TOKEN_BYTES


class Script(Struct, frozen=True):
    """Holds the tokens with which an answer begins, instead of the model's random tokens."""

    tokens: tuple[int, ...]
    is_whole: bool  # True if the answer ends after these tokens; False: the model's random tokens follow


class ScriptWriter:
    """Writes the scripts (`Script`) for the requests of one engine, by the rules of this module."""

    def __init__(self, tokenizer: Tokenizer, parsers: AnswerParsers | None) -> None:
        self.tokenizer = tokenizer
        self._parsers = AnswerParsers() if parsers is None else parsers

    @staticmethod
    def open(model_dir: str, vocab_size: int, parsers: AnswerParsers | None) -> "ScriptWriter | None":
        """Return the writer for a model folder; None if the folder has no tokenizer.json, or one with more than `vocab_size` tokens."""
        path = Path(model_dir) / "tokenizer.json"
        if not model_dir or not path.is_file():
            return None
        tokenizer = Tokenizer.from_file(str(path))
        return ScriptWriter(tokenizer, parsers) if tokenizer.get_vocab_size() <= vocab_size else None

    def write(self, start: Start) -> Script | None:
        """Return the script of an attempt; None if the whole answer is the model's random text.

        Raises:
            ValueError: This engine does not support the demanded structured output, no value fits a schema, or tool calls are demanded
                without tools. The message states the reason.
        """
        answer = self._answer(start)
        reasoning = self._reasoning(start)
        if answer is None and not reasoning:
            return None
        tokens = self.tokenizer.encode(reasoning + (answer or ""), add_special_tokens=False).ids
        return Script(tuple(tokens), is_whole=answer is not None)

    def _answer(self, start: Start) -> str | None:
        match start.sampling.form:
            case AnyObject():
                return "{}"
            case JsonSchema(schema=schema):
                return json.dumps(value_of(json.loads(schema)), ensure_ascii=False)
            case Choice(strings=strings):
                return strings[0]
            case ToolCallForm():
                if start.parsing is None or not start.parsing.tools:
                    raise ValueError("tool calls are demanded, and there are no tools")
                return self._call(start.parsing)
            case None:
                parsing = start.parsing
                calls = parsing is not None and parsing.tools and parsing.tool_choice is ToolChoice.AUTO
                return self._call(parsing) if parsing is not None and calls and not parsing.earlier_calls else None
            case _:
                raise ValueError("a simulated engine keeps JSON schemas and choices, and no other form; leave it out")

    def _call(self, parsing: ParsingTask) -> str | None:
        if parsing.tool_choice is ToolChoice.AUTO and parsing.earlier_calls:
            return None
        tools: list[Mapping[str, Any]] = [tool["function"] for tool in json.loads(parsing.tools)]
        named = [tool for tool in tools if tool["name"] == parsing.function]
        tool = named[0] if named else tools[min(parsing.earlier_calls, len(tools) - 1)]
        arguments = value_of(tool.get("parameters") or {"type": "object"})
        if self._parsers.tool_calls in ("qwen3_coder", "qwen3_xml"):
            return _xml_call(tool["name"], arguments)
        call = {"name": tool["name"], "arguments": arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

    def _reasoning(self, start: Start) -> str:
        if not self._parsers.reasoning or start.parsing is None:
            return ""
        end = len(start.tokens) - start.generated_tokens * TOKEN_BYTES  # from this byte on, tokens belong to the answer
        ids = [
            int.from_bytes(start.tokens[at : at + TOKEN_BYTES], "little")
            for at in range(max(0, end - PROMPT_BYTES), end, TOKEN_BYTES)
        ]
        prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
        begun, closed = prompt.rfind("<think>"), prompt.rfind("</think>")
        if closed > begun:
            return ""
        thought = REASONING
        if (most := start.sampling.thinking_tokens) is not None:
            thought = self.tokenizer.decode(self.tokenizer.encode(REASONING, add_special_tokens=False).ids[:most])
        return f"{thought}</think>" if begun >= 0 else f"<think>{thought}</think>"


def _xml_call(name: str, arguments: Any) -> str:
    parameters = arguments.items() if isinstance(arguments, dict) else ()
    lines = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in parameters
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"
