"""Records on their way from a segment: read straight into the callers' memory where they can be, and verified."""

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
    """One block that is to be read. Positional: one is made for each."""

    index: int  # in the call
    key: BlockKey
    place: RecordLocation
    codec: Codec
    into: ByteArray


class RecordFinding(Enum):
    """What a record turned out to be."""

    GOOD = auto()
    BAD = auto()  # damaged, cut short, or another block's
    DISCARDED = auto()
    OTHER_CODEC = auto()  # written under other settings


class RecordReadResult(Struct, frozen=True):
    """What became of one wanted block."""

    wanted: RecordRead
    finding: RecordFinding
    fetched: FetchResult


def read(file: DiskFile, nonce: bytes, run: Sequence[RecordRead], scratch: Scratch) -> list[RecordReadResult]:
    """Read records that follow each other in a segment, at most `BATCH_RECORDS` of them, with one operation.

    Raises:
        OSError: None of them could be read.
    """
    copies = scratch.payloads(sum(_copied_bytes(wanted) for wanted in run))
    landings: list[_PendingRecord] = []
    pieces: list[ByteArray] = []
    for index, wanted in enumerate(run):
        copied = _copied_bytes(wanted)
        landing = _PendingRecord(wanted, scratch.headers[index], copies[:copied], scratch.tails[index])
        copies = copies[copied:]
        landings.append(landing)
        pieces += landing.pieces()
    first_page = run[0].place.page
    there = file.read(pieces, first_page * PAGE_BYTES) // PAGE_BYTES
    landed = []
    for landing in landings:
        place = landing.wanted.place
        is_whole = place.page - first_page + record_pages(place.length) <= there
        finding, fetched = landing.settle(nonce) if is_whole else (RecordFinding.BAD, CORRUPT)
        landed.append(RecordReadResult(landing.wanted, finding, fetched))
    return landed


class _PendingRecord(Struct, frozen=True):
    """Where one record's pages go: the payload into the destination as far as it can, the rest into memory of ours."""

    wanted: RecordRead
    header: ByteArray  # a page
    copy: ByteArray  # whole pages for all of the payload, or empty: it goes directly
    tail: ByteArray  # a page for the end of a direct payload

    def pieces(self) -> list[ByteArray]:
        if self.copy.nbytes:
            return [self.header, self.copy]
        pieces, whole = [self.header], self._whole
        if whole:
            pieces.append(self.wanted.into[:whole])
        if whole < self.wanted.place.length:
            pieces.append(self.tail)
        return pieces

    def settle(self, nonce: bytes) -> tuple[RecordFinding, FetchResult]:
        """Verify what was read, and bring it where it is wanted."""
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
        """Bytes of the payload that fill pages."""
        return self.wanted.place.length - self.wanted.place.length % PAGE_BYTES


def _is_plain(wanted: RecordRead) -> bool:
    return wanted.codec.codec_id == PlainCodec.codec_id


def _copied_bytes(wanted: RecordRead) -> int:
    """What of a payload has to go through memory of ours, in whole pages."""
    length = wanted.place.length
    if _is_plain(wanted) and wanted.into.nbytes == length and is_aligned(wanted.into):
        return 0
    return pages_for(length) * PAGE_BYTES
