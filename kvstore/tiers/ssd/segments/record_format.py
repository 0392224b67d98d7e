"""Record format: the bytes of a segment file. Does no I/O.

Rules:

1. A segment is a sequence of pages of 4 KiB; integers are little-endian. Page 0 holds the segment's head. Records begin at
   page 1, one after the other. The last pages may hold a footer. All other bytes have no meaning.
2. A record is a page with its header, then its payload, padded to whole pages. The header holds the block's key (namespace
   digest and block hash), codec, length and checksum, the page number, a sequence number, and the segment's nonce.
3. A new random nonce is drawn each time a file is reused. Only records with this nonce count. Old records of the file
   do not have it. Payload bytes that imitate a record do not have it either, because the writer of a payload does not
   know the nonce.
4. The footer is written when the segment is full or the tier is closed. It is a table of the segment's blocks, so that
   opening reads only a few pages. The last page is a trailer with the size and checksum of the table.
5. A CRC-32C covers all bytes except padding. Head, record headers and trailer also have a version. A structure with a
   wrong checksum or another version is ignored. If the head has another version, the whole file is ignored.
6. Each read of a block also reads the record's header and compares all fields. Even if a table is wrong, on disk or in
   memory, a read therefore never returns wrong bytes.
7. The header of a bad block is overwritten. A footer's table may still list the block, but a read then finds no valid
   header, and the block is a miss. A search of the whole file does not find the block either.
"""

import struct
from array import array
from collections.abc import Iterable

import google_crc32c
from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.pool.extents import PAGE_BYTES, pages_for

FORMAT_VERSION = 1

NONCE_BYTES = 8

SEGMENT_MAGIC = b"FleetSeg"
RECORD_MAGIC = b"FRec"
FOOTER_MAGIC = b"FleetEnd"
DISCARDED = b"Gone"

HEAD = struct.Struct("<8sI4x8sQQ")  # head of a segment: magic, version, nonce, sequence, bytes of the file
# Header of a record: magic, version, codec, nonce, sequence, key, page, length, checksum.
RECORD = struct.Struct("<4sHBx8sQ32sIII")
ENTRY = struct.Struct("<32sII")  # entry of the footer's table: key, page, length
# Trailer: magic, version, nonce, sequence, last sequence, entries, next page, pages of the table, checksum of the table.
TRAILER = struct.Struct("<8sI4x8sQQIIII")
CHECKSUM = struct.Struct("<I")  # CRC-32C of the preceding structure

TRAILER_PAGES = 1
FIRST_PAGE = 1  # first page of a segment with records; page 0 has the head

Key = bytes
"""Key of a block in 32 bytes: the namespace digest, then the block hash."""


class SegmentHead(Struct, frozen=True, kw_only=True):
    """Content of page 0 of a segment file, the segment's head."""

    nonce: bytes
    sequence: int  # sequence number; a segment that is begun later has a higher one
    file_bytes: int


class RecordHeader(Struct, frozen=True):
    """Header of one record.

    The object is created with positional arguments, because this is faster and one object is made for each block.
    """

    key: Key
    page: int  # number of the page with the header
    length: int  # length of the payload in bytes
    codec_id: int
    sequence: int
    crc32c: int  # CRC-32C of the payload


class SegmentFooter(Struct, frozen=True, kw_only=True):
    """Content of a segment's trailer, the last page of its footer (rule 4)."""

    nonce: bytes
    sequence: int  # sequence number of the segment
    last_sequence: int  # a sequence number that is higher than those of the segment and of all its records
    entries: int
    next_page: int  # first page after the last record
    table_pages: int
    table_crc32c: int


class NewerSegmentFormat(Exception):
    """The segment was written by another version of this program."""


def footer_pages(entries: int) -> int:
    """Return the number of pages of a footer with a table of this many entries, including the trailer."""
    return pages_for(entries * ENTRY.size) + TRAILER_PAGES


def segment_head(head: SegmentHead) -> bytes:
    return _sealed(HEAD.pack(SEGMENT_MAGIC, FORMAT_VERSION, head.nonce, head.sequence, head.file_bytes))


