"""Response templates: how models write reasoning and tool calls, in the format of Hugging Face's response parser.

The parser is `transformers.utils.chat_parsing.ResponseParser` (installed with the extra ``parsers``). A template in the model
folder (``response_template`` in tokenizer_config.json) is preferred. Otherwise the router uses a built-in template of this module,
which it chooses by the parser names in the workers' settings. Workers whose engine parses need no template.
"""

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from msgspec import Struct

from fleet.core.errors import did_you_mean, invalid
from fleet.core.requests import AnswerParsers
from fleet.frontend.text.delimiters import Search, delimiter_searches, may_never_end

CONTENT, REASONING, TOOL_CALLS = "content", "thinking", "tool_calls"
"""Field names in Hugging Face's response templates."""

_VERBATIM = {"content": "text", "content_args": {"strip": False}}
_THINK = {"open": "<think>", "close": "</think>", "repeats": True, "join": "", **_VERBATIM}
_JSON_CALL = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "repeats": True,
    "transform": {"type": "function", "function": "{content}"},
}
_XML_CALL = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    # A value without an end tag takes the rest of the call, so that the value is not lost. The possessive quantifiers keep the
    # time to parse a call linear in its length.
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]++)>\n?"
        r"(?P<value>(?:(?!\n?(?:</parameter>|\Z)).)*+)\n?(?:</parameter>|\Z)"
    },
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}

TOOL_CALL_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "hermes": _JSON_CALL,
    "qwen3_json": _JSON_CALL,
    "qwen3_coder": _XML_CALL,
    "qwen3_xml": _XML_CALL,
}
"""Response templates for tool calls, by vLLM's name of the tool call parser."""

REASONING_FIELDS: Mapping[str, Mapping[str, Any]] = {"deepseek_r1": _THINK, "deepseek_v3": _THINK, "qwen3": _THINK}
"""Response templates for reasoning, by vLLM's name of the reasoning parser."""

UNCHECKED = ("", "auto", "hf")
"""Values of the workers' parser settings that are not checked, because they name no parser. Empty means no parser, ``auto`` the
parser that fits the model folder, and ``hf`` the response template in the model folder."""

MAX_FIELDS, MAX_LITERALS, MAX_LITERAL_CHARACTERS = 64, 64, 256
"""Maximum numbers of fields in a response template, of literals in a field, and of characters in a literal. A template beyond them is
not used, because requests wait while a template is compiled."""

TURN_BEGINS = (
    r"<\|assistant\|>\n?|<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|\[/INST\]"
    r"|<｜Assistant｜>|<start_of_turn>model\n"
)
"""Regular expression of the texts by which common chat templates begin the assistant's turn."""


SEARCH_SECONDS = 0.05
"""Time limit of one search for a delimiter, because the event loop waits for the search. A search usually takes microseconds; an answer
whose search reaches the limit counts as malformed."""


def misspelt_parser(tool_call_parser: str, reasoning_parser: str) -> str:
    """Return an error message for the first setting that seems to misspell a parser of the router; empty if neither does.

    A name unlike all parsers of the router is no error, because it may be a parser that only vLLM has. If neither the
    workers nor the router can parse by this name, only requests with tools are refused.
    """
    for setting, name, known in (
        ("tool_call_parser", tool_call_parser, TOOL_CALL_FIELDS),
        ("reasoning_parser", reasoning_parser, REASONING_FIELDS),
    ):
        if name not in known and name not in UNCHECKED and (meant := did_you_mean(name, known)):
            names = ", ".join(sorted(known))
            return f"{setting}: {name!r} is none of the parsers that the router has: {names}{meant}"
    return ""


class LimitedPattern:
    """A compiled regular expression of the package `regex` whose searches have a time limit.

    For some expressions of model folders, such as (a|aa)+$, the time grows exponentially with the length of the text.
    """

    def __init__(self, pattern: Any) -> None:
        self.pattern: str = pattern.pattern
        self._pattern = pattern

    def search(self, text: str, position: int = 0, *, partial: bool = False) -> Any:
        """Search as the compiled expression does, within the time limit.

        Raises:
            TimeoutError: The search takes longer than `SEARCH_SECONDS`.
        """
        return self._pattern.search(text, position, partial=partial, timeout=SEARCH_SECONDS)

    def finditer(self, text: str) -> Iterator[Any]:
        """Find all matches, as the compiled expression does. Raise TimeoutError like `search`."""
        return self._pattern.finditer(text, timeout=SEARCH_SECONDS)  # type: ignore[no-any-return]


class CompiledTemplate(Struct, frozen=True):
    """A response template, and how to find its delimiters."""

    template: Any  # `ResponseTemplate` of transformers
    searches: Mapping[str | None, Search | None]  # result of `delimiter_searches`: a search for each region

    @property
    def fields(self) -> Mapping[str, Any]:
        """Definitions of the regions, by their names."""
        return self.template.fields  # type: ignore[no-any-return]


