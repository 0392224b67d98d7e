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
        self._takes_tools = "tools" in jinja2.meta.find_undeclared_variables(syntax)
        names = [node.attr for node in syntax.find_all(jinja2.nodes.Getattr)]
        names += [node.value for node in syntax.find_all(jinja2.nodes.Const)]
        self._takes_calls = "tool_calls" in names
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], tools: str = "") -> str:
        """Return the conversation as text, up to the start of the assistant's turn. `tools` is a JSON list, or empty.

        Raises:
            RequestRejected: The template cannot render these messages, or would silently drop tools or tool calls
                (INVALID_ARGUMENT, field ``chat.messages`` or ``chat.tools``).
        """
        if tools and not self._takes_tools:
            raise invalid("chat.tools", "the model's chat template does not support tools; leave them out")
        for index, message in enumerate(messages):
            if message.tool_calls and not self._takes_calls:
                field = f"chat.messages[{index}].tool_calls"
                raise invalid(field, "the model's chat template does not support tool calls; leave them out")
        try:
            return self._template.render(
                messages=[_template_message(message) for message in messages],
                tools=json.loads(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise invalid("chat.messages", f"the model's chat template does not accept them: {error}") from error


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form of `transformers`: the arguments of calls are objects, and empty fields are absent."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in json.loads(message.tool_calls)]
    for field in ("tool_call_id", "name"):
        if value := getattr(message, field):
            fields[field] = value
    return fields


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
