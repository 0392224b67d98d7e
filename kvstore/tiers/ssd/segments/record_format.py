"""What lies in a segment file, byte by byte. Pure.

Rules:

1. A segment is a sequence of pages of 4 KiB; integers are little-endian. Page 0 is the segment's head. Records follow
   each other from page 1; the last pages may hold a footer. Whatever else is in the file means nothing.
2. A record is a page with its header, then its payload, padded to whole pages. The header names the block (namespace
   digest and name), its codec, length and checksum, the page where it stands, a sequence number, and the segment's nonce.
3. The nonce is drawn anew each time a file is begun, at random: records of the file's former life, and payloads that
   somebody made look like records, do not have it.
4. The footer is written when the segment is full or the tier is closed: a table of the blocks that are in it, so that
   opening reads a few pages a segment; then, on the very last page, a trailer with the table's place and checksum.
5. Everything but padding is under a CRC-32C, and under a version: what does not fit is as if it were not there.
6. Each read of a block reads its header too and compares all of it with what was asked for. So no table, here or in
   memory, has to be right for the bytes to be.
7. A block that was found bad has its header overwritten, so that a table read later cannot bring it back.
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

HEAD = struct.Struct("<8sI4x8sQQ")  # magic, version, nonce, sequence, bytes of the file
RECORD = struct.Struct("<4sHBx8sQ32sIII")  # magic, version, codec, nonce, sequence, key, page, length, checksum
ENTRY = struct.Struct("<32sII")  # key, page, length
TRAILER = struct.Struct("<8sI4x8sQQIIII")
# magic, version, nonce, sequence, last sequence, entries, next page, pages of the table, its checksum
CHECKSUM = struct.Struct("<I")  # CRC-32C of the structure that it follows

TRAILER_PAGES = 1
FIRST_PAGE = 1  # of records

Key = bytes
"""32 bytes: namespace digest, then name."""


class SegmentHead(Struct, frozen=True, kw_only=True):
    """Who a file is, in its present life."""

    nonce: bytes
    sequence: int  # grows from segment to segment
    file_bytes: int


class RecordHeader(Struct, frozen=True):
    """The header of one block. Positional: one is made for each block that is written or read."""

    key: Key
    page: int  # where the header stands
    length: int  # of the payload, in bytes
    codec_id: int
    sequence: int
    crc32c: int  # of the payload


class SegmentFooter(Struct, frozen=True, kw_only=True):
    """The trailer's content."""

    nonce: bytes
    sequence: int  # of the segment
    last_sequence: int  # of the records in it
    entries: int
    next_page: int  # behind the last record
    table_pages: int
    table_crc32c: int


class NewerSegmentFormat(Exception):
    """Written by a version of this program that knows more; nothing can be said of it."""


def footer_pages(entries: int) -> int:
    """Pages that the table of so many blocks and the trailer occupy."""
    return pages_for(entries * ENTRY.size) + TRAILER_PAGES


def segment_head(head: SegmentHead) -> bytes:
    return _sealed(HEAD.pack(SEGMENT_MAGIC, FORMAT_VERSION, head.nonce, head.sequence, head.file_bytes))


def read_segment_head(page: ByteArray) -> SegmentHead | None:
    """None when the page is not the head of a segment, or damaged.

    Raises:
        Newer: Its format is not ours.
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
    """None when there is no record of this life of the segment on the page of that number, or it is damaged."""
    if not _is_sealed(page, RECORD.size):
        return None
    magic, version, codec_id, its_nonce, sequence, key, its_page, length, crc32c = RECORD.unpack_from(page.data)
    if magic != RECORD_MAGIC or version != FORMAT_VERSION or its_nonce != nonce or its_page != number:
        return None
    return RecordHeader(key, its_page, length, codec_id, sequence, crc32c)


def is_discarded(page: ByteArray) -> bool:
    return page[: len(DISCARDED)].tobytes() == DISCARDED


def record_signs() -> tuple[bytes, slice]:
    """Magic and version, which every record header begins with, and where the nonce is in it; for a quick look."""
    begin = struct.pack("<4sH", RECORD_MAGIC, FORMAT_VERSION)
    return begin, slice(8, 8 + NONCE_BYTES)


def table(keys: Iterable[Key], pages: "array[int]", lengths: "array[int]") -> bytes:
    """The footer's table, padded to whole pages."""
    rows = b"".join(map(ENTRY.pack, keys, pages, lengths))
    return rows.ljust(pages_for(len(rows)) * PAGE_BYTES, b"\0")


def read_table(rows: ByteArray, entries: int) -> tuple[list[Key], "array[int]", "array[int]"]:
    """Keys, pages and lengths of a table that was found whole."""
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
    """None when the page is no trailer, or damaged, or of another version."""
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
