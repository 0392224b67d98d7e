"""Prefix index: which workers and store tiers hold the blocks of a prompt or will soon hold them, and how accurate this view is.

There are two data structures for two kinds of knowledge. Holders report single blocks and evict them in any order, so `PrefixIndex` has an
entry for each block. The prompts of live requests, of assumed caches and of peer routers come and go as a whole, so `RadixTree` keeps whole
prompts, without an entry for each block. Both say in the same form how many leading blocks of a prompt each holder has (`runs`).

Rules of both:

1. A *holder* is anything that keeps reusable blocks: a worker's prefix cache, or one namespace in one tier of a store node. Each holder has
   a bit, and a *mask* has the bits of any number of holders. New holders get the bits of holders that have left, so masks stay short.
2. A block key is the first 8 bytes of a block hash as an integer. If the keys of two blocks collide, the router expects a
   hit that is not there. Engines and stores compare all 16 bytes, so the only effect is that the block is computed.
3. The *leading blocks* of a holder are the consecutive blocks of a prompt that it holds, from the first one on. Holders may
   evict blocks in any order; blocks behind a hole do not count, because no engine could use them.

Rule of `PrefixIndex`, which maps the key of each block to the mask of its holders:

4. A holder is never believed to hold more blocks than its capacity: further blocks are not added (and are counted
   in `overflowed`). So the memory of the index is bounded by the sum of all capacities, and is freed when all holders leave.

The index is a dict of integers and one set of integers for each holder, without an object for each block. If a block has one holder, the
holder's set and the dict share one integer object. The time to remove a holder is proportional to the number of its blocks.

The worker registry (`fleet.router.state.worker_registry`) enters what workers report (`fleet.backends.workers.streams`), what store nodes
report (`fleet.backends.workers.store_watch`), and what external servers report (`fleet.backends.kv_events.stream`). These three modules
also detect gaps between sequence numbers. After a gap they replace everything that the index knows about the sender.

Rules of `RadixTree`. The worker table (`fleet.router.state.worker_table`) has one for each of the three kinds of prompts, and gives workers
their bits in these trees.

5. A *chain* is the sequence of block keys of a prompt, held as a whole by one holder. A key covers its block and everything
   before it, so chains with a common key have everything before it in common.
6. Chains are paths in a tree of *nodes*: runs of blocks that belong to the same chains. A chain that branches off in the middle of a node
   splits it. Most prompts have a shared beginning and an end of their own, so they need two nodes, whatever their length. The time for a
   query or a change is proportional to the number of nodes on its path.
7. A node is removed with its last chain, so there are never more nodes than blocks. When chains are removed, neighbouring nodes may remain
   that belong to exactly the same chains. They are joined when an added chain passes through many of them, so an old split does not cost
   time for ever.
8. Each node counts, for each holder, its child nodes and the chains that end in it, but not the chains that pass through it. So adding or
   removing a chain changes few nodes, however deep the tree is: those that no other chain of its holder passes through, and the node
   before them.
9. An attacker may make the keys of two prompts collide. Then some numbers of blocks are slightly wrong, but nothing else fails: a
   chain that meets a node of another path is recorded only up to that node.

Rules of cache accuracy, which compares the predicted cached tokens with those that workers report:

10. The comparison is between the prompt tokens that placement expected to be cached and those that were cached, once for each request,
    on the worker that computed its prompt. Both are whole blocks and exclude the last token, which every engine computes.
11. The smaller of the two numbers counts as agreed, because both count tokens from the start of the prompt. Precision is the agreed tokens
    divided by the predicted ones, and recall the agreed tokens divided by the reported ones. The hit-rate error is the predicted minus the
    reported tokens, divided by all prompt tokens.
12. For each worker, the tokens of the latest `WINDOW` comparisons are summed; comparisons with nothing predicted and nothing reported are
    left out. If there are at least `ENOUGH` comparisons and the precision or the recall of the sums is below `DRIFTS`, the cache is said to
    drift. It no longer drifts when both are at least `RECOVERED`. Each change is reported once.
"""

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import accumulate, islice, pairwise, repeat
from itertools import chain as one_after_another
from operator import and_
from typing import NamedTuple, NewType

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from kvstore.block import HASH_BYTES, BlockHash
from kvstore.messages import POOL_TIER

