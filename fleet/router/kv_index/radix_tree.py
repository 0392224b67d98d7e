"""Blocks that are held prompt by prompt: who has how much of one, without an entry for each block.

Rules:

1. A *chain* is the keys of a prompt's full blocks, held as a whole by one holder. A key stands for its block and all that is
   before it, so chains that have a key in common have everything before it in common.
2. Chains are paths in a tree of *pieces*: runs of blocks that the same chains go through. A chain that parts from others in
   the middle of a piece divides it. Most prompts are a beginning that many have and an end that nobody else has: two pieces,
   however long they are, and what is asked or changed costs as much as there are pieces.
3. Pieces go when the last chain through them does; so there are never more than blocks. Those that no chain tells apart any more are
   put together when a chain is added that goes through many of them: what was divided long ago costs nothing for ever.
4. What goes on from a piece is counted there, and not what goes through it: who comes or goes changes the pieces that nobody else of
   its holder goes through, and the one before them, however many there are above.
5. Two prompts whose keys collide, which somebody may bring about, make numbers wrong by some blocks and nothing else: a chain
   that runs into a piece which belongs elsewhere is noted until there.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain as one_after_another

from msgspec import Struct

from fleet.core.clock import Nanos

Keys = Sequence[int]

JOIN_ABOVE = 16  # pieces that could be one; fewer cost less to follow than to put together, and to divide again


class ChainHolder:
    """Somebody who holds chains."""

    __slots__ = ("bit", "blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks = 0  # unique ones that it holds


class Chain(Struct, eq=False):
    """One of a holder's chains. Made by `RadixTree.add`."""

    holder: ChainHolder
    keys: Keys
    last: "RadixNode | None" = None  # where it ends; None: it has no blocks
    until: Nanos = Nanos(0)  # for holders that keep it for a time


class RadixNode(Struct, eq=False):
    """Some blocks that follow each other, and who has them."""

    above: "RadixNode | None"  # what is before it
    start: int  # blocks before it
    keys: Keys  # its own
    mask: int  # the holders' bits
    chain: Chain | None  # the one that it was made for, if that ends here
    on: dict[ChainHolder, int] | None = None  # chains that end here and next pieces, by holder; None: that chain alone
    count: int = 1  # of both, whoever has them

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


