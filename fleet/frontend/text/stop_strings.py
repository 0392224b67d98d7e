"""Stop strings in a text that arrives in pieces.

Rules:

1. The text ends before the stop string that is complete first; of several that are complete with the same character,
   before the longest. So the answer does not depend on how the text was cut into pieces.
2. Text is held back only while it may be the beginning of a stop string.
"""

from collections.abc import Sequence


class StopStrings:
    """The search for the stop strings of one request."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._first_characters = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    @property
    def held(self) -> str:
        """The text that may be the beginning of a stop string."""
        return self._held

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that is certain now, and whether a stop string ended it."""
        text = self._held + text
        first: tuple[int, int] | None = None  # end and beginning of the earliest match
        for string in self._strings:
            begin = text.find(string)
            if begin >= 0 and (first is None or (begin + len(string), begin) < first):
                first = (begin + len(string), begin)
        if first is not None:
            self._held = ""
            return text[: first[1]], True
        begin = self._beginning(text)
        self._held = text[begin:]
        return text[:begin], False

    def flush(self) -> str:
        """Return the text that was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return the position of the longest end of `text` that is the beginning of a stop string."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._first_characters:
                tail = text[begin:]
                if any(string.startswith(tail) for string in self._strings):
                    return begin
        return len(text)