Keys = Sequence[int]
Holder = NewType("Holder", str)


class StoreNamespace(NamedTuple):
    """Identifies the blocks in one store that belong to one fingerprint."""

    store_id: StoreId
    fingerprint: str


# Maximum number of blocks that `lost_blocks` looks up. With this number, the error of the estimated share of lost blocks is below 0.07 in
# 95 % of all cases.
SAMPLED_BLOCKS = 256
WORTH_BISECTING = 64  # number of a prompt's keys above which bisecting (`runs`) is faster than looking up each key
# Number of bytes of a block hash that form a block key. Stores compare the whole hash, because a collision there would return the KV of
# other tokens.
KEY_BYTES = 8
# Maximum number of nodes with one child node, and without a chain that ends in them, on the path of an added chain. If there are more, each
# of them is merged with its child node.
JOIN_ABOVE = 16

# Cache accuracy (rule 12):
WINDOW = 64  # number of latest comparisons that count for each worker
ENOUGH = 16  # number of comparisons that are needed before a cache can count as drifting
DRIFTS = 0.8  # a cache drifts if its precision or recall is below this; one evicted block in ten is still normal
RECOVERED = 0.9  # drift ends when precision and recall are at least this


def engine_cache_holder(worker_id: WorkerId) -> Holder:
    return Holder(f"worker/{worker_id}")


def store_tier_holder(store_id: StoreId, fingerprint: str, tier: str = POOL_TIER) -> Holder:
    return Holder(f"store/{store_id}/{fingerprint}/{tier}")


def keys_of(hashes: Sequence[BlockHash]) -> tuple[int, ...]:
    """Return the block keys of block hashes, in order."""
    return struct.unpack("<" + f"Q{HASH_BYTES - KEY_BYTES}x" * len(hashes), b"".join(hashes))


def runs(masks: Mapping[int, int], keys: Keys) -> list[tuple[int, int]]:
    """Return how many leading blocks of a prompt the holders have (rule 3).

    The result is a list of pairs, in ascending order: a number of leading blocks, and the bits of the holders with exactly this number.

    Leading blocks never go beyond a block that has no holder. So a long prompt is first cut at such a block, which is found by bisecting.
    Only the blocks before the cut are checked one by one.
    """
    if not keys or keys[0] not in masks:
        return []
    if len(keys) > WORTH_BISECTING:
        keys = keys[: bisect_left(keys, True, key=lambda key: key not in masks)]
    holders = list(map(masks.get, keys, repeat(0)))
    if 0 in holders:
        del holders[holders.index(0) :]
    held = len(holders)
    first = holders[0]
    if holders.count(first) == held:  # all holders of the first block have the same number of leading blocks
        return [(held, first)]
    running = list(accumulate(holders, and_))
    running.append(0)
    return [
        (depth, mask & ~following)
        for depth, (mask, following) in enumerate(pairwise(running), start=1)
        if mask != following
    ]


