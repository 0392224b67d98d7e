"""Chat templates of Hugging Face models, rendered by Jinja in a sandbox with the globals that templates expect.

The template comes from ``chat_template.jinja`` or else from ``tokenizer_config.json``. It is code that is delivered
with the weights; the sandbox restricts it to the messages.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fleet.core.errors import ConfigurationRefused, invalid
from fleet.core.requests import ChatMessage

GLOBALS = ("raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner")
"""Functions that templates find in the environment."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *GLOBALS})
"""Variables that a request cannot set."""

WITHOUT_EFFECT = (("enable_thinking", False), ("thinking", False), ("reasoning_effort", "none"))
"""Variables that turn reasoning off. A template without them belongs to a model that does not reason."""


class ChatTemplate:
    """Compiled template of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: Path) -> None:
        """Compile the template.

        Raises:
            ConfigurationRefused: The template is invalid; the message names `origin`.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
            syntax = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ConfigurationRefused(f"{origin}: the chat template is not valid: {error}") from error
        self._variables = jinja2.meta.find_undeclared_variables(syntax)
        self._takes_tools = "tools" in self._variables
        names = [node.attr for node in syntax.find_all(jinja2.nodes.Getattr)]
        names += [node.value for node in syntax.find_all(jinja2.nodes.Const)]
        self._takes_calls = "tool_calls" in names
        self._takes_developer = "developer" in source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], tools: str = "", template_args: str = "") -> str:
        """Return the conversation as text, up to the start of the assistant's turn.

        Args:
            messages: At least one message. A template that does not know the role ``developer`` gets ``system``.
            tools: A JSON list as in `ChatPrompt.tools`; empty: none.
            template_args: A JSON object with further variables; empty: none.

        Raises:
            RequestRejected: The template cannot render these messages, or would silently drop tools, tool calls or
                variables (INVALID_ARGUMENT, field ``chat.messages``, ``chat.tools`` or ``chat.template_args``).
        """
        if tools and not self._takes_tools:
            raise invalid("chat.tools", "the model's chat template does not support tools; leave them out")
        for index, message in enumerate(messages):
            if message.tool_calls and not self._takes_calls:
                field = f"chat.messages[{index}].tool_calls"
                raise invalid(field, "the model's chat template does not support tool calls; leave them out")
        try:
            return self._template.render(
                messages=[self._message(message) for message in messages],
                tools=json.loads(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **(self._further_variables(template_args) if template_args else {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise invalid("chat.messages", f"the model's chat template does not accept them: {error}") from error

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message in the form of `transformers`: the arguments of calls are objects, and empty fields are absent."""
        role = "system" if message.role == "developer" and not self._takes_developer else message.role
        fields: dict[str, Any] = {"role": role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in json.loads(message.tool_calls)]
        for field in ("tool_call_id", "name"):
            if value := getattr(message, field):
                fields[field] = value
        return fields

    def _further_variables(self, template_args: str) -> dict[str, Any]:
        """Return the client's variables that the template knows."""
        variables: dict[str, Any] = json.loads(template_args)
        known = {}
        for name, value in variables.items():
            if name in RESERVED or name in self._special_tokens:
                raise invalid("chat.template_args", f"{name[:100]!r} is a variable that the router sets; leave it out")
            if name in self._variables:
                known[name] = value
            elif (name, value) not in WITHOUT_EFFECT:
                takes = sorted(self._variables - {*RESERVED, *self._special_tokens, *GLOBALS})
                raise invalid(
                    "chat.template_args",
                    f"the model's chat template has no variable {name[:100]!r}; it has {', '.join(takes) or 'none'}",
                )
        return known


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call, which OpenAI's clients write as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationTag(jinja2.ext.Extension):
    """Ignores the tag ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise like Hugging Face; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
