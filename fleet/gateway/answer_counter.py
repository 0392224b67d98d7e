"""Answer counter: estimates the tokens of an answer from its bytes."""

import re

TAIL_BYTES = 512  # end of an answer, which holds its usage

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')
_EVENT = b"data: {"


class AnswerCounter:
    """Token count of an answer: its events if it is streamed, else its reported usage."""

    def __init__(self) -> None:
        self.events = False
        self.tokens = 0
        self._tail = b""

    def count(self, piece: bytes) -> int:
        """Return the number of new tokens in this piece."""
        text = self._tail + piece
        if self.events:
            new = text.count(_EVENT)
            # Keep a possible beginning of the next event, but no event that was counted.
            self._tail = text[-(len(_EVENT) - 1) :]
        else:
            said = _COMPLETION_TOKENS.findall(text)
            new = max(0, int(said[-1]) - self.tokens) if said else 0
            self._tail = text[-TAIL_BYTES:]
        self.tokens += new
        return new