def read_segment_head(page: ByteArray) -> SegmentHead | None:
    """Parse a segment's head; return None if the page is not a head or is damaged.

    Raises:
        NewerSegmentFormat: The head has another version.
    """
    if not _is_sealed(page, HEAD.size):
        return None
    magic, version, nonce, sequence, file_bytes = HEAD.unpack_from(page.data)
    if magic != SEGMENT_MAGIC:
        return None
    if version != FORMAT_VERSION:
        raise NewerSegmentFormat
    return SegmentHead(nonce=nonce, sequence=sequence, file_bytes=file_bytes)


def record_header(record: RecordHeader, nonce: bytes) -> bytes:
    return _sealed(
        RECORD.pack(
            RECORD_MAGIC,
            FORMAT_VERSION,
            record.codec_id,
            nonce,
            record.sequence,
            record.key,
            record.page,
            record.length,
            record.crc32c,
        )
    )


def read_record_header(page: ByteArray, nonce: bytes, number: int) -> RecordHeader | None:
    """Parse the record header on page `number`; return None if it is damaged, or has another nonce (rule 3) or page."""
    if not _is_sealed(page, RECORD.size):
        return None
    magic, version, codec_id, its_nonce, sequence, key, its_page, length, crc32c = RECORD.unpack_from(page.data)
    if magic != RECORD_MAGIC or version != FORMAT_VERSION or its_nonce != nonce or its_page != number:
        return None
    return RecordHeader(key, its_page, length, codec_id, sequence, crc32c)


def is_discarded(page: ByteArray) -> bool:
    return page[: len(DISCARDED)].tobytes() == DISCARDED


def record_signs() -> tuple[bytes, slice]:
    """Return the bytes with which every record header begins, and the slice of the header in which the nonce lies.

    `kvstore.tiers.ssd.segments.recovery` uses them to find record headers fast.
    """
    begin = struct.pack("<4sH", RECORD_MAGIC, FORMAT_VERSION)
    return begin, slice(8, 8 + NONCE_BYTES)


def table(keys: Iterable[Key], pages: "array[int]", lengths: "array[int]") -> bytes:
    """Encode the footer's table, padded to whole pages."""
    rows = b"".join(map(ENTRY.pack, keys, pages, lengths))
    return rows.ljust(pages_for(len(rows)) * PAGE_BYTES, b"\0")


def read_table(rows: ByteArray, entries: int) -> tuple[list[Key], "array[int]", "array[int]"]:
    """Decode the keys, pages and lengths of a verified table."""
    keys: list[Key] = []
    pages, lengths = array("I"), array("I")
    for key, page, length in ENTRY.iter_unpack(rows[: entries * ENTRY.size].data):
        keys.append(key)
        pages.append(page)
        lengths.append(length)
    return keys, pages, lengths


def trailer(footer: SegmentFooter) -> bytes:
    return _sealed(
        TRAILER.pack(
            FOOTER_MAGIC,
            FORMAT_VERSION,
            footer.nonce,
            footer.sequence,
            footer.last_sequence,
            footer.entries,
            footer.next_page,
            footer.table_pages,
            footer.table_crc32c,
        )
    )


def read_trailer(page: ByteArray) -> SegmentFooter | None:
    """Parse a trailer; return None if the page is not a trailer, is damaged, or has another version."""
    if not _is_sealed(page, TRAILER.size):
        return None
    magic, version, nonce, sequence, last, entries, next_page, table_pages, table_crc32c = TRAILER.unpack_from(
        page.data
    )
    if magic != FOOTER_MAGIC or version != FORMAT_VERSION or table_pages != pages_for(entries * ENTRY.size):
        return None
    return SegmentFooter(
        nonce=nonce,
        sequence=sequence,
        last_sequence=last,
        entries=entries,
        next_page=next_page,
        table_pages=table_pages,
        table_crc32c=table_crc32c,
    )


def _sealed(structure: bytes) -> bytes:
    return structure + CHECKSUM.pack(google_crc32c.value(structure))


def _is_sealed(page: ByteArray, size: int) -> bool:
    expected: int = CHECKSUM.unpack_from(page.data, size)[0]
    return bool(google_crc32c.value(page[:size].tobytes()) == expected)
