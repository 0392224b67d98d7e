"""Quantised codecs: store each 16-bit floating-point value as 8 bits that share a scale, with a bound on the error.

- E4M3 has one scale, a power of two, for each head of each layer. Each value keeps 4 significant bits, so its error is
  at most 1/16 of the value, except near zero (`Fp8Codec`). An encoded block has half the size of the block.
- INT8 has one scale for each channel. A channel is one element of one head of one layer, over all tokens of the block.
  The error is at most 0.4 % of the channel's largest value. For KV the mean error is a sixth of that of E4M3, because
  the outliers of keys are in few channels. With 16 tokens per block, an encoded block has 0.56 of the block's size;
  with more tokens it has less.

The header of an encoded block has the error bound (`kvstore.codecs.encoded_block`). A block with an infinity or a NaN
is stored unchanged. Values are always stored with heads before tokens, even if the namespace has another layout, so
that the values of one head are adjacent.
"""

import numpy as np
from numpy.typing import NDArray

from kvstore.buffers import ByteArray
from kvstore.codecs.encoded_block import EXACT, EncodedBlock, ErrorBound, PayloadForm, pack
from kvstore.errors import UndecodableBlock
from kvstore.layouts.repack import RepackPlan, plan_fill
from kvstore.layouts.shards import BlockShape, BlockShard
from kvstore.messages import BlockKey
from kvstore.namespace import KvNamespace
from kvstore.native import kernels
from kvstore.native.float_formats import E4M3_LARGEST, HalfFormat, e4m3_decoder, e4m3_encoder

PACKED_LAYOUT = "LHND"


class BlockValues:
    """Converts blocks of a namespace to 16-bit arrays [layers × heads, tokens, elements], and back."""

    def __init__(self, namespace: KvNamespace):
        """Prepare the copies that bring a block's values into the order of the array.

        Raises:
            LayoutMismatch: The namespace's layout is invalid, or its block size does not match its other fields.
            ValueError: The values are not 16-bit floating-point numbers.
        """
        self.half = HalfFormat(namespace.dtype)
        shape = BlockShape.of(namespace)
        self.shape = (shape.layers * shape.kv_heads, shape.block_tokens, shape.head_dim)
        at_rest, ordered = BlockShard(namespace.layout, shape.everything), BlockShard(PACKED_LAYOUT, shape.everything)
        self._order: RepackPlan = plan_fill(shape, [at_rest], [ordered])
        self._restore: RepackPlan = plan_fill(shape, [ordered], [at_rest])
        self._is_ordered = self._order.run_count == 1

    def of(self, block: ByteArray) -> NDArray[np.uint16]:
        """Return the values of a block.

        The array shares the block's memory if the values in it are aligned and already in the order of the array.
        """
        if not self._is_ordered:
            ordered = np.empty_like(block)
            self._order.perform([block], [ordered])
            block = ordered
        values = block.view(np.uint16).reshape(self.shape)
        return values if values.flags.aligned else values.copy()

    def put(self, values: NDArray[np.uint16], into: ByteArray) -> None:
        self._restore.perform([values.reshape(-1).view(np.uint8)], [into])

    def are_finite(self, values: NDArray[np.uint16]) -> bool:
        return int((values & 0x7FFF).max()) <= self.half.largest


