"""Verification: encodes blocks of the pool for a tier, and decodes them, without relying on unverified bytes.

A block's bytes in the pool may be wrong, or may change while a tier writes them, because a writer whose reservation has
ended may still write there. A checksum computed from such bytes would make wrong bytes look right. Therefore a block
that is stored unchanged keeps its published checksum. A block that will be encoded is first copied, and the copy is
verified before it is encoded. A block from a tier is decoded in memory outside the pool, and its checksum is computed
from that memory.
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
    """Decode the `content` from a tier into a slot of the pool; return the CRC-32C of the decoded block.

    Raises:
        UndecodableBlock: The content cannot be decoded; nothing was written to `into`.
    """
    block = np.empty_like(into)
    codec.decode(key, content, block)
    np.copyto(into, block)
    return crc32c([block])
