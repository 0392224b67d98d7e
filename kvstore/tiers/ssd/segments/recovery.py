"""Segment recovery: finds out which records a segment file contains when the tier is opened.

An undamaged footer is trusted, because each read of a block compares its header anyway. If the process was killed while
it appended records to the file, the footer is missing. If the footer is missing or damaged, the whole file is read, and
each record with an undamaged header and payload is recovered. The writes of a killed process may have reached the file
in any order, so the search continues page by page after a damaged record.
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
"""Number of pages that are read at a time when a file is searched: 4 MiB, enough for a disk's full speed."""


class RecoveredSegment(Struct, frozen=True, kw_only=True):
    """Contents of a segment file, as recovery found them."""

    nonce: bytes
    sequence: int
    next_page: int  # first page after the last record that was recovered
    last_sequence: int  # at least as high as the sequence numbers of the segment and of all its records
    keys: list[Key]
    pages: "array[int]"
    lengths: "array[int]"


class UnreadableSegment(Struct, frozen=True):
    """The file cannot be used as a segment. It is overwritten when its space is needed."""

    reason: str


def recover(file: DiskFile) -> RecoveredSegment | UnreadableSegment:
    """Read a segment file, and return the records that it contains.

    Raises:
        OSError: The file cannot be read.
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
        recovered = _from_footer(file, footer, size_pages)
        if recovered is not None:
            return recovered
    if head is not None:
        return _from_records(file, head.nonce, head.sequence, size_pages)
    if footer is not None:
        return _from_records(file, footer.nonce, footer.sequence, size_pages)
    return UnreadableSegment("its head is missing or damaged")


def _from_footer(file: DiskFile, footer: SegmentFooter, size_pages: int) -> RecoveredSegment | None:
    """Read the footer's table; return None if it is damaged."""
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
    """Reads a file many pages at a time, and keeps the pages of the last read."""

    def __init__(self, file: DiskFile, size_pages: int) -> None:
        self._file = file
        self.size_pages = size_pages
        self._buffer = aligned(WINDOW_PAGES * PAGE_BYTES)
        self._first = 0
        self._count = 0

    def pages(self, first: int) -> ByteArray:
        """Return pages in shape [pages, 4096]: one or more from `first` on, or none after the end of the file."""
        if not self._first <= first < self._first + self._count:
            wanted = min(WINDOW_PAGES, self.size_pages - first)
            read = self._file.read([self._buffer[: wanted * PAGE_BYTES]], first * PAGE_BYTES) if wanted > 0 else 0
            self._first, self._count = first, read // PAGE_BYTES
        rows = self._buffer.reshape(WINDOW_PAGES, PAGE_BYTES)
        return rows[first - self._first : self._count]


def _records(window: _Window, nonce: bytes) -> Iterator[RecordHeader]:
    """Yield all undamaged records with this nonce, in file order."""
    page = FIRST_PAGE
    while (found := _next_header(window, nonce, page)) is not None:
        behind = found.page + record_pages(found.length)
        if behind <= window.size_pages and _payload_crc32c(window, found) == found.crc32c:
            yield found
            page = behind
        else:
            page = found.page + 1


def _next_header(window: _Window, nonce: bytes, page: int) -> RecordHeader | None:
    """Find the first undamaged record header on this page or after it; return None if there is none."""
    begin, nonce_at = record_signs()
    signs, wanted = np.frombuffer(begin, np.uint8), np.frombuffer(nonce, np.uint8)
    while len(rows := window.pages(page)):
        if (record := read_record_header(rows[0], nonce, page)) is not None:
            return record  # the usual case: the next record begins right here
        alike = (rows[:, : len(begin)] == signs).all(axis=1) & (rows[:, nonce_at] == wanted).all(axis=1)
        for index in np.flatnonzero(alike):
            number = page + int(index)
            if (record := read_record_header(rows[index], nonce, number)) is not None:
                return record
        page += len(rows)
    return None


def _payload_crc32c(window: _Window, record: RecordHeader) -> int | None:
    """Compute the checksum of a payload; return None if the file ends before the payload."""
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
