"""Codec benchmark: measures size, speed and error of a codec on blocks that look like KV."""

import statistics
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvstore.buffers import ByteArray
from kvstore.clock import Nanos
from kvstore.messages import BlockKey
from kvstore.namespace import KvNamespace
from kvstore.native.float_formats import HalfFormat
from kvstore.ports import Codec

SECOND = 1e9


class CodecFigures(Struct, frozen=True, kw_only=True):
    """The measurements of one codec. Speeds are medians for one thread, and count the bytes of the original block."""

    ratio: float  # bytes of a block / bytes of its encoded form
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    error_rms: float  # root mean square of the errors / root mean square of the values; 0: lossless
    error_largest: float  # largest error, relative to the block's largest magnitude


def kv_like_block(namespace: KvNamespace, seed: int = 0) -> ByteArray:
    """Make a block of normally distributed values, whose channels differ in magnitude as the channels of attention keys do.

    For dtypes other than float16, bfloat16 and float32, the bytes are random.
    """
    random = np.random.default_rng(seed)
    heads = (namespace.layers, namespace.kv_heads)
    if namespace.dtype not in ("float16", "bfloat16", "float32"):
        return random.integers(0, 256, namespace.block_bytes, np.uint8)
    channels = np.exp(random.normal(0, 1, (*heads, 1, namespace.head_dim)))
    numbers = random.normal(0, 1, (*heads, namespace.block_tokens, namespace.head_dim)) * channels
    values = numbers.astype(np.float32)
    patterns = values if namespace.dtype == "float32" else HalfFormat(namespace.dtype).patterns(values)
    return patterns.reshape(-1).view(np.uint8)


def measure(codec: Codec, namespace: KvNamespace, now: Callable[[], Nanos], rounds: int = 7) -> CodecFigures:
    """Encode and decode one block `rounds` times, after one round that is not counted."""
    block = kv_like_block(namespace)
    key = BlockKey(namespace.digest, bytes(16))
    decoded = np.empty_like(block)
    encoded = codec.encode(key, block)
    codec.decode(key, encoded, decoded)
    encoding, decoding = [], []
    for _ in range(rounds):
        begun = now()
        encoded = codec.encode(key, block)
        between = now()
        codec.decode(key, encoded, decoded)
        encoding.append(between - begun)
        decoding.append(now() - between)
    before, after = _numbers(namespace, block), _numbers(namespace, decoded)
    errors = np.abs(after - before)
    return CodecFigures(
        ratio=block.nbytes / encoded.nbytes,
        encode_bytes_per_second=block.nbytes * SECOND / max(1, statistics.median(encoding)),
        decode_bytes_per_second=block.nbytes * SECOND / max(1, statistics.median(decoding)),
        error_rms=float(np.sqrt(np.mean(errors**2) / np.mean(before**2))),
        error_largest=float(errors.max() / np.abs(before).max()),
    )


def _numbers(namespace: KvNamespace, block: ByteArray) -> NDArray[np.float64]:
    if namespace.dtype == "float32":
        return block.view(np.float32).astype(np.float64)
    if namespace.dtype in tuple(HalfFormat):
        return HalfFormat(namespace.dtype).numbers(block.view(np.uint16)).astype(np.float64)
    return block.astype(np.float64)
