"""Rank shards: copy the part of a block that one rank holds between the rank's memory and the block in the pool.

Rules:

1. A block in a store has all heads and one checksum (`kvstore.layouts.shards`). A shard consists of runs: contiguous
   pieces of the block. Several ranks write a block together: one rank reserves its slot, each rank writes the runs of
   its shard, and the rank that reserved the slot publishes the block when all ranks have reported.
2. Each rank reports to the publishing rank what its runs contribute to the checksum, computed from the rank's own
   bytes. The block's checksum is computed only from these contributions, never from the bytes in the pool. If a run is
   missing or was overwritten, the checksum therefore does not match the bytes in the pool, and readers do not use these
   bytes.
3. A rank that reads its shard verifies the checksum of the whole block while it copies the shard, so it reads the block
   only once.

CRC-32C is linear. If the register begins at zero, the checksum of a block is the exclusive or of the checksums of its
shards, each computed as if all other bytes of the block were zero. Precomputed tables give the effect of a number of
zero bytes on the register in one step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Self, TypeAlias

import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.layouts.repack import RUN_FIELDS, read_shard
from kvstore.layouts.shards import BlockShape, BlockShard
from kvstore.messages import ClientWriteReservation, Slots
from kvstore.namespace import AT_REST
from kvstore.native import checksums

POLYNOMIAL = 0x82F63B78  # Castagnoli's polynomial with reflected bits; RFC 3720, appendix B.4
ONES = 0xFFFFFFFF  # initial value of the CRC register, and mask that inverts its bits for the result

Tables = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class WriteGrant(Struct, frozen=True, kw_only=True):
    """Names the slots that one rank has reserved, so that all ranks can write to them.

    That rank sends the grant to the other ranks, encoded by the library msgspec.
    """

    incarnation: str  # incarnation of the node that has reserved the slots
    places: ClientWriteReservation

    def some(self, first: int, end: int) -> "WriteGrant":
        """Return a grant for the slots from `first` to `end` (exclusive), under the same reservation."""
        places = self.places
        return WriteGrant(
            incarnation=self.incarnation,
            places=ClientWriteReservation(
                reservation_id=places.reservation_id,
                indices=places.indices[first:end],
                slots=Slots(places.slots[first:end].packed),
                refused=0,
            ),
        )


_CopyStep: TypeAlias = "tuple[int, Tables | None, int, int, int, slice | None]"
"""One piece of a run that lies within one part of the rank's memory. It is a tuple and not a Struct, to save time: a
block has hundreds of pieces.

