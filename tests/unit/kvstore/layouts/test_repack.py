"""Repacking: plans between all layouts and rank counts, compared with the definition of a layout."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore.errors import LayoutMismatch
from kvstore.layouts.repack import plan_fill, read_shard
from kvstore.layouts.shards import BlockShape, BlockShard, Box, Span, shards_by_rank
from kvstore.namespace import ELEMENT_BYTES
from tests.support.kvstore.shapes import a_shape, one_part_per_layer

LAYOUTS = ["LHND", "LNHD", "HLND", "NLHD", "LKHND", "LKNHD", "KLNHD", "LHKND", "LHDN"]
TP_PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (1, 1), (8, 2), (2, 8)]
DTYPES = ["float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "int8"]

shapes = st.builds(
    BlockShape,
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    block_tokens=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    element_bytes=st.sampled_from([ELEMENT_BYTES[dtype] for dtype in DTYPES]),
)


def a_whole_block(shape: BlockShape, seed: int = 0) -> np.ndarray:
    """Make a block with the axes [layers, heads, tokens, elements, bytes of an element]."""
    axes = (shape.layers, shape.kv_heads, shape.block_tokens, shape.head_dim, shape.element_bytes)
    return np.random.default_rng(seed).integers(0, 256, axes, np.uint8)


def index_by_index(shape: BlockShape, block: np.ndarray, part: BlockShard) -> np.ndarray:
    """Return a shard's bytes, collected element by element by the definition of a layout."""
    half = shape.head_dim // 2
    sizes = {"L": part.box.layers.count, "H": part.box.heads.count, "N": shape.block_tokens, "K": 2, "D": half}
    axes = part.layout if "K" in part.layout else part.layout.replace("D", "KD")
    found = []
    for position in itertools.product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, position, strict=True))
        layer, head = part.box.layers.first + at["L"], part.box.heads.first + at["H"]
        found.append(block[layer, head, at["N"], at["K"] * half + at["D"]])
    return np.concatenate(found)


def objects(shape: BlockShape, parts) -> list[np.ndarray]:
    return [np.full(shape.bytes_of(part.box), 0xEE, np.uint8) for part in parts]


@pytest.mark.parametrize(("tp", "other_tp"), TP_PAIRS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes, layout=st.sampled_from(LAYOUTS), other_layout=st.sampled_from(LAYOUTS))
def test_any_rank_count_and_layout_repacks_both_ways(tp, other_tp, shape, layout, other_layout):
    block = a_whole_block(shape)
    theirs, ours = shards_by_rank(shape, layout, tp), shards_by_rank(shape, other_layout, other_tp)
    written = [index_by_index(shape, block, part) for part in theirs]

    read, back = objects(shape, ours), objects(shape, theirs)
    for rank, part in enumerate(ours):
        plan_fill(shape, theirs, [part]).perform(written, [read[rank]])
    plan_fill(shape, ours, theirs).perform(read, back)

    for part, found in zip(ours, read, strict=True):
        assert np.array_equal(found, index_by_index(shape, block, part))
    for sent, returned in zip(written, back, strict=True):
        assert np.array_equal(sent, returned)


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes, at_rest=st.sampled_from(LAYOUTS), layout=st.sampled_from(LAYOUTS), tp=st.sampled_from([1, 2, 4, 8])
)
def test_rank_reads_its_heads_into_one_tensor_per_layer(shape, at_rest, layout, tp):
    block = a_whole_block(shape)
    whole = index_by_index(shape, block, BlockShard(at_rest, shape.everything))

    for rank in range(tp):
        tensors = one_part_per_layer(layout, shape.shard_box(tp, rank))
        filled = objects(shape, tensors)
        read_shard(shape, at_rest, tensors).perform([whole], filled)

        for part, found in zip(tensors, filled, strict=True):
            assert np.array_equal(found, index_by_index(shape, block, part))


@settings(max_examples=100, deadline=None)
@given(shape=shapes, layout=st.sampled_from(LAYOUTS), other=st.sampled_from(LAYOUTS), tp=st.sampled_from([1, 2, 4]))
def test_runs_of_a_plan_describe_its_copies(shape, layout, other, tp):
    assume(shape.kv_heads % tp == 0)
    sources, destination = shards_by_rank(shape, layout, tp), BlockShard(other, shape.everything)
    plan = plan_fill(shape, sources, [destination])
    written = [index_by_index(shape, a_whole_block(shape), part) for part in sources]
    by_plan, by_runs = objects(shape, [destination]), objects(shape, [destination])

    plan.perform(written, by_plan)
    runs = plan.runs()
    for source, start, to, at, length in runs:
        by_runs[to][at : at + length] = written[source][start : start + length]

    assert np.array_equal(by_plan[0], by_runs[0])
    assert (len(runs), int(runs[:, 4].sum())) == (plan.run_count, plan.bytes)


