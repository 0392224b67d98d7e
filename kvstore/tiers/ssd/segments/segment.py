"""Segment: the state in memory of one segment file. The caller locks it (`SsdState.lock`); the segment does no I/O itself.

    FREE -> ACTIVE -> FULL -> SEALED -> LEAVING -> FREE

Records are appended to an ACTIVE segment. A FULL segment waits for unfinished writes and then for its footer. A SEALED
segment is only read, and may be evicted. A LEAVING segment is being evicted: its blocks leave the index, and it waits
until calls have finished reading its file. A file is reused only while its segment is FREE, so a reader never sees bytes
that were written after the reuse.

Two transitions are not in the diagram. When the tier is opened, recovered segments are SEALED, and the newest one may
become ACTIVE again. If the head of a new ACTIVE segment cannot be written, the segment becomes LEAVING.
"""

from array import array
from collections.abc import Sequence
from enum import Enum, auto

from kvstore.clock import Nanos
from kvstore.pool.extents import PAGE_BYTES, pages_for
from kvstore.tiers.ssd.disk import DiskFile
from kvstore.tiers.ssd.segments.eviction import SegmentUse
from kvstore.tiers.ssd.segments.record_format import FIRST_PAGE, NONCE_BYTES, Key, footer_pages

MOST_HITS = 255  # number at which the counter of the reads of one record (`record_hits`) stops


class SegmentState(Enum):
    FREE = auto()
    ACTIVE = auto()
    FULL = auto()
    SEALED = auto()
    LEAVING = auto()


class Segment:
    """Holds the state of one segment file and its blocks.

    The ordinal of a block is its number in the segment, from 0 on, in the order in which the blocks became readable.
    """

    __slots__ = (
        "file", "folder", "hits", "is_damaged", "keys", "lengths", "live", "live_pages", "name", "next_page", "nonce", "pages", "promised",
        "readers", "record_hits", "sequence", "size_bytes", "slot", "state", "used_at", "writers",
    )  # fmt: skip

    def __init__(self, slot: int, folder: str, name: str, file: DiskFile) -> None:
        self.slot = slot  # number of the segment in the index
        self.folder = folder
        self.name = name
        self.file = file
        self.size_bytes = file.size_bytes
        self.state = SegmentState.FREE
        self.readers = 0  # number of calls that read from the file now
        self.writers = 0  # number of calls that write records to the file now
        self.begin(bytes(NONCE_BYTES), 0, Nanos(0))
        self.state = SegmentState.FREE

    def begin(self, nonce: bytes, sequence: int, now: Nanos) -> None:
        """Make the segment ACTIVE, without blocks, so that its file is written from the beginning."""
        assert not self.readers, (self.name, self.readers)
        assert not self.writers, (self.name, self.writers)
        self.state = SegmentState.ACTIVE
        self.nonce = nonce
        self.sequence = sequence
        self.next_page = FIRST_PAGE
        # number of records that have been assigned a place in the file; some may not be written yet
        self.promised = 0
        self.keys: list[Key] = []
        self.pages = array("I")
        self.lengths = array("I")
        self.record_hits = bytearray()
        self.live = 0  # number of blocks of this segment that are in the index
        self.live_pages = 0
        self.hits = 0
        self.used_at = now
        self.is_damaged = False  # True if a block of the segment was found bad

    def restore(self, keys: list[Key], pages: "array[int]", lengths: "array[int]", next_page: int) -> None:
        """Use the contents that recovery has found in the file."""
        self.keys, self.pages, self.lengths = keys, pages, lengths
        self.record_hits = bytearray(len(keys))
        self.promised = len(keys)
        self.next_page = next_page

    @property
    def size_pages(self) -> int:
        return self.size_bytes // PAGE_BYTES

    def take(self, records: Sequence[int]) -> tuple[int, int]:
        """Assign adjacent places to as many of the records as fit, from the first one on.

        Args:
            records: Number of pages of each record.

        Returns:
            The page of the first record, and how many records got a place.
        """
        first, taken = self.next_page, 0
        for count in records:
            if self.next_page + count + footer_pages(self.promised + 1) > self.size_pages:
                break
            self.next_page += count
            self.promised += 1
            taken += 1
        return first, taken

    def add(self, key: Key, page: int, length: int) -> int:
        """Add a written record; return its ordinal."""
        self.keys.append(key)
        self.pages.append(page)
        self.lengths.append(length)
        self.record_hits.append(0)
        return len(self.keys) - 1

    def hit(self, ordinal: int, now: Nanos) -> None:
        """Count a read of a block."""
        self.hits += 1
        self.used_at = now
        if self.record_hits[ordinal] < MOST_HITS:
            self.record_hits[ordinal] += 1

    def use(self) -> SegmentUse:
        return SegmentUse(
            sequence=self.sequence,
            blocks=self.live,
            live_share=self.live_pages / self.size_pages,
            hits=self.hits,
            used_at=self.used_at,
        )


def record_pages(length: int) -> int:
    """Return the number of pages of a record with a payload of `length` bytes, including the page of its header."""
    return 1 + pages_for(length)


def largest_payload_bytes(segment_bytes: int) -> int:
    """Return the length in bytes of the largest payload that fits into a segment of that size."""
    pages = segment_bytes // PAGE_BYTES - FIRST_PAGE - footer_pages(1)
    return (pages - 1) * PAGE_BYTES
