"""Answer text: turns an answer's tokens into text, and ends the answer at a stop string.

Rules:

1. A token that ends generation (end of sequence, or a stop token) counts as a token, but gives no text. As in vLLM, this
   also holds if special tokens are shown.
2. Stop strings are ignored until more than `min_tokens` tokens have come.
3. The text ends before the stop string that is complete first. If several are complete at the same character, it ends before
   the longest one. So the answer does not depend on how the text was cut into pieces. A client may ask for the stop string
   as a part of the text.
4. Text is only held back while it may be the beginning of a stop string, or until a character is complete.
"""

from collections.abc import Sequence

from fleet.core.requests import Delta, Logprobs
from fleet.router.ports import TextDecoder


class AnswerText:
    """Decodes the answer of one request and looks for its stop strings."""

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
        self.stopped = False  # True once a stop string has ended the answer

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; empty if none did."""
        return self._stops.found if self.stopped and self._stops is not None else ""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> Delta:
        """Add the tokens of an engine step; return the text that can be sent, and the tokens up to a stop string."""
        assert not self.stopped
        if len(token_ids) == 1 and self._stops is None:  # the most frequent case
            self.num_tokens += 1
            text = "" if token_ids[0] in self._end_token_ids else self._decoder.add(token_ids[0])
            return Delta(text=text, token_ids=tuple(token_ids), logprobs=tuple(logprobs[:1]))
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
        """Return the text that was held back, when no more tokens come; empty after a stop string."""
        if self.stopped:
            return ""
        rest = self._decoder.flush()
        if self._stops is None:
            return rest
        text, self.stopped = self._stops.add(rest)
        return text if self.stopped else text + self._stops.flush()


class StopStrings:
    """Finds the first stop string of one request in text that arrives in pieces."""

    def __init__(self, strings: Sequence[str], *, included: bool = False) -> None:
        self._strings = tuple(strings)
        self._included = included  # True if the text keeps the stop string at its end
        self._first_characters = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""
        self.found = ""
        """The stop string that ended the text; empty if none did yet."""

    @property
    def held(self) -> str:
        """The text that is held back, because it may be the beginning of a stop string."""
        return self._held

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that can be sent now, and whether a stop string has ended the answer."""
        text = self._held + text
        # End and beginning of the stop string that is complete first; None: none was found.
        first: tuple[int, int] | None = None
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
        """Return the text that is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return where the longest suffix of `text` begins that is a prefix of a stop string; without one, return the length."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._first_characters:
                tail = text[begin:]
                if any(string.startswith(tail) for string in self._strings):
                    return begin
        return len(text)
