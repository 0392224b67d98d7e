"""Text decoders: token ids to text, in steps that never split a character.

Most models are byte-level: each token stands for bytes, which are decoded as UTF-8 as they arrive. For the others
(SentencePiece with byte fallback) the text of a token depends on its neighbours. There a window of the last tokens is
decoded again with each new token, and the added text is returned once it does not end in U+FFFD.
"""

import codecs
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_WAITING = 16  # tokens; a character has at most 4 bytes, so more tokens cannot be the start of one
PROMPT_WINDOW = 8  # last tokens of the prompt that may affect the text of the first token


def _printable_bytes() -> Mapping[str, int]:
    """Return the alphabet of byte-level vocabularies: the inverse of GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _printable_bytes()


class TokenBytesTable:
    """Bytes of each token of a byte-level vocabulary, looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}  # bounded by the vocabulary, since unknown ids are not stored

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for special tokens and unknown ids."""
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
    except KeyError:  # an added token, which is plain text
        return piece.encode()


class ByteLevelDecoder:
    """Decoder of one request. Implements `fleet.router.ports.TextDecoder`."""

    def __init__(self, table: TokenBytesTable, prompt: Sequence[int]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        if prompt:
            self.add(prompt[-4:])  # a prompt may end within a character of at most 4 bytes

    def add(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Decoder of one request. Implements `fleet.router.ports.TextDecoder`."""

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
        # New tokens may change earlier text that was already returned. They are then decoded alone.
        appended = text.startswith(self._known_text)
        added = text[len(self._known_text) :] if appended else self._decode(self._new)
        if added:
            self._known, self._new = self._new, []
            self._known_text = self._decode(self._known)
        elif len(self._new) >= MAX_WAITING:  # special tokens have no text
            self._new = []
        return added

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Return the shortest end of the prompt that consists of whole characters; empty if there is none."""
        for size in range(min(PROMPT_WINDOW // 2, len(prompt)), min(PROMPT_WINDOW, len(prompt)) + 1):
            window = list(prompt[len(prompt) - size :])
            text = self._decode(window)
            if text and REPLACEMENT not in text:
                return window, text
        return [], ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
