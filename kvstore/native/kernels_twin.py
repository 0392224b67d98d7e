"""Twin of `kernels.c` in numpy: it defines the results, and is used if the C code is not built.

Each function writes the same bytes as the function of the same name in `kernels.c`. All arrays are contiguous. The
caller provides the arrays for results. If sizes do not match, a function raises `ValueError` and writes nothing.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvstore.native.checksums_twin import ByteArray
from kvstore.native.float_formats import HalfFormat

COPY_AXES = 5
COPY_COLUMNS = 5 + 3 * COPY_AXES
"""Number of columns in the table of `copy`. The first five columns are: index of the source, offset in the source,
index of the destination, offset in the destination, and bytes of a run. Three columns follow for each axis, outermost
axis first: the number of runs, the stride in the source and the stride in the destination. Unused axes have one run.
Offsets and strides are in bytes."""

LONGEST_ITEM = 1 << 20
"""Maximum length of a run, in bytes, that is copied as one numpy item. Longer runs are copied byte by byte, because
numpy's items are limited to 2 GiB. For long runs, the byte-wise copy is hardly slower."""

LARGEST_CODE = 127.0

ONE = 0x3F80
"""The number 1.0 in bfloat16."""


def copy(table: NDArray[np.int64], sources: Sequence[ByteArray], destinations: Sequence[ByteArray]) -> None:
    """Copy runs of bytes between objects.

    Args:
        table: One row with `COPY_COLUMNS` columns for each strided copy.
        sources: Source objects.
        destinations: Destination objects; none of them overlaps a source.
    """
    views = [_views(row, sources, destinations) for row in table.tolist()]
    for to, origin in views:
        np.copyto(to, origin)


def split(block: ByteArray, planes: ByteArray) -> None:
    """Separate the bytes of values by their position within a value.

    Args:
        block: Values of equal width, without gaps.
        planes: Result, shape [width, values]; plane i receives byte i of each value.
    """
    _fits(block.nbytes == planes.nbytes, "planes and block differ in size")
    np.copyto(planes, block.reshape(-1, len(planes)).T)


def join(planes: Sequence[ByteArray], block: ByteArray) -> None:
    """Make values from the planes into which `split` has separated them. The planes need not be adjacent in memory."""
    _fits(block.nbytes == sum(plane.nbytes for plane in planes), "planes and block differ in size")
    _fits(len({plane.nbytes for plane in planes}) == 1, "planes differ in size")
    values = block.reshape(-1, len(planes))
    for index, plane in enumerate(planes):
        values[:, index] = plane


def narrow(
    values: NDArray[np.uint16], tables: NDArray[np.uint8], which: NDArray[np.uint16], codes: NDArray[np.uint8]
) -> None:
    """Convert 16-bit values to 8-bit codes by tables with one entry per 16-bit pattern.

    All values of a group use one table.

    Args:
        values: Shape [groups, values of a group].
        tables: Shape [tables, 65536].
        which: Shape [groups]; index of the table of each group.
        codes: Result, with the shape of `values`.
    """
    _fits(values.shape == codes.shape and len(which) == len(values), "values, codes and groups differ in size")
    _fits(not which.size or int(which.max()) < len(tables), "a group's table does not exist")
    for row, table, into in zip(values, which, codes, strict=True):
        # No index is out of range; "clip" is set because it makes numpy write without a temporary buffer.
        np.take(tables[table], row, out=into, mode="clip")


def widen(
    codes: NDArray[np.uint8], tables: NDArray[np.uint16], which: NDArray[np.uint16], values: NDArray[np.uint16]
) -> None:
    """Convert 8-bit codes to 16-bit values by tables of 256 entries, as the reverse of `narrow`.

    All codes of a group use one table.
    """
    _fits(values.shape == codes.shape and len(which) == len(values), "values, codes and groups differ in size")
    _fits(not which.size or int(which.max()) < len(tables), "a group's table does not exist")
    for row, table, into in zip(codes, which, values, strict=True):
        np.take(tables[table], row, out=into, mode="clip")  # "clip" avoids a temporary buffer, as in `narrow`


