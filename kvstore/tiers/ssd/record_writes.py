"""Record writes: compose the records of a segment from pieces of memory. Blocks that begin on a page are not copied."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.pool.extents import PAGE_BYTES, pages_for
from kvstore.tiers.ssd.disk import is_aligned
from kvstore.tiers.ssd.disk_threads import Scratch
from kvstore.tiers.ssd.segments.record_format import Key, RecordHeader, record_header


class SsdWrite(Struct, frozen=True):
    """One encoded block to write.

    The object is created with positional arguments, because this is faster and one object is made for each block.
    """

    key: Key
    content: ByteArray  # the block as the codec encodes it
    codec_id: int
    crc32c: int  # CRC-32C of `content`


def compose(
    payloads: Sequence[SsdWrite], first_page: int, first_sequence: int, nonce: bytes, scratch: Scratch
) -> list[ByteArray]:
    """Return the pieces of memory that form adjacent records in this order. The first record begins at `first_page`.

    `payloads` has at most `disk_threads.BATCH_RECORDS` blocks. If a payload begins at a page boundary in memory,
    only its partial last page is copied.
    """
    pieces: list[ByteArray] = []
    copies = scratch.payloads(sum(_copied_bytes(payload.content) for payload in payloads))
    page = first_page
    for index, payload in enumerate(payloads):
        content = payload.content
        sequence = first_sequence + index
        header = record_header(
            RecordHeader(payload.key, page, content.nbytes, payload.codec_id, sequence, payload.crc32c), nonce
        )
        row = scratch.headers[index]
        row[: len(header)] = np.frombuffer(header, np.uint8)
        row[len(header) :] = 0
        pieces.append(row)
        pages = pages_for(content.nbytes)
        if copied := _copied_bytes(content):
            copy, copies = copies[:copied], copies[copied:]
            copy[: content.nbytes] = content
            copy[content.nbytes :] = 0
            pieces.append(copy)
        else:
            whole = content.nbytes - content.nbytes % PAGE_BYTES
            if whole:
                pieces.append(content[:whole])
            if whole < content.nbytes:
                tail = scratch.tails[index]
                tail[: content.nbytes - whole] = content[whole:]
                tail[content.nbytes - whole :] = 0
                pieces.append(tail)
        page += 1 + pages
    return pieces


def _copied_bytes(content: ByteArray) -> int:
    """Return how many bytes have to go through the buffers of `Scratch`, rounded up to whole pages."""
    return 0 if is_aligned(content) else pages_for(content.nbytes) * PAGE_BYTES
