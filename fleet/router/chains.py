"""Blocks that are held prompt by prompt: who has how much of one, without an entry for each block.

Rules:

1. A *chain* is the keys of a prompt's full blocks, held as a whole by one holder. A key stands for its block and all that is
   before it, so chains that have a key in common have everything before it in common.
2. The blocks at the beginning of a chain that others have too are noted one by one. The rest is its *tail*: one entry, under
   the key of its first block. Most prompts end in what nobody else has, and that costs the same however long it is.
3. A chain that runs into the tail of another divides it: as far as both go, blocks are noted one by one from then on.
4. Two prompts whose keys collide, which somebody may bring about, make numbers wrong by some blocks and nothing else.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from msgspec import Struct

from fleet.clock import Nanos
from fleet.router.index import runs

Keys = Sequence[int]


class ChainHolder:
    """Somebody who holds chains: what is noted for one."""

    __slots__ = ("bit", "shared", "tail_blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.shared: dict[int, int] = {}  # its chains by key of a block that is noted by itself
        self.tail_blocks = 0

    @property
    def blocks(self) -> int:
        """Unique ones that it holds."""
        return len(self.shared) + self.tail_blocks


class Chain(Struct, eq=False):
    """One of a holder's chains. Made by `Chains.add`."""

    holder: ChainHolder
    keys: Keys
    tail: int = 0  # where it begins among the keys
    until: Nanos = Nanos(0)  # for holders that keep it for a time


class Chains:
    """All chains of some holders, each with a bit of its own."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}  # bits of the holders by key of a block that is noted by itself
        self._tails: dict[int, Chain] = {}  # by their first key
        self._tail_blocks = 0

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._masks) + self._tail_blocks

    def add(self, holder: ChainHolder, keys: Keys) -> Chain:
        """Note a chain; one that has the same keys as another is another all the same."""
        chain = Chain(holder, keys)
        depth = _leading(self._masks, keys)
        if depth < len(keys):
            other = self._tails.get(keys[depth])
            if other is not None and other.tail == depth:
                depth = self._divide(other, keys)
            if depth < len(keys):
                self._tails[keys[depth]] = chain
        if depth:
            self._note(holder, keys[:depth])
        chain.tail = depth
        self._count(holder, len(keys) - depth)
        return chain

    def continued(self, holder: ChainHolder, keys: Keys) -> Chain | None:
        """The holder's chain that `keys` begins with, if it has a tail."""
        depth = _leading(self._masks, keys)
        if depth == len(keys) or (found := self._tails.get(keys[depth])) is None:
            return None
        whole = found.holder is holder and len(found.keys) <= len(keys) and found.keys[-1] == keys[len(found.keys) - 1]
        return found if whole else None

    def extend(self, chain: Chain, keys: Keys) -> None:
        """Put more keys in place of those of a chain that is `continued`: as nobody shares its tail, nobody has the rest."""
        self._count(chain.holder, len(keys) - len(chain.keys))
        chain.keys = keys

    def remove(self, chain: Chain) -> None:
        """Forget a chain that was added, once."""
        holder, keys, tail = chain.holder, chain.keys, chain.tail
        if tail < len(keys):
            self._count(holder, tail - len(keys))
            if self._tails.get(keys[tail]) is chain:
                del self._tails[keys[tail]]
        if not tail:
            return
        masks, shared, others = self._masks, holder.shared, ~holder.bit
        for key in keys[:tail]:
            if (left := shared.get(key, 1) - 1) > 0:
                shared[key] = left
                continue
            shared.pop(key, None)
            if rest := masks.get(key, 0) & others:
                masks[key] = rest
            else:
                masks.pop(key, None)

    def runs(self, keys: Keys) -> list[tuple[int, int]]:
        """Whose leading blocks of a prompt end where, as `fleet.router.index.runs` has it."""
        if not keys:
            return []
        found = runs(self._masks, keys)
        depth = found[-1][0] if found else 0
        if depth == len(keys) or (other := self._tails.get(keys[depth])) is None or other.tail != depth:
            return found
        if found:  # it has all that is before its tail, so it is among those who have most
            rest = found[-1][1] & ~other.holder.bit
            found[-1:] = [(depth, rest)] if rest else []
        found.append((_common(other.keys, keys, depth), other.holder.bit))
        return found

    def _divide(self, other: Chain, keys: Keys) -> int:
        """Note blocks of a tail one by one, as far as `keys` has them too; returns how far that is."""
        start, theirs = other.tail, other.keys
        end = _common(theirs, keys, start)
        del self._tails[theirs[start]]
        self._note(other.holder, theirs[start:end])
        other.tail = end
        self._count(other.holder, start - end)
        if end < len(theirs):
            self._tails[theirs[end]] = other
        return end

    def _note(self, holder: ChainHolder, keys: Keys) -> None:
        masks, shared, bit = self._masks, holder.shared, holder.bit
        for key in keys:
            shared[key] = shared.get(key, 0) + 1
            masks[key] = masks.get(key, 0) | bit

    def _count(self, holder: ChainHolder, blocks: int) -> None:
        holder.tail_blocks += blocks
        self._tail_blocks += blocks

    def check(self, chains: Sequence[Chain]) -> None:
        """Assert that these are all chains, and that what is noted follows from them."""
        shared: dict[int, dict[int, int]] = {}
        tails: dict[int, int] = {}
        for chain in chains:
            counts = shared.setdefault(id(chain.holder), {})
            for key in chain.keys[: chain.tail]:
                counts[key] = counts.get(key, 0) + 1
            tails[id(chain.holder)] = tails.get(id(chain.holder), 0) + len(chain.keys) - chain.tail
        masks: dict[int, int] = {}
        for holder in {id(chain.holder): chain.holder for chain in chains}.values():
            assert shared[id(holder)] == holder.shared
            assert tails[id(holder)] == holder.tail_blocks
            for key in holder.shared:
                masks[key] = masks.get(key, 0) | holder.bit
        assert masks == self._masks
        assert self._tail_blocks == sum(tails.values())
        assert self._tails == {chain.keys[chain.tail]: chain for chain in chains if chain.tail < len(chain.keys)}


def _leading(masks: Mapping[int, int], keys: Keys) -> int:
    """How many of them are in the map; whoever holds a block holds all before it, so bisection finds the first that is not."""
    if not keys or keys[0] not in masks:
        return 0
    return bisect_left(keys, True, key=lambda key: key not in masks)


def _common(one: Keys, other: Keys, start: int) -> int:
    """How many leading keys two chains have in common, which is more than `start`."""
    end = min(len(one), len(other))
    if one[end - 1] == other[end - 1]:
        return end
    return bisect_left(range(end), True, lo=start, key=lambda at: one[at] != other[at])
