"""The KV memory of one simulated engine, counted and not stored: a prefix cache over a budget of blocks.

Rules:

1. A block is free, held by sequences, or idle: nobody holds it, but it has a name and can be found again.
2. Blocks without a name (prompts not computed yet, the tail of a prompt, answers) are a number each sequence owns.
3. Room is made by forgetting the idle block that was released longest ago; a sequence releases its last block first, so that
   the tail of a chain goes before its head.
"""

from collections import OrderedDict
from collections.abc import Sequence


class KvBudget:
    """Blocks of one engine."""

    def __init__(self, blocks: int):
        assert blocks >= 1, blocks
        self._free = blocks
        self._held: dict[int, int] = {}  # sequences that hold a named block
        self._idle: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._stored: list[int] = []
        self._removed: list[int] = []
        self.blocks = blocks

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return self._free + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.available

    def leading(self, keys: Sequence[int]) -> int:
        """How many blocks of a chain are here, from its first on."""
        held, idle = self._held, self._idle
        for index, key in enumerate(keys):
            if key not in held and key not in idle:
                return index
        return len(keys)

    def idle_among(self, keys: Sequence[int]) -> int:
        return sum(key in self._idle for key in keys)

    def hold(self, keys: Sequence[int]) -> None:
        """Hold blocks that are here."""
        for key in keys:
            if key in self._idle:
                del self._idle[key]
                self._held[key] = 1
            else:
                self._held[key] += 1

    def take(self, blocks: int) -> None:
        """Own so many blocks without a name; there must be room (`available`)."""
        assert blocks <= self.available, (blocks, self.available)
        while self._free < blocks:
            key, _ = self._idle.popitem(last=False)
            self._removed.append(key)
            self._free += 1
        self._free -= blocks

    def give(self, blocks: int) -> None:
        """Own so many blocks less."""
        self._free += blocks

    def name(self, keys: Sequence[int]) -> list[int]:
        """Give owned blocks their names, now that they are computed; returns the names given, which are held.

        The first of equal blocks takes the name; another one stays what it is until its sequence ends.
        """
        held, idle = self._held, self._idle
        named = [key for key in keys if key not in held and key not in idle]
        held.update(dict.fromkeys(named, 1))
        self._stored += named
        return named

    def release(self, keys: Sequence[int]) -> None:
        """Hold named blocks no longer."""
        held, idle = self._held, self._idle
        for key in reversed(keys):
            if (users := held[key]) > 1:
                held[key] = users - 1
            else:
                del held[key]
                idle[key] = None

    def changes(self) -> tuple[list[int], list[int]]:
        """Names that came and are here, and names that went, since the last call. Some may be in both: they went first."""
        stored, removed = self._stored, self._removed
        if removed:
            stored = [key for key in stored if key in self._held or key in self._idle]
        self._stored, self._removed = [], []
        return stored, removed

    def check(self) -> None:
        """Assert rule 1."""
        assert 0 <= self._free <= self.blocks
        assert not self._held.keys() & self._idle.keys()
        assert all(users >= 1 for users in self._held.values())
