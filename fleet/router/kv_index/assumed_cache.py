"""Assumed cache: what a worker without KV events is believed to hold, from the prompts that it was sent.

Prompts are kept as they were sent. The least recently sent prompt is forgotten first: when there is no more room, or when
its time is over. A prompt that continues an earlier one, like the next turn of a conversation, replaces it. Blocks that prompts share
stay as long as one of these prompts stays.
"""

from collections import OrderedDict
from itertools import islice

from fleet.core.clock import Nanos
from fleet.router.kv_index.radix_tree import Chain, ChainHolder, Keys, RadixTree

MAX_LISTED_FACTOR = 8  # most keys of all prompts, over the capacity; shared blocks are listed with each prompt


class AssumedCache:
    """The assumed cache of one worker."""

    def __init__(self, chains: RadixTree, bit: int, capacity_blocks: int) -> None:
        """Start empty.

        Args:
            chains: The assumed prompts of all workers of the table.
            bit: The worker's bit in `chains`.
            capacity_blocks: Blocks that the worker's cache holds.
        """
        self._chains = chains
        self.capacity = capacity_blocks
        self._held = ChainHolder(bit)
        # The assumed prompts by their last block key, the least recently sent first.
        self._sent: OrderedDict[int, Chain] = OrderedDict()
        self.listed = 0

    def __len__(self) -> int:
        """Return the number of blocks that the worker is assumed to hold."""
        return self._held.blocks

    def sent(self, keys: Keys, until: Nanos) -> None:
        """Add a prompt as far as there is room; it stays at least as long as the prompt that it continues."""
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
        """Add a prompt that was sent some time ago, unless it is known. It counts as sent now when the oldest prompts are forgotten."""
        if keys and keys[: self.capacity][-1] not in self._sent:
            self.sent(keys, until)

    def latest(self, count: int) -> list[Chain]:
        """Return the most recently sent prompts, at most `count`, the latest one first."""
        return list(islice(reversed(self._sent.values()), count))

    def expire(self, now: Nanos) -> None:
        """Forget the prompts whose validity has ended."""
        while self._sent and next(iter(self._sent.values())).until <= now:
            self._forget_first()

    def clear(self) -> None:
        while self._sent:
            self._forget_first()

    def _forget_first(self) -> None:
        _, chain = self._sent.popitem(last=False)
        self.listed -= len(chain.keys)
        self._chains.remove(chain)

    def chains(self) -> list[Chain]:
        """Return the chains of all prompts."""
        return list(self._sent.values())

    def check(self) -> None:
        """Assert that the limits of the cache are kept."""
        assert len({key for chain in self.chains() for key in chain.keys}) == self._held.blocks <= self.capacity
        assert self.listed == sum(len(chain.keys) for chain in self.chains())
        assert all(chain.keys[-1] == last for last, chain in self._sent.items())
