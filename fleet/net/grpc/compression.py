"""Decompression of messages from gRPC clients.

Messages are decompressed before their caller is authenticated, and a kilobyte can expand to a megabyte of zeros. A
message that has more than `ALWAYS_ALLOWED_BYTES` after decompression may therefore be at most `MAX_RATIO` times as long
as the compressed message. So a caller who wants to cause much work has to send much.
"""

import zlib
from typing import Final

from fleet.net.grpc.options import LONGEST_REQUEST_BYTES

IDENTITY: Final = b"identity"
_WINDOWS: Final = {b"gzip": 31, b"deflate": 15}  # zlib's window bits: 31 for a gzip header, 15 for a zlib header
ENCODINGS: Final = (IDENTITY, *_WINDOWS)  # values of the header `grpc-encoding`

# Maximum ratio of the size after decompression to the size before. The ratio of text is 3 to 5, that of token ids is lower.
MAX_RATIO: Final = 32
# Any ratio is allowed if the decompressed message has at most this size, because a prompt may repeat one word.
# Decompressing this much takes half a millisecond.
ALWAYS_ALLOWED_BYTES: Final = 256 << 10


class DecompressedTooLarge(Exception):
    """Raised if a message would expand beyond the limit of `decompress_message`."""


def decompress_message(content: bytes, encoding: bytes) -> bytes:
    """Return the decompressed message.

    It may have at most `LONGEST_REQUEST_BYTES`. If it has more than `ALWAYS_ALLOWED_BYTES`, it may be at most `MAX_RATIO` times as long
    as `content`.

    Raises:
        DecompressedTooLarge: The message exceeds this limit, which the error names. Nothing beyond the limit was
            decompressed.
        ValueError: The content is not a compressed message.
    """
    most = min(LONGEST_REQUEST_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * len(content)))
    unpacking = zlib.decompressobj(_WINDOWS[encoding])
    try:
        message = unpacking.decompress(content, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(message) > most:
        advice = "; send it uncompressed" if most < LONGEST_REQUEST_BYTES else ""
        raise DecompressedTooLarge(
            f"the message has {len(content)} bytes, and must not unpack to more than {most}{advice}"
        )
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError("it is truncated or has trailing bytes")
    return message
