"""Native costs, compared bit by bit with the version in numpy."""

import math
import random

import numpy as np
import pytest

from fleet.router import policy as quantity
from fleet.router.native import costs, twin

native = pytest.mark.skipif(not costs.BUILT, reason="not built")


def a_table(rng: random.Random, workers: int) -> np.ndarray:
    table = np.zeros((quantity.QUANTITIES, workers))
    for worker in range(workers):
        table[:, worker] = [rng.choice([0, rng.randrange(100)]) for _ in range(quantity.QUANTITIES)]
        table[quantity.BLOCK_TOKENS, worker] = rng.choice([16, 32, 48, 64])
        table[quantity.MAX_RUNNING, worker] = rng.choice([1, 3, 16, 256])
        table[quantity.PREFILL_SPEED, worker] = rng.choice([1, 0.3, 7])
        table[quantity.DECODE_SPEED, worker] = rng.choice([1, 0.7, 3])
        table[quantity.CONVERSION, worker] = rng.random()
    return table


@native
@pytest.mark.parametrize("workers", [1, 2, 7, 64, 513])
def test_native_costs_equal_the_twin_bit_for_bit(workers):
    rng = random.Random(workers)
    for _ in range(30):
        table = a_table(rng, workers)
        weights = (rng.choice([1.0, 0.1, 3.3]), 0.75, *(rng.random() for _ in range(3)), rng.choice([0.0, 2.0, 0.3]))
        weights += (rng.choice([0.0, 1.0, 0.7]), rng.choice([0.0, 0.1]))
        switches = tuple(rng.random() < 0.5 for _ in range(3))
        expected, found = np.empty(workers), np.empty(workers)
        twin.fleet_costs(table, expected, 1000, *weights, *switches)
        costs.fleet_costs(table, found, 1000, *weights, *switches)

        assert expected.tobytes() == found.tobytes()
        # One column is repeated, so that there may be two lowest costs.
        table = table[:, [*range(workers), rng.randrange(workers)]]
        twins = twin.fleet_lowest(table, 1000, *weights, *switches)
        assert costs.fleet_lowest(np.ascontiguousarray(table), 1000, *weights, *switches) == twins


@native
def test_native_lowest_equals_the_twin():
    rng = random.Random(0)
    for _ in range(100):
        values = np.array([rng.choice([1.0, 1.0, 2.5, -3.0, 1e300]) for _ in range(rng.randrange(1, 80))])
        assert costs.lowest(values) == twin.lowest(values)


@pytest.mark.parametrize("module", [costs, twin])
@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], [float("-inf"), 1.0]])
def test_non_finite_costs_are_refused(module, values):
    with pytest.raises(ValueError, match="costs must be finite"):
        module.lowest(np.array(values))


@pytest.mark.parametrize("module", [costs, twin])
@pytest.mark.parametrize(("workers", "prompt_tokens"), [(0, 1), (3, math.inf), (70, math.nan)])
def test_non_finite_worker_values_are_refused(module, workers, prompt_tokens):
    weights = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="costs must be finite"):
        module.fleet_lowest(np.ones((quantity.QUANTITIES, workers)), prompt_tokens, *weights, False, True, False)


@native
@pytest.mark.parametrize("shape", [(quantity.QUANTITIES - 1, 4), (quantity.QUANTITIES, 3), (1, 4)])
def test_table_of_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match="17 quantities"):
        costs.fleet_costs(np.zeros(shape), np.empty(4), 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, True, True, False)
    if shape[0] != quantity.QUANTITIES:
        with pytest.raises(ValueError, match="17 quantities"):
            costs.fleet_lowest(np.zeros(shape), 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, True, True, False)


@native
def test_native_spread_equals_the_twin():
    rng = random.Random(0)
    for _ in range(300):
        places, workers = rng.randrange(1, 200), rng.randrange(1, 130)
        row_at = np.array([rng.choice([-1, rng.randrange(workers)]) for _ in range(places)], dtype=np.intp)
        masks = [rng.getrandbits(rng.choice([1, 63, 64, 65, 250])) for _ in range(rng.randrange(5))]
        runs = [(depth, mask) for depth, mask in enumerate(masks, start=1) if mask]
        expected, found = np.zeros(workers), np.zeros(workers)
        twin.spread(runs, row_at, expected)
        costs.spread(runs, row_at, found)

        assert expected.tolist() == found.tolist()


@native
def test_native_spread_live_equals_the_twin():
    rng = random.Random(0)
    for _ in range(300):
        workers = rng.randrange(1, 130)
        row_at = np.full(rng.randrange(workers, 200), -1, dtype=np.intp)
        rows = rng.sample(range(workers), rng.randrange(1, workers + 1))  # other workers have another block size
        row_at[rng.sample(range(len(row_at)), len(rows))] = rows
        masks = [rng.getrandbits(rng.choice([1, 63, 64, 65, 250])) for _ in range(rng.randrange(5))]
        runs = [(depth, mask) for depth, mask in enumerate(masks, start=1) if mask]
        expected = a_table(rng, workers)
        expected[quantity.LIVE_BLOCKS] = 0
        expected[quantity.ENGINE_BLOCKS, 0] = rng.choice([0.0, math.inf, -math.inf, math.nan])
        found = expected.copy()
        twin.spread_live(runs, row_at, expected)
        costs.spread_live(runs, row_at, found)

        assert expected.tobytes() == found.tobytes()


@pytest.mark.parametrize("module", [costs, twin])
def test_all_have_room_is_false_with_one_full_worker(module):
    table = np.zeros((quantity.QUANTITIES, 70))
    table[quantity.LIMIT] = 3
    table[quantity.REQUESTS] = 2

    assert module.all_have_room(table)
    table[quantity.REQUESTS, 69] = 3
    assert not module.all_have_room(table)
    assert module.all_have_room(table[:, :0].copy())


@native
def test_native_block_keys_equal_the_twin():
    rng = random.Random(0)
    for _ in range(200):
        size = 4 * rng.randrange(1, 70)
        tokens, factors = rng.randbytes(rng.randrange(0, 12 * size)), rng.randbytes(2 * size)
        found = costs.block_keys(memoryview(tokens), size, factors)

        assert found == twin.block_keys(tokens, size, factors)
        assert len(found) == len(tokens) // size


@pytest.mark.parametrize("module", [costs, twin])
@pytest.mark.parametrize("size", [-4, 0, 8])
def test_factors_of_wrong_length_are_refused(module, size):
    with pytest.raises(ValueError, match="a factor of 8 bytes"):
        module.block_keys(bytes(64), size, bytes(8))


def test_c_row_numbers_equal_the_python_ones():
    """Compare the enumeration in costs.c with Python's constants."""
    from pathlib import Path

    source = Path(costs.__file__).with_name("costs.c").read_text()
    named = source[source.index("enum {") : source.index("};")]
    for line in named.splitlines()[1:]:
        if "=" in line:
            name, value = line.strip(" ,").split(" = ")
            assert getattr(quantity, name) == int(value)
