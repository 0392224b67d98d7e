"""Messages of gRPC clients that compress them.

Unpacking is work before anybody knows whose call it is: a kilobyte can say a megabyte of zeros. So a message may become only so
many times as long as it came, and then costs about as much as one that came in that length.
"""

import zlib
from typing import Final

from fleet.net.grpc.options import LONGEST_REQUEST_BYTES

IDENTITY: Final = b"identity"
_WINDOWS: Final = {b"gzip": 31, b"deflate": 15}  # of zlib, for a header of gzip or its own
ENCODINGS: Final = (IDENTITY, *_WINDOWS)  # as they are called in `grpc-encoding`

MAX_RATIO: Final = 32  # as long; prose becomes 3 to 5 times as long, and token ids less
ALWAYS_ALLOWED_BYTES: Final = (
    256 << 10
)  # a prompt that says one word again and again is no bomb: this takes half a millisecond


class DecompressedTooLarge(Exception):
    """A message that would become longer than it may."""


def decompress_message(content: bytes, encoding: bytes) -> bytes:
    """The message in `content`.

    Raises:
        UnpacksToTooMuch: No more of it was unpacked than is allowed; the message says how much that is.
        ValueError: It is no such message.
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
        raise ValueError("it ends too early, or too late")
    return message
