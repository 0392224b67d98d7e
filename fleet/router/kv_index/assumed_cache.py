"""What a worker that tells nothing of its prefix cache is believed to hold: what was sent there, for a while.

Prompts are kept as they were sent, the least recently sent first to go: when they are more than there is room for, or when
their time has passed. A prompt that begins with an earlier one, as the turns of a conversation do, takes its place. What
prompts have in common stays as long as one of them does.
"""

from collections import OrderedDict

from fleet.core.clock import Nanos
from fleet.router.kv_index.radix_tree import Chain, ChainHolder, Keys, RadixTree

MAX_LISTED_FACTOR = 8  # keys in all prompts, over the capacity: what prompts share is listed with each


class AssumedCache:
    """The beliefs about one worker."""

    def __init__(self, chains: RadixTree, bit: int, capacity_blocks: int) -> None:
        """Nothing was sent yet.

        Args:
            chains: Those of all workers that tell nothing.
            bit: This worker's there.
            capacity_blocks: What its cache holds.
        """
        self._chains = chains
        self.capacity = capacity_blocks
        self._held = ChainHolder(bit)
        self._sent: OrderedDict[int, Chain] = OrderedDict()  # by last key
        self.listed = 0

    def __len__(self) -> int:
        """Blocks."""
        return self._held.blocks

    def sent(self, keys: Keys, until: Nanos) -> None:
        """Note a prompt, as far as there is room for it; times never go back."""
        keys = keys[: self.capacity]
        if not keys:
            return
        if (known := self._sent.pop(keys[-1], None)) is not None:
            chain = known
        elif (begun := self._chains.continued(self._held, keys)) is not None:
            chain = begun
            del self._sent[chain.keys[-1]]
            self.listed += len(keys) - len(chain.keys)
            self._chains.extend(chain, keys)
        else:
            chain = self._chains.add(self._held, keys)
            self.listed += len(keys)
        chain.until = until
        self._sent[keys[-1]] = chain
        while self._held.blocks > self.capacity or self.listed > MAX_LISTED_FACTOR * self.capacity:
            self._forget_first()

    def expire(self, now: Nanos) -> None:
        """Forget what has had its time."""
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
        """All that is kept."""
        return list(self._sent.values())

    def check(self) -> None:
        """Assert that it keeps to its bounds."""
        assert len({key for chain in self.chains() for key in chain.keys}) == self._held.blocks <= self.capacity
        assert self.listed == sum(len(chain.keys) for chain in self.chains())
        assert all(chain.keys[-1] == last for last, chain in self._sent.items())
