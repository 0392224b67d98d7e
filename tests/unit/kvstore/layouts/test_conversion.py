"""Conversion of an engine's blocks to the store's layout, compared with a conversion by the definition of a layout."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import LayoutMismatch
from kvstore.layouts.conversion import Conversion
from kvstore.layouts.fingerprint import Fingerprint, describe
from tests.support.kvstore.shapes import a_typed_namespace


def an_engine(**fields) -> Fingerprint:
    return msgspec.structs.replace(describe(a_typed_namespace()), **fields)


def a_block(engine: Fingerprint, seed: int = 0) -> np.ndarray:
    """Make a random block in the store's layout, with the axes layers, heads, tokens, bytes of one head and token."""
    width = engine.head_dim * engine.element_bytes
    axes = (engine.layers, engine.kv_heads, engine.block_tokens, width)
    return np.random.default_rng(seed).integers(0, 256, axes, np.uint8)


def as_held(block: np.ndarray, layout: str, tp: int) -> np.ndarray:
    """Return the bytes that all ranks hold, one rank after the other; no two ranks may hold the same head."""
    tokens_first = layout == "LNHD"
    shards = np.split(block, tp, axis=1)
    return np.concatenate([(each.transpose(0, 2, 1, 3) if tokens_first else each).reshape(-1) for each in shards])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layout", ["LHND", "LNHD"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_every_layout_and_rank_count_converts_both_ways(layout, tp, seed):
    engine = an_engine(layout=layout, tp=tp)
    conversion, block = Conversion(engine), a_block(engine, seed)
    held = as_held(block, layout, tp)

    assert np.array_equal(conversion.write(held), block.reshape(-1))
    assert np.array_equal(conversion.read(block.reshape(-1)), held)


def test_replicated_heads_reach_all_their_ranks():
    engine = an_engine(tp=8)  # 8 ranks, but only 4 heads
    conversion, block = Conversion(engine), a_block(engine)

    held = conversion.read(block.reshape(-1))

    assert held.nbytes == conversion.engine_bytes == 2 * conversion.stored_bytes
    first, second = held.reshape(8, -1)[:2]
    assert np.array_equal(first, second)
    assert np.array_equal(conversion.write(held), block.reshape(-1))


@pytest.mark.parametrize(("field", "value"), [("layout", "NHD"), ("tp", 3), ("head_dim", 0)])
def test_impossible_conversion_is_refused_by_field(field, value):
    with pytest.raises(LayoutMismatch) as refused:
        Conversion(an_engine(**{field: value}))

    assert refused.value.field == field


@pytest.mark.parametrize("direction", ["read", "write"])
def test_block_of_another_size_is_refused(direction):
    conversion = Conversion(an_engine(layout="LNHD"))

    with pytest.raises(LayoutMismatch, match="block_bytes"):
        getattr(conversion, direction)(bytes(conversion.stored_bytes - 1))


def test_namespace_at_rest_ignores_layout_and_ranks():
    namespace = a_typed_namespace()

    assert {describe(namespace, layout=axes, tp=tp).at_rest for axes in ("LHND", "LNHD") for tp in (1, 2, 4)} == {
        namespace
    }
