"""Rank shards: which bytes of a block a rank holds, and how the checksums of all ranks give that of the block."""

import msgspec
import numpy as np
import pytest

from kvstore.errors import LayoutMismatch
from kvstore.layouts.rank_shards import RankShard, WriteGrant, combined_checksums, whole_checksums
from kvstore.layouts.shards import BlockShape
from kvstore.messages import ClientWriteReservation, ReservationId, Slot, Slots
from kvstore.native import checksums
from tests.support.kvstore.builders import a_block
from tests.support.kvstore.shapes import a_shape

SHAPE = a_shape(layers=3, kv_heads=4)
BLOCK_BYTES = SHAPE.bytes_of(SHAPE.everything)


def shards(tp: int, shape: BlockShape = SHAPE) -> list[RankShard]:
    return [RankShard.of_rank(shape, tp=tp, rank=rank) for rank in range(tp)]


def own(shard: RankShard, block: np.ndarray) -> np.ndarray:
    """Return the bytes of a block that a rank holds, in the order of its memory."""
    return np.concatenate([block[start : start + length] for start, length in shard.runs])


def in_parts(held: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(held, np.cumsum(sizes))


def test_rank_holds_its_heads_of_every_layer():
    second = RankShard.of_rank(SHAPE, tp=2, rank=1)
    layer = BLOCK_BYTES // 3

    assert second.runs == tuple((index * layer + layer // 2, layer // 2) for index in range(3))
    assert second.bytes == BLOCK_BYTES // 2
    assert RankShard.of_rank(SHAPE, tp=1, rank=0).runs == ((0, BLOCK_BYTES),)


@pytest.mark.parametrize("sizes", [[], [1, 7, 0, 100], [BLOCK_BYTES // 24]])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_of_all_ranks_make_the_block_and_checksum(tp, sizes):
    block, place = a_block(1, BLOCK_BYTES), a_block(2, BLOCK_BYTES)

    sums = [shard.put(in_parts(own(shard, block), sizes), place) for shard in shards(tp)]

    assert place.tobytes() == block.tobytes()
    assert whole_checksums(BLOCK_BYTES, sums) == checksums.extend(0, block)


def test_ranks_with_the_same_head_have_the_same_runs():
    first, second, third, fourth = (shard.runs for shard in shards(4, a_shape(kv_heads=2)))

    assert first == second != third == fourth


def test_indivisible_heads_are_refused():
    with pytest.raises(LayoutMismatch, match="4 heads cannot be divided among 3 ranks"):
        RankShard.of_rank(SHAPE, tp=3, rank=0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_gets_its_bytes_and_the_block_checksum(tp):
    block = a_block(3, BLOCK_BYTES)

    for shard in shards(tp):
        into = np.zeros(shard.bytes, np.uint8)
        assert shard.get(block, in_parts(into, [5, 100])) == checksums.extend(0, block)
        assert into.tobytes() == own(shard, block).tobytes()
        taken = np.zeros(shard.bytes, np.uint8)
        shard.take(block, in_parts(taken, [5, 100]))
        assert taken.tobytes() == into.tobytes()


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_overwritten_byte_does_not_match_the_checksum(at):
    block, place = a_block(4, BLOCK_BYTES), a_block(5, BLOCK_BYTES)
    sums = [shard.put([own(shard, block)], place) for shard in shards(2)]

    place[at] ^= 1

    assert whole_checksums(BLOCK_BYTES, sums) != checksums.extend(0, place)


def test_missing_shard_does_not_match_the_checksum():
    block, place = a_block(4, BLOCK_BYTES), a_block(5, BLOCK_BYTES)
    first, second = shards(2)
    sums = [first.put([own(first, block)], place), second.put([own(second, block)], np.zeros(BLOCK_BYTES, np.uint8))]

    assert whole_checksums(BLOCK_BYTES, sums) != checksums.extend(0, place)


def test_only_blocks_written_by_all_ranks_have_a_checksum():
    assert combined_checksums(BLOCK_BYTES, [{0: 1, 1: 2, 2: 3}, {0: 4, 2: 3}]) == {
        0: whole_checksums(BLOCK_BYTES, [1, 4]),
        2: whole_checksums(BLOCK_BYTES, [3, 3]),
    }
    assert combined_checksums(BLOCK_BYTES, [{0: 1}, {}]) == {}


def test_write_grant_survives_encoding():
    slots = Slots.of([Slot(0, 1), Slot(4096, 2), Slot(8192, 3)])
    grant = WriteGrant(
        incarnation="i",
        places=ClientWriteReservation(reservation_id=ReservationId(7), indices=(1, 2, 5), slots=slots, refused=4),
    )

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=WriteGrant) == grant
    part = grant.some(1, 9).places
    assert (part.reservation_id, part.indices, list(part.slots)) == (7, (2, 5), [Slot(4096, 2), Slot(8192, 3)])
