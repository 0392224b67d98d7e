"""Native kernels and their Python versions: both write the same bytes and refuse the same sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.layouts.repack import plan_fill
from kvstore.layouts.shards import BlockShape, shards_by_rank
from kvstore.native import kernels
from kvstore.native import kernels_twin as twin
from kvstore.native.float_formats import HalfFormat
from tests.support.kvstore.native_kernels import native_kernels
from tests.support.kvstore.shapes import a_shape, one_part_per_layer

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([1, 2, 7, 32, 130])
EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


def finite(half: HalfFormat, patterns: np.ndarray) -> np.ndarray:
    return np.where((patterns & 0x7FFF) <= half.largest, patterns, 0).astype(np.uint16)


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    layouts=st.tuples(*[st.sampled_from(["LHND", "LNHD", "HLND", "LKNHD", "LHDN"])] * 2),
    tp=st.sampled_from([1, 2, 4]),
    element_bytes=st.sampled_from([1, 2, 4]),
)
def test_copy_equals_its_twin(seed, layouts, tp, element_bytes):
    shape = BlockShape(layers=3, kv_heads=4, block_tokens=5, head_dim=6, element_bytes=element_bytes)
    sources, destinations = shards_by_rank(shape, layouts[0], tp), one_part_per_layer(layouts[1], shape.everything)
    table = plan_fill(shape, sources, destinations).table
    random = np.random.default_rng(seed)
    given_bytes = [random.integers(0, 256, shape.bytes_of(part.box), np.uint8) for part in sources]
    by_twin, by_native = ([np.zeros(shape.bytes_of(part.box), np.uint8) for part in destinations] for _ in range(2))

    twin.copy(table, given_bytes, by_twin)
    native_kernels().copy(table, given_bytes, by_native)

    assert all(np.array_equal(one, other) for one, other in zip(by_twin, by_native, strict=True))


@settings(max_examples=40, deadline=None)
@given(seed=seeds, width=st.sampled_from([1, 2, 3, 4, 8]), values=sizes)
def test_split_and_join_equal_their_twins(seed, width, values):
    block = np.random.default_rng(seed).integers(0, 256, width * values, np.uint8)
    by_twin, by_native = (np.zeros((width, values), np.uint8) for _ in range(2))

    twin.split(block, by_twin)
    native_kernels().split(block, by_native)
    joined = [np.zeros_like(block), np.zeros_like(block)]
    twin.join(list(by_twin), joined[0])
    native_kernels().join(list(by_twin), joined[1])

    assert np.array_equal(by_twin, by_native)
    assert np.array_equal(joined[0], block)
    assert np.array_equal(joined[1], block)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, groups=st.integers(1, 5), length=sizes)
def test_narrow_and_widen_equal_their_twins(seed, groups, length):
    random = np.random.default_rng(seed)
    which = random.integers(0, 3, groups, np.uint16)
    for name, index, entries, value in (("narrow", np.uint16, 1 << 16, np.uint8), ("widen", np.uint8, 256, np.uint16)):
        tables = random.integers(0, np.iinfo(value).max, (3, entries), value)
        arguments = random.integers(0, entries, (groups, length), index)
        by_twin, by_native = (np.zeros((groups, length), value) for _ in range(2))

        getattr(twin, name)(arguments, tables, which, by_twin)
        getattr(native_kernels(), name)(arguments, tables, which, by_native)

        assert np.array_equal(by_twin, by_native)
        assert np.array_equal(by_twin, tables[which[:, np.newaxis], arguments])


@pytest.mark.parametrize("half", HalfFormat)
@settings(max_examples=60, deadline=None)
@given(seed=seeds, groups=st.integers(1, 3), rows=st.integers(1, 17), columns=sizes, spread=st.integers(0, 1 << 15))
def test_quantise_equals_its_twin_for_finite_values(half, seed, groups, rows, columns, spread):
    """Quantise random values; `spread` says how far their magnitudes differ, up to all magnitudes with subnormals and zeros."""
    random = np.random.default_rng(seed)
    shape = (groups, rows, columns)
    magnitudes = random.integers(0, 1 << 15) + random.integers(0, spread + 1, shape)
    values = finite(half, (magnitudes & 0x7FFF | random.integers(0, 2, shape) << 15).astype(np.uint16))
    assert_quantised_alike(half, values)


@pytest.mark.parametrize("half", HalfFormat)
def test_quantise_equals_its_twin_for_every_value(half):
    assert_quantised_alike(half, finite(half, EVERY_PATTERN).reshape(2, 1, -1))
    assert_quantised_alike(half, finite(half, EVERY_PATTERN).reshape(16, 16, -1))


def assert_quantised_alike(half: HalfFormat, values: np.ndarray) -> None:
    results = []
    for kernel in (twin, native_kernels()):
        scales = np.zeros((len(values), values.shape[2]), np.uint16)
        codes, back = np.zeros(values.shape, np.int8), np.zeros_like(values)
        kernel.quantise(values, half.fraction_bits, scales, codes)
        kernel.dequantise(codes, scales, half.fraction_bits, back)
        results.append((scales, codes, back))
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("half", HalfFormat)
def test_dequantise_equals_its_twin_for_every_code_and_scale(half):
    scales = finite(HalfFormat.BFLOAT16, EVERY_PATTERN & 0x7FFF)[::37].reshape(1, -1).copy()
    codes = np.repeat(np.arange(-127, 128).astype(np.int8)[np.newaxis, :, np.newaxis], scales.size, axis=2)
    by_twin, by_native = (np.zeros(codes.shape, np.uint16) for _ in range(2))
    twin.dequantise(codes, scales, half.fraction_bits, by_twin)
    native_kernels().dequantise(codes, scales, half.fraction_bits, by_native)

    assert np.array_equal(by_twin, by_native)


def oddly(array: np.ndarray) -> np.ndarray:
    """Return a copy of the array at an odd memory address, as in a view of packed bytes."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = 1 - room.ctypes.data % 2
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert view.ctypes.data % 2
    return view


