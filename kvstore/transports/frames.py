"""Frames of the TCP data plane.

Rules:

1. A request is 32 bytes, followed by the block's bytes in a PUT; a reply is 16 bytes, followed by the block's bytes
   when a GET succeeded. Integers are big-endian. Replies come in the order of the requests; clients may send up to
   `WINDOW` requests before they read.
2. The first request of a connection is OPEN, which binds it to a namespace; all blocks have that namespace's size.
3. Every block travels with its CRC-32C, verified by the side that receives it.
4. Whatever does not follow these rules ends the connection at once.
"""

import struct
from enum import IntEnum

MAGIC = b"FKV1"

REQUEST = struct.Struct(">4sB3xQQII")  # magic, operation, offset, generation, length, crc32c
OPENING = struct.Struct(">4sB3x16s8x")  # magic, operation, digest of the namespace
REPLY = struct.Struct(">4sB3xII")  # magic, status, length of what follows, crc32c of it
assert REQUEST.size == OPENING.size == 32
assert REPLY.size == 16

WINDOW = 64
"""Requests in flight on a connection: their heads fit any socket buffer, so that neither side waits for the other."""


class Operation(IntEnum):
    OPEN = 1
    GET = 2
    PUT = 3


class Status(IntEnum):
    DONE = 0
    GONE = 1  # the slot is another block's by now, or of another namespace
    CORRUPT = 2  # the bytes of a PUT do not match their checksum
    UNKNOWN = 3  # OPEN: no such namespace here
