"""What a server that tells nothing of its prefix cache is believed to hold: what was sent there, for a while.

Blocks are kept by generation, of which there are `GENERATIONS`. A block is in the youngest one in which it was sent; when that
holds its share of what the server can hold, or its share of the time has passed, the next one begins, and what is only in
the oldest one is forgotten. So the least recently used blocks go first, when between three quarters and all of room and time
have passed since their last use, and noting a prompt costs one set operation, not one per block. (An LRU list per block
costs twenty times as much and is no nearer to what the server really does.)
"""

from collections import deque
from collections.abc import Collection, Sequence

from fleet.clock import SECOND, Nanos

GENERATIONS = 4  # more would forget less at a time, and compare more sets for it


class AssumedCache:
    """The beliefs about one server."""

    def __init__(self, capacity_blocks: int, ttl_seconds: float, now: Nanos) -> None:
        self._most = min(GENERATIONS, capacity_blocks)
        self._share_blocks = capacity_blocks // self._most
        self._share_nanos = int(ttl_seconds * SECOND / self._most)
        self._generations: deque[set[int]] = deque([set()])  # the youngest last
        self._turn_at = now + self._share_nanos

    def __len__(self) -> int:
        return len(set().union(*self._generations))

    def sent(self, keys: Sequence[int], now: Nanos) -> tuple[Sequence[int], Collection[int]]:
        """Note a prompt; returns its keys as far as there is room for them, and what is forgotten for it."""
        kept = keys[: self._share_blocks]
        gone: Collection[int] = ()
        young = self._generations[-1]
        if now >= self._turn_at or len(young) + len(kept) > self._share_blocks:
            gone = self._turn(now).difference(kept)
            young = self._generations[-1]
        young.update(kept)
        return kept, gone

    def expire(self, now: Nanos) -> Collection[int]:
        """What is to be forgotten since its time has passed."""
        return self._turn(now) if now >= self._turn_at else ()

    def _turn(self, now: Nanos) -> set[int]:
        generations = self._generations
        gone: set[int] = set()
        if len(generations) == self._most:
            gone = generations.popleft().difference(*generations)
        generations.append(set())
        self._turn_at = now + self._share_nanos
        return gone
