"""Places of values in the simulated engine's memory."""

import os

import numpy as np
import pytest

from workers.engines.simulated.layout import EngineLayout

BLOCK_BYTES = 2 * 4 * 32 * 8


def a_layout(kv_layout="HND", tensor_parallel=1) -> EngineLayout:
    return EngineLayout(
        layers=2, kv_heads=4, block_tokens=32, head_bytes=8, tensor_parallel=tensor_parallel, kv_layout=kv_layout
    )


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_values_come_back_from_every_layout(kv_layout, tensor_parallel):
    layout, values = a_layout(kv_layout, tensor_parallel), os.urandom(BLOCK_BYTES)

    assert layout.values(layout.lay_out(values)) == values


def test_no_two_layouts_are_the_same():
    values = os.urandom(BLOCK_BYTES)

    laid_out = {a_layout(axes, ranks).lay_out(values) for axes in ("HND", "NHD") for ranks in (1, 2, 4)}

    assert len(laid_out) == 5  # with one head for each rank, both orders of heads and tokens are the same


def test_a_rank_has_its_heads_of_all_layers_in_its_own_order():
    values = np.arange(2 * 4 * 32 * 8, dtype=np.int64).astype(np.uint8).tobytes()
    whole = np.frombuffer(values, np.uint8).reshape(2, 4, 32, 8)

    held = np.frombuffer(a_layout("NHD", 2).lay_out(values), np.uint8).reshape(2, 2, 32, 2, 8)

    for rank, layer, token, head in np.ndindex(2, 2, 32, 2):
        assert np.array_equal(held[rank, layer, token, head], whole[layer, 2 * rank + head, token])
