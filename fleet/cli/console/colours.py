"""Colours of a terminal: none where the output is no terminal, or where NO_COLOR is set (https://no-color.org)."""

import sys
from enum import StrEnum
from typing import TextIO

from fleet.config import child_environment

CLEARED = "\x1b[H\x1b[2J"
"""Clears a terminal and starts at its top."""


class Colour(StrEnum):
    """Colours by their code."""

    GREEN = "32"
    YELLOW = "33"
    RED = "31"


def coloured(text: str, colour: Colour, file: TextIO | None = None) -> str:
    """Return a text in a colour if `file`, by default standard output, shows colours."""
    shows = (file or sys.stdout).isatty() and not child_environment().get("NO_COLOR")
    return f"\x1b[{colour}m{text}\x1b[0m" if shows else text
