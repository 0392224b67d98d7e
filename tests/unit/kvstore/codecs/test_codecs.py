"""Codecs: number formats against other implementations, error bounds, malformed payloads, and the benchmark."""

import tracemalloc

import lz4.block
import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.buffers import crc32c
from kvstore.codecs.byte_planes import SplitCodec
from kvstore.codecs.encoded_block import EXACT, ErrorBound, PayloadForm, bound_of, pack
from kvstore.codecs.lz4 import Lz4
from kvstore.codecs.plain import PlainCodec
from kvstore.codecs.quantised import BlockValues, Fp8Codec, Int8Codec
from kvstore.codecs.verification import decoded
from kvstore.codecs.zstd import Zstd
from kvstore.errors import LayoutMismatch, UndecodableBlock
from kvstore.native.float_formats import HalfFormat, e4m3_codes, e4m3_encoder, e4m3_numbers
from loadtests.kvstore.benchmarks.codec_figures import kv_like_block, measure
from tests.support.kvstore.shapes import a_key, a_typed_namespace

THEIRS = {HalfFormat.BFLOAT16: ml_dtypes.bfloat16, HalfFormat.FLOAT16: np.float16}
EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


def finite(half: HalfFormat, patterns: np.ndarray) -> np.ndarray:
    return np.where((patterns & 0x7FFF) <= half.largest, patterns, 0).astype(np.uint16)


# Number formats, compared with another implementation.


@pytest.mark.parametrize("half", HalfFormat)
def test_16_bit_patterns_match_another_implementation(half):
    patterns = finite(half, EVERY_PATTERN)

    assert np.array_equal(half.numbers(patterns), patterns.view(THEIRS[half]).astype(np.float32))
    assert np.array_equal(half.patterns(half.numbers(patterns)), patterns)


@pytest.mark.parametrize("half", HalfFormat)
@given(bits=st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=50))
def test_16_bit_rounding_matches_another_implementation(half, bits):
    largest = float(half.numbers(np.array([half.largest], np.uint16))[0])
    numbers = np.clip(np.array(bits, np.uint32).view(np.float32), -largest, largest)

    assert np.array_equal(half.patterns(numbers), numbers.astype(THEIRS[half]).view(np.uint16))


def test_e4m3_codes_match_another_implementation():
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    known = ~np.isnan(theirs)

    assert np.array_equal(e4m3_numbers()[known], theirs[known])
    assert known.sum() == 254


