"""Expected content of blocks: a pure function of namespace and name, so that every wrong byte is found."""

import hashlib
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray
from kvstore.namespace import KvNamespace

STRIDE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the multiples, and thus all words of a block, differ


def chain(seed: int, number: int, length: int) -> list[BlockHash]:
    """Return the block names of one prompt. With the same seed and number, a shorter chain is a prefix of a longer one."""
    return [hashlib.blake2b(f"{seed}:{number}:{index}".encode(), digest_size=16).digest() for index in range(length)]


class ExpectedContent:
    """Content of the blocks of one namespace, whose block size is a multiple of 8 bytes."""

    def __init__(self, namespace: KvNamespace):
        self._digest = namespace.digest
        self._words: NDArray[np.uint64] = np.arange(namespace.block_bytes // 8, dtype=np.uint64) * STRIDE

    def of(self, name: BlockHash) -> ByteArray:
        """Return the content of a block."""
        return cast("ByteArray", (self._words + self._first(name)).view(np.uint8))

    def wrong_bytes(self, name: BlockHash, found: ByteArray) -> int:
        """Return the number of bytes that differ from the expected content."""
        expected = self._words + self._first(name)
        if np.array_equal(found.view(np.uint64), expected):
            return 0
        return int(np.count_nonzero(found != expected.view(np.uint8)))

    def _first(self, name: BlockHash) -> np.uint64:
        digest = hashlib.blake2b(name, digest_size=8, key=self._digest).digest()
        return np.uint64(int.from_bytes(digest, "little"))
