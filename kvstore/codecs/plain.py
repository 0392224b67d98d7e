"""Bytes as they are: what does not have to be smaller or sealed."""

import numpy as np

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey


class PlainCodec:
    """See `kvstore.ports.Codec`. `encode` copies nothing."""

    codec_id = 0

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:  # noqa: ARG002 - the same for every block
        return block

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:  # noqa: ARG002 - see above
        if encoded.nbytes != into.nbytes:
            raise UndecodableBlock(f"{encoded.nbytes} bytes, not {into.nbytes}")
        np.copyto(into, encoded)