class Fp8Codec:
    """Codec that stores each value as an E4M3 number, rounded to the nearest one, ties to even.

    Format of the body (`kvstore.codecs.encoded_block`): one exponent as int16 for each head of each layer, then one
    byte per value.
    """

    codec_id = 3

    def __init__(self, namespace: KvNamespace):
        self._values = BlockValues(namespace)
        self._groups = self._values.shape[0]
        # The scale of a head is a power of two. It is less than 1/224 of the largest magnitude of the head's values.
        # E4M3 numbers below 2 ** -6 are 2 ** -9 apart, so rounding them adds an error of up to 2 ** -10 * scale.
        self._bound = ErrorBound(2.0**-4, 2.0**-10 / 224, self._values.half.half_least)

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        values = self._values.of(block)
        largest = (values.reshape(self._groups, -1) & 0x7FFF).max(axis=1)
        if int(largest.max()) > self._values.half.largest:
            return pack(self.codec_id, key, [block.data], form=PayloadForm.VERBATIM, bound=EXACT)
        exponents = _exponents(self._values.half.numbers(largest))
        distinct, which = np.unique(exponents, return_inverse=True)
        tables = np.stack([e4m3_encoder(self._values.half, int(exponent)) for exponent in distinct])
        codes = np.empty((self._groups, values[0].size), np.uint8)
        kernels.narrow(values.reshape(codes.shape), tables, which.astype(np.uint16), codes)
        return pack(self.codec_id, key, [exponents.data, codes.data], form=PayloadForm.PACKED, bound=self._bound)

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        payload = EncodedBlock(self.codec_id, key, encoded)
        payload.check(payload.body)
        if payload.form is PayloadForm.VERBATIM:
            _copy_verbatim(payload, into)
            return
        heads, tokens, elements = self._values.shape
        scales_bytes = heads * 2
        _expect(payload, scales_bytes + heads * tokens * elements)
        exponents = np.frombuffer(payload.body[:scales_bytes].tobytes(), "<i2")
        codes = payload.body[scales_bytes:].reshape(heads, -1)
        distinct, which = np.unique(exponents, return_inverse=True)
        tables = np.stack([e4m3_decoder(self._values.half, int(exponent)) for exponent in distinct])
        values = np.empty(codes.shape, np.uint16)
        kernels.widen(codes, tables, which.astype(np.uint16), values)
        self._values.put(values, into)


class Int8Codec:
    """Codec that stores each value as an integer from -127 to 127.

    Format of the body (`kvstore.codecs.encoded_block`): the scale of each channel as bfloat16, then one byte per value.
    """

    codec_id = 4

    def __init__(self, namespace: KvNamespace):
        self._values = BlockValues(namespace)
        # The error of a decoded value is at most half a step of the integers, plus the rounding of the decoded value.
        # A step is the channel's largest magnitude / 127, rounded up to bfloat16. Rounding up makes it at most 1/128
        # larger. The field `least` of the bound covers scales and values near zero.
        half = self._values.half
        self._bound = ErrorBound(half.half_step, 0.004, half.half_least + HalfFormat.BFLOAT16.half_least)

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        values = self._values.of(block)
        if not self._values.are_finite(values):
            return pack(self.codec_id, key, [block.data], form=PayloadForm.VERBATIM, bound=EXACT)
        heads, _, elements = values.shape
        scales = np.empty((heads, elements), np.uint16)
        codes = np.empty(values.shape, np.int8)
        kernels.quantise(values, self._values.half.fraction_bits, scales, codes)
        return pack(self.codec_id, key, [scales.data, codes.data], form=PayloadForm.PACKED, bound=self._bound)

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        payload = EncodedBlock(self.codec_id, key, encoded)
        payload.check(payload.body)
        if payload.form is PayloadForm.VERBATIM:
            _copy_verbatim(payload, into)
            return
        heads, tokens, elements = self._values.shape
        scales_bytes = heads * elements * 2
        _expect(payload, scales_bytes + heads * tokens * elements)
        scales = np.frombuffer(payload.body[:scales_bytes].tobytes(), "<u2").reshape(heads, elements)
        codes = payload.body[scales_bytes:].view(np.int8).reshape(self._values.shape)
        values = np.empty(self._values.shape, np.uint16)
        kernels.dequantise(codes, scales, self._values.half.fraction_bits, values)
        self._values.put(values, into)


def _exponents(largest: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return for each largest magnitude m the least exponent e for which m / 2 ** e fits into E4M3."""
    fractions, exponents = np.frexp(largest)
    beyond = fractions > E4M3_LARGEST / 512  # the largest E4M3 number, 448, is 7/8 of 2 ** 9
    return (exponents - 9 + beyond).astype("<i2")


def _copy_verbatim(payload: EncodedBlock, into: ByteArray) -> None:
    _expect(payload, into.nbytes)
    np.copyto(into, payload.body)


def _expect(payload: EncodedBlock, length: int) -> None:
    if payload.body.nbytes != length:
        raise UndecodableBlock(f"a body of {payload.body.nbytes} bytes, not {length}")
