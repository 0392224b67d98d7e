"""Chat templates as Hugging Face renders them: Jinja in a sandbox, with the globals that templates rely on.

The template is read from ``chat_template.jinja``, else from ``tokenizer_config.json``. It is code that comes with the
weights; the sandbox keeps it from everything but the messages.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fleet.errors import ConfigurationRefused, invalid
from fleet.requests import ChatMessage


class ChatTemplate:
    """One model's template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: Path) -> None:
        """Compile.

        Raises:
            ConfigurationRefused: The template is not valid; the message names `origin`.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationRefused(f"{origin}: the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, up to where the assistant's turn begins.

        Raises:
            Refused: The template does not accept these messages (INVALID_ARGUMENT, field ``chat.messages``).
        """
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise invalid("chat.messages", f"the model's chat template does not accept them: {error}") from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

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
    """As Hugging Face has it: Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
