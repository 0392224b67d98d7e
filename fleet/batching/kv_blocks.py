"""KV blocks of a modelled engine (`fleet.batching.attempts`): a prefix cache that counts and names blocks, but stores no bytes.

Rules:

1. A block is free, used by attempts, or idle. No attempt uses an idle block, but the block has a name, so that a later prompt can use
   it again. A handoff lease uses the blocks that it keeps, like an attempt.
2. A block without a name belongs to one attempt: it is a block of a prompt that is not computed yet, a partly filled block, or a block
   of an answer. Only the number of these blocks is stored in the attempt. A block gets its name when all its tokens are computed, so
   that other attempts find it. If a block of that name exists already, the attempt's block stays without a name until the attempt ends.
3. A prompt is admitted with blocks for all its tokens and one more token. The leading blocks of the prompt that are in the cache are
   used; the other blocks are taken from the free and idle ones.
4. If no block is free, the idle block that was released first loses its name and is used again. An attempt releases its last block
   first, so the end of a chain is evicted before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from fleet.batching.attempts import BatchedAttempt, Name
from kvstore.block import blocks_for


class KvBlocks(Generic[Name]):
    """Counts the blocks of one engine, and keeps their names."""

    def __init__(self, blocks: int, block_tokens: int):
        assert blocks >= 1, blocks
        self._free = blocks
        self._users: dict[Name, int] = {}  # number of attempts and handoff leases that use each named block; 0: idle
        self._idle: OrderedDict[Name, None] = OrderedDict()  # idle blocks, in the order of their release
        self._stored: list[Name] = []
        self._removed: list[Name] = []
        self._block_tokens = block_tokens
        self.blocks = blocks

    def __contains__(self, key: object) -> bool:
        return key in self._users

    @property
    def available(self) -> int:
        """Number of blocks that an attempt can take: the free and the idle ones."""
        return self._free + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks that attempts and handoff leases use."""
        return self.blocks - self.available

    def leading(self, keys: Sequence[Name]) -> int:
        """Return the number of leading blocks of a chain that are in the cache."""
        users = self._users
        if not keys or keys[0] not in users:
            return 0
        here = list(map(users.__contains__, keys))
        return here.index(False) if False in here else len(here)

    def names(self) -> list[Name]:
        """Return the names of all blocks in the cache."""
        return list(self._users)

    @property
    def changed(self) -> int:
        """Number of names that were stored in or removed from the cache since the last call of `changes`."""
        return len(self._stored) + len(self._removed)

    def changes(self) -> tuple[list[Name], list[Name]]:
        """Return two lists: the names that were stored since the last call and are still in the cache, and the names that were removed.

        A name in both lists was removed and then stored again.
        """
        stored, removed = self._stored, self._removed
        if removed:
            users = self._users
            stored = [key for key in stored if key in users]
        self._stored, self._removed = [], []
        return stored, removed

    # Methods for named blocks:

    def hold(self, keys: Sequence[Name]) -> None:
        """Record that an attempt or a handoff lease uses these named blocks, which must be in the cache."""
        users, idle = self._users, self._idle
        for key in keys:
            if not (before := users[key]):
                del idle[key]
            users[key] = before + 1

    def release(self, keys: Sequence[Name]) -> None:
        """Record that an attempt or a handoff lease no longer uses these named blocks. Blocks without users become idle."""
        users, idle = self._users, self._idle
        for key in reversed(keys):
            left = users[key] - 1
            users[key] = left
            if not left:
                idle[key] = None

    # Methods for all blocks of an attempt:

    def reserve(self, attempt: BatchedAttempt[Name], here: int) -> bool:
        """Take the blocks for a prompt and one more token (rule 3). The first `here` blocks of the prompt must be in the cache.

        Return False, and take nothing, if too few blocks are available.
        """
        cached = attempt.job.keys[:here]
        wanted = attempt.prompt_tokens // self._block_tokens + 1 - here
        if wanted > self.available - (sum(map(self._idle.__contains__, cached)) if here else 0):
            return False
        attempt.held = list(cached)
        self.hold(cached)
        self._take(wanted)
        attempt.own = wanted
        attempt.computed = here * self._block_tokens
        return True

    def room(self, attempt: BatchedAttempt[Name]) -> int:
        """Return the number of tokens, of prompt and answer together, that fit into the blocks of an attempt."""
        return (len(attempt.held) + attempt.own) * self._block_tokens

    def missing(self, attempt: BatchedAttempt[Name]) -> int:
        """Return the number of blocks that an attempt has to fetch.

        These are the blocks of the tokens whose KV the engine will have after the fetch (`BatchedAttempt.coming`), without the attempt's
        named blocks.
        """
        return max(0, blocks_for(attempt.coming, self._block_tokens) - len(attempt.held))

    def grow(self, attempt: BatchedAttempt[Name]) -> None:
        """Take one more block for an attempt. A block must be available."""
        self._take(1)
        attempt.own += 1

    def name(self, attempt: BatchedAttempt[Name], keys: Sequence[Name], computed: int) -> None:
        """Give names to those blocks without names that the first `computed` tokens of an attempt fill.

        `keys` has the names of the attempt's blocks, in order. A name that another block has already is left out (rule 2).
        """
        full, known = min(computed // self._block_tokens, len(keys)), len(attempt.held)
        if full <= known:
            return
        fresh: Sequence[Name]
        if not known or keys[known - 1] == attempt.held[-1]:
            # The attempt's named blocks are the first ones of the chain.
            fresh = keys[known:full]
        else:
            held = set(attempt.held)
            fresh = [key for key in keys[:full] if key not in held]
        users = self._users
        named = [key for key in fresh if key not in users]
        users.update(dict.fromkeys(named, 1))
        self._stored += named
        attempt.held += named
        attempt.own -= len(named)

    def free(self, attempt: BatchedAttempt[Name]) -> None:
        """Release all blocks of an attempt that has ended, was cancelled or was preempted."""
        self.release(attempt.held)
        self._free += attempt.own
        attempt.held, attempt.own, attempt.computed = [], 0, 0

    def _take(self, blocks: int) -> None:
        """Take this number of blocks, which must be `available`, for an attempt; evict idle blocks if too few are free."""
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

    def check(self, owned: int) -> None:
        """Assert that each block is free, used or idle (rule 1). `owned` is the number of all attempts' blocks without names."""
        assert self._free >= 0
        assert self._free + len(self._users) + owned == self.blocks
        assert all(users >= 0 for users in self._users.values())
        assert {key for key, users in self._users.items() if not users} == self._idle.keys()
