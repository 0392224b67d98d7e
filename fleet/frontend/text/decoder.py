"""Token ids to text, a few at a time, without ever giving half a character.

Most models are byte-level: every token stands for bytes, and UTF-8 is decoded as the bytes come. For the others
(SentencePiece with byte fallback) a token's text depends on its neighbours; there a window of the last tokens is
decoded again with each new one, and what is new at its end is given out once it does not end in U+FFFD.
"""

import codecs
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_WAITING = 16  # tokens; a character has at most 4 bytes, so the rest is no beginning of one
PROMPT_WINDOW = 8  # last tokens of the prompt that may decide about the first token's text


def _printable_bytes() -> Mapping[str, int]:
    """The alphabet that byte-level vocabularies are written in: GPT-2's `bytes_to_unicode`, turned round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _printable_bytes()


class TokenBytesTable:
    """The bytes of each token of a byte-level vocabulary, looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}  # at most the vocabulary, since unknown ids are not kept

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for special tokens and for ids that do not exist."""
        if (known := self._bytes.get(token_id)) is not None:
            return known
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        content = b"" if token_id in self._special else _bytes_of(piece)
        self._bytes[token_id] = content
        return content


def _bytes_of(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:  # an added token, which is written as it is
        return piece.encode()


class ByteLevelDecoder:
    """Of one request; implements `fleet.router.ports.TextDecoder`."""

    def __init__(self, table: TokenBytesTable, prompt: Sequence[int]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        if prompt:
            self.add(prompt[-4:])  # a prompt may end within a character, which has at most 4 bytes

    def add(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Of one request; implements `fleet.router.ports.TextDecoder`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._known, self._known_text = self._context(prompt)
        self._new: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        self._new.extend(token_ids)
        text = self._decode([*self._known, *self._new])
        if text.endswith(REPLACEMENT) and len(self._new) < MAX_WAITING:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode([*self._known, *self._new])) if self._new else ""

    def _take(self, text: str) -> str:
        # Where the new tokens changed the text before them, which is already given out, they are read alone.
        appended = text.startswith(self._known_text)
        added = text[len(self._known_text) :] if appended else self._decode(self._new)
        if added:
            self._known, self._new = self._new, []
            self._known_text = self._decode(self._known)
        elif len(self._new) >= MAX_WAITING:  # special tokens, which have no text
            self._new = []
        return added

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The shortest end of the prompt that is whole characters; nothing if there is none."""
        for size in range(min(PROMPT_WINDOW // 2, len(prompt)), min(PROMPT_WINDOW, len(prompt)) + 1):
            window = list(prompt[len(prompt) - size :])
            text = self._decode(window)
            if text and REPLACEMENT not in text:
                return window, text
        return [], ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