class ResponseTemplates:
    """Compiles and caches the response templates of one router process."""

    def __init__(self) -> None:
        # Module of transformers that compiles templates; None before `load`, or if transformers is not installed.
        self._parser: Any = None
        self._missing: ImportError | None = None
        self._compiled: dict[
            tuple[str, str, str], CompiledTemplate | str | None
        ] = {}  # a text says why the template cannot be used; None: the model has no template

    @property
    def is_loaded(self) -> bool:
        """True after `load`, also if the parser is not installed."""
        return self._parser is not None or self._missing is not None

    def load(self) -> None:
        """Import the parser if it is installed. This takes one to three seconds of CPU time."""
        try:
            importlib.import_module("transformers.utils.chat_parsing")
            self._parser = importlib.import_module("transformers.utils.chat_parsing.response_templates")
        except ImportError as error:
            self._missing = error

    def compiled(
        self, model: str, own: Mapping[str, Any] | None, parsers: AnswerParsers | None
    ) -> CompiledTemplate | None:
        """Return the compiled response template of a model; None if there is none.

        Args:
            model: Name of the model.
            own: Template from the model folder; None if the folder has none.
            parsers: Parser names from the settings of its workers; None if they give none.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the parser is not installed or has another version, or the model's own template
                is not valid.
        """
        names = ("", "") if parsers is None else (parsers.tool_calls, parsers.reasoning)
        key = (model, *names)
        if key not in self._compiled:
            spec = own if own is not None else _built_in(*names)
            self._compiled[key] = None if spec is None else self._compile(model, spec)
        compiled = self._compiled[key]
        if isinstance(compiled, str):
            raise invalid("chat.tools", compiled)
        return compiled

    def _compile(self, model: str, spec: Any) -> CompiledTemplate | str:
        """Compile a template. If it cannot be used, return the reason as a text.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the parser is not installed.
        """
        if self._parser is None:
            message = "this router cannot parse answers: install its extra, pip install 'fleet-serving[parsers]'"
            raise invalid("chat.tools", message) from self._missing
        try:
            fields = spec.get("fields") if isinstance(spec, Mapping) else None
            if isinstance(fields, Mapping) and len(fields) > MAX_FIELDS:
                raise ValueError(f"it has {len(fields)} fields; at most {MAX_FIELDS} are supported")
            template = self._parser.load_response_template(spec)
            for name, field in template.fields.items():
                _check_field(name, field)
            parser = importlib.import_module("transformers.utils.chat_parsing").ResponseParser(template, prefix="")
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            return f"the response template of {model!r} is not valid: {error}"
        if not (hasattr(parser, "_buffer") and hasattr(parser, "_pos")):  # `parsed_answer` reads these attributes
            return (
                f"this router cannot parse answers with transformers {version('transformers')}, which keeps the text that it"
                " holds under other names; install transformers 5.19"
            )
        searches = delimiter_searches(template, held=TOOL_CALLS)
        template.start_anchor_re = LimitedPattern(template.start_anchor_re)
        for field in template.fields.values():
            field.open_re, field.close_re = _limited(field.open_re), _limited(field.close_re)
        return CompiledTemplate(template, searches)


def _limited(pattern: Any) -> LimitedPattern | None:
    return None if pattern is None else LimitedPattern(pattern)


def _check_field(name: str, field: Any) -> None:
    """Check a field for errors that compiling a template does not find.

    Raises:
        ValueError: Parsing by the field could take so long that the router's other requests wait, or a tag pattern of
            its content is not valid.
    """
    literals = [*(field.open_literals or ()), *(field.close_literals or ())]
    if len(literals) > MAX_LITERALS or any(len(literal) > MAX_LITERAL_CHARACTERS for literal in literals):
        raise ValueError(
            f"the field {name!r} has over {MAX_LITERALS} literals, or one of over {MAX_LITERAL_CHARACTERS} characters"
        )
    if field.open_re is not None and field.close_re is not None and may_never_end(field.open_re, field.close_re):
        raise ValueError(
            f"the field {name!r} can open and close at the same place; let one of its patterns match a character, in syntax"
            " that Python's module re reads too"
        )
    regex = importlib.import_module("regex")
    for pattern in _tag_patterns(field.content_args):
        try:
            regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"the field {name!r} has the tag_pattern {pattern!r}: {error}") from error


def _tag_patterns(arguments: Any) -> Iterator[Any]:
    """Yield the tag patterns in the `content_args` of a field, and in the mappings that are nested in them."""
    if isinstance(arguments, Mapping):
        for key, value in arguments.items():
            if key == "tag_pattern":
                yield value
            else:
                yield from _tag_patterns(value)


def _built_in(tool_calls: str, reasoning: str) -> Mapping[str, Any] | None:
    """Return the built-in template for two parser names; None if both are unknown."""
    fields: dict[str, Any] = {}
    if (calls := TOOL_CALL_FIELDS.get(tool_calls)) is not None:
        fields[TOOL_CALLS] = calls
    if (thinking := REASONING_FIELDS.get(reasoning)) is not None:
        fields[REASONING] = thinking
    if not fields:
        return None
    return {"version": 1, "start_anchor_pattern": TURN_BEGINS, "fields": {CONTENT: _VERBATIM, **fields}}
