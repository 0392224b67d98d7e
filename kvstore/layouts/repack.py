"""Repacking: plans and performs the copies of a block from one layout and set of ranks to another.

Rules:

1. An object is a contiguous piece of memory with a block or a part of it. A plan is made once for a set of source
   objects and a set of destination objects, and is used for every block. Only the descriptions of the objects
   (`kvstore.layouts.shards.BlockShard`) are needed to make it, so a mismatch is an error before any byte moves.
2. A plan of `plan_fill` writes every byte of every destination exactly once. If that is impossible, `plan_fill` raises
   `LayoutMismatch`.
3. If several source objects hold the same head, the first of them that is tried provides the head. To spread the load,
   a caller begins with a different source for each rank, as `kvstore.layouts.fingerprint` does.
4. Bytes are copied and never changed, so a plan depends on the size of the data type and not on the data type itself.

A plan consists of strided copies. Each of them copies bytes from one source object to one destination object. Bytes
that are contiguous in the source and in the destination form one run of such a copy. One call of a kernel (native code)
performs all copies of a block.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvstore.buffers import ByteArray
from kvstore.errors import LayoutMismatch
from kvstore.layouts.shards import BlockShape, BlockShard, Box
from kvstore.native import kernels
from kvstore.native.kernels_twin import COPY_AXES, COPY_COLUMNS

RUN_FIELDS = ("source", "source_offset", "destination", "destination_offset", "length")
"""Columns of `RepackPlan.runs`. Source and destination are indices of objects (rule 1); offsets and lengths are in bytes."""


class StridedCopy(Struct, frozen=True, kw_only=True):
    """Copy of runs (contiguous bytes) of equal length from one object to another, evenly spaced along some axes.

    All sizes, offsets and strides are in bytes.
    """

    source: int  # index of the source object
    destination: int
    source_offset: int
    destination_offset: int
    # number of runs along each axis, from the outermost axis of the destination on; empty: one run
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]
    run_bytes: int

    @property
    def runs(self) -> int:
        return math.prod(self.counts)

    def row(self) -> list[int]:
        """Return the copy as one row of the table that the function `kvstore.native.kernels_twin.copy` takes."""
        unused = COPY_AXES - len(self.counts)
        axes = zip(self.counts, self.source_strides, self.destination_strides, strict=True)
        where = [self.source, self.source_offset, self.destination, self.destination_offset, self.run_bytes]
        return where + [number for axis in axes for number in axis] + [1, 0, 0] * unused


class RepackPlan(Struct, frozen=True, kw_only=True, dict=True):
    """Copies that bring one block from a set of source objects into a set of destination objects."""

    source_bytes: tuple[int, ...]  # size of each source object in bytes
    destination_bytes: tuple[int, ...]
    copies: tuple[StridedCopy, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes that are copied for one block."""
        return sum(copy.runs * copy.run_bytes for copy in self.copies)

    @property
    def run_count(self) -> int:
        """Number of pieces of one block that are contiguous both in a source and in a destination."""
        return sum(copy.runs for copy in self.copies)

    def perform(self, sources: Sequence[ByteArray], destinations: Sequence[ByteArray]) -> None:
        """Copy one block from the sources to the destinations.

        Args:
            sources: Contiguous bytes of each source object, in the order for which the plan was made.
            destinations: Contiguous bytes of each destination object, also in the order of the plan. Bytes that the
                plan does not name stay unchanged.

        Raises:
            ValueError: An object has a wrong size; nothing was copied.
        """
        _check("sources", sources, self.source_bytes)
        _check("destinations", destinations, self.destination_bytes)
        kernels.copy(self.table, sources, destinations)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        rows = [copy.row() for copy in self.copies]
        return np.array(rows, np.int64).reshape(len(rows), COPY_COLUMNS)

    def runs(self) -> NDArray[np.int64]:
        """Return every run as a row with the columns `RUN_FIELDS`, for a caller that copies the runs itself."""
        return np.concatenate([np.zeros((0, len(RUN_FIELDS)), np.int64), *(_runs(copy) for copy in self.copies)])


def plan_fill(
    shape: BlockShape, sources: Sequence[BlockShard], destinations: Sequence[BlockShard], *, first: int = 0
) -> RepackPlan:
    """Plan the copies that fill every destination from the sources that hold its bytes.

    The source with index `first` is tried first (rule 3); the other sources follow in cyclic order.

    Raises:
        LayoutMismatch: A layout is invalid, a destination is not within the block, or the sources lack bytes that a
            destination needs.
    """
    copies = [
        _copy(shape, sources, source, destinations, destination, box)
        for destination, part in enumerate(destinations)
        for source, box in _covering(shape, part.box, sources, first)
    ]
    return _plan(shape, sources, destinations, copies)


