"""KV namespaces: everything besides the tokens that must be equal for a block to be reusable.

A layout is the order of a block's axes, outermost first, one letter each:

    L  layers            H  heads of keys and values        N  tokens
    D  elements of one head and token                       K  keys, then values

``K`` may be left out: each head and token then has its keys followed by its values, as if ``K`` stood right before
``D``. "LHND" is a block whose heads come before its tokens, and "LNHD" one whose tokens come first. "LKNHD" has all
keys of a layer before all values. "HLND" has the heads outermost, so some of the heads form one contiguous piece. The
layout of an engine's memory is described by the same letters (`kvstore.layouts.repack`).
"""

import hashlib
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from kvstore.block import HashAlgorithm

FORMAT_VERSION = 1
DIGEST_BYTES = 16

AT_REST = "LHND"
"""Layout of all blocks in a store. A namespace and a block hash are therefore equal for engines of every layout and number
of ranks. Each engine converts between this layout and its own (`kvstore.layouts.conversion`).
"""

ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,  # vLLM's name for e4m3
    "fp8_e4m3": 1,
    "fp8_e4m3fnuz": 1,  # not the same as e4m3: another exponent bias, so the same bits mean other numbers
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Sizes of the known data types; for others the size follows from the block's size."""


class KvNamespace(Struct, frozen=True, kw_only=True):
    """Meaning of the bytes of a block. The tensor-parallel rank is not part of it: a block holds all heads."""

    model: str
    revision: str  # digest of the weights
    dtype: str  # data type of the KV values
    block_tokens: int
    layers: int
    kv_heads: int  # heads of the whole model
    head_dim: int  # elements per head and token, keys and values together
    layout: str = AT_REST  # axes of a block in the store
    lora: str = ""
    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256_128
    block_bytes: int
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly when all fields are: SHA-256 over the fields as JSON with sorted keys."""
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
        """Size of one value; None when `block_bytes` does not follow from the other fields."""
        size, rest = divmod(self.block_bytes, self.elements)
        return size if size and not rest and size == ELEMENT_BYTES.get(self.dtype, size) else None
