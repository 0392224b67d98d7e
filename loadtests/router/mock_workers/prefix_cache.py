"""Prefix cache of a mock worker, on blocks of text instead of tokens."""

from itertools import islice

import xxhash

BLOCK_BYTES = 256  # about 64 tokens


class PrefixCache:
    """The last used blocks, each named by the hash of all text up to its end; the end of a prompt is evicted before its beginning."""

    def __init__(self, capacity: int):
        self._capacity = capacity  # blocks
        self._blocks: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def admit(self, prompt: bytes) -> tuple[int, int]:
        """Store a prompt.

        Returns:
            The number of leading blocks that were cached, and the number of full blocks.
        """
        chain = []
        parent = 0
        for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
            parent = xxhash.xxh3_64_intdigest(prompt[end - BLOCK_BYTES : end], parent)
            chain.append(parent)
        known = next((number for number, block in enumerate(chain) if block not in self._blocks), len(chain))
        for block in reversed(chain):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for block in list(islice(self._blocks, max(0, len(self._blocks) - self._capacity))):
            del self._blocks[block]
        return known, len(chain)
