"""Sealing: encryption of blocks that leave a node's memory, with AES-256-GCM around another codec.

Rules:

1. A deployment has one or more secrets of at least 32 bytes, newest first. Blocks are encrypted with the newest secret.
   The older secrets decrypt blocks that were encrypted before. To change the secret, add a new one at the front. Once
   an old secret is removed, its blocks cannot be decrypted any more and count as misses.
2. The key of a namespace is HKDF-SHA256(secret, info "fleet.kvstore.seal.v1" ‖ 0x00 ‖ namespace digest). The key of a block
   is HMAC-SHA256(namespace key, block hash). The random 96-bit nonces therefore have to differ only among the
   encryptions of one block, and a secret can encrypt any amount of data.
3. The authenticated data consists of the version, the ids of this codec, of the inner codec and of the secret, the
   namespace digest and the block hash. Encrypted bytes therefore do not decrypt as another block, namespace or codec.
4. The id of a secret is 8 bytes of HKDF-SHA256(secret, info "fleet.kvstore.secret-id.v1" ‖ 0x00). The id says with
   which secret a block was encrypted, and reveals nothing about the secret.

Format of a sealed block:

    version   1 byte
    inner     1 byte, id of the inner codec
    secret    8 bytes, id of the secret
    nonce     12 bytes
    sealed    the encrypted bytes, and a tag of 16 bytes

Encryption hides neither lengths nor access patterns. A tier may return an older encryption of the same block. This is
harmless, because both contain the same KV.
"""

import hmac
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey
from kvstore.ports import Codec

VERSION = 1
SEALED = 0x80
"""Bit that marks the codec id of a sealed codec; the other bits are the id of the inner codec, whose output is
encrypted."""

SECRET_BYTES = 32
KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
_ID_BYTES = 8
_HEAD_BYTES = 2 + _ID_BYTES
_OVERHEAD_BYTES = _HEAD_BYTES + NONCE_BYTES + TAG_BYTES
_NAMESPACE_INFO = b"fleet.kvstore.seal.v1\0"
_ID_INFO = b"fleet.kvstore.secret-id.v1\0"


class SealingKeys(Struct, frozen=True):
    """Encryption keys of one namespace: `by_id` maps the id of each secret (rule 4) to the namespace's key (rule 2).

    `repr` shows only the ids of the secrets.
    """

    newest: bytes  # id of the newest secret
    by_id: Mapping[bytes, bytes]

    def __repr__(self) -> str:
        return f"SealingKeys({', '.join(each.hex() for each in self.by_id)})"


def keys_for(digest: bytes, secrets: Sequence[bytes]) -> SealingKeys:
    """Derive the keys of a namespace (rule 2) from `secrets`, at least one, newest first."""
    assert secrets, "no secret to seal with"
    assert all(len(secret) >= SECRET_BYTES for secret in secrets), f"a secret is shorter than {SECRET_BYTES} bytes"
    ids = [_derive(secret, _ID_INFO, _ID_BYTES) for secret in secrets]
    keys = [_derive(secret, _NAMESPACE_INFO + digest, KEY_BYTES) for secret in secrets]
    return SealingKeys(newest=ids[0], by_id=dict(zip(ids, keys, strict=True)))


class SealedCodec:
    """Codec that encrypts the blocks that another codec, the inner codec, has encoded."""

    def __init__(self, inner: Codec, keys: SealingKeys, nonces: Callable[[int], bytes] = os.urandom):
        assert not inner.codec_id & SEALED, "sealed already"
        self.codec_id = SEALED | inner.codec_id
        self._inner = inner
        self._keys = keys
        self._nonces = nonces

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        content = self._inner.encode(key, block)
        head = bytes([VERSION, self._inner.codec_id]) + self._keys.newest
        nonce = self._nonces(NONCE_BYTES)
        payload = np.empty(content.nbytes + _OVERHEAD_BYTES, np.uint8)
        sealed_from = _HEAD_BYTES + NONCE_BYTES
        payload[:sealed_from] = np.frombuffer(head + nonce, np.uint8)
        cipher = self._cipher(self._keys.by_id[self._keys.newest], key)
        cipher.encrypt_into(nonce, content.data, self._associated(head, key), payload[sealed_from:].data)
        return payload

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        if encoded.nbytes < _OVERHEAD_BYTES:
            raise UndecodableBlock(f"{encoded.nbytes} bytes are fewer than a seal's {_OVERHEAD_BYTES}")
        head = encoded[:_HEAD_BYTES].tobytes()
        if head[0] != VERSION or head[1] != self._inner.codec_id:
            raise UndecodableBlock(f"sealed with version {head[0]} and codec {head[1]}, which this node does not use")
        if (namespace_key := self._keys.by_id.get(head[2:])) is None:
            raise UndecodableBlock(f"sealed with secret {head[2:].hex()}, which this node does not have")
        sealed_from = _HEAD_BYTES + NONCE_BYTES
        content = np.empty(encoded.nbytes - _OVERHEAD_BYTES, np.uint8)
        try:
            self._cipher(namespace_key, key).decrypt_into(
                encoded[_HEAD_BYTES:sealed_from].data,
                encoded[sealed_from:].data,
                self._associated(head, key),
                content.data,
            )
        except InvalidTag as error:
            raise UndecodableBlock("the seal is broken: damaged, or another block's bytes") from error
        self._inner.decode(key, content, into)

    def _cipher(self, namespace_key: bytes, key: BlockKey) -> AESGCM:
        return AESGCM(hmac.digest(namespace_key, key.name, "sha256"))

    def _associated(self, head: bytes, key: BlockKey) -> bytes:
        return bytes([self.codec_id]) + head + key.digest + key.name


def _derive(secret: bytes, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret)