def read_shard(shape: BlockShape, at_rest: str, into: Sequence[BlockShard]) -> RepackPlan:
    """Plan the copies from a whole-model block to the memory of one rank, which may have one object for each layer.

    Raises:
        LayoutMismatch: A layout is invalid, or a shard is not within the block.
    """
    return plan_fill(shape, [BlockShard(at_rest, shape.everything)], into)


def _plan(
    shape: BlockShape, sources: Sequence[BlockShard], destinations: Sequence[BlockShard], copies: list[StridedCopy]
) -> RepackPlan:
    return RepackPlan(
        source_bytes=tuple(shape.bytes_of(part.box) for part in sources),
        destination_bytes=tuple(shape.bytes_of(part.box) for part in destinations),
        copies=tuple(copies),
    )


def _covering(shape: BlockShape, wanted: Box, parts: Sequence[BlockShard], first: int) -> Iterator[tuple[int, Box]]:
    """Yield boxes that fill `wanted` without overlap, each with the index of the part that provides it."""
    if wanted.overlap(shape.everything) != wanted:
        raise LayoutMismatch("heads", f"heads: {wanted} is not within {shape.everything}")
    missing = [wanted]
    for turn in range(len(parts)):
        index = (first + turn) % len(parts)
        rests: list[Box] = []
        for box in missing:
            if common := box.overlap(parts[index].box):
                yield index, common
                rests += box.without(common)
            else:
                rests.append(box)
        missing = rests
    if missing and wanted:
        raise LayoutMismatch("heads", f"heads: the sources lack {missing[0]}")


def _copy(
    shape: BlockShape,
    sources: Sequence[BlockShard],
    source: int,
    destinations: Sequence[BlockShard],
    destination: int,
    box: Box,
) -> StridedCopy:
    source_offset, source_strides = _place(shape, sources[source], box)
    destination_offset, destination_strides = _place(shape, destinations[destination], box)
    counts = _extents(shape, box)
    axes = sorted(
        ((destination_strides[axis], source_strides[axis], counts[axis]) for axis in counts if counts[axis] > 1),
        reverse=True,
    )
    merged = _merge(axes)
    run_bytes = shape.element_bytes
    if merged and merged[-1][:2] == (run_bytes, run_bytes):
        run_bytes *= merged.pop()[2]
    return StridedCopy(
        source=source,
        destination=destination,
        source_offset=source_offset,
        destination_offset=destination_offset,
        counts=tuple(count for _, _, count in merged),
        source_strides=tuple(stride for _, stride, _ in merged),
        destination_strides=tuple(stride for stride, _, _ in merged),
        run_bytes=run_bytes,
    )


def _merge(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring axes whose elements are contiguous both in the source and in the destination."""
    merged: list[tuple[int, int, int]] = []
    for to_stride, from_stride, count in axes:
        if merged and merged[-1][:2] == (to_stride * count, from_stride * count):
            merged[-1] = (to_stride, from_stride, merged[-1][2] * count)
        else:
            merged.append((to_stride, from_stride, count))
    return merged


def _extents(shape: BlockShape, box: Box) -> dict[str, int]:
    """Return the sizes of the axes of a box.

    An odd `head_dim` is not divided into keys and values: the axis ``K`` then has the size 1.
    """
    halves = 1 if shape.head_dim % 2 else 2
    return {
        "L": box.layers.count,
        "H": box.heads.count,
        "N": shape.block_tokens,
        "K": halves,
        "D": shape.head_dim // halves,
    }


def _place(shape: BlockShape, part: BlockShard, box: Box) -> tuple[int, dict[str, int]]:
    """Return the offset of a box within a part that holds it, and the strides of the axes, in bytes."""
    extents = _extents(shape, part.box)
    strides: dict[str, int] = {}
    stride = shape.element_bytes
    for axis in reversed(shape.axes(part.layout)):
        strides[axis] = stride
        stride *= extents[axis]
    layers = box.layers.first - part.box.layers.first
    heads = box.heads.first - part.box.heads.first
    return layers * strides["L"] + heads * strides["H"], strides


def _runs(copy: StridedCopy) -> NDArray[np.int64]:
    steps = np.indices(copy.counts, dtype=np.int64).reshape(len(copy.counts), copy.runs)
    rows = np.empty((copy.runs, len(RUN_FIELDS)), np.int64)
    rows[:, 0] = copy.source
    rows[:, 1] = copy.source_offset + np.array(copy.source_strides, np.int64) @ steps
    rows[:, 2] = copy.destination
    rows[:, 3] = copy.destination_offset + np.array(copy.destination_strides, np.int64) @ steps
    rows[:, 4] = copy.run_bytes
    return rows


def _check(name: str, objects: Sequence[ByteArray], sizes: tuple[int, ...]) -> None:
    found = tuple(each.nbytes for each in objects)
    if found != sizes:
        raise ValueError(f"{name}: objects have {found} bytes instead of {sizes}")
