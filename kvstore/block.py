"""Block hashes: divide tokens into blocks and name each block by a hash of all tokens up to its end.

The rules are complete, so that another language can compute the same hashes (test vectors:
tests/unit/kvstore/chain_vectors.json):

1. A token id is an unsigned 32-bit little-endian integer. A block is `block_tokens` consecutive ids. Only full blocks
   have a hash; the tokens after the last full block have none.
2. H is the first 16 bytes of SHA-256 ("sha256-128"), or XXH3-128 with seed 0, big-endian ("xxh3-128").
3. The root is H("fleet.chain.v1" ‖ 0x00 ‖ algorithm id in ASCII ‖ 0x00 ‖ salt). The salt is empty or has 32 bytes:
   HMAC-SHA-256 of the tenant's name under the deployment's secret. If the client sends a `cache_salt`, the salt is
   HMAC-SHA-256("fleet.client.v1" ‖ 0x00 ‖ the client's text) under the tenant's salt. If the request names a LoRA
   adapter, the salt is SHA-256("fleet.adapter.v1" ‖ 0x00 ‖ A ‖ 0x00 ‖ S). A is a text in UTF-8 that identifies the
   adapter's weights. S is the salt that the request would have without the adapter.
4. The hash of block i is H(P ‖ the block's tokens ‖ the block's extras). P is the hash of block i-1, or the root for
   the first block. Extras stand for inputs that are not tokens (images, audio). For each item that overlaps the block,
   in order of position, the extras contain its offset from the block's start (4 bytes, little-endian, signed) and the
   SHA-256 of its content (32 bytes).

A hash therefore covers the whole prefix. Tenants with different salts, and different adapters, never share a block. An
adapter that is merged into the weights is part of the namespace instead (`kvstore.namespace`). Hashes have 128 bits
because a collision would give one prompt's KV to another prompt. SHA-256 is the default because clients choose the
tokens and must not be able to construct a collision.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import cast

import numpy as np
import xxhash

try:
    # The native code hashes a whole prompt in one call, four times faster than Python.
    from kvstore.native import _chain

    BUILT = True
    """True if the native module (`chain.c`) could be imported. `extend` then uses it for SHA-256 without extras."""
except ImportError:  # either the native module is not built, or the processor has no SHA instructions
    BUILT = False

TOKEN_BYTES = 4
HASH_BYTES = 16
SALT_BYTES = 32
_NAME = np.dtype((np.void, HASH_BYTES))

BlockHash = bytes
"""Hash that identifies a block, in 16 bytes. It depends on the tokens and extras of the block and of all blocks before
it, on the salt and on the algorithm (rules 2 to 4)."""


class HashAlgorithm(StrEnum):
    SHA256_128 = "sha256-128"
    # XXH3 is six times faster than SHA-256 on short blocks, but safe only if no client tries to construct collisions.
    XXH3_128 = "xxh3-128"


def _sha256_128(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]


_DIGESTS: Mapping[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.SHA256_128: _sha256_128,
    HashAlgorithm.XXH3_128: xxhash.xxh3_128_digest,
}


@lru_cache(maxsize=1024)
def root(salt: bytes = b"", algorithm: HashAlgorithm = HashAlgorithm.SHA256_128) -> BlockHash:
    """Return the root of a chain (rule 3 of this module).

    The first block of a prompt has no previous block, so the root takes the place of the previous block's hash.
    """
    assert len(salt) in (0, SALT_BYTES), f"a salt has 0 or {SALT_BYTES} bytes, not {len(salt)}"
    return _DIGESTS[algorithm](b"fleet.chain.v1\0" + algorithm.encode() + b"\0" + salt)


def extend(
    parent: BlockHash,
    tokens: bytes | memoryview,
    block_tokens: int,
    *,
    algorithm: HashAlgorithm = HashAlgorithm.SHA256_128,
    extras: Mapping[int, bytes] | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks in `tokens`, which follow the block `parent`.

    `parent` is a block hash or the root, and was computed with the same `algorithm`. `extras` maps the index of a block
    in `tokens` to the bytes that stand for the images and the audio in this block (rule 4 of this module).
    """
    size = block_tokens * TOKEN_BYTES
    if BUILT and extras is None and algorithm is HashAlgorithm.SHA256_128:
        return _chain.extend(parent, tokens, size)
    digest = _DIGESTS[algorithm]
    names = []
    for index, start in enumerate(range(0, len(tokens) - size + 1, size)):
        content = parent + tokens[start : start + size]
        if extras is not None:
            content += extras.get(index, b"")
        parent = digest(content)
        names.append(parent)
    return names


def chain(
    tokens: bytes | memoryview,
    block_tokens: int,
    *,
    salt: bytes = b"",
    algorithm: HashAlgorithm = HashAlgorithm.SHA256_128,
    extras: Mapping[int, bytes] | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks of a prompt; the arguments are those of `root` and `extend`."""
    return extend(root(salt, algorithm), tokens, block_tokens, algorithm=algorithm, extras=extras)


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens, rounded up: the last block may be partly filled."""
    return -(-num_tokens // block_tokens)


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """Return the salt that separates a tenant's blocks from the blocks of other tenants.

    `secret` is the deployment's secret. The empty tenant has an empty salt, so requests without a tenant share their
    blocks.
    """
    if not tenant:
        return b""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).digest()


def cache_salt(text: str, salt: bytes = b"") -> bytes:
    """Return the salt for a request whose ``cache_salt`` is `text`; `salt` is the salt of the request's tenant, or empty."""
    assert len(salt) in (0, SALT_BYTES), f"a salt has 0 or {SALT_BYTES} bytes, not {len(salt)}"
    return hmac.digest(salt, b"fleet.client.v1\0" + text.encode("utf-8", "surrogatepass"), "sha256")


def adapter_salt(adapter: str, salt: bytes = b"") -> bytes:
    """Return the salt that separates an adapter's blocks from the blocks of the model and of other adapters.

    `adapter` identifies the adapter's weights, so it differs between two adapters with the same name. `salt` is the salt
    that the request would have without the adapter.
    """
    assert adapter, "an adapter needs an identity"
    return hashlib.sha256(b"fleet.adapter.v1\0" + adapter.encode() + b"\0" + salt).digest()


def split(hashes: bytes) -> list[BlockHash]:
    """Split concatenated block hashes; raise ValueError if the length is not a multiple of 16."""
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"hashes: {len(hashes)} bytes is not a multiple of {HASH_BYTES}")
    if not hashes:
        return []
    # Numpy cuts the bytes five times as fast as slicing in Python.
    return cast("list[BlockHash]", np.frombuffer(hashes, _NAME).tolist())
