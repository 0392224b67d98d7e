"""Colours: puts text for a terminal in colours.

The text stays without colours if the output is not a terminal, or if NO_COLOR is set (https://no-color.org).
"""

import sys
from enum import StrEnum
from typing import TextIO

from fleet.config import child_environment

CLEARED = "\x1b[H\x1b[2J"
"""Text that clears a terminal and moves the cursor to its top."""


class Colour(StrEnum):
    """Colours, with their codes in ANSI escape sequences."""

    GREEN = "32"
    YELLOW = "33"
    RED = "31"


def coloured(text: str, colour: Colour, file: TextIO | None = None) -> str:
    """Return a text in a colour if `file` shows colours; if it does not, return the text unchanged.

    The default of `file` is standard output.
    """
    shows = (file or sys.stdout).isatty() and not child_environment().get("NO_COLOR")
    return f"\x1b[{colour}m{text}\x1b[0m" if shows else text
