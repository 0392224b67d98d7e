"""Incremental text decoder: token ids to text, in steps that never split a character.

`tokenizers.decoders.DecodeStream` decodes the last tokens again with each new one, and returns the added text once it
does not end in U+FFFD. This module adds what it lacks: an end, a bound on the tokens that it holds back, and a way on
from bytes that are no UTF-8, at which it raises.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
MAX_HELD = 16  # tokens; a character has at most 4 bytes, so more tokens cannot be the start of one
CONTEXT = 4, 8  # fewest and most last tokens of the prompt that may affect the text of the first token


class IncrementalDecoder:
    """Decoder of one request. Implements `fleet.router.ports.TextDecoder`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context, text = self._end_of(prompt)
        self._stream = DecodeStream(context, True)
        whole = not text.endswith(REPLACEMENT)
        self._context = context if whole else []
        self._known = "" if whole else text.rstrip(REPLACEMENT)  # the stream repeats an incomplete context
        self._held: tuple[int, ...] = ()

    def add(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the library raises no narrower error: new bytes made earlier ones invalid
            self._held = (*self._held, token_id)
            return self._restart()
        if text is None:
            self._held = (*self._held, token_id)
            return self._restart() if len(self._held) >= MAX_HELD else ""
        self._held = ()
        if self._known:
            text, self._known = text.removeprefix(self._known), ""
        return text

    def flush(self) -> str:
        return self._restart() if self._held else ""

    def _restart(self) -> str:
        """Return the text of the held tokens as it is, and go on after the context."""
        known = self._decode(self._context)
        text = self._decode([*self._context, *self._held])
        if not text.startswith(known):  # the context ends in bytes that belong to those of the held tokens
            text, known = self._decode(self._held), ""
        self._stream, self._held, self._known = DecodeStream(self._context, True), (), ""
        return text[len(known) :]

    def _end_of(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Return the shortest end of the prompt that begins with a whole character, and its text."""
        context: list[int] = []
        text = ""
        fewest, most = (min(size, len(prompt)) for size in CONTEXT)
        for size in range(fewest, most + 1):
            context = list(prompt[len(prompt) - size :])
            text = self._decode(context)
            if text and not text.startswith(REPLACEMENT):
                break
        return context, text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
