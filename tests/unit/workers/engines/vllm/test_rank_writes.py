"""Rank writes: which heads of which blocks a rank of an engine writes; tested without engine and store."""

import pytest

from kvstore.errors import LayoutMismatch
from tests.support.kvstore.shapes import a_typed_namespace
from workers.engines.vllm.blocks.rank_writes import RankPosition


def test_ranks_with_the_same_head_take_turns_to_write():
    seats = [RankPosition.of(a_typed_namespace(kv_heads=2), rank=rank, ranks=4) for rank in range(4)]

    wrote = [[seat.rank for seat in seats if seat.writes(turn)] for turn in range(3)]

    assert wrote == [[0, 2], [1, 3], [0, 2]]


def test_ranks_that_cannot_share_the_heads_are_refused():
    with pytest.raises(LayoutMismatch, match="4 heads cannot be divided among 3 ranks"):
        RankPosition.of(a_typed_namespace(kv_heads=4), rank=0, ranks=3)
