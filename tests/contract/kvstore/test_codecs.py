"""Contract tests of all codecs."""

import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.codecs.encoded_block import bound_of
from kvstore.codecs.registry import Codecs, CodecSettings, Compression
from kvstore.errors import UndecodableBlock
from loadtests.kvstore.benchmarks.codec_figures import kv_like_block
from tests.support.kvstore.shapes import a_key, a_typed_namespace

EXACT = ("none", "zstd", "lz4")
EVERY_NAME = [*Compression, *(f"sealed {each}" for each in Compression)]
SECRET = "5e" * 32


def a_codec(name: str, dtype: str = "bfloat16", **fields):
    """Return the codec with this name, such as "zstd" or "sealed zstd", and the namespace that it is for."""
    compression = Compression(name.removeprefix("sealed "))
    secrets = (SECRET,) if name.startswith("sealed") else ()
    namespace = a_typed_namespace(dtype, **fields)
    return Codecs(CodecSettings(compression=compression, sealing_secrets=secrets)).open(namespace), namespace


def every(*names):
    return pytest.mark.parametrize("name", [*names, *(f"sealed {name}" for name in names)])


def decoded(codec, key, encoded, block):
    into = np.full(block.nbytes, 0xEE, np.uint8)
    codec.decode(key, encoded, into)
    return into


@every(*EXACT)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_exact_codecs_give_back_the_same_bytes(name, dtype):
    codec, namespace = a_codec(name, dtype)
    for block in (kv_like_block(namespace), np.zeros(namespace.block_bytes, np.uint8), some_bytes(namespace, 1)):
        encoded = codec.encode(a_key(namespace), block)

        assert np.array_equal(decoded(codec, a_key(namespace), encoded, block), block)


@every(*Compression)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_can_be_encoded(name, seed):
    """Encode blocks with infinities and every kind of NaN, too; every codec returns blocks with such values unchanged."""
    codec, namespace = a_codec(name, layers=1, kv_heads=2, head_dim=8)
    block = some_bytes(namespace, seed)

    encoded = codec.encode(a_key(namespace), block)

    back = decoded(codec, a_key(namespace), encoded, block)
    not_finite = ((block.view(np.uint16) & 0x7FFF) > 0x7F7F).any()
    if name.removeprefix("sealed ") in EXACT or not_finite:
        assert np.array_equal(back, block)


@every(*Compression)
def test_truncated_or_extended_payload_is_rejected(name):
    codec, namespace = a_codec(name)
    block = kv_like_block(namespace)
    encoded = codec.encode(a_key(namespace), block)

    for length in {0, 1, 2, 21, 22, 23, 24, 25, 38, 39, 60, encoded.nbytes // 2, encoded.nbytes - 1}:
        with pytest.raises(UndecodableBlock):
            decoded(codec, a_key(namespace), encoded[:length], block)
    with pytest.raises(UndecodableBlock):
        decoded(codec, a_key(namespace), np.append(encoded, np.uint8(0)), block)


@every("zstd", "lz4", "fp8", "int8")
@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 1 << 20), bit=st.integers(0, 7))
@example(position=305, bit=1)  # a bit in the padding of a zstd bit stream
def test_flipped_bit_is_rejected_or_harmless(name, position, bit):
    codec, namespace = a_codec(name, layers=1, kv_heads=2, head_dim=8)
    block = kv_like_block(namespace)
    encoded = codec.encode(a_key(namespace), block).copy()
    encoded[position % encoded.nbytes] ^= 1 << bit

    try:
        back = decoded(codec, a_key(namespace), encoded, block)
    except UndecodableBlock:
        return
    assert name == "zstd"  # the format of zstd has a few meaningless bits
    assert np.array_equal(back, block)


@every("zstd", "lz4", "fp8", "int8")
@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(max_size=300))
def test_garbage_is_rejected(name, garbage):
    codec, namespace = a_codec(name, layers=1, kv_heads=1, head_dim=2)
    block = kv_like_block(namespace)

    with pytest.raises(UndecodableBlock):
        decoded(codec, a_key(namespace), np.frombuffer(garbage, np.uint8), block)


@every("zstd", "lz4", "fp8", "int8")
def test_payload_of_another_block_is_rejected(name):
    codec, namespace = a_codec(name)
    other_codec, other_namespace = a_codec(name, model="other")
    block = kv_like_block(namespace)
    encoded = codec.encode(a_key(namespace, "a"), block)

    with pytest.raises(UndecodableBlock):
        decoded(codec, a_key(namespace, "b"), encoded, block)
    with pytest.raises(UndecodableBlock):
        decoded(other_codec, a_key(other_namespace, "a"), encoded, block)


@every(*Compression)
def test_payload_of_another_codec_is_rejected(name):
    codec, namespace = a_codec(name)
    block = kv_like_block(namespace)

    for theirs in EVERY_NAME:
        if theirs != name:
            with pytest.raises(UndecodableBlock):
                decoded(codec, a_key(namespace), a_codec(theirs)[0].encode(a_key(namespace), block), block)


def test_ids_are_distinct_and_fit_a_byte():
    ids = [a_codec(name)[0].codec_id for name in EVERY_NAME]

    assert ids == [0, 1, 2, 3, 4, 128, 129, 130, 131, 132]


@every(*Compression)
def test_a_codec_serves_several_threads(name):
    codec, namespace = a_codec(name)
    blocks = [kv_like_block(namespace, seed) for seed in range(4)]
    expected = [
        decoded(codec, a_key(namespace, str(seed)), codec.encode(a_key(namespace, str(seed)), block), block)
        for seed, block in enumerate(blocks)
    ]
    wrong: list[int] = []

    def work(seed: int) -> None:
        key = a_key(namespace, str(seed))
        for _ in range(10):
            back = decoded(codec, key, codec.encode(key, blocks[seed]), blocks[seed])
            if not np.array_equal(back, expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert wrong == []


@pytest.mark.parametrize("name", Compression)
def test_encoding_does_not_change_the_block(name):
    codec, namespace = a_codec(name)
    block = kv_like_block(namespace)
    before = block.copy()
    block.flags.writeable = False

    codec.encode(a_key(namespace), block)

    assert np.array_equal(block, before)


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_exact_codec_reports_no_loss(name):
    codec, namespace = a_codec(name)

    bound = bound_of(codec.encode(a_key(namespace), kv_like_block(namespace)))

    assert (bound.relative, bound.of_largest, bound.least) == (0, 0, 0)


def some_bytes(namespace, seed):
    return np.random.default_rng(seed).integers(0, 256, namespace.block_bytes, np.uint8)