class RadixTree:
    """All chains of some holders, each with a bit of its own."""

    def __init__(self) -> None:
        self.nodes: dict[int, RadixNode] = {}  # by their first key
        self._blocks = 0

    def __len__(self) -> int:
        """Distinct blocks."""
        return self._blocks

    def add(self, holder: ChainHolder, keys: Keys) -> Chain:
        """Note a chain; one that has the same keys as another is another all the same."""
        chain = Chain(holder, keys)
        nodes, depth, total = self.nodes, 0, len(keys)
        above: RadixNode | None = None
        whole = 0  # pieces that go on in one way only, as far as they are known
        while depth < total:
            node = nodes.get(keys[depth])
            if node is None:
                chain.last = nodes[keys[depth]] = RadixNode(above, depth, keys[depth:], holder.bit, chain)
                self._blocks += total - depth
                holder.blocks += total - depth
                break
            if node.above is not above:
                break  # rule 5
            if above is not None and above.count == 1:
                whole += 1
            depth += len(node.keys)
            if depth > total or node.keys[-1] != keys[depth - 1]:  # it does not have all of them
                common = _common(node, keys)
                depth = node.start + common
                if (node := self._divide(node, common)) is None:
                    break  # rule 5
            above = node
        if chain.last is None:
            chain.last = above
        if above is not None:
            above.count += 1
            _enter(above, holder)
            if whole > JOIN_ABOVE:
                self._join(above)
        return chain

    def continued(self, holder: ChainHolder, keys: Keys) -> Chain | None:
        """The holder's chain that `keys` begins with, if nobody has its end too."""
        nodes, total = self.nodes, len(keys)
        last: RadixNode | None = None
        depth = 0
        while depth < total and (node := nodes.get(keys[depth])) is not None and node.above is last:
            if _common(node, keys) < len(node.keys):
                return None
            last = node
            depth = node.end
        if last is None or last.mask != holder.bit or last.count > 1:
            return None
        return last.chain

    def extend(self, chain: Chain, keys: Keys) -> None:
        """Put more keys in place of those of a chain that is `continued`: as nobody shares its end, nobody has the rest."""
        last = chain.last
        assert last is not None
        more = len(keys) - last.end
        last.keys = keys[last.start :]
        chain.holder.blocks += more
        self._blocks += more
        chain.keys = keys

    def remove(self, chain: Chain) -> None:
        """Forget a chain that was added, once."""
        holder, node = chain.holder, chain.last
        if node is not None and node.chain is chain:
            node.chain = None  # they are not to hold each other
            if node.on is None:  # it goes with the chain
                del self.nodes[node.keys[0]]
                self._blocks -= len(node.keys)
                holder.blocks -= len(node.keys)
                node = node.above
        fewer = True  # chains that end in the piece, or next pieces
        while node is not None:
            on = _on(node)
            if fewer:
                node.count -= 1
            if on[holder] > 1:
                on[holder] -= 1
                return
            del on[holder]
            holder.blocks -= len(node.keys)
            node.mask &= ~holder.bit
            if fewer := not on:
                del self.nodes[node.keys[0]]
                self._blocks -= len(node.keys)
            node = node.above

    def begins(self, key: int) -> bool:
        """Whether some chain's first block is this one."""
        return key in self.nodes

    def runs(self, keys: Keys) -> list[tuple[int, int]]:
        """Whose leading blocks of a prompt end where, as `fleet.router.kv_index.prefix_index.runs` has it."""
        if not keys or keys[0] not in self.nodes:
            return []
        nodes, total = self.nodes, len(keys)
        found: list[tuple[int, int]] = []
        above: RadixNode | None = None
        depth = mask = 0
        while depth < total and (node := nodes.get(keys[depth])) is not None and node.above is above:
            if node.mask != mask:
                if gone := mask & ~node.mask:
                    found.append((depth, gone))
                mask = node.mask
            end = depth + len(node.keys)
            if end > total or node.keys[-1] != keys[end - 1]:  # it does not have all of them
                depth += _common(node, keys)
                break
            above = node
            depth = end
        if mask:
            found.append((depth, mask))
        return found

    def _divide(self, node: RadixNode, length: int) -> RadixNode | None:
        """Divide a piece; returns the beginning, which is new, so that chains still end where they did. None: keys collide."""
        begins = node.keys[0]
        if node.keys[length] in self.nodes:
            return None
        on = dict.fromkeys(_on(node), 1)
        first = RadixNode(node.above, node.start, node.keys[:length], node.mask, None, on)
        node.above = first
        node.start += length
        node.keys = node.keys[length:]
        self.nodes[begins] = first
        self.nodes[node.keys[0]] = node
        return first

    def _join(self, node: RadixNode) -> None:
        """Put together, on the way to a piece, those that go on in one way only."""
        last: RadixNode | None = node
        while last is not None:
            parts, above = [last], last.above
            while above is not None and above.count == 1:
                parts.append(above)
                above = above.above
            if len(parts) > 1:  # the last one stays, so that chains still end where they did
                for part in parts:
                    del self.nodes[part.keys[0]]
                last.start, last.above = parts[-1].start, above
                last.keys = tuple(one_after_another.from_iterable(part.keys for part in reversed(parts)))
                self.nodes[last.keys[0]] = last
            last = above

    def check(self, chains: Sequence[Chain]) -> None:
        """Assert that these are all chains, and that what is noted follows from them."""
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
                assert node.start == (0 if node.above is None else node.above.end)
                node = node.above
            assert keys == list(chain.keys)
            held.setdefault(id(chain.holder), set()).update(keys)
        assert {node.keys[0]: id(node) for node in nodes.values()} == {
            key: id(node) for key, node in self.nodes.items()
        }
        expected = {place: ends.get(place, {}) for place in nodes}
        counted = {place: sum(counts.values()) for place, counts in expected.items()}
        for place, node in nodes.items():
            if node.above is not None:
                counted[id(node.above)] += 1
                before = expected[id(node.above)]
                for holder in through[place]:
                    before[holder] = before.get(holder, 0) + 1
        for place, node in nodes.items():
            assert expected[place] == {id(holder): count for holder, count in _on(node).items()}
            assert node.mask == sum(holder.bit for holder in _on(node))
            assert node.count == counted[place]
            assert node.chain is None or node.chain.last is node
        for chain in chains:
            assert chain.holder.blocks == len(held[id(chain.holder)])
        assert self._blocks == sum(len(node.keys) for node in nodes.values())


def _on(node: RadixNode) -> dict[ChainHolder, int]:
    """What counts how chains go on from a piece, from now on."""
    if node.on is None:
        assert node.chain is not None
        node.on = {node.chain.holder: 1}
    return node.on


def _enter(first: RadixNode, holder: ChainHolder) -> None:
    """One more of a holder's chains goes on from a piece, or ends there."""
    node: RadixNode | None = first
    while node is not None:
        on = _on(node)
        if holder in on:
            on[holder] += 1
            return
        on[holder] = 1
        node.mask |= holder.bit
        holder.blocks += len(node.keys)
        node = node.above


def _common(node: RadixNode, keys: Keys) -> int:
    """How many of a piece's blocks a prompt has that has the first of them."""
    own, start = node.keys, node.start
    end = min(len(own), len(keys) - start)
    if own[end - 1] == keys[start + end - 1]:
        return end
    return bisect_left(range(end), True, lo=1, key=lambda at: own[at] != keys[start + at])
