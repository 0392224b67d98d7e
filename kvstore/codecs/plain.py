"""Plain codec: stores blocks unchanged."""

import numpy as np

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey


class PlainCodec:
    """Codec that stores a block as it is. `encode` returns the block itself, without a copy."""

    codec_id = 0

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:  # noqa: ARG002 - the key is not needed
        return block

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:  # noqa: ARG002 - the key is not needed
        if encoded.nbytes != into.nbytes:
            raise UndecodableBlock(f"{encoded.nbytes} bytes, not {into.nbytes}")
        np.copyto(into, encoded)
