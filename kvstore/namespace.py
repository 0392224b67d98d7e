"""KV namespaces: everything besides the tokens that has to be equal for a block to be reusable.

A layout is the order of a block's axes, outermost first, one letter each:

    L  layers            H  heads of keys and values        N  tokens
    D  elements of one head and token                       K  keys, then values

``K`` may be left out. This means the same as ``K`` right before ``D``: for each head and token, the keys are followed
by the values. In "LHND" the heads come before the tokens, and in "LNHD" the tokens come before the heads. "LKNHD" has
all keys of a layer before all values of the layer. "HLND" has the heads outermost, so consecutive heads form one
contiguous piece. The same letters describe the layout of an engine's memory (`kvstore.layouts.repack`).
"""

import hashlib
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from kvstore.block import HashAlgorithm

FORMAT_VERSION = 1
DIGEST_BYTES = 16

AT_REST = "LHND"
"""Layout of all blocks in a store. Engines with different layouts and numbers of ranks therefore have the same
namespace and block hashes. Each engine converts between this layout and its own layout
(`kvstore.layouts.conversion`)."""

ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,  # vLLM's name for fp8_e4m3
    "fp8_e4m3": 1,
    "fp8_e4m3fnuz": 1,  # differs from fp8_e4m3 in the exponent bias, so the same bits mean other numbers
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Number of bytes per value for each known data type. For an unknown type, `KvNamespace.element_bytes` computes this
number from the size of the block."""


class KvNamespace(Struct, frozen=True, kw_only=True):
    """Describes what the bytes of a block mean: their model, weights, data type, sizes and layout.

    A namespace is the same for any number of tensor-parallel ranks, because a block has the values of all heads.
    """

    model: str
    revision: str  # digest of the weights
    dtype: str  # data type of the KV values
    block_tokens: int
    layers: int
    kv_heads: int  # number of KV heads of the whole model
    head_dim: int  # number of elements per head and token, keys and values together
    layout: str = AT_REST  # order of a block's axes in the store
    lora: str = ""
    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256_128
    block_bytes: int
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """Digest of 16 bytes. Namespaces have the same digest only if all their fields are equal.

        The digest is the beginning of the SHA-256 of the fields as JSON with sorted keys.
        """
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()[:DIGEST_BYTES]

    @property
    def fingerprint(self) -> str:
        """The digest in hexadecimal digits."""
        return self.digest.hex()

    def differences(self, other: "KvNamespace") -> list[str]:
        """Return the names of the fields that differ, for error messages."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]

    @property
    def elements(self) -> int:
        """Number of values in a block."""
        return self.layers * self.kv_heads * self.block_tokens * self.head_dim

    @property
    def element_bytes(self) -> int | None:
        """Size of one value in bytes; None if `block_bytes` does not match the other fields."""
        size, rest = divmod(self.block_bytes, self.elements)
        return size if size and not rest and size == ELEMENT_BYTES.get(self.dtype, size) else None
