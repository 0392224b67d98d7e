"""SSD volume: appends records to the segments of one directory, and frees space by evicting segments.

Rules:

1. The segments of a directory together stay under its limit (`SsdSettings.share_bytes`). The disk space that the file
   system needs to manage their files is counted too. A new file is made only if it fits; otherwise a whole segment is evicted.
2. When a segment is evicted, all its blocks are removed from the index, under `SsdState.lock`. Its file is reused when no
   call reads from it any more. Blocks that were read often are rescued if the write budget allows it: they are read from
   the file before they leave the index, and written to the next segment.
3. The file system is used only while `SsdState.lock` is not held. One call at a time makes room for new records; other
   calls that need room wait for this call until their deadline.
4. A circuit breaker stops writes to a directory that cannot be written to.
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np
from msgspec import Struct

from kvstore.buffers import ByteArray, crc32c
from kvstore.circuit_breaker import CircuitBreaker
from kvstore.clock import Clock, Nanos, seconds
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.ssd.disk import Disk, DiskFile, aligned
from kvstore.tiers.ssd.disk_threads import BATCH_RECORDS, Scratch
from kvstore.tiers.ssd.index import RecordLocation
from kvstore.tiers.ssd.record_writes import SsdWrite, compose
from kvstore.tiers.ssd.segments.eviction import Score
from kvstore.tiers.ssd.segments.record_format import (
    DISCARDED,
    NONCE_BYTES,
    TRAILER_PAGES,
    SegmentFooter,
    SegmentHead,
    read_record_header,
    segment_head,
    table,
    trailer,
)
from kvstore.tiers.ssd.segments.recovery import RecoveredSegment, UnreadableSegment
from kvstore.tiers.ssd.segments.segment import Segment, SegmentState, record_pages
from kvstore.tiers.ssd.settings import FOLDER_BYTES, SsdSettings, Sync, footprint
from kvstore.tiers.ssd.state import FailureLog, SsdState

RESUME_SHARE = 8
"""After a restart, records are appended to the newest segment if at least 1/RESUME_SHARE of it is free, and if its size
is `SsdSettings.segment_bytes`."""

log = logging.getLogger(__name__)

AdmitRewrite = Callable[[int], bool]
"""A function that returns whether a block of this many bytes may be copied out of an evicted segment
(`SsdSettings.rescue_hits`). If so, it has charged the bytes to the write budget, if the tier has one."""


class RecordRun(Struct, frozen=True):
    """Adjacent places in a segment, in which one call will write `count` records."""

    segment: Segment
    first_page: int
    first_sequence: int
    count: int


class VolumeFull(Exception):
    """No segment has become free by the deadline, or the directory has no segment."""


class Volume:
    """The segments of one directory: appends records to them, and evicts them."""

    def __init__(
        self,
        disk: Disk,
        settings: SsdSettings,
        state: SsdState,
        clock: Clock,
        score: Score,
        admit_rewrite: AdmitRewrite,
    ) -> None:
        self.disk = disk
        self.segments: list[Segment] = []
        self.breaker = CircuitBreaker()  # stops writes to this directory for a pause after a failed one (rule 4)
        self.read_failures = FailureLog("reads fail, blocks are misses", disk.folder)
        self.write_failures = FailureLog("writes fail, blocks are not kept", disk.folder)
        self._growth_failures = FailureLog("no further segment can be made, using the existing ones", disk.folder)
        self._settings = settings
        self._state = state
        self._clock = clock
        self._score = score
        self._admit_rewrite = admit_rewrite
        self._limit_bytes = settings.share_bytes - FOLDER_BYTES - disk.foreign_bytes()
        self._bytes = 0
        self._active: Segment | None = None
        self._rotation = threading.Lock()
        self._scratch = Scratch()  # buffers that only the thread that has locked `_rotation` may use
        self._names = set(disk.segments())

    # The methods below are called when the tier is opened.

    def count_unusable(self, name: str) -> None:
        """Count a file's space as used, although the file cannot be opened and its blocks are lost."""
        self._names.add(name)
        self._bytes += footprint(self._settings.segment_bytes)

    @property
    def can_hold(self) -> int:
        """Number of segments of the configured size that the directory's limit allows."""
        return max(self._limit_bytes, 0) // footprint(self._settings.segment_bytes)

    def restore(self, found: Sequence[tuple[Segment, RecoveredSegment | UnreadableSegment]], now: Nanos) -> None:
        """Add the recovered segments, and make the newest one ACTIVE again if enough of it is free (`RESUME_SHARE`).

        If the segments exceed the directory's limit, segments are removed: the unreadable ones first, then the oldest
        ones.
        """
        for segment, recovered in sorted(found, key=_age):
            self.segments.append(segment)
            self._bytes += footprint(segment.size_bytes)
            if isinstance(recovered, RecoveredSegment):
                segment.begin(recovered.nonce, recovered.sequence, now)
                segment.restore(recovered.keys, recovered.pages, recovered.lengths, recovered.next_page)
                segment.state = SegmentState.SEALED
        for segment in list(self.segments):
            if self._bytes > self._limit_bytes:
                self._remove(segment)
        readable = [segment for segment in self.segments if segment.state is SegmentState.SEALED]
        for segment in readable:
            self._state.index.restore(segment)
        if readable:
            self._resume(readable[-1])

    def _resume(self, newest: Segment) -> None:
        free_pages = newest.size_pages - newest.next_page
        if newest.size_bytes != self._settings.segment_bytes or free_pages * RESUME_SHARE < newest.size_pages:
            return
        try:  # remove the footer, because it would not contain the records that are appended from now on
            newest.file.write([aligned(PAGE_BYTES)], newest.size_bytes - PAGE_BYTES)
        except OSError as error:
            self.write_failures.failed(error)
            return
        newest.state = SegmentState.ACTIVE
        self._active = newest

    # The methods below are for writing.

    def write(self, payloads: Sequence[SsdWrite], scratch: Scratch, deadline: Nanos) -> int:
        """Append records and make them readable. Return how many were written; fewer than all if room or time ran out.

        Args:
            payloads: At most `BATCH_RECORDS`; each fits into a segment.
            scratch: The caller's buffers.
            deadline: Limits the wait for room; a running write is not interrupted.

        Raises:
            OSError: The remaining records could not be written.
        """
        written = 0
        while written < len(payloads):
            rest = payloads[written:]
            try:
                run = self._reserve([record_pages(payload.content.nbytes) for payload in rest], deadline)
            except VolumeFull:
                break
            try:
                self._append(run, rest[: run.count], scratch)
            finally:
                self._finish_write(run.segment)
            written += run.count
        return written

    def overwrite_header(self, place: RecordLocation) -> None:
        """Overwrite the header of a bad block (rule 7 of `record_format`). The caller has pinned the segment.

        Raises:
            OSError: The header has perhaps not been overwritten.
        """
        page = aligned(PAGE_BYTES)
        page[: len(DISCARDED)] = np.frombuffer(DISCARDED, np.uint8)
        place.segment.file.write([page], place.page * PAGE_BYTES)

    def _reserve(self, records: Sequence[int], deadline: Nanos) -> RecordRun:
        while True:
            with self._state.lock:
                if (run := self._take(records)) is not None:
                    return run
            left = deadline - self._clock.now()
            if left <= 0 or not self._rotation.acquire(timeout=seconds(left)):
                raise VolumeFull
            try:
                with self._state.lock:
                    if (run := self._take(records)) is not None:
                        return run  # another call has just made room
                self._rotate(records[0], deadline)
            finally:
                self._rotation.release()

    def _take(self, records: Sequence[int]) -> RecordRun | None:
        if (segment := self._active) is None:
            return None
        first_page, count = segment.take(records)
        if not count:
            return None
        segment.writers += 1
        return RecordRun(segment, first_page, self._state.take_sequences(count), count)

    def _append(self, run: RecordRun, payloads: Sequence[SsdWrite], scratch: Scratch) -> None:
        segment = run.segment
        pieces = compose(payloads, run.first_page, run.first_sequence, segment.nonce, scratch)
        segment.file.write(pieces, run.first_page * PAGE_BYTES)
        if self._settings.sync is Sync.WRITE:
            segment.file.sync()
        with self._state.lock:
            page = run.first_page
            for payload in payloads:
                length = payload.content.nbytes
                self._state.index.add(segment, payload.key, page, length)
                page += record_pages(length)
            self._state.count.bytes_written += (page - run.first_page) * PAGE_BYTES
            segment.used_at = self._clock.now()

    def _finish_write(self, segment: Segment) -> None:
        """Record that a writer has finished; after the last writer of a full segment, write the segment's footer."""
        with self._state.lock:
            segment.writers -= 1
            is_last = segment.state is SegmentState.FULL and not segment.writers
        if is_last:
            self._seal(segment)

    # The methods below are for segments.

    def _rotate(self, needed_pages: int, deadline: Nanos) -> None:
        """Replace the active segment by a segment with room for a record of `needed_pages` pages.

        Raises:
            VolumeFull: No segment became free by the deadline.
            OSError: The new segment could not be made or written.
        """
        self._stop_appending()
        rescued: list[SsdWrite] = []
        try:
            segment = self._begin(rescued, needed_pages, deadline)
        finally:
            with self._state.lock:
                self._state.rescuing.difference_update(payload.key for payload in rescued)
        with self._state.lock:
            self._active = segment

    def _begin(self, rescued: list[SsdWrite], needed_pages: int, deadline: Nanos) -> Segment:
        """Return a segment that is ready for appending, and write the rescued blocks (rule 2) to it.

        Raise the same errors as `_rotate`.
        """
        segment = self._free_segment(rescued, needed_pages, deadline)
        segment.begin(secrets.token_bytes(NONCE_BYTES), self._state.take_sequences(), self._clock.now())
        try:
            self._write_head(segment)
            self._write_rescued(segment, rescued)
        except OSError:
            with self._state.lock:
                self._state.drop_all(segment)
                segment.state = SegmentState.LEAVING
                self._state.release(segment, readers=0)
            raise
        return segment

    def _stop_appending(self) -> None:
        """Make the active segment FULL, so that nothing is appended to it, and seal it if no call writes to it."""
        with self._state.lock:
            segment, self._active = self._active, None
            if segment is None:
                return
            segment.state = SegmentState.FULL
            is_idle = not segment.writers
        if is_idle:
            self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """Write the footer of a segment, and make the segment SEALED.

        If the footer cannot be written, the next opening of the tier takes longer; there is no other harm.
        """
        try:
            self._write_footer(segment)
            if self._settings.sync is not Sync.NEVER:
                segment.file.sync()
        except OSError as error:
            self.write_failures.failed(error)
        with self._state.lock:
            segment.state = SegmentState.SEALED
            self._state.lock.notify_all()

    def _free_segment(self, rescued: list[SsdWrite], needed_pages: int, deadline: Nanos) -> Segment:
        """Return a free segment: new, unused, or evicted. Add the blocks that are rescued (rule 2) to `rescued`."""
        spare_bytes = self._settings.segment_bytes * 15 // 16 - needed_pages * PAGE_BYTES
        share_bytes = int(min(self._settings.rescue_share * self._settings.segment_bytes, spare_bytes))
        while True:
            if (segment := self._grow()) is not None:
                return segment
            with self._state.lock:
                free = next((segment for segment in self.segments if segment.state is SegmentState.FREE), None)
                victim = None if free is not None else self._choose()
                if victim is not None:
                    victim.state = SegmentState.LEAVING
                    victim.readers += 1  # this call counts as a reader, because it reads the blocks that are rescued
                hot = self._hot(victim) if victim is not None and not rescued else []
            if free is not None:
                if free.size_bytes == self._settings.segment_bytes:
                    return free
                self._remove(free)  # frees its space: it has another size than `segment_bytes`, so it is not reused
            elif victim is not None:
                try:
                    rescued += self._read_rescued(victim, hot, share_bytes, deadline)
                    with self._state.lock:
                        self._state.rescuing.update(payload.key for payload in rescued)
                finally:
                    self._drop(victim)
            else:
                self._wait_for_room(deadline)

    def _wait_for_room(self, deadline: Nanos) -> None:
        with self._state.lock:
            left = deadline - self._clock.now()
            if left <= 0 or not self.segments:
                raise VolumeFull
            self._state.lock.wait_for(
                lambda: any(segment.state in (SegmentState.FREE, SegmentState.SEALED) for segment in self.segments),
                seconds(left),
            )

    def _grow(self) -> Segment | None:
        """Make one more segment with its file; return None if the directory's limit forbids it, or if making it failed.

        Raises:
            OSError: Making the file failed, and the directory has no other segment.
        """
        size_bytes = self._settings.segment_bytes
        if self._bytes + footprint(size_bytes) > self._limit_bytes:
            return None
        try:
            name, file = self._create(size_bytes)
        except OSError as error:
            self._growth_failures.failed(error)
            if not self.segments:
                raise
            return None
        self._growth_failures.worked()
        self._names.add(name)
        self._bytes += footprint(size_bytes)
        with self._state.lock:
            segment = Segment(self._state.index.slot(), self.disk.folder, name, file)
            self._state.index.enroll(segment)
            self.segments.append(segment)
        return segment

    def _create(self, size_bytes: int) -> tuple[str, DiskFile]:
        """Create a segment's file under the first name that is free; return the name and the file.

        If another program has made an entry with such a name, for example a folder or a link, the next name is tried.

        Raises:
            OSError: The file could not be made.
        """
        while True:
            name = next(name for name in map("segment-{:06}".format, itertools.count()) if name not in self._names)
            try:
                return name, self.disk.create(name, size_bytes)
            except FileExistsError:
                log.warning(
                    "SSD tier: name of a segment taken by a foreign entry, using another name",
                    extra={"folder": self.disk.folder, "entry": name},
                )
                self._names.add(name)

    def _choose(self) -> Segment | None:
        """Choose the SEALED segment to evict; return None if there is none.

        Segments without readers come first, because their files are free at once.
        """
        now = self._clock.now()
        sealed = [segment for segment in self.segments if segment.state is SegmentState.SEALED]
        return min(
            sealed,
            key=lambda segment: (segment.readers > 0, self._score(segment.use(), now), segment.sequence),
            default=None,
        )

    def _drop(self, victim: Segment) -> None:
        with self._state.lock:
            self._state.count.evicted += self._state.drop_all(victim)
            self._state.release(victim)

    def _remove(self, segment: Segment) -> None:
        """Delete the file of an unused segment."""
        segment.file.close()
        try:
            self.disk.remove(segment.name)
        except OSError as error:
            self.write_failures.failed(error)
            return
        finally:
            with self._state.lock:
                self.segments = [other for other in self.segments if other is not segment]
        self._names.discard(segment.name)
        self._bytes -= footprint(segment.size_bytes)

    # The methods below are for blocks that are rescued from an evicted segment.

    def _hot(self, victim: Segment) -> list[RecordLocation]:
        """Return the blocks with at least `rescue_hits` reads; blocks that were read more often come first."""
        if not self._settings.rescue_hits:
            return []
        hits = victim.record_hits
        hot = [p for p in self._state.index.live(victim) if hits[p.ordinal] >= self._settings.rescue_hits]
        return sorted(hot, key=lambda place: (-hits[place.ordinal], place.ordinal))

    def _read_rescued(
        self, victim: Segment, hot: Sequence[RecordLocation], share_bytes: int, deadline: Nanos
    ) -> list[SsdWrite]:
        """Read the blocks that will be rescued, as many as `rescue_share`, the write budget and the deadline allow.

        Damaged blocks are skipped.
        """
        left_bytes = share_bytes
        payloads = []
        for place in hot:
            size_bytes = record_pages(place.length) * PAGE_BYTES
            if size_bytes > left_bytes or self._clock.now() >= deadline or not self._admit_rewrite(size_bytes):
                break
            left_bytes -= size_bytes
            pages = aligned(size_bytes)
            try:
                count = victim.file.read([pages], place.page * PAGE_BYTES)
            except OSError as error:
                self.read_failures.failed(error)
                break
            record = read_record_header(pages, victim.nonce, place.page) if count == size_bytes else None
            content = pages[PAGE_BYTES : PAGE_BYTES + place.length]
            key = victim.keys[place.ordinal]
            is_it = record is not None and record.key == key and record.length == place.length
            if record is not None and is_it and crc32c([content]) == record.crc32c:
                payloads.append(SsdWrite(key, content, record.codec_id, record.crc32c))
        return payloads

    def _write_rescued(self, segment: Segment, rescued: Sequence[SsdWrite]) -> None:
        for first in range(0, len(rescued), BATCH_RECORDS):
            batch = rescued[first : first + BATCH_RECORDS]
            with self._state.lock:
                records = [record_pages(payload.content.nbytes) for payload in batch]
                first_page, count = segment.take(records)
                run = RecordRun(segment, first_page, self._state.take_sequences(count), count)
            self._append(run, batch[:count], self._scratch)
            with self._state.lock:
                self._state.count.rescued += count

    # The methods below are for the head and the footer of a segment.

    def _write_head(self, segment: Segment) -> None:
        head = SegmentHead(nonce=segment.nonce, sequence=segment.sequence, file_bytes=segment.size_bytes)
        segment.file.write([_page(segment_head(head))], 0)

    def _write_footer(self, segment: Segment) -> None:
        rows = table(segment.keys, segment.pages, segment.lengths)
        footer = SegmentFooter(
            nonce=segment.nonce,
            sequence=segment.sequence,
            last_sequence=self._state.take_sequences(),
            entries=len(segment.keys),
            next_page=segment.next_page,
            table_pages=len(rows) // PAGE_BYTES,
            table_crc32c=google_crc32c.value(rows),
        )
        pages = aligned(len(rows) + TRAILER_PAGES * PAGE_BYTES)
        pages[: len(rows)] = np.frombuffer(rows, np.uint8)
        pages[len(rows) :] = _page(trailer(footer))
        segment.file.write([pages], segment.size_bytes - pages.nbytes)

    def close(self) -> None:
        """Write the footer of the active segment, and close all files. No call may be running."""
        self._stop_appending()
        for segment in self.segments:
            segment.file.close()
        self.disk.close()


def _page(structure: bytes) -> ByteArray:
    page = aligned(PAGE_BYTES)
    page[: len(structure)] = np.frombuffer(structure, np.uint8)
    return page


def _age(found: tuple[Segment, RecoveredSegment | UnreadableSegment]) -> int:
    recovered = found[1]
    return recovered.sequence if isinstance(recovered, RecoveredSegment) else -1
