"""Zstandard compressor for byte planes, at level 1: one core compresses about 1 GB/s.

Higher levels compress KV hardly better.
"""

import numpy as np
import zstandard

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock

LEVEL = 1


class Zstd:
    """Compresses byte planes (`kvstore.codecs.byte_planes`) with Zstandard.

    Each call makes its own Zstandard context, because contexts are not thread-safe.
    """

    codec_id = 1

    def compress(self, plane: ByteArray) -> bytes:
        return zstandard.ZstdCompressor(level=LEVEL).compress(plane.data)

    def decompress(self, packed: ByteArray, length: int) -> ByteArray:
        try:
            claimed = zstandard.get_frame_parameters(packed.data).content_size
            # The size is compared first, because the library allocates as much memory as the input claims.
            if claimed != length:
                raise UndecodableBlock(f"a frame of {claimed} bytes, not {length}")
            content = zstandard.ZstdDecompressor().decompress(
                packed.data, max_output_size=length, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise UndecodableBlock(str(error)) from error
        if len(content) != length:
            raise UndecodableBlock(f"{len(content)} bytes, not {length}")
        return np.frombuffer(content, np.uint8)
