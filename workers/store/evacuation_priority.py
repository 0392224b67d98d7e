"""Evacuation priority: the order in which a draining worker's warm blocks are copied.

Rules:

1. This module orders the warm blocks of one worker, because a drain may not have time or room for all of them. It has
   no influence on which worker is removed: Kubernetes compares only the number of warm blocks, which each worker's
   Lease reports.
2. Blocks that occur in more of the recent prompts come first. If two blocks occur in the same number of prompts, the
   one that was used more recently comes first; if this is equal too, the one that is earlier in its chain. Therefore no
   block precedes an earlier block of its own chain.
3. Blocks that no recent prompt contains (blocks of answers and of older prompts) come last, in the order in which the
   cache stored them.
4. The newest prompts are remembered, up to `MOST_BYTES`. The names of their blocks are computed only when an evacuation
   needs them.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from fleet.core.requests import TokenBytes
from kvstore.block import BlockHash, HashAlgorithm, chain
from workers.ports import RecentPrompt

MOST_BYTES = 8 << 20
"""Maximum number of bytes of the kept prompts: 2 million tokens, or 65,000 blocks of 32 tokens, whose names take a
tenth of a second to compute."""


class RecentPrompts:
    """Keeps the newest prompts of one worker (rule 4)."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._prompts: deque[RecentPrompt] = deque()

    def note(self, tokens: TokenBytes, salt: bytes) -> None:
        self._prompts.append(RecentPrompt(tokens, salt))
        self._bytes += len(tokens)
        while self._bytes > self._most:
            self._bytes -= len(self._prompts.popleft().tokens)

    def all(self) -> tuple[RecentPrompt, ...]:
        """Return the prompts, the newest one last."""
        return tuple(self._prompts)


class _BlockUse(Struct):
    """Records how the recent prompts use one block."""

    position: int  # position of the block in its chain
    count: int = 0
    latest: int = 0  # position of the newest recent prompt that contains the block; the oldest prompt has position 0


def by_evacuation_priority(
    prompts: Iterable[RecentPrompt], cached: Sequence[BlockHash], *, block_tokens: int, algorithm: HashAlgorithm
) -> list[BlockHash]:
    """Return the names of the blocks of `prompts` and of `cached`, each once, the most valuable first (rules 2 and 3).

    Args:
        prompts: The recent prompts, the newest one last.
        cached: Names of the blocks in the engine's cache, in the order in which they were stored.
        block_tokens: Number of tokens in a block.
        algorithm: Hash algorithm of the names.
    """
    uses: dict[BlockHash, _BlockUse] = {}
    for number, prompt in enumerate(prompts):
        names = chain(prompt.tokens, block_tokens, salt=prompt.salt, algorithm=algorithm)
        for position, name in enumerate(names):
            use = uses.get(name)
            if use is None:
                use = uses[name] = _BlockUse(position)
            use.count += 1
            use.latest = number
    ordered = sorted(uses, key=lambda name: (-uses[name].count, -uses[name].latest, uses[name].position))
    return ordered + [name for name in cached if name not in uses]
