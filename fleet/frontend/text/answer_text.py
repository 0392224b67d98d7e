"""Answer text: turns an answer's tokens into the text that is certain, until a stop string ends it.

Rules:

1. A token that ends generation (end of sequence, or a stop token) counts as a token and yields no text, also where
   special tokens are shown (as in vLLM).
2. Stop strings are ignored until `min_tokens` tokens have come.
3. The text ends before the stop string that is complete first; of several that are complete with the same character,
   before the longest. So the answer does not depend on how the text was cut into pieces. A client may ask for the stop
   string as a part of the text.
4. Text is held back only while it may be the beginning of a stop string.
"""

from collections.abc import Sequence

from fleet.core.requests import Delta, Logprobs
from fleet.router.ports import TextDecoder


class AnswerText:
    """The text of one request's answer."""

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop: Sequence[str] = (),
        end_token_ids: frozenset[int],
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stop, included=include_stop) if stop else None
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped = False  # True after a stop string

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; empty if none did."""
        return self._stops.found if self.stopped and self._stops is not None else ""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> Delta:
        """Add the tokens of a step; tokens after a stop string are dropped."""
        assert not self.stopped
        texts = []
        taken = 0
        for token_id in token_ids:
            taken += 1
            if token_id in self._end_token_ids:
                continue
            text = self._decoder.add(token_id)
            if self._stops is not None and self.num_tokens + taken > self._min_tokens:
                text, self.stopped = self._stops.add(text)
            texts.append(text)
            if self.stopped:
                break
        self.num_tokens += taken
        return Delta(text="".join(texts), token_ids=tuple(token_ids[:taken]), logprobs=tuple(logprobs[:taken]))

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._decoder.flush()
        if self._stops is None:
            return rest
        text, self.stopped = self._stops.add(rest)
        return text if self.stopped else text + self._stops.flush()


class StopStrings:
    """The search for the stop strings of one request."""

    def __init__(self, strings: Sequence[str], *, included: bool = False) -> None:
        self._strings = tuple(strings)
        self._included = included  # the text contains the stop string that ended it
        self._first_characters = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""
        self.found = ""
        """The string that ended the text."""

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
                self.found = string
        if first is not None:
            self._held = ""
            return text[: first[0] if self._included else first[1]], True
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
