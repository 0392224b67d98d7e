"""Shards: describe which layers and heads of a block an object holds, and in which order of axes.

Rules:

1. A block has all layers and all heads of keys and values of the model, for `block_tokens` tokens. A shard has the same
   tokens, but may have fewer layers and heads, and another layout (`kvstore.namespace`).
2. With tensor-parallel size T and H heads, rank r holds the heads from r * H / T to (r + 1) * H / T (exclusive). If
   there are more ranks than heads, T / H neighbouring ranks hold the same head.
3. If the heads cannot be divided among the ranks, an error names the field before any byte moves.
"""

from collections.abc import Sequence
from typing import Self

from msgspec import Struct

from kvstore.errors import LayoutMismatch
from kvstore.namespace import KvNamespace


class Span(Struct, frozen=True, order=True):
    """Range of consecutive layers or heads, which may be empty."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def overlap(self, other: "Span") -> "Span":
        first = max(self.first, other.first)
        return Span(first, max(0, min(self.end, other.end) - first))


class Box(Struct, frozen=True):
    """A part of a block: the layers of one range, with the heads of another range."""

    layers: Span
    heads: Span

    def __bool__(self) -> bool:
        return self.layers.count > 0 and self.heads.count > 0

    def overlap(self, other: "Box") -> "Box":
        return Box(self.layers.overlap(other.layers), self.heads.overlap(other.heads))

    def without(self, hole: "Box") -> "list[Box]":
        """Return the rest of this box without `hole`, which lies within it, as up to four boxes. No box is empty."""
        above = Span(self.layers.first, hole.layers.first - self.layers.first)
        below = Span(hole.layers.end, self.layers.end - hole.layers.end)
        before = Span(self.heads.first, hole.heads.first - self.heads.first)
        after = Span(hole.heads.end, self.heads.end - hole.heads.end)
        rests = [Box(above, self.heads), Box(hole.layers, before), Box(hole.layers, after), Box(below, self.heads)]
        return [rest for rest in rests if rest]


class BlockShard(Struct, frozen=True):
    """Describes contiguous bytes that hold a block or a part of it.

    `box` has the layers and heads in these bytes, and `layout` the order of their axes.
    """

    layout: str
    box: Box


class BlockShape(Struct, frozen=True, kw_only=True):
    """Sizes of the axes of a block of the whole model."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int  # number of elements of a head for one token, keys and values together
    element_bytes: int

    @classmethod
    def of(cls, namespace: KvNamespace) -> Self:
        """Return the shape of a namespace's blocks.

        Raises:
            LayoutMismatch: `block_bytes` does not match the shape and the dtype.
        """
        if (element_bytes := namespace.element_bytes) is None:
            raise LayoutMismatch(
                "block_bytes",
                f"block_bytes: {namespace.block_bytes} bytes are not {namespace.elements} values of {namespace.dtype}",
            )
        return cls(
            layers=namespace.layers,
            kv_heads=namespace.kv_heads,
            block_tokens=namespace.block_tokens,
            head_dim=namespace.head_dim,
            element_bytes=element_bytes,
        )

    @property
    def everything(self) -> Box:
        return Box(Span(0, self.layers), Span(0, self.kv_heads))

    def bytes_of(self, box: Box) -> int:
        return box.layers.count * box.heads.count * self.block_tokens * self.head_dim * self.element_bytes

    def axes(self, layout: str) -> str:
        """Return the five axes of a layout in order. If the layout has no ``K``, it is added before ``D``.

        Raises:
            LayoutMismatch: The layout is invalid, or separates keys and values although `head_dim` is odd.
        """
        if sorted(layout.replace("K", "", 1)) != list("DHLN"):
            known = "each of L, H, N, D once, and K at most once"
            raise LayoutMismatch("layout", f"layout: {layout!r} does not name {known}")
        if "K" not in layout:
            return layout.replace("D", "KD")
        if self.head_dim % 2:
            raise LayoutMismatch(
                "layout", f"layout: {layout!r} separates keys and values; head_dim {self.head_dim} is odd"
            )
        return layout

    def replicas(self, tp: int) -> int:
        """Return the number of ranks that hold the same head.

        Raises:
            LayoutMismatch: The heads cannot be divided among `tp` ranks.
        """
        if tp < 1 or (self.kv_heads % tp and tp % self.kv_heads):
            raise LayoutMismatch("tp", f"tp: {self.kv_heads} heads cannot be divided among {tp} ranks")
        return max(1, tp // self.kv_heads)

    def shard_box(self, tp: int, rank: int) -> Box:
        """Return the layers and heads of one rank (rule 2).

        Raises:
            LayoutMismatch: The heads cannot be divided among `tp` ranks, or there is no such rank.
        """
        replicas = self.replicas(tp)
        if not 0 <= rank < tp:
            raise LayoutMismatch("rank", f"rank: {rank} is not one of {tp} ranks")
        count = max(1, self.kv_heads // tp)
        return Box(Span(0, self.layers), Span(rank // replicas * count, count))


def shards_by_rank(shape: BlockShape, layout: str, tp: int) -> Sequence[BlockShard]:
    """Return for each rank of an engine, in order, the description of the object with the rank's part of a block.

    Raises:
        LayoutMismatch: The heads cannot be divided among `tp` ranks.
    """
    shape.replicas(tp)
    return [BlockShard(layout, shape.shard_box(tp, rank)) for rank in range(tp)]
