"""TCP frames: the protocol of the TCP data plane.

Rules:

1. Integers are big-endian. A connection begins with an OPENING, which names a namespace, and a CHALLENGE as the answer.
   If the challenge demands a proof, the client sends one (32 bytes) and gets a VERDICT with the node's own proof
   (`kvstore.security.authentication`). All blocks of a connection have its namespace's block size.
2. A request is a REQUEST, one ENTRY for each block (at most `WINDOW`), and for PUT the bytes of all blocks in order.
   A reply is a REPLY and one status byte for each block. In a reply to GET, the bytes of the DONE blocks follow in order,
   and then a second status byte for each block: whether the slot still belonged to the block after the reply's last block
   was sent.
3. Replies come in the order of the requests. A client may send a second request before it reads the reply to the first
   one. Before a third request it has to read the first reply, because the node reads nothing while a reply waits to be
   sent.
4. The side that receives a block verifies its CRC-32C. The node takes the checksum of a PUT from its ENTRY. The client
   takes the checksum of a GET from the match in which it found the block.
5. A violation of these rules ends the connection at once.
"""

import struct
from enum import IntEnum

MAGIC = b"FKV2"

OPENING = struct.Struct(">4sB3x16s16s")  # magic, operation, digest of the namespace, nonce of the client
CHALLENGE = struct.Struct(">4sB3x16s")  # magic, status, nonce of the node
VERDICT = struct.Struct(">4sB3x32s")  # magic, status, proof of the node
REQUEST = struct.Struct(">4sB3xI")  # magic, operation, number of blocks
ENTRY = struct.Struct(">QQI")  # offset, generation, crc32c
REPLY = struct.Struct(">4sI")  # magic, number of blocks

WINDOW = 64
"""Maximum number of blocks of a request. So many blocks hide the time of a round trip, and still fit into one vectored
write."""


class DataPlaneOperation(IntEnum):
    OPEN = 1
    GET = 2
    PUT = 3


class DataPlaneStatus(IntEnum):
    DONE = 0
    GONE = 1  # the slot has another block, a block of another namespace, or none that may be read or written now
    CORRUPT = 2  # the bytes of a PUT do not match their checksum
    UNKNOWN = 3  # OPEN: the namespace is not open here
    AUTHENTICATE = 4  # OPEN: the client has to prove the secret
    REFUSED = 5  # VERDICT: the client's proof was wrong
