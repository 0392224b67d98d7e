"""Which of a worker's warm blocks are worth most: what of them to bring away first when it goes. Pure.

Rules:

1. A worker is worth the blocks that are warm there, one like the other: that is what routers count, what its Lease says, and
   what is compared where one of several has to go. Here they are put in order, since there may not be time or room for all.
2. A block comes before those that fewer of the latest prompts began with; among equals, before those that were used longer ago;
   then by its place in its chain. So no block comes before one that its chain needs first.
3. What none of these prompts began with (answers, and what was asked for long ago) comes last, as it came into the cache.
4. Prompts are kept up to `MOST_BYTES`, the latest ones; naming their blocks is left for the day that it is needed.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from fleet.core.requests import TokenBytes
from kvstore.block import BlockHash, HashAlgorithm, chain

MOST_BYTES = 8 << 20
"""Of tokens: 2 million, 65,000 blocks of 32, which are named in a tenth of a second."""


class RecentPrompt(Struct, frozen=True):
    tokens: TokenBytes
    salt: bytes


class RecentPrompts:
    """Of one worker."""

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
        """The latest one last."""
        return tuple(self._prompts)


class _BlockUse(Struct):
    """Of one block."""

    place: int  # in its chain
    count: int = 0
    latest: int = 0  # number of the prompt


def by_evacuation_priority(
    prompts: Iterable[RecentPrompt], cached: Sequence[BlockHash], *, block_tokens: int, algorithm: HashAlgorithm
) -> list[BlockHash]:
    """Names of blocks that may be warm, what is worth most first (rules 2 and 3).

    Args:
        prompts: The latest one last.
        cached: What the engine holds, in the order in which it came.
        block_tokens: Tokens a block.
        algorithm: Of the names.
    """
    uses: dict[BlockHash, _BlockUse] = {}
    for number, prompt in enumerate(prompts):
        names = chain(prompt.tokens, block_tokens, salt=prompt.salt, algorithm=algorithm)
        for place, name in enumerate(names):
            use = uses.get(name)
            if use is None:
                use = uses[name] = _BlockUse(place)
            use.count += 1
            use.latest = number
    ordered = sorted(uses, key=lambda name: (-uses[name].count, -uses[name].latest, uses[name].place))
    return ordered + [name for name in cached if name not in uses]
