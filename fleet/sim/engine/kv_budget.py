"""KV budget of a simulated engine: a prefix cache that counts blocks and stores no bytes.

Rules:

1. A block is free, held by sequences, or idle. An idle block is held by nobody, but has a name and can be found again.
2. Blocks without a name are a number that each sequence owns: prompts that are not computed yet, partly filled blocks, answers.
3. If no block is free, the idle block that was released first loses its name. A sequence releases its last block first, so the
   tail of a chain is evicted before its head.
"""

from collections import OrderedDict
from collections.abc import Sequence


class KvBudget:
    """The blocks of one engine."""

    def __init__(self, blocks: int):
        assert blocks >= 1, blocks
        self._free = blocks
        self._users: dict[int, int] = {}  # named block -> sequences that hold it; 0 if it is idle
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of release
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
        """Return the number of leading blocks of a chain that are here."""
        users = self._users
        if not keys or keys[0] not in users:
            return 0
        here = list(map(users.__contains__, keys))
        return here.index(False) if False in here else len(here)

    def idle_among(self, keys: Sequence[int]) -> int:
        return sum(map(self._idle.__contains__, keys))

    def hold(self, keys: Sequence[int]) -> None:
        """Hold named blocks, which must be here."""
        users, idle = self._users, self._idle
        for key in keys:
            if not (before := users[key]):
                del idle[key]
            users[key] = before + 1

    def take(self, blocks: int) -> None:
        """Take blocks without a name; as many must be `available`."""
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
        """Give blocks without a name back."""
        self._free += blocks

    def name(self, keys: Sequence[int]) -> list[int]:
        """Name owned blocks after they were computed; return the names that were given, and hold these.

        If a block of that name is here already, the owned block stays without a name until its sequence ends.
        """
        users = self._users
        named = [key for key in keys if key not in users]
        users.update(dict.fromkeys(named, 1))
        self._stored += named
        return named

    def release(self, keys: Sequence[int]) -> None:
        """Stop holding named blocks."""
        users, idle = self._users, self._idle
        for key in reversed(keys):
            left = users[key] - 1
            users[key] = left
            if not left:
                idle[key] = None

    @property
    def changed(self) -> bool:
        """True if `changes` would return anything."""
        return bool(self._stored or self._removed)

    def changes(self) -> tuple[list[int], list[int]]:
        """Return the names stored and removed since the last call. A name in both was removed first."""
        stored, removed = self._stored, self._removed
        if removed:
            users = self._users
            stored = [key for key in stored if key in users]
        self._stored, self._removed = [], []
        return stored, removed

    def names(self) -> list[int]:
        """Return the names of all blocks that can be found here."""
        return list(self._users)

    def check(self) -> None:
        """Assert rule 1."""
        assert 0 <= self._free <= self.blocks
        assert all(users >= 0 for users in self._users.values())
        assert {key for key, users in self._users.items() if not users} == self._idle.keys()
