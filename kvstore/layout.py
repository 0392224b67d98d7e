"""Namespaces: everything besides the tokens that must be equal for a block to be reusable."""

import hashlib

import msgspec
from msgspec import Struct

from kvstore.block import HashAlgorithm

FORMAT_VERSION = 1


class Namespace(Struct, frozen=True, kw_only=True):
    """What the bytes of a block mean. Tensor-parallel rank is not part of it: a block holds all heads."""

    model: str
    revision: str  # digest of the weights
    dtype: str  # of the KV values
    block_tokens: int
    layers: int
    kv_heads: int  # of the whole model
    head_dim: int  # elements a head and token, keys and values together
    layout: str = "LHND"  # axes of a block: layers, heads, tokens, elements
    lora: str = ""
    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256_128
    block_bytes: int
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly when every field is: SHA-256 over the fields as JSON with sorted keys."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()[:16]

    @property
    def fingerprint(self) -> str:
        """The digest as hex, for humans and for the wire."""
        return self.digest.hex()

    def differences(self, other: "Namespace") -> list[str]:
        """Names of the fields that differ, for the message of a refusal."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