@pytest.mark.parametrize("half", HalfFormat)
@pytest.mark.parametrize("exponent", [-9, 0, 3])
def test_e4m3_rounding_matches_another_implementation(half, exponent):
    numbers = half.numbers(finite(half, EVERY_PATTERN)).astype(np.float64) * 2.0**-exponent
    within = np.clip(numbers, -448, 448)

    assert np.array_equal(e4m3_encoder(half, exponent), within.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_values_beyond_e4m3_become_its_largest():
    assert e4m3_codes(np.array([449.0, 1e300, -1e300])).tolist() == [0x7E, 0x7E, 0xFE]


# Error bounds.


def assert_within(
    bound: ErrorBound, half: HalfFormat, before: np.ndarray, after: np.ndarray, axes: tuple[int, ...]
) -> None:
    """Assert that the error of every value is within the bound; values along `axes` share a scale."""
    numbers, decoded = half.numbers(before).astype(np.float64), half.numbers(after).astype(np.float64)
    largest = np.abs(numbers).max(axis=axes, keepdims=True)
    allowed = bound.relative * np.abs(numbers) + bound.of_largest * largest + bound.least
    off = np.abs(decoded - numbers)
    assert (off <= allowed).all(), float((off - allowed).max())


CODECS = {
    Fp8Codec: (lambda half: ErrorBound(1 / 16, 2.0**-10 / 224, half.half_least), (2, 3)),
    Int8Codec: (lambda half: ErrorBound(half.half_step, 0.004, half.half_least + 2.0**-134), (2,)),
}


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("half", HalfFormat)
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    around=st.integers(0, (1 << 15) - 1),
    spread=st.sampled_from([1, 64, 1024, 8192, 1 << 15]),
    tokens=st.sampled_from([1, 5, 16]),
)
def test_error_of_every_value_is_within_the_bound(make, half, seed, around, spread, tokens):
    """Encode values of one magnitude up to all magnitudes, including subnormal values and the largest ones."""
    namespace = a_typed_namespace(half.value, block_tokens=tokens, head_dim=8)
    shape = (namespace.layers, namespace.kv_heads, tokens, namespace.head_dim)
    random = np.random.default_rng(seed)
    patterns = (around + random.integers(0, spread, shape)) & 0x7FFF | random.integers(0, 2, shape) << 15
    values = finite(half, patterns.astype(np.uint16))
    block = values.reshape(-1).view(np.uint8)
    codec, key = make(namespace), a_key(namespace)
    back = np.empty_like(block)

    encoded = codec.encode(key, block)
    codec.decode(key, encoded, back)

    bound, axes = CODECS[make]
    assert_within(bound(half), half, values, back.view(np.uint16).reshape(shape), axes)
    stored = bound_of(encoded)
    promised = bound(half)
    assert np.float32([promised.relative, promised.of_largest, promised.least]).tolist() == [
        stored.relative,
        stored.of_largest,
        stored.least,
    ]


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("layout", ["LNHD", "HLND", "LKNHD", "NLKHD"])
def test_scales_do_not_depend_on_the_layout(make, layout):
    """Encode equal values in another layout, and compare the decoded values."""
    plain, other = a_typed_namespace(head_dim=8), a_typed_namespace(head_dim=8, layout=layout)
    block = kv_like_block(plain)
    arranged, back, ordered = (np.empty_like(block) for _ in range(3))
    BlockValues(other).put(block.view(np.uint16), arranged)
    codec, key = make(other), a_key(other)

    codec.decode(key, codec.encode(key, arranged), back)

    expected = np.empty_like(block)
    make(plain).decode(a_key(plain), make(plain).encode(a_key(plain), block), expected)
    ordered[:] = BlockValues(other).of(back).reshape(-1).view(np.uint8)
    assert np.array_equal(ordered, expected)
    assert not np.array_equal(arranged, block)


@pytest.mark.parametrize("make", CODECS)
def test_powers_of_two_and_zeros_are_decoded_exactly(make):
    namespace = a_typed_namespace("bfloat16", head_dim=8)
    values = np.zeros((namespace.layers, namespace.kv_heads, 16, 8), np.uint16)
    values[1] = HalfFormat.BFLOAT16.patterns(np.full((4, 16, 8), 127 * 2.0**-10, np.float32))  # 127 INT8 steps
    values[1, 2] = HalfFormat.BFLOAT16.patterns(np.full((16, 8), 2.0**20, np.float32)) if make is Fp8Codec else 0
    if make is Fp8Codec:
        values[1, [0, 1, 3]] = HalfFormat.BFLOAT16.patterns(np.float32([2.0**-20]))[0]
    block, back = values.reshape(-1).view(np.uint8), np.empty(values.nbytes, np.uint8)
    codec, key = make(namespace), a_key(namespace)

    codec.decode(key, codec.encode(key, block), back)

    assert np.array_equal(back, block)


def test_verbatim_block_of_another_codec_is_rejected():
    namespace = a_typed_namespace("bfloat16")
    block = np.full(namespace.block_bytes, 0xFF, np.uint8)  # NaN everywhere
    key = a_key(namespace)

    with pytest.raises(UndecodableBlock, match="another"):
        Int8Codec(namespace).decode(key, Fp8Codec(namespace).encode(key, block), np.empty_like(block))


def test_invalid_layout_is_refused_by_field():
    with pytest.raises(LayoutMismatch) as refused:
        Fp8Codec(a_typed_namespace(layout="NHD"))

    assert refused.value.field == "layout"


# Decompression bombs.


