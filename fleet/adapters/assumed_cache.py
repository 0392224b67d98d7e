"""What a server that tells nothing of its prefix cache is believed to hold: what was sent there, for a while.

Blocks are kept by generation. A block is in the young one when it was sent last; when that holds half of what the server
can hold, or half of the time has passed, it becomes the old one, and what is only in the former old one is forgotten. So the
least recently used blocks go first, each between the last half and the whole of room and time after its last use, and
noting a prompt costs one set operation, not one per block. (An LRU list per block costs twenty times as much and is no
nearer to what the server really does.)
"""

from collections.abc import Collection, Sequence

from fleet.clock import SECOND, Nanos


class AssumedCache:
    """The beliefs about one server."""

    def __init__(self, capacity_blocks: int, ttl_seconds: float, now: Nanos) -> None:
        self._half_blocks = max(1, capacity_blocks // 2)
        self._half_nanos = int(ttl_seconds * SECOND / 2)
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._turn_at = now + self._half_nanos

    def __len__(self) -> int:
        return len(self._young | self._old)

    def sent(self, keys: Sequence[int], now: Nanos) -> tuple[Sequence[int], Collection[int]]:
        """Note a prompt; returns its keys as far as there is room for them, and what is forgotten for it."""
        kept = keys[: self._half_blocks]
        gone: Collection[int] = ()
        if now >= self._turn_at or len(self._young) + len(kept) > self._half_blocks:
            gone = self._turn(now)
        self._young.update(kept)
        return kept, gone

    def expire(self, now: Nanos) -> Collection[int]:
        """What is to be forgotten since its time has passed."""
        return self._turn(now) if now >= self._turn_at else ()

    def _turn(self, now: Nanos) -> Collection[int]:
        gone = self._old - self._young
        self._old, self._young = self._young, set()
        self._turn_at = now + self._half_nanos
        return gone
