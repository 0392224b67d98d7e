"""Block hashes of the native module, compared with Python's hashlib."""

import hashlib
import random

import pytest

from kvstore import block
from kvstore.block import HashAlgorithm, chain, extend, root

if block.BUILT:
    from kvstore.native._chain import extend as native_extend

native = pytest.mark.skipif(not block.BUILT, reason="not built, or the processor has no SHA instructions")


def by_hashlib(parent: bytes, tokens: bytes, size: int) -> list[bytes]:
    names = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = hashlib.sha256(parent + tokens[start : start + size]).digest()[:16]
        names.append(parent)
    return names


@native
@pytest.mark.parametrize("block_tokens", [1, 9, 10, 11, 12, 13, 16, 25, 26, 27, 32, 64, 100, 256, 1000])
def test_native_hashes_equal_hashlib_for_all_paddings(block_tokens):
    """Hash messages of different lengths: the 9 bytes at the end of a SHA-256 message fit into its last 64 bytes, or need 64 more."""
    rng = random.Random(block_tokens)
    for num_tokens in (0, 1, block_tokens - 1, block_tokens, block_tokens + 1, 7 * block_tokens + 3):
        tokens, parent = rng.randbytes(4 * num_tokens), rng.randbytes(16)
        expected = by_hashlib(parent, tokens, 4 * block_tokens)

        assert extend(parent, tokens, block_tokens) == expected
        assert extend(parent, memoryview(tokens), block_tokens) == expected


@native
def test_long_prompt_hashed_without_the_gil_is_equal():
    tokens = random.Random(1).randbytes(4 * 40_000)

    assert extend(root(), tokens, 64) == by_hashlib(root(), tokens, 256)


@native
@pytest.mark.parametrize(("parent", "size"), [(b"", 64), (bytes(15), 64), (bytes(16), 0), (bytes(16), -4)])
def test_invalid_parent_or_size_is_refused(parent, size):
    with pytest.raises(ValueError, match="a parent of 16 bytes and a size above 0"):
        native_extend(parent, bytes(64), size)


def test_hashes_are_equal_without_the_native_module(monkeypatch):
    tokens = random.Random(2).randbytes(4 * 100)
    expected = chain(tokens, 16)
    monkeypatch.setattr(block, "BUILT", False)

    assert chain(tokens, 16) == expected


def test_other_algorithms_and_extras_bypass_the_native_module():
    tokens = random.Random(3).randbytes(4 * 64)

    assert chain(tokens, 16, extras={1: b"x"})[0] == chain(tokens, 16)[0]
    assert chain(tokens, 16, extras={1: b"x"})[1] != chain(tokens, 16)[1]
    assert chain(tokens, 16, algorithm=HashAlgorithm.XXH3_128) != chain(tokens, 16)


@native
def test_block_size_beyond_the_prompt_takes_no_memory():
    assert native_extend(bytes(16), bytes(64), 1 << 62) == []
