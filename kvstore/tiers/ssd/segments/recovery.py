"""What a segment file holds, found out when the tier is opened.

Where the footer is whole, it is believed: reading a block compares its header anyway. Where there is none (the process
was killed while it wrote), or it is damaged, the file is read from end to end, and each record counts whose header and
payload are whole. Nothing is assumed about the order in which the writes of a killed process reached the file: behind a
record that is torn, the search for the next goes on page by page.
"""

from array import array
from collections.abc import Iterator

import google_crc32c
import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.ssd.disk import DiskFile, aligned
from kvstore.tiers.ssd.segments.record_format import (
    FIRST_PAGE,
    TRAILER_PAGES,
    Key,
    NewerSegmentFormat,
    RecordHeader,
    SegmentFooter,
    read_record_header,
    read_segment_head,
    read_table,
    read_trailer,
    record_signs,
)
from kvstore.tiers.ssd.segments.segment import record_pages

WINDOW_PAGES = 1024
"""Read at a time when a file is searched: 4 MiB, enough for a disk's full speed."""


class RecoveredSegment(Struct, frozen=True, kw_only=True):
    """What a file was found to hold."""

    nonce: bytes
    sequence: int
    next_page: int  # behind the last whole record
    last_sequence: int  # of the segment, or of a record in it
    keys: list[Key]
    pages: "array[int]"
    lengths: "array[int]"


class UnreadableSegment(Struct, frozen=True):
    """Nothing in the file can be used; it is written over when its space is needed."""

    reason: str


def recover(file: DiskFile) -> RecoveredSegment | UnreadableSegment:
    """Read one file.

    Raises:
        OSError: It cannot be read.
    """
    page = aligned(PAGE_BYTES)
    size_pages = file.size_bytes // PAGE_BYTES
    if size_pages < FIRST_PAGE + TRAILER_PAGES:
        return UnreadableSegment("too short")
    try:
        head = read_segment_head(page) if file.read([page], 0) == PAGE_BYTES else None
    except NewerSegmentFormat:
        return UnreadableSegment("written by another version of this program")
    footer = None
    if file.read([page], (size_pages - TRAILER_PAGES) * PAGE_BYTES) == PAGE_BYTES:
        footer = read_trailer(page)
    if footer is not None and (head is None or head.nonce == footer.nonce):
        life = _from_footer(file, footer, size_pages)
        if life is not None:
            return life
    if head is not None:
        return _from_records(file, head.nonce, head.sequence, size_pages)
    if footer is not None:
        return _from_records(file, footer.nonce, footer.sequence, size_pages)
    return UnreadableSegment("its head is missing or damaged")


def _from_footer(file: DiskFile, footer: SegmentFooter, size_pages: int) -> RecoveredSegment | None:
    """None when the table is damaged."""
    begin = size_pages - TRAILER_PAGES - footer.table_pages
    if begin < FIRST_PAGE or not FIRST_PAGE <= footer.next_page <= begin:
        return None
    rows = aligned(max(footer.table_pages, 1) * PAGE_BYTES)[: footer.table_pages * PAGE_BYTES]
    if file.read([rows], begin * PAGE_BYTES) != rows.nbytes:
        return None
    if google_crc32c.value(rows.tobytes()) != footer.table_crc32c:
        return None
    keys, pages, lengths = read_table(rows, footer.entries)
    if any(page + record_pages(length) > begin for page, length in zip(pages, lengths, strict=True)):
        return None
    return RecoveredSegment(
        nonce=footer.nonce,
        sequence=footer.sequence,
        next_page=footer.next_page,
        last_sequence=footer.last_sequence,
        keys=keys,
        pages=pages,
        lengths=lengths,
    )


def _from_records(file: DiskFile, nonce: bytes, sequence: int, size_pages: int) -> RecoveredSegment:
    keys: list[Key] = []
    pages, lengths = array("I"), array("I")
    next_page, last_sequence = FIRST_PAGE, sequence
    for record in _records(_Window(file, size_pages), nonce):
        keys.append(record.key)
        pages.append(record.page)
        lengths.append(record.length)
        next_page = record.page + record_pages(record.length)
        last_sequence = max(last_sequence, record.sequence)
    return RecoveredSegment(
        nonce=nonce,
        sequence=sequence,
        next_page=next_page,
        last_sequence=last_sequence,
        keys=keys,
        pages=pages,
        lengths=lengths,
    )


class _Window:
    """A file's pages, read in large pieces, mostly each once."""

    def __init__(self, file: DiskFile, size_pages: int) -> None:
        self._file = file
        self.size_pages = size_pages
        self._buffer = aligned(WINDOW_PAGES * PAGE_BYTES)
        self._first = 0
        self._count = 0

    def pages(self, first: int) -> ByteArray:
        """Some pages from this one on, shape [pages, 4096]; none behind the end."""
        if not self._first <= first < self._first + self._count:
            wanted = min(WINDOW_PAGES, self.size_pages - first)
            read = self._file.read([self._buffer[: wanted * PAGE_BYTES]], first * PAGE_BYTES) if wanted > 0 else 0
            self._first, self._count = first, read // PAGE_BYTES
        rows = self._buffer.reshape(WINDOW_PAGES, PAGE_BYTES)
        return rows[first - self._first : self._count]


def _records(window: _Window, nonce: bytes) -> Iterator[RecordHeader]:
    """All records of a life that are whole, in the order of their places."""
    page = FIRST_PAGE
    while (found := _next_header(window, nonce, page)) is not None:
        behind = found.page + record_pages(found.length)
        if behind <= window.size_pages and _payload_crc32c(window, found) == found.crc32c:
            yield found
            page = behind
        else:
            page = found.page + 1


def _next_header(window: _Window, nonce: bytes, page: int) -> RecordHeader | None:
    """The first page from this one on that is a record's header."""
    begin, nonce_at = record_signs()
    signs, wanted = np.frombuffer(begin, np.uint8), np.frombuffer(nonce, np.uint8)
    while len(rows := window.pages(page)):
        if (record := read_record_header(rows[0], nonce, page)) is not None:
            return record  # where it should be
        alike = (rows[:, : len(begin)] == signs).all(axis=1) & (rows[:, nonce_at] == wanted).all(axis=1)
        for index in np.flatnonzero(alike):
            number = page + int(index)
            if (record := read_record_header(rows[index], nonce, number)) is not None:
                return record
        page += len(rows)
    return None


def _payload_crc32c(window: _Window, record: RecordHeader) -> int | None:
    """None when the file ends before the payload does."""
    checksum, page, left = 0, record.page + 1, record.length
    while left:
        rows = window.pages(page)
        if not len(rows):
            return None
        count = min(left, rows.nbytes)
        checksum = google_crc32c.extend(checksum, rows.reshape(-1)[:count])
        page += len(rows)
        left -= count
    return checksum