def quantise(
    values: NDArray[np.uint16], fraction_bits: int, scales: NDArray[np.uint16], codes: NDArray[np.int8]
) -> None:
    """Divide 16-bit floating-point values by a scale per column, and round them to the nearest integer within ±127.

    Args:
        values: Bit patterns, shape [groups, rows, columns]; all numbers are finite.
        fraction_bits: Number of fraction bits of the values: 7 for bfloat16, 10 for float16.
        scales: Result, shape [groups, columns], always bfloat16: a column's largest magnitude / 127, rounded up; 1.0
            for a column of zeros.
        codes: Result, with the shape of `values`.
    """
    _fits(values.shape == codes.shape and scales.shape == (len(values), values.shape[2]), "shapes do not fit")
    half = _half(fraction_bits)
    numbers = half.numbers(values)
    largest = half.numbers((values & 0x7FFF).max(axis=1)) / np.float32(LARGEST_CODE)
    bits = (largest.view(np.uint32) + 0xFFFF) >> 16
    bits[bits == 0] = ONE  # any scale fits a column of zeros
    scales[:] = bits
    numbers /= HalfFormat.BFLOAT16.numbers(scales)[:, np.newaxis]
    np.copyto(codes, np.rint(numbers, out=numbers), casting="unsafe")


def dequantise(
    codes: NDArray[np.int8], scales: NDArray[np.uint16], fraction_bits: int, values: NDArray[np.uint16]
) -> None:
    """Multiply integer codes by the scale of their column, and write the products to `values` as 16-bit numbers.

    The products are rounded to nearest, ties to even, and limited to the largest finite number. The arguments are those
    of `quantise`, with `values` as the result.
    """
    _fits(values.shape == codes.shape and scales.shape == (len(values), values.shape[2]), "shapes do not fit")
    numbers = codes.astype(np.float32)
    # a product may be infinite; `patterns` then limits it to the largest finite number
    with np.errstate(over="ignore"):
        numbers *= HalfFormat.BFLOAT16.numbers(scales)[:, np.newaxis]
    values[:] = _half(fraction_bits).patterns(numbers)


def _half(fraction_bits: int) -> HalfFormat:
    for half in HalfFormat:
        if half.fraction_bits == fraction_bits:
            return half
    raise ValueError(f"no format has {fraction_bits} fraction bits")


def _views(
    row: list[int], sources: Sequence[ByteArray], destinations: Sequence[ByteArray]
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Return two arrays of runs for one copy: a view of the destination, and a view of the source.

    Numpy checks that the views lie within the objects.
    """
    _fits(min(row) >= 0, "a copy is not within its objects")
    source, source_offset, destination, destination_offset, length = row[:5]
    counts, steps, strides = row[5::3], row[6::3], row[7::3]
    _fits(min(counts) >= 1, "a copy has no runs")
    item = _item(length)
    if length > LONGEST_ITEM:
        counts, steps, strides = [*counts, length], [*steps, 1], [*strides, 1]
    used = [axis for axis, count in enumerate(counts) if count != 1]
    shape = tuple(counts[axis] for axis in used)
    try:
        to = np.ndarray(shape, item, destinations[destination], destination_offset, tuple(strides[a] for a in used))
        origin = np.ndarray(shape, item, sources[source], source_offset, tuple(steps[a] for a in used))
    except (TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"a copy is not within its objects: {error}") from error
    return to, origin


@lru_cache(maxsize=1024)
def _item(length: int) -> np.dtype[np.void]:
    return np.dtype("V1" if length > LONGEST_ITEM else f"V{length}")


def _fits(fitting: bool, message: str) -> None:
    if not fitting:
        raise ValueError(message)
