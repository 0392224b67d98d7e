"""Answer text: turns an answer's tokens into the text that is certain, until a stop string ends it.

A token that ends generation (end of sequence, or a stop token) counts as a token and yields no text. Stop strings are ignored until
`min_tokens` tokens have come.
"""

from collections.abc import Sequence

from fleet.core.requests import Delta, Logprobs
from fleet.frontend.text.stop_strings import StopStrings
from fleet.router.ports import TextDecoder


class AnswerText:
    """The text of one request's answer."""

    def __init__(
        self, decoder: TextDecoder, *, stop: Sequence[str] = (), end_token_ids: frozenset[int], min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stop) if stop else None
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped = False  # True after a stop string

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
