"""Prompts of which nothing is known but their length and the keys of their blocks, where a router wants tokens and hashes."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

from fleet.core.requests import TOKEN_BYTES, TokenBytes
from fleet.router.kv_index.prefix_index import KEY_BYTES
from kvstore.block import HASH_BYTES


class BlankTokens(bytes):
    """Token ids that nobody looks at: as long as a prompt, without its memory, and with its keys by block size."""

    _length: int
    keys: Mapping[int, tuple[int, ...]]

    def __new__(cls, tokens: int, keys: Mapping[int, tuple[int, ...]]) -> Self:
        blank = super().__new__(cls)
        blank._length = TOKEN_BYTES * tokens
        blank.keys = keys
        return blank

    def __len__(self) -> int:
        return self._length

    def __add__(self, more: Any) -> Self:  # what the client has, when another worker goes on
        return type(self)((self._length + memoryview(more).nbytes) // TOKEN_BYTES, self.keys)


def keys_of(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:  # noqa: ARG001 - a `Hasher`
    """Of a prompt and what was generated since: the blocks that an answer fills are nobody else's, and have none."""
    assert isinstance(tokens, BlankTokens)
    return tokens.keys[block_tokens]


def hashes_of(keys: Iterable[int]) -> tuple[bytes, ...]:
    """Names of blocks with these keys: a router looks at no more of them."""
    return tuple([key.to_bytes(KEY_BYTES, "little").ljust(HASH_BYTES, b"\0") for key in keys])