@pytest.mark.parametrize("half", HalfFormat)
def test_unaligned_values_are_accepted(half):
    values = finite(half, EVERY_PATTERN).reshape(4, 128, 128)
    scales, codes, back = np.zeros((4, 128), np.uint16), np.zeros(values.shape, np.int8), np.zeros_like(values)
    native_kernels().quantise(values, half.fraction_bits, scales, codes)
    native_kernels().dequantise(codes, scales, half.fraction_bits, back)
    odd_scales, odd_codes, odd_back = oddly(np.zeros_like(scales)), np.zeros_like(codes), oddly(np.zeros_like(values))
    native_kernels().quantise(oddly(values), half.fraction_bits, odd_scales, odd_codes)
    native_kernels().dequantise(odd_codes, odd_scales, half.fraction_bits, odd_back)

    assert np.array_equal(odd_scales, scales)
    assert np.array_equal(odd_codes, codes)
    assert np.array_equal(odd_back, back)


def test_unaligned_copy_table_is_accepted():
    shape = a_shape()
    table = plan_fill(shape, shards_by_rank(shape, "LHND", 1), shards_by_rank(shape, "LNHD", 1)).table
    source = np.arange(shape.bytes_of(shape.everything), dtype=np.uint8)
    into, oddly_into = np.zeros_like(source), np.zeros_like(source)

    native_kernels().copy(table, [source], [into])
    native_kernels().copy(oddly(table), [source], [oddly_into])

    assert into.any()
    assert np.array_equal(into, oddly_into)


@pytest.fixture(params=["twin", "native"])
def kernel(request):
    return twin if request.param == "twin" else native_kernels()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (0, 1),
        (0, -1),
        (5, 0),
        (2, 1),
        (1, -1),
        (1, 1),
        (3, 1),
        (3, 1 << 62),
        (4, 1 << 40),
        (5, 3),
        (6, 1 << 62),
        (7, -8),
    ],
)
def test_a_copy_that_leaves_its_objects_is_refused(kernel, column, value):
    shape = a_shape()
    table = plan_fill(shape, shards_by_rank(shape, "LHND", 1), shards_by_rank(shape, "LNHD", 1)).table.copy()
    table[0, column] = value
    objects = [np.zeros(shape.bytes_of(shape.everything), np.uint8)]

    with pytest.raises(ValueError, match=r"."):
        kernel.copy(table, objects, [objects[0].copy()])


def u1(*shape):
    return np.zeros(shape, np.uint8)


def u2(*shape):
    return np.zeros(shape, np.uint16)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("split", (u1(8), u1(2, 5))),
        ("join", ([u1(4), u1(3)], u1(7))),
        ("join", ([u1(4), u1(4)], u1(7))),
        ("narrow", (u2(2, 4), u1(1, 65536), u2(2), u1(2, 5))),
        ("narrow", (u2(2, 4), u1(1, 65536), u2(1), u1(2, 4))),
        ("narrow", (u2(2, 4), u1(1, 65536), u2(2) + 1, u1(2, 4))),
        ("widen", (u1(2, 4), u2(1, 256), u2(2) + 1, u2(2, 4))),
        ("quantise", (u2(2, 3, 4), 7, u2(2, 3), u1(2, 3, 4).view(np.int8))),
        ("quantise", (u2(2, 3, 4), 7, u2(2, 4), u1(2, 4, 4).view(np.int8))),
        ("quantise", (u2(2, 3, 4), 8, u2(2, 4), u1(2, 3, 4).view(np.int8))),
        ("dequantise", (u1(2, 3, 4).view(np.int8), u2(1, 4), 7, u2(2, 3, 4))),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kernel, name, arguments):
    with pytest.raises(ValueError, match=r"."):
        getattr(kernel, name)(*arguments)


def test_every_kernel_has_a_twin():
    names = set(kernels.__all__) - {"BUILT"}

    assert names == {name for name in dir(native_kernels()) if not name.startswith("_")}
    assert all(callable(getattr(twin, name)) for name in names)
