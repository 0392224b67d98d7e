"""Assumed cache: what a worker without KV events is believed to hold, from the prompts that it was sent.

Whole prompts are kept, in the order in which they were sent. When the cache is full, the least recently sent prompt is forgotten. A prompt
is also forgotten when it expires, because it is assumed to be cached only for a limited time. A prompt may continue an earlier one, like
the next turn of a conversation. It replaces the earlier prompt if no other prompt contains the last blocks of the earlier one. A block that
several prompts share is kept as long as one of these prompts.
"""

import heapq
from collections import OrderedDict
from itertools import islice

from fleet.core.clock import Nanos
from fleet.router.kv_index.prefix_index import Chain, ChainHolder, Keys, RadixTree

# Maximum number of block keys of all prompts together, as a multiple of the capacity in blocks. A block that several prompts share counts
# once for each prompt. Beyond it, the least recently sent prompts are forgotten.
MAX_LISTED_FACTOR = 8
# Maximum number of entries in `AssumedCache._earlier`, as a multiple of the maximum number of block keys. Beyond it, the heap is built anew
# without entries that are out of date.
MAX_NOTED_FACTOR = 2


class AssumedCache:
    """Keeps the prompts that one worker is assumed to have cached, up to the capacity of its cache."""

    def __init__(self, chains: RadixTree, bit: int, capacity_blocks: int) -> None:
        """Start empty.

        Args:
            chains: The radix tree with the assumed prompts of all workers of the model.
            bit: The worker's bit in `chains`.
            capacity_blocks: Maximum number of blocks that the worker's cache can hold.
        """
        self._chains = chains
        self.capacity = capacity_blocks
        self._held = ChainHolder(bit)
        # The assumed prompts by their last block key. The least recently sent one is first.
        self._sent: OrderedDict[int, Chain] = OrderedDict()
        # Heap of the prompts that `add_earlier` has added. In `_sent` they may come after prompts that expire later, so `expire` finds them
        # here. An entry has the instant at which the prompt expires, and the prompt's last block key. Entries may be out of date, because
        # prompts are forgotten, replaced or sent again.
        self._earlier: list[tuple[Nanos, int]] = []
        self.listed = 0

    def __len__(self) -> int:
        """Return the number of blocks that the worker is assumed to hold."""
        return self._held.blocks

    def sent(self, keys: Keys, until: Nanos) -> None:
        """Add a prompt, cut to the capacity. It expires at `until`, or later if it repeats or continues a prompt that expires later.

        From call to call, `until` must not decrease, because `expire` checks the prompts in the order in which they were added. A prompt
        that expires earlier than the prompts before it is added by `add_earlier`.
        """
        keys = keys[: self.capacity]
        if not keys:
            return
        if (known := self._sent.pop(keys[-1], None)) is not None:
            chain = known
        elif (begun := self._chains.extendable_chain(self._held, keys)) is not None:
            chain = begun
            del self._sent[chain.keys[-1]]
            self.listed += len(keys) - len(chain.keys)
            self._chains.extend(chain, keys)
        else:
            chain = self._chains.add(self._held, keys)
            self.listed += len(keys)
        chain.until = max(chain.until, until)
        self._sent[keys[-1]] = chain
        while self._held.blocks > self.capacity or self.listed > MAX_LISTED_FACTOR * self.capacity:
            self._forget_first()

    def add_earlier(self, keys: Keys, until: Nanos) -> None:
        """Add a prompt that was sent some time ago, unless it is known already.

        If the cache is full, prompts that were added before this one are forgotten first.
        """
        keys = keys[: self.capacity]
        if not keys or keys[-1] in self._sent:
            return
        self.sent(keys, until)
        heapq.heappush(self._earlier, (self._sent[keys[-1]].until, keys[-1]))
        if len(self._earlier) > MAX_NOTED_FACTOR * MAX_LISTED_FACTOR * self.capacity:
            self._earlier = [(chain.until, last) for last, chain in self._sent.items()]
            heapq.heapify(self._earlier)

    def latest(self, count: int) -> list[Chain]:
        """Return the most recently sent prompts, at most `count`, the latest one first."""
        return list(islice(reversed(self._sent.values()), count))

    def expire(self, now: Nanos) -> None:
        """Forget the prompts that have expired: they are no longer assumed to be cached."""
        while self._sent and next(iter(self._sent.values())).until <= now:
            self._forget_first()
        while self._earlier and self._earlier[0][0] <= now:
            _, last = heapq.heappop(self._earlier)
            if (chain := self._sent.get(last)) is not None and chain.until <= now:
                self._forget(last)

    def clear(self) -> None:
        while self._sent:
            self._forget_first()

    def _forget_first(self) -> None:
        self._forget(next(iter(self._sent)))

    def _forget(self, last: int) -> None:
        chain = self._sent.pop(last)
        self.listed -= len(chain.keys)
        self._chains.remove(chain)

    def chains(self) -> list[Chain]:
        """Return the chains of all assumed prompts, for the check of the radix tree."""
        return list(self._sent.values())

    def check(self) -> None:
        """Assert that the counts match the prompts, and that the limits of the cache are kept."""
        assert len({key for chain in self.chains() for key in chain.keys}) == self._held.blocks <= self.capacity
        assert self.listed == sum(len(chain.keys) for chain in self.chains())
        assert all(chain.keys[-1] == last for last, chain in self._sent.items())
        assert len(self._earlier) <= MAX_NOTED_FACTOR * MAX_LISTED_FACTOR * self.capacity
