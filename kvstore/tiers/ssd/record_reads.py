"""Record reads: read records from a segment, directly into the callers' memory where possible, and verify them.

The finding about a record is only a result here. `kvstore.tiers.ssd.reader` decides what happens to a damaged block.
"""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray, crc32c
from kvstore.codecs.plain import PlainCodec
from kvstore.codecs.verification import decoded
from kvstore.errors import UndecodableBlock
from kvstore.messages import CORRUPT, GONE, BlockKey, BlockOutcome, FetchResult
from kvstore.pool.extents import PAGE_BYTES, pages_for
from kvstore.ports import Codec
from kvstore.tiers.ssd.disk import DiskFile, is_aligned
from kvstore.tiers.ssd.disk_threads import Scratch
from kvstore.tiers.ssd.index import RecordLocation, flat
from kvstore.tiers.ssd.segments.record_format import is_discarded, read_record_header
from kvstore.tiers.ssd.segments.segment import record_pages


class RecordRead(Struct, frozen=True):
    """One block to read from a segment, and the buffer for it.

    The object is created with positional arguments, because this is faster and one object is made for each block.
    """

    index: int  # index of the block among the keys of the call `BackingTier.get`
    key: BlockKey
    place: RecordLocation
    codec: Codec
    into: ByteArray


class RecordFinding(Enum):
    """State of a record that was read."""

    GOOD = auto()
    BAD = auto()  # the record is damaged or incomplete, belongs to another block, or cannot be decoded
    DISCARDED = auto()  # the header was overwritten, because the block was found bad earlier
    OTHER_CODEC = auto()  # the header is intact, but the block was written with another codec, under other settings


class RecordReadResult(Struct, frozen=True):
    """Result of one `RecordRead`."""

    wanted: RecordRead
    finding: RecordFinding
    fetched: FetchResult


def read(file: DiskFile, nonce: bytes, run: Sequence[RecordRead], scratch: Scratch) -> list[RecordReadResult]:
    """Read adjacent records of a segment with one operation, and return one result for each record.

    `run` has at most `disk_threads.BATCH_RECORDS` records.

    Raises:
        OSError: The operation failed, so no record was read.
    """
    copies = scratch.payloads(sum(_copied_bytes(wanted) for wanted in run))
    pending: list[_PendingRecord] = []
    pieces: list[ByteArray] = []
    for index, wanted in enumerate(run):
        copied = _copied_bytes(wanted)
        record = _PendingRecord(wanted, scratch.headers[index], copies[:copied], scratch.tails[index])
        copies = copies[copied:]
        pending.append(record)
        pieces += record.pieces()
    first_page = run[0].place.page
    pages_read = file.read(pieces, first_page * PAGE_BYTES) // PAGE_BYTES
    results = []
    for record in pending:
        place = record.wanted.place
        is_whole = place.page - first_page + record_pages(place.length) <= pages_read
        finding, fetched = record.verify(nonce) if is_whole else (RecordFinding.BAD, CORRUPT)
        results.append(RecordReadResult(record.wanted, finding, fetched))
    return results


class _PendingRecord(Struct, frozen=True):
    """The buffers that receive one record.

    A plain payload is read directly into the destination (`RecordRead.into`), if the destination is aligned. All other
    bytes are read into buffers of the operation (`Scratch`).
    """

    wanted: RecordRead
    header: ByteArray  # one page, for the header
    copy: ByteArray  # pages for the whole payload; empty if the payload goes directly to the destination
    tail: ByteArray  # one page, for the last bytes of a payload that goes directly to the destination

    def pieces(self) -> list[ByteArray]:
        if self.copy.nbytes:
            return [self.header, self.copy]
        pieces, whole = [self.header], self._whole
        if whole:
            pieces.append(self.wanted.into[:whole])
        if whole < self.wanted.place.length:
            pieces.append(self.tail)
        return pieces

    def verify(self, nonce: bytes) -> tuple[RecordFinding, FetchResult]:
        """Verify the record, and put its block into the destination. The result is GOOD only if all bytes are right."""
        wanted = self.wanted
        length = wanted.place.length
        record = read_record_header(self.header, nonce, wanted.place.page)
        if record is None:
            return (RecordFinding.DISCARDED, GONE) if is_discarded(self.header) else (RecordFinding.BAD, CORRUPT)
        if record.key != flat(wanted.key) or record.length != length:
            return RecordFinding.BAD, CORRUPT
        if record.codec_id != wanted.codec.codec_id:
            return RecordFinding.OTHER_CODEC, GONE
        if not self.copy.nbytes:
            np.copyto(wanted.into[self._whole :], self.tail[: length - self._whole])
            if crc32c([wanted.into]) != record.crc32c:
                return RecordFinding.BAD, CORRUPT
            return RecordFinding.GOOD, FetchResult(BlockOutcome.MOVED, record.crc32c)
        content = self.copy[:length]
        if crc32c([content]) != record.crc32c:
            return RecordFinding.BAD, CORRUPT
        try:
            return RecordFinding.GOOD, FetchResult(
                BlockOutcome.MOVED, decoded(wanted.codec, wanted.key, content, wanted.into)
            )
        except UndecodableBlock:
            return RecordFinding.BAD, CORRUPT

    @property
    def _whole(self) -> int:
        """Number of bytes of the payload that fill whole pages."""
        return self.wanted.place.length - self.wanted.place.length % PAGE_BYTES


def _is_plain(wanted: RecordRead) -> bool:
    return wanted.codec.codec_id == PlainCodec.codec_id


def _copied_bytes(wanted: RecordRead) -> int:
    """Return how many bytes of a payload have to go through the buffers of `Scratch`, rounded up to whole pages."""
    length = wanted.place.length
    if _is_plain(wanted) and wanted.into.nbytes == length and is_aligned(wanted.into):
        return 0
    return pages_for(length) * PAGE_BYTES
