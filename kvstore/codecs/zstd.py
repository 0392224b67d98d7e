"""Zstandard at level 1: about a gigabyte a second a core, and still all that KV gives."""

import numpy as np
import zstandard

from kvstore.buffers import ByteArray
from kvstore.errors import UndecodableBlock

LEVEL = 1


class Zstd:
    """See `kvstore.codecs.byte_planes.Compressor`. A context a call: they are not thread-safe, and cost next to nothing."""

    codec_id = 1

    def compress(self, plane: ByteArray) -> bytes:
        return zstandard.ZstdCompressor(level=LEVEL).compress(plane.data)

    def decompress(self, packed: ByteArray, length: int) -> ByteArray:
        try:
            claimed = zstandard.get_frame_parameters(packed.data).content_size
            if claimed != length:  # before anything of that size is allocated
                raise UndecodableBlock(f"a frame of {claimed} bytes, not {length}")
            content = zstandard.ZstdDecompressor().decompress(
                packed.data, max_output_size=length, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise UndecodableBlock(str(error)) from error
        if len(content) != length:
            raise UndecodableBlock(f"{len(content)} bytes, not {length}")
        return np.frombuffer(content, np.uint8)
