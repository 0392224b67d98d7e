"""Plain codec: stores blocks unchanged."""

import numpy as np

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey


class PlainCodec:
    """Implements `kvstore.ports.Codec`; `encode` does not copy."""

    codec_id = 0

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:  # noqa: ARG002 - the same for every block
        return block

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:  # noqa: ARG002 - the same for every block
        if encoded.nbytes != into.nbytes:
            raise UndecodableBlock(f"{encoded.nbytes} bytes, not {into.nbytes}")
        np.copyto(into, encoded)
