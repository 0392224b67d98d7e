"""How long an answer has become, from its bytes as they pass."""

import re

TAIL_BYTES = 512  # of an answer, in which its usage stands

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')
_EVENT = b"data: {"


class AnswerCounter:
    """Tokens of an answer, roughly: its events where it is streamed, else what its usage says."""

    def __init__(self) -> None:
        self.events = False
        self.tokens = 0
        self._tail = b""

    def count(self, piece: bytes) -> int:
        """Those that are new with this piece."""
        text = self._tail + piece
        if self.events:
            new = text.count(_EVENT)
            # What may be the beginning of the next mark, and none that was counted.
            self._tail = text[-(len(_EVENT) - 1) :]
        else:
            said = _COMPLETION_TOKENS.findall(text)
            new = max(0, int(said[-1]) - self.tokens) if said else 0
            self._tail = text[-TAIL_BYTES:]
        self.tokens += new
        return new
