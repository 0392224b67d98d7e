"""Frames of the TCP data plane.

Rules:

1. Integers are big-endian. A connection begins with an OPENING, which names a namespace, and a CHALLENGE that answers
   it. Where the challenge asks for a proof, the client sends one (32 bytes) and gets a VERDICT with the node's own; see
   `kvstore.security.authentication`. All blocks of a connection have its namespace's size.
2. A request is a REQUEST, as many ENTRY as it says, at most `WINDOW`, and in a PUT the bytes of all its blocks in order.
   A reply is a REPLY and a status (1 byte) for each of them. In a GET there follow the bytes of those that are DONE, in
   order, and then one status a block again: whether the slot was still that block's when its last byte had been read.
3. Replies come in the order of the requests. Clients may send one more request before they read a reply, and have to
   read it then: the node reads nothing more while a reply waits to be taken.
4. Blocks travel with their CRC-32C, in the entry or in what the client matched, verified by the side that receives them.
5. Whatever does not follow these rules ends the connection at once.
"""

import struct
from enum import IntEnum

MAGIC = b"FKV2"

OPENING = struct.Struct(">4sB3x16s16s")  # magic, operation, digest of the namespace, nonce of the client
CHALLENGE = struct.Struct(">4sB3x16s")  # magic, status, nonce of the node
VERDICT = struct.Struct(">4sB3x32s")  # magic, status, proof of the node
REQUEST = struct.Struct(">4sB3xI")  # magic, operation, blocks
ENTRY = struct.Struct(">QQI")  # offset, generation, crc32c
REPLY = struct.Struct(">4sI")  # magic, blocks

WINDOW = 64
"""Blocks of a request: enough to hide a round trip behind them, few enough for one gathering write."""


class DataPlaneOperation(IntEnum):
    OPEN = 1
    GET = 2
    PUT = 3


class DataPlaneStatus(IntEnum):
    DONE = 0
    GONE = 1  # the slot is another block's by now, or of another namespace
    CORRUPT = 2  # the bytes of a PUT do not match their checksum
    UNKNOWN = 3  # OPEN: no such namespace here
    AUTHENTICATE = 4  # OPEN: prove that you have the secret
    REFUSED = 5  # that was no proof
