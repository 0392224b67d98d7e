"""Prompts of `fleet up --check`, made from prose that ships with Python, so every machine has the same ones."""

import importlib
from collections.abc import Iterator
from pathlib import Path

from fleet.core.requests import TOKEN_BYTES, TokenBytes
from fleet.frontend.text.codec import load_codec

LONGEST = 3000  # tokens
SHARED = 512  # common tokens
FEWEST = 20

_LENGTHS = (40, 48, 63, 64, 65, 96, 128, 200, 333, 777, 1024, 1500, 2049)
_LONG = 2
_SHARING = 6


def reference_prompts(model_dir: Path, *, max_tokens: int) -> list[TokenBytes]:
    """Return token ids of at least 20 prompts, none longer than `max_tokens`."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    codec = load_codec(model_dir)
    text = codec.encode("\n".join(topics[name] for name in sorted(topics)))
    prompts = list(_cut(text, max_tokens))
    prompts.append(prompts[-1])  # a repeated prompt
    assert len(prompts) >= FEWEST
    return prompts


def _cut(text: TokenBytes, max_tokens: int) -> Iterator[TokenBytes]:
    """Cut the text into consecutive pieces, so that prompts share nothing by accident."""
    position = 0

    def take(tokens: int) -> TokenBytes:
        nonlocal position
        piece = text[position * TOKEN_BYTES : (position + tokens) * TOKEN_BYTES]
        position += tokens
        assert len(piece) == tokens * TOKEN_BYTES, "the text is too short"
        return piece

    for length in (*_LENGTHS, *[LONGEST] * _LONG):
        yield take(min(length, max_tokens))
    shared = take(min(SHARED, max_tokens // 2))
    for sharing in range(_SHARING):
        yield shared + take(40 + 16 * sharing)