The items are: end of the previous piece in the block; table for the zeros between that end and this piece (None: no
gap); start and end of this piece in the block; index of the part; slice of the part (None: the whole part)."""


class RankShard:
    """The runs (contiguous pieces) of a block that one rank holds; copies them into and out of blocks.

    The bytes of the shard are these runs in order. Thread-safe.
    """

    def __init__(self, block_bytes: int, runs: Iterable[tuple[int, int]]):
        """Describe a shard by the start and length of each run in bytes. The runs are in order, and none is empty."""
        self.block_bytes = block_bytes
        self.runs = tuple(runs)
        self.bytes = sum(length for _, length in self.runs)
        end = 0
        for start, length in self.runs:
            assert end <= start and length > 0, self.runs  # noqa: PT018 - one condition: the runs are in order
            end = start + length
        assert end <= block_bytes, (end, block_bytes)
        self._end = end
        self._steps: dict[tuple[int, ...], tuple[_CopyStep, ...]] = {}

    @classmethod
    def of_rank(cls, shape: BlockShape, *, tp: int, rank: int) -> Self:
        """Return the shard of a rank, with its layers and heads in the order of the store.

        Raises:
            LayoutMismatch: The heads cannot be divided among `tp` ranks, or there is no such rank.
        """
        plan = read_shard(shape, AT_REST, [BlockShard(AT_REST, shape.shard_box(tp, rank))])
        start, there, length = (RUN_FIELDS.index(name) for name in ("source_offset", "destination_offset", "length"))
        rows = sorted(plan.runs().tolist(), key=lambda row: row[there])
        return cls(shape.bytes_of(shape.everything), [(row[start], row[length]) for row in rows])

    def put(self, parts: Sequence[ByteArray], block: ByteArray) -> int:
        """Copy this rank's runs (rule 1) into a block; return their contribution to the block's checksum (rule 2)."""
        register = 0
        for _, gap, start, end, index, within in self._copy_steps(parts):
            if gap is not None:
                register = _skip_zeros(register, gap)
            part = parts[index] if within is None else parts[index][within]
            register = checksums.copy(register ^ ONES, part, block[start:end]) ^ ONES
        return _skip_zeros(register, _zeros(self.block_bytes - self._end))

    def get(self, block: ByteArray, parts: Sequence[ByteArray]) -> int:
        """Copy this rank's runs (rule 1) out of a block, and return the checksum of the whole block.

        For the runs of this rank, the checksum is computed from the copied bytes.
        """
        checksum = 0
        for before, gap, start, end, index, within in self._copy_steps(parts):
            if gap is not None:
                checksum = checksums.extend(checksum, block[before:start])
            part = parts[index] if within is None else parts[index][within]
            checksum = checksums.copy(checksum, block[start:end], part)
        return checksums.extend(checksum, block[self._end :]) if self._end < self.block_bytes else checksum

    def take(self, block: ByteArray, parts: Sequence[ByteArray]) -> None:
        """Copy this rank's runs (rule 1) out of a block, whose checksum the caller has verified."""
        for _, _, start, end, index, within in self._copy_steps(parts):
            np.copyto(parts[index] if within is None else parts[index][within], block[start:end])

    def _copy_steps(self, parts: Sequence[ByteArray]) -> tuple[_CopyStep, ...]:
        """Divide the runs into copies, each of which lies within one part of the rank's memory, and return the copies.

        The result is cached, because all blocks of an engine have equal part sizes.
        """
        sizes = tuple([part.nbytes for part in parts])
        steps = self._steps.get(sizes)
        if steps is None:
            assert sum(sizes) == self.bytes, (sizes, self.bytes)
            steps = self._steps[sizes] = tuple(self._make_steps(sizes))
        return steps

    def _make_steps(self, sizes: Sequence[int]) -> Iterator[_CopyStep]:
        part = first = before = 0
        for run, length in self.runs:
            start, end = run, run + length
            while start < end:
                while first == sizes[part]:
                    part, first = part + 1, 0
                piece = min(end - start, sizes[part] - first)
                within = None if piece == sizes[part] else slice(first, first + piece)
                gap = _zeros(start - before) if start > before else None
                yield before, gap, start, start + piece, part, within
                start, first = start + piece, first + piece
                before = start


def whole_checksums(block_bytes: int, sums: Iterable[int]) -> int:
    """Return the checksum of a block of `block_bytes` bytes; `sums` has the contributions of all its shards (rule 2)."""
    checksum = _skip_zeros(ONES, _zeros(block_bytes)) ^ ONES
    for each in sums:
        checksum ^= each
    return checksum


def combined_checksums(block_bytes: int, sums_by_rank: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return the checksums of those blocks that all ranks have written, by index of the block.

    `sums_by_rank` has one mapping for each rank: the rank's contribution to the checksum of each block that it wrote.
    """
    return {
        index: whole_checksums(block_bytes, [sums[index] for sums in sums_by_rank])
        for index in sums_by_rank[0]
        if all(index in sums for sums in sums_by_rank)
    }


def _skip_zeros(register: int, zeros: Tables) -> int:
    """Return the CRC register after it has read n more zero bytes; `zeros` is the result of `_zeros(n)`."""
    lowest, low, high, highest = zeros
    return lowest[register & 0xFF] ^ low[register >> 8 & 0xFF] ^ high[register >> 16 & 0xFF] ^ highest[register >> 24]


@lru_cache(maxsize=256)  # kept, because each layout and number of ranks needs only a few values of `count`
def _zeros(count: int) -> Tables:
    """Return one table per byte of the register, with the effect of `count` zero bytes on each value of the byte."""
    power = [POLYNOMIAL, *(1 << bit for bit in range(31))]  # the effect of one zero bit on each bit of the register
    columns = [1 << bit for bit in range(32)]
    bits = 8 * count
    while bits:
        if bits & 1:
            columns = [_multiply(power, column) for column in columns]
        power = [_multiply(power, column) for column in power]
        bits >>= 1
    lowest, low, high, highest = (
        tuple(_multiply(columns[start : start + 8], value) for value in range(256)) for start in (0, 8, 16, 24)
    )
    return lowest, low, high, highest


def _multiply(columns: Sequence[int], vector: int) -> int:
    product = 0
    for bit, column in enumerate(columns):
        if vector >> bit & 1:
            product ^= column
    return product
