"""LZ4 compressor for byte planes: shrinks KV only a little, but decompresses faster than Zstandard."""

import lz4.block
import numpy as np

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock


class Lz4:
    """Compresses byte planes (`kvstore.codecs.byte_planes`) with LZ4."""

    codec_id = 2

    def compress(self, plane: ByteArray) -> bytes:
        packed: bytes = lz4.block.compress(plane, store_size=False)
        return packed

    def decompress(self, packed: ByteArray, length: int) -> ByteArray:
        try:
            content = lz4.block.decompress(packed, uncompressed_size=length)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise UndecodableBlock(str(error)) from error
        if len(content) != length:
            raise UndecodableBlock(f"{len(content)} bytes, not {length}")
        return np.frombuffer(content, np.uint8)
