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
        self._users: dict[int, int] = {}  # sequences that hold a named block; 0: it is idle
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
        users = self._users
        if not keys or keys[0] not in users:
            return 0
        here = list(map(users.__contains__, keys))
        return here.index(False) if False in here else len(here)

    def idle_among(self, keys: Sequence[int]) -> int:
        return sum(map(self._idle.__contains__, keys))

    def hold(self, keys: Sequence[int]) -> None:
        """Hold blocks that are here."""
        users, idle = self._users, self._idle
        for key in keys:
            if not (before := users[key]):
                del idle[key]
            users[key] = before + 1

    def take(self, blocks: int) -> None:
        """Own so many blocks without a name; there must be room (`available`)."""
        assert blocks <= self.available, (blocks, self.available)
        if (missing := blocks - self._free) > 0:
            forget, users = self._idle.popitem, self._users
            gone = [forget(False)[0] for _ in range(missing)]
            for key in gone:
                del users[key]
            self._removed += gone
            self._free = 0
        else:
            self._free -= blocks

    def give(self, blocks: int) -> None:
        """Own so many blocks less."""
        self._free += blocks

    def name(self, keys: Sequence[int]) -> list[int]:
        """Give owned blocks their names, now that they are computed; returns the names given, which are held.

        The first of equal blocks takes the name; another one stays what it is until its sequence ends.
        """
        users = self._users
        named = [key for key in keys if key not in users]
        users.update(dict.fromkeys(named, 1))
        self._stored += named
        return named

    def release(self, keys: Sequence[int]) -> None:
        """Hold named blocks no longer."""
        users, idle = self._users, self._idle
        for key in reversed(keys):
            left = users[key] - 1
            users[key] = left
            if not left:
                idle[key] = None

    @property
    def changed(self) -> bool:
        """Whether `changes` has something to tell."""
        return bool(self._stored or self._removed)

    def changes(self) -> tuple[list[int], list[int]]:
        """Names that came and are here, and names that went, since the last call. Some may be in both: they went first."""
        stored, removed = self._stored, self._removed
        if removed:
            users = self._users
            stored = [key for key in stored if key in users]
        self._stored, self._removed = [], []
        return stored, removed

    def names(self) -> list[int]:
        """Of all blocks that can be found here."""
        return list(self._users)

    def check(self) -> None:
        """Assert rule 1."""
        assert 0 <= self._free <= self.blocks
        assert all(users >= 0 for users in self._users.values())
        assert {key for key, users in self._users.items() if not users} == self._idle.keys()
