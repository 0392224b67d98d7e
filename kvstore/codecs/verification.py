"""Verification: encodes a block of the pool for a tier, and decodes it, without ever trusting unverified bytes.

Bytes in the pool may be wrong, or change while a tier writes them, because a writer whose reservation has ended may still
write there. A checksum that is taken from such bytes would make wrong bytes look right. So an unencoded block keeps its
published checksum, and a block to encode is copied and verified first. A decoded block is given the checksum of the
decoded bytes, not of the pool's bytes afterwards.
"""

import numpy as np

from kvstore.buffers import ByteArray, crc32c
from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey
from kvstore.ports import Codec


def encoded(codec: Codec, key: BlockKey, block: ByteArray, checksum: int) -> tuple[ByteArray, int] | None:
    """Return the encoded block and its CRC-32C; None if the block does not match `checksum`, its published CRC-32C."""
    if codec.codec_id == PlainCodec.codec_id:
        return (block, checksum) if crc32c([block]) == checksum else None
    copy = block.copy()
    if crc32c([copy]) != checksum:
        return None
    content = codec.encode(key, copy)
    return content, crc32c([content])


def decoded(codec: Codec, key: BlockKey, content: ByteArray, into: ByteArray) -> int:
    """Decode a tier's content into the pool; return the block's CRC-32C.

    Raises:
        UndecodableBlock: The content cannot be decoded; nothing was written to `into`.
    """
    block = np.empty_like(into)
    codec.decode(key, content, block)
    np.copyto(into, block)
    return crc32c([block])
