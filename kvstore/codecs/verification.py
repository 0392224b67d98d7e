"""From a block in the pool to the bytes that a tier keeps, with the checksum that was published and no other.

Bytes of the pool may be wrong, or change while a tier writes them: a writer that outlived its reservation may scribble
there. A tier that summed up what it found would keep wrong bytes under a right checksum. So what is kept as it is keeps the
checksum that the block was published with, and what is encoded is copied and looked at first. On the way up the same holds:
the checksum is that of what was decoded, not of what lies in the pool afterwards.
"""

import numpy as np

from kvstore.buffers import ByteArray, crc32c
from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey
from kvstore.ports import Codec


def encoded(codec: Codec, key: BlockKey, block: ByteArray, checksum: int) -> tuple[ByteArray, int] | None:
    """What to keep of a block, and its CRC-32C; None when the block is not what its checksum says.

    Args:
        codec: Of the block's namespace.
        key: Names the block.
        block: Its bytes.
        checksum: CRC-32C that it was published with.
    """
    if codec.codec_id == PlainCodec.codec_id:
        return (block, checksum) if crc32c([block]) == checksum else None
    still = block.copy()
    if crc32c([still]) != checksum:
        return None
    content = codec.encode(key, still)
    return content, crc32c([content])


def decoded(codec: Codec, key: BlockKey, content: ByteArray, into: ByteArray) -> int:
    """Put into the pool what a tier has kept of a block; returns its CRC-32C.

    Raises:
        UndecodableBlock: The content is not what the codec makes; nothing was put there.
    """
    still = np.empty_like(into)
    codec.decode(key, content, still)
    np.copyto(into, still)
    return crc32c([still])