class PrefixIndex:
    """Maps block keys to their holders. A holder must be added before it is used. Methods accept keys that the index does not contain."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self.held: dict[Holder, set[int]] = {}
        self._bits: dict[Holder, int] = {}
        self._capacities: dict[Holder, int] = {}
        self.holders: dict[int, Holder] = {}  # the holders by their bits (rule 1)
        self._free_bits: list[int] = []
        self.overflowed = 0

    def __len__(self) -> int:
        """Return the number of distinct blocks that the holders together are believed to hold."""
        return len(self._masks)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._bits

    def held_by(self, holder: Holder) -> int:
        """Return how many blocks a holder is believed to hold."""
        return len(self.held[holder])

    def lost_blocks(self, holder: Holder, alike: int, elsewhere: float) -> float:
        """Estimate how many blocks would have to be computed again if the cache of a holder were lost.

        Only a sample of the holder's blocks is looked up, so the cost does not grow with their number. Block keys are hashes, so the first
        blocks of the holder's set are a random sample.

        Args:
            holder: The holder.
            alike: Bits of the holders that can replace this one; a block that one of them has is not lost.
            elsewhere: The part of a block, from 0 to 1, that counts as lost if only holders outside `alike` have the block. It is above 0
                if loading a block takes time.
        """
        held, others = self.held[holder], ~self._bits[holder]
        if not held:
            return 0.0
        masks = [self._masks[key] & others for key in islice(held, SAMPLED_BLOCKS)]
        lost = sum(elsewhere if mask else 1.0 for mask in masks if not mask & alike)
        return lost / len(masks) * len(held)

    def add(self, holder: Holder, capacity: int) -> None:
        """Add an empty holder with room for `capacity` blocks."""
        assert holder not in self._bits, holder
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
        self._bits[holder] = bit
        self.holders[bit] = holder
        self.held[holder] = set()
        self._capacities[holder] = capacity

    def remove(self, holder: Holder) -> None:
        """Remove a holder and all its blocks."""
        self.cleared(holder)
        bit = self._bits.pop(holder)
        del self.holders[bit], self.held[holder], self._capacities[holder]
        if self._bits:
            self._free_bits.append(bit)
        else:
            self._free_bits.clear()
            self._masks = {}  # a dict keeps the memory of its table when entries are removed; a new dict releases it

    def stored(self, holder: Holder, keys: Iterable[int]) -> None:
        bit, held, masks = self._bits[holder], self.held[holder], self._masks
        new = tuple(keys)
        if not held.isdisjoint(new):
            new = tuple(key for key in new if key not in held)
        if len(new) > (room := self._capacities[holder] - len(held)):
            new = tuple(dict.fromkeys(new))
            self.overflowed += max(0, len(new) - room)
            new = new[:room]
        held.update(new)
        if masks.keys().isdisjoint(new):  # most blocks are new to the index, and are added in one step
            masks.update(dict.fromkeys(new, bit))
        else:
            for key in new:
                masks[key] = masks.get(key, 0) | bit

    def removed(self, holder: Holder, keys: Iterable[int]) -> None:
        held = self.held[holder]
        gone = held.intersection(keys)
        self._unmark(self._bits[holder], gone)
        held -= gone

    def cleared(self, holder: Holder) -> None:
        self._unmark(self._bits[holder], self.held[holder])
        self.held[holder] = set()

    def bit(self, holder: Holder) -> int:
        """Return the bit of a holder, valid until the holder is removed."""
        return self._bits[holder]

    def runs(self, keys: Keys) -> list[tuple[int, int]]:
        """Return how many leading blocks of a prompt each holder has, in the form of the function `runs`."""
        return runs(self._masks, keys)

    def longest(self, keys: Keys) -> dict[Holder, int]:
        """Return the number of leading blocks of each holder that has at least the first block of a prompt (rule 3)."""
        depths: dict[Holder, int] = {}
        for depth, bits in self.runs(keys):
            self._credit(bits, depth, depths)
        return depths

    def _credit(self, bits: int, depth: int, depths: dict[Holder, int]) -> None:
        while bits:
            bit = bits & -bits
            depths[self.holders[bit]] = depth
            bits ^= bit

    def _unmark(self, bit: int, keys: AbstractSet[int]) -> None:
        take, others = self._masks.pop, ~bit
        self._masks.update([(key, rest) for key in keys if (rest := take(key) & others)])

    def check(self) -> None:
        """Assert that the map from keys to holders and the sets of keys by holder agree."""
        assert len(set(self._bits.values())) == len(self._bits)
        assert not set(self._free_bits) & set(self.holders)
        assert {bit: holder for holder, bit in self._bits.items()} == self.holders
        expected: dict[int, int] = {}
        for holder, held in self.held.items():
            assert len(held) <= self._capacities[holder], holder
            for key in held:
                expected[key] = expected.get(key, 0) | self._bits[holder]
        assert expected == self._masks

    @property
    def blocks(self) -> Mapping[Holder, int]:
        return {holder: len(held) for holder, held in self.held.items()}


class ChainHolder:
    """One holder of chains, such as a worker. The bit of the holder stands for the holder in the masks of nodes."""

    __slots__ = ("bit", "blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks = 0  # number of distinct blocks in all chains of this holder


class Chain(Struct, eq=False):
    """One prompt of a holder as a sequence of block keys (rule 5); `RadixTree.add` makes it."""

    holder: ChainHolder
    keys: Keys
    last: "RadixNode | None" = None  # the node in which the chain ends; None: the tree has no block of the chain
    until: Nanos = Nanos(0)  # instant until which the chain is kept, for holders that keep chains for a limited time


class RadixNode(Struct, eq=False):
    """Consecutive blocks that belong to the same chains (rule 6)."""

    parent: "RadixNode | None"  # the node before this one; None: this node begins with the first block
    start: int  # number of blocks before this node on its path
    keys: Keys  # block keys of the node's own blocks, in order
    mask: int  # bits of the holders whose chains contain these blocks
    chain: Chain | None  # the chain for which the node was made; None: that chain does not end here, or was removed
    # For each holder, the number of its chains that end here, plus the number of child nodes with chains of this holder; None: only `chain`
    # ends here.
    continuations: dict[ChainHolder, int] | None = None
    count: int = 1  # number of all chains that end here, plus the number of child nodes

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


class RadixTree:
    """Keeps the chains of several holders in one tree, and finds how many leading blocks of a prompt each holder has."""

    def __init__(self) -> None:
        self.nodes: dict[int, RadixNode] = {}  # all nodes by their first block key
        self._blocks = 0

    def __len__(self) -> int:
        """Return the number of distinct blocks in all chains of the tree."""
        return self._blocks

    def add(self, holder: ChainHolder, keys: Keys) -> Chain:
        """Add a chain, and return it. If the tree already has a chain with the same keys, it keeps both."""
        chain = Chain(holder, keys)
        nodes, depth, total = self.nodes, 0, len(keys)
        parent: RadixNode | None = None
        whole = 0  # number of nodes on the path with one child node and no chain that ends in them
        while depth < total:
            node = nodes.get(keys[depth])
            if node is None:
                chain.last = nodes[keys[depth]] = RadixNode(parent, depth, keys[depth:], holder.bit, chain)
                self._blocks += total - depth
                holder.blocks += total - depth
                break
            if node.parent is not parent:
                break  # block keys collide (rule 9)
            if parent is not None and parent.count == 1:
                whole += 1
            depth += len(node.keys)
            # The added chain has only the first blocks of the node.
            if depth > total or node.keys[-1] != keys[depth - 1]:
                common = _common_blocks(node, keys)
                depth = node.start + common
                if (node := self._split(node, common)) is None:
                    break  # block keys collide (rule 9)
            parent = node
        if chain.last is None:
            chain.last = parent
        if parent is not None:
            parent.count += 1
            _count_chain(parent, holder)
            if whole > JOIN_ABOVE:
                self._join(parent)
        return chain

    def extendable_chain(self, holder: ChainHolder, keys: Keys) -> Chain | None:
        """Return a chain of this holder that is a prefix of `keys` and whose last node no other chain uses; None if there is none."""
        nodes, total = self.nodes, len(keys)
        last: RadixNode | None = None
        depth = 0
        while depth < total and (node := nodes.get(keys[depth])) is not None and node.parent is last:
            if _common_blocks(node, keys) < len(node.keys):
                return None
            last = node
            depth = node.end
        if last is None or last.mask != holder.bit or last.count > 1:
            return None
        return last.chain

    def extend(self, chain: Chain, keys: Keys) -> None:
        """Replace the keys of a chain that `extendable_chain` returned. Only this chain uses its last node, so that node just becomes longer."""
        last = chain.last
        assert last is not None
        more = len(keys) - last.end
        last.keys = keys[last.start :]
        chain.holder.blocks += more
        self._blocks += more
        chain.keys = keys

    def remove(self, chain: Chain) -> None:
        """Remove a chain that `add` returned. A chain must not be removed twice."""
        holder, node = chain.holder, chain.last
        if node is not None and node.chain is chain:
            node.chain = None  # without this, chain and node would keep each other alive
            if node.continuations is None:  # the chain is the only one in this node, so the node is removed with it
                del self.nodes[node.keys[0]]
                self._blocks -= len(node.keys)
                holder.blocks -= len(node.keys)
                node = node.parent
        fewer = True  # True if `node` has lost a chain or a child node, so that its `count` falls
        while node is not None:
            continuations = _continuations(node)
            if fewer:
                node.count -= 1
            if continuations[holder] > 1:
                continuations[holder] -= 1
                return
            del continuations[holder]
            holder.blocks -= len(node.keys)
            node.mask &= ~holder.bit
            if fewer := not continuations:
                del self.nodes[node.keys[0]]
                self._blocks -= len(node.keys)
            node = node.parent

    def has_first_block(self, key: int) -> bool:
        """Return whether a node of the tree begins with this block key. If not, no chain begins with it."""
        return key in self.nodes

    def runs(self, keys: Keys) -> list[tuple[int, int]]:
        """Return how many leading blocks of a prompt each holder has, in the form of the function `runs`."""
        if not keys or keys[0] not in self.nodes:
            return []
        nodes, total = self.nodes, len(keys)
        found: list[tuple[int, int]] = []
        parent: RadixNode | None = None
        depth = mask = 0
        while depth < total and (node := nodes.get(keys[depth])) is not None and node.parent is parent:
            if node.mask != mask:
                if gone := mask & ~node.mask:
                    found.append((depth, gone))
                mask = node.mask
            end = depth + len(node.keys)
            if end > total or node.keys[-1] != keys[end - 1]:  # the prompt has only the first blocks of the node
                depth += _common_blocks(node, keys)
                break
            parent = node
            depth = end
        if mask:
            found.append((depth, mask))
        return found

    def _split(self, node: RadixNode, length: int) -> RadixNode | None:
        """Split a node and return its new first part; None if keys collide. The object `node` becomes the last part, so chains still end in it."""
        first_key = node.keys[0]
        if node.keys[length] in self.nodes:
            return None
        continuations = dict.fromkeys(_continuations(node), 1)
        first = RadixNode(node.parent, node.start, node.keys[:length], node.mask, None, continuations)
        node.parent = first
        node.start += length
        node.keys = node.keys[length:]
        self.nodes[first_key] = first
        self.nodes[node.keys[0]] = node
        return first

    def _join(self, node: RadixNode) -> None:
        """Merge nodes on the path from the root to `node`.

        Each node with one child node, and no chain that ends in it, is merged with its child node.
        """
        last: RadixNode | None = node
        while last is not None:
            parts, parent = [last], last.parent
            while parent is not None and parent.count == 1:
                parts.append(parent)
                parent = parent.parent
            if len(parts) > 1:
                # The last of these nodes takes the keys of the others. It is kept, because chains may end in it.
                for part in parts:
                    del self.nodes[part.keys[0]]
                last.start, last.parent = parts[-1].start, parent
                last.keys = tuple(one_after_another.from_iterable(part.keys for part in reversed(parts)))
                self.nodes[last.keys[0]] = last
            last = parent

    def check(self, chains: Sequence[Chain]) -> None:
        """Assert that the tree contains exactly these chains, and that all its counts, masks and keys are those of the chains."""
        ends: dict[int, dict[int, int]] = {}
        through: dict[int, set[int]] = {}
        nodes: dict[int, RadixNode] = {}
        held: dict[int, set[int]] = {}
        for chain in chains:
            keys: list[int] = []
            node = chain.last
            if node is not None:
                counts = ends.setdefault(id(node), {})
                counts[id(chain.holder)] = counts.get(id(chain.holder), 0) + 1
            while node is not None:
                through.setdefault(id(node), set()).add(id(chain.holder))
                nodes[id(node)] = node
                keys[:0] = node.keys
                assert node.start == (0 if node.parent is None else node.parent.end)
                node = node.parent
            assert keys == list(chain.keys)
            held.setdefault(id(chain.holder), set()).update(keys)
        assert {node.keys[0]: id(node) for node in nodes.values()} == {
            key: id(node) for key, node in self.nodes.items()
        }
        expected = {place: ends.get(place, {}) for place in nodes}
        counted = {place: sum(counts.values()) for place, counts in expected.items()}
        for place, node in nodes.items():
            if node.parent is not None:
                counted[id(node.parent)] += 1
                before = expected[id(node.parent)]
                for holder in through[place]:
                    before[holder] = before.get(holder, 0) + 1
        for place, node in nodes.items():
            assert expected[place] == {id(holder): count for holder, count in _continuations(node).items()}
            assert node.mask == sum(holder.bit for holder in _continuations(node))
            assert node.count == counted[place]
            assert node.chain is None or node.chain.last is node
        for chain in chains:
            assert chain.holder.blocks == len(held[id(chain.holder)])
        assert self._blocks == sum(len(node.keys) for node in nodes.values())


def _continuations(node: RadixNode) -> dict[ChainHolder, int]:
    """Return the counts of a node by holder. Create them if the node does not have them yet."""
    if node.continuations is None:
        assert node.chain is not None
        node.continuations = {node.chain.holder: 1}
    return node.continuations


def _count_chain(first: RadixNode, holder: ChainHolder) -> None:
    """Count one more chain of a holder that ends in a node. If the holder is new in the node, count the node as a child of its parent too."""
    node: RadixNode | None = first
    while node is not None:
        continuations = _continuations(node)
        if holder in continuations:
            continuations[holder] += 1
            return
        continuations[holder] = 1
        node.mask |= holder.bit
        holder.blocks += len(node.keys)
        node = node.parent


def _common_blocks(node: RadixNode, keys: Keys) -> int:
    """Return how many blocks of a node are also in a prompt that has the first block of the node."""
    own, start = node.keys, node.start
    end = min(len(own), len(keys) - start)
    if own[end - 1] == keys[start + end - 1]:
        return end
    return bisect_left(range(end), True, lo=1, key=lambda at: own[at] != keys[start + at])


class Knowledge(StrEnum):
    """How the router knows what a worker has cached. The values are public, because they are labels of metrics."""

    EXACT = "exact"  # the worker reports what it caches
    APPROXIMATE = "approximate"  # the worker reports nothing, and is assumed to hold the prompts that it was sent


class CacheComparison(Struct, frozen=True):
    """Compares the predicted with the reported cached tokens of one prompt, or the sums of both over several prompts (rule 11)."""

    prompt: int = 0
    predicted: int = 0
    reported: int = 0
    agreed: int = 0

    def __add__(self, other: "CacheComparison") -> "CacheComparison":
        return CacheComparison(
            self.prompt + other.prompt,
            self.predicted + other.predicted,
            self.reported + other.reported,
            self.agreed + other.agreed,
        )

    @property
    def precision(self) -> float:
        return self.agreed / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.agreed / self.reported if self.reported else 1.0

    @property
    def hit_rate_error(self) -> float:
        return (self.predicted - self.reported) / self.prompt if self.prompt else 0.0


_NOTHING = CacheComparison()


def compare(prompt_tokens: int, predicted_tokens: int, reported_tokens: int, block_tokens: int) -> CacheComparison:
    """Compare the predicted with the reported cached tokens of one prompt (rule 10)."""
    most = max(0, prompt_tokens - 1) // block_tokens * block_tokens
    predicted, reported = max(0, min(predicted_tokens, most)), min(reported_tokens, most)
    return CacheComparison(prompt_tokens, predicted, reported, min(predicted, reported))


class CacheAccuracy:
    """Keeps the latest comparisons of one worker, and decides whether its cache drifts (rule 12)."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.drifting = False
        self.recent = CacheComparison()
        self._window: deque[CacheComparison] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def note(self, compared: CacheComparison) -> bool:
        """Add the comparison of one prompt. Return True if the cache has begun to drift, or no longer drifts, because of it."""
        if not compared.predicted and not compared.reported:
            return False
        window, recent = self._window, self.recent
        gone = window.popleft() if len(window) == WINDOW else _NOTHING
        window.append(compared)
        self.recent = recent = CacheComparison(
            recent.prompt + compared.prompt - gone.prompt,
            recent.predicted + compared.predicted - gone.predicted,
            recent.reported + compared.reported - gone.reported,
            recent.agreed + compared.agreed - gone.agreed,
        )
        worst = min(recent.precision, recent.recall)
        drifting = worst < (RECOVERED if self.drifting else DRIFTS) and len(self._window) >= ENOUGH
        changed = drifting is not self.drifting
        self.drifting = drifting
        return changed

    def check(self) -> None:
        """Assert that `recent` is the sum of the comparisons in the window."""
        assert sum(self._window, start=CacheComparison()) == self.recent
        assert len(self._window) <= WINDOW