def test_shard_with_heads_outermost_is_one_run():
    shape = a_shape(layers=4, kv_heads=8)

    plan = read_shard(shape, "HLND", [BlockShard("HLND", shape.shard_box(tp=4, rank=1))])

    assert plan.runs().tolist() == [[0, plan.bytes, 0, 0, plan.bytes]]


def test_shard_with_layers_outermost_is_one_run_per_layer():
    shape = a_shape(layers=4, kv_heads=8)

    plan = read_shard(shape, "LHND", [BlockShard("LHND", shape.shard_box(tp=4, rank=1))])

    assert plan.run_count == 4


def test_first_tried_replica_provides_the_heads():
    shape = a_shape(kv_heads=2)
    sources = shards_by_rank(shape, "LHND", tp=8)

    plan = plan_fill(shape, sources, [BlockShard("LHND", shape.shard_box(tp=8, rank=6))], first=6)

    assert {copy.source for copy in plan.copies} == {6}


def test_odd_head_dim_is_moved_undivided():
    shape = BlockShape(layers=2, kv_heads=1, block_tokens=3, head_dim=5, element_bytes=2)
    whole = a_whole_block(shape)

    into = objects(shape, [BlockShard("NLHD", shape.everything)])
    read_shard(shape, "LHND", [BlockShard("NLHD", shape.everything)]).perform([whole.reshape(-1)], into)

    assert np.array_equal(into[0], whole.transpose(2, 0, 1, 3, 4).reshape(-1))


@pytest.mark.parametrize(
    ("field", "layout"),
    [("layout", "LHN"), ("layout", "LHNDX"), ("layout", "LLHND"), ("layout", "LKKHND"), ("layout", "")],
)
def test_invalid_layout_is_refused_by_field(field, layout):
    with pytest.raises(LayoutMismatch) as refused:
        read_shard(a_shape(), "LHND", [BlockShard(layout, a_shape().everything)])

    assert refused.value.field == field


def test_separate_keys_and_values_need_an_even_head_dim():
    shape = BlockShape(layers=1, kv_heads=1, block_tokens=1, head_dim=5, element_bytes=2)

    with pytest.raises(LayoutMismatch, match="head_dim 5 is odd"):
        read_shard(shape, "LKHND", [BlockShard("LHND", shape.everything)])


@pytest.mark.parametrize(
    ("heads", "tp", "rank", "field"),
    [(6, 4, 0, "tp"), (4, 6, 0, "tp"), (4, 0, 0, "tp"), (4, 2, 2, "rank"), (4, 2, -1, "rank")],
)
def test_indivisible_heads_and_unknown_ranks_are_refused(heads, tp, rank, field):
    with pytest.raises(LayoutMismatch) as refused:
        a_shape(kv_heads=heads).shard_box(tp, rank)

    assert refused.value.field == field


def test_plan_without_a_complete_source_is_refused():
    shape = a_shape(kv_heads=4)

    with pytest.raises(LayoutMismatch, match="the sources lack"):
        plan_fill(shape, shards_by_rank(shape, "LHND", 4)[:3], [BlockShard("LHND", shape.everything)])
    with pytest.raises(LayoutMismatch, match="is not within"):
        plan_fill(
            shape,
            [BlockShard("LHND", shape.everything)],
            [BlockShard("LHND", Box(Span(0, shape.layers + 1), Span(0, 4)))],
        )


@pytest.mark.parametrize("which", ["sources", "destinations"])
def test_object_of_another_size_is_refused_unwritten(which):
    shape = a_shape()
    part = BlockShard("LHND", shape.everything)
    given = {name: objects(shape, [part]) for name in ("sources", "destinations")}
    given[which][0] = given[which][0][:-1]
    given["sources"][0][:] = 1

    with pytest.raises(ValueError, match=which):
        plan_fill(shape, [part], [part]).perform(given["sources"], given["destinations"])

    assert set(given["destinations"][0]) == {0xEE}
