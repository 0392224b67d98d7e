"""Radix tree: the prompts that workers hold or will soon hold, prompt by prompt, without an entry for each block.

Rules:

1. A *chain* is the sequence of block keys of a prompt, held as a whole by one holder. A key covers its block and everything
   before it, so chains with a common key have everything before it in common.
2. Chains are paths in a tree of *nodes*: runs of blocks that belong to the same chains. A chain that branches off in the middle of a node
   splits it. Most prompts have a shared beginning and an end of their own, so they need two nodes, whatever their length. The time for a
   query or a change is proportional to the number of nodes on its path.
3. A node is removed with its last chain, so there are never more nodes than blocks. When chains are removed, neighbouring nodes may remain
   that belong to exactly the same chains. They are joined when an added chain passes through many of them, so an old split does not cost
   time for ever.
4. Each node counts, for each holder, its child nodes and the chains that end in it, but not the chains that pass through it. So adding or
   removing a chain changes few nodes, however deep the tree is: those that no other chain of its holder passes through, and the node
   before them.
5. An attacker may make the keys of two prompts collide. Then some numbers of blocks are slightly wrong, but nothing else fails: a
   chain that meets a node of another path is recorded only up to that node.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain as one_after_another

from msgspec import Struct

from fleet.core.clock import Nanos

Keys = Sequence[int]

# Maximum number of nodes with one child node, and without a chain that ends in them, on the path of an added chain. If there are more, each
# of them is merged with its child node.
JOIN_ABOVE = 16


class ChainHolder:
    """One holder of chains, such as a worker. The bit of the holder stands for the holder in the masks of nodes."""

    __slots__ = ("bit", "blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks = 0  # number of distinct blocks in all chains of this holder


class Chain(Struct, eq=False):
    """One prompt of a holder as a sequence of block keys (rule 1); `RadixTree.add` makes it."""

    holder: ChainHolder
    keys: Keys
    last: "RadixNode | None" = None  # the node in which the chain ends; None: the tree has no block of the chain
    until: Nanos = Nanos(0)  # instant until which the chain is kept, for holders that keep chains for a limited time


class RadixNode(Struct, eq=False):
    """Consecutive blocks that belong to the same chains (rule 2)."""

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
                break  # block keys collide (rule 5)
            if parent is not None and parent.count == 1:
                whole += 1
            depth += len(node.keys)
            # The added chain has only the first blocks of the node.
            if depth > total or node.keys[-1] != keys[depth - 1]:
                common = _common_blocks(node, keys)
                depth = node.start + common
                if (node := self._split(node, common)) is None:
                    break  # block keys collide (rule 5)
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
        """Return how many leading blocks of a prompt each holder has (in the form of `fleet.router.kv_index.prefix_index.runs`)."""
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
