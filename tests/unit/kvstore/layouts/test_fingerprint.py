"""Fingerprints: when blocks are identical, convertible or incompatible, and what a conversion costs."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.layouts.fingerprint import (
    MAX_TP,
    MUST_BE_EQUAL,
    ConversionCost,
    Convertible,
    Fingerprint,
    Identical,
    Incompatible,
    describe,
    negotiate,
)
from kvstore.layouts.repack import read_shard
from kvstore.layouts.shards import shards_by_rank
from tests.support.kvstore.shapes import a_typed_namespace

OTHERS = {
    "version": 2,
    "model": "other",
    "revision": "r2",
    "lora": "adapter@1",
    "dtype": "fp8_e5m2",
    "element_bytes": 4,
    "block_tokens": 32,
    "layers": 3,
    "kv_heads": 8,
    "head_dim": 64,
    "hash_algorithm": "xxh3-128",
}


def a_fingerprint(**fields) -> Fingerprint:
    return msgspec.structs.replace(describe(a_typed_namespace("fp8_e4m3")), **fields)


def test_equal_fingerprints_are_identical():
    assert negotiate(writer=a_fingerprint(tp=2), reader=a_fingerprint(tp=2)) == Identical()


@pytest.mark.parametrize("field", MUST_BE_EQUAL)
def test_different_values_are_incompatible(field):
    answer = negotiate(writer=a_fingerprint(), reader=a_fingerprint(**{field: OTHERS[field]}))

    assert isinstance(answer, Incompatible)
    assert answer.field == field
    assert answer.error().field == field
    assert str(OTHERS[field]) in answer.reason


def test_every_field_must_be_equal_or_convertible():
    assert set(Fingerprint.__struct_fields__) == {*MUST_BE_EQUAL, "layout", "tp"}
    assert set(OTHERS) == set(MUST_BE_EQUAL)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layout", "NHD"), ("layout", ""), ("tp", 3), ("tp", 0), ("tp", -4), ("tp", MAX_TP + 1), ("tp", 1 << 60)],
)
@pytest.mark.parametrize("side", ["writer", "reader"])
def test_invalid_layout_or_rank_count_is_incompatible(side, field, value):
    sides = {"writer": a_fingerprint(), "reader": a_fingerprint(), side: a_fingerprint(**{field: value})}

    answer = negotiate(**sides)

    assert isinstance(answer, Incompatible)
    assert answer.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("element_bytes", 0), ("block_tokens", 0), ("layers", 0), ("kv_heads", 0), ("head_dim", 0), ("version", 9)],
)
def test_invalid_size_or_version_on_both_sides_is_incompatible(field, value):
    answer = negotiate(writer=a_fingerprint(**{field: value}), reader=a_fingerprint(**{field: value}))

    assert isinstance(answer, Incompatible)
    assert answer.field == field


@pytest.mark.parametrize(("written", "read"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (8, 2), (8, 8), (2, 16)])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000))
def test_plans_give_each_rank_its_bytes(written, read, seed):
    writer, reader = a_fingerprint(tp=written, layout="LNHD"), a_fingerprint(tp=read, layout="LKHND")
    shape = writer.shape
    whole = np.random.default_rng(seed).integers(0, 256, shape.bytes_of(shape.everything), np.uint8)
    objects = [np.empty(shape.bytes_of(part.box), np.uint8) for part in shards_by_rank(shape, "LNHD", written)]
    for part, filled in zip(shards_by_rank(shape, "LNHD", written), objects, strict=True):
        read_shard(shape, "LHND", [part]).perform([whole], [filled])

    answer = negotiate(writer=writer, reader=reader)

    assert isinstance(answer, Convertible)
    assert len(answer.plans) == read
    for part, plan in zip(shards_by_rank(shape, "LKHND", read), answer.plans, strict=True):
        wanted, found = (np.empty(shape.bytes_of(part.box), np.uint8) for _ in range(2))
        read_shard(shape, "LHND", [part]).perform([whole], [wanted])
        plan.perform(objects, [found])
        assert np.array_equal(found, wanted)


def test_cost_matches_the_plans():
    writer, reader = a_fingerprint(), a_fingerprint(tp=8, layout="LNHD")  # 4 heads: two ranks hold each
    shape = writer.shape

    answer = negotiate(writer=writer, reader=reader)

    assert isinstance(answer, Convertible)
    shard_bytes = shape.bytes_of(shape.shard_box(8, 0))
    runs = shape.layers
    assert answer.cost == ConversionCost(
        bytes=8 * shard_bytes, runs=8 * runs, bytes_a_rank=shard_bytes, runs_a_rank=runs
    )
    assert answer.cost.seconds(bytes_per_second=shard_bytes, seconds_per_run=2.0) == 1 + 2 * runs


def test_ranks_read_a_shared_head_from_different_replicas():
    answer = negotiate(writer=a_fingerprint(tp=8), reader=a_fingerprint(tp=8, layout="HLND"))

    assert isinstance(answer, Convertible)
    assert [{copy.source for copy in plan.copies} for plan in answer.plans] == [{rank} for rank in range(8)]


def test_fingerprint_survives_json():
    described = a_fingerprint(tp=4)

    assert msgspec.json.decode(msgspec.json.encode(described), type=Fingerprint) == described


def test_heads_outermost_cost_one_run_for_each_rank():
    namespace = a_typed_namespace(layout="HLND")
    answer = negotiate(writer=describe(namespace), reader=describe(namespace, tp=4))

    assert isinstance(answer, Convertible)
    assert answer.cost.runs_a_rank == 1