def a_bomb(namespace, compressor, plane: bytes):
    """Make a well-formed payload with one plane that expands to more than a plane."""
    other = bytes(namespace.block_bytes // 2)
    lengths = len(plane).to_bytes(4, "little") + len(other).to_bytes(4, "little")
    return pack(compressor.codec_id, a_key(namespace), [lengths, plane, other], form=PayloadForm.PACKED, bound=EXACT)


@pytest.mark.parametrize(
    ("compressor", "plane"),
    [
        (Zstd(), zstandard.ZstdCompressor().compress(bytes(64 << 20))),
        (Zstd(), zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))),
        (Lz4(), lz4.block.compress(bytes(200 << 10), store_size=False)),
    ],
    ids=["zstd with size", "zstd without size", "lz4"],
)
def test_decompression_bomb_is_rejected_with_little_memory(compressor, plane):
    namespace = a_typed_namespace()
    codec, block_bytes = SplitCodec(namespace, compressor), namespace.block_bytes
    bomb = a_bomb(namespace, compressor, plane)
    into = np.empty(block_bytes, np.uint8)
    tracemalloc.start()

    with pytest.raises(UndecodableBlock):
        codec.decode(a_key(namespace), bomb, into)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plane) < block_bytes // 2
    assert peak < 4 * block_bytes


@pytest.mark.parametrize("lengths", [(1 << 31, 1 << 31), (0, 0), (1 << 14, 1 << 15), (1 << 15, 1 << 14)])
def test_planes_with_wrong_lengths_are_rejected(lengths):
    namespace = a_typed_namespace()
    table = b"".join(length.to_bytes(4, "little") for length in lengths)
    payload = pack(1, a_key(namespace), [table, bytes(1 << 14)], form=PayloadForm.PACKED, bound=EXACT)

    with pytest.raises(UndecodableBlock):
        SplitCodec(namespace, Zstd()).decode(a_key(namespace), payload, np.empty(namespace.block_bytes, np.uint8))


def test_unknown_dtype_is_compressed_as_bytes():
    namespace = a_typed_namespace("mx6", block_bytes=12_345)
    block = np.random.default_rng(0).integers(0, 4, 12_345, np.uint8)
    codec, back = SplitCodec(namespace, Zstd()), np.empty_like(block)

    encoded = codec.encode(a_key(namespace), block)
    codec.decode(a_key(namespace), encoded, back)

    assert encoded.nbytes < block.nbytes / 2
    assert np.array_equal(back, block)


# Benchmark.


@pytest.mark.parametrize(
    ("make", "ratio", "rms"),
    [
        (lambda namespace: PlainCodec(), (1, 1), (0, 0)),
        (lambda namespace: SplitCodec(namespace, Zstd()), (1.35, 1.5), (0, 0)),
        (Fp8Codec, (1.95, 2), (0.02, 0.03)),
        (Int8Codec, (1.7, 1.8), (0.003, 0.007)),
    ],
)
def test_benchmark_reports_size_error_and_speed(make, ratio, rms):
    namespace = a_typed_namespace(layers=4)
    ticks = iter(range(0, 1 << 30, 1000))

    figures = measure(make(namespace), namespace, lambda: next(ticks))

    assert ratio[0] <= figures.ratio <= ratio[1]
    assert rms[0] <= figures.error_rms <= rms[1]
    assert figures.encode_bytes_per_second == figures.decode_bytes_per_second == namespace.block_bytes * 1e6


class OverwrittenWhileDecoding:
    """A codec that overwrites the destination while it decodes, like a writer whose reservation has ended."""

    codec_id = 99

    def __init__(self, place):
        self._place = place

    def decode(self, key, payload, into):
        into[:] = payload
        self._place[:] = 0


def test_checksum_covers_the_decoded_bytes():
    content = np.arange(64, dtype=np.uint8)
    place = np.full(64, 7, np.uint8)

    checksum = decoded(OverwrittenWhileDecoding(place), None, content, place)

    assert checksum == crc32c([content])
    assert bytes(place) == bytes(content)
