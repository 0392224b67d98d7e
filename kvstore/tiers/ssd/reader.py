"""SSD reader: reads each run of adjacent records in one operation, and several runs at the same time."""

import logging
from collections.abc import Sequence
from functools import partial

from kvstore.buffers import ByteArray
from kvstore.clock import Clock, Nanos
from kvstore.errors import TierFailed, reason
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.ssd.disk_threads import DiskThreads, Job, Scratch, batches
from kvstore.tiers.ssd.index import RecordLocation, flat
from kvstore.tiers.ssd.record_reads import RecordFinding, RecordRead, RecordReadResult, read
from kvstore.tiers.ssd.segments.segment import record_pages
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.state import SsdState
from kvstore.tiers.ssd.volume import Volume

log = logging.getLogger(__name__)


class SsdReader:
    """Reads blocks from all volumes, and drops bad blocks."""

    def __init__(
        self, settings: SsdSettings, state: SsdState, volumes: Sequence[Volume], disk_threads: DiskThreads, clock: Clock
    ) -> None:
        self._state = state
        self._volumes = {volume.disk.folder: volume for volume in volumes}
        self._disk_threads = disk_threads
        self._clock = clock
        self._threads = settings.threads
        self._batch_bytes = settings.batch_bytes

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        """Read blocks into the given buffers by the deadline (see `kvstore.ports.BackingTier.get`)."""
        call = _ReadCall()
        found = self._pin(keys, into)
        try:
            found.sort(key=lambda read: (read.place.segment.slot, read.place.page))
            jobs: list[Job] = [
                partial(self._read, run, deadline, call)
                for batch in batches([each.place.length for each in found], self._batch_bytes, self._threads)
                for run in _runs(found[batch])
            ]
            self._disk_threads.run(jobs, deadline)
            for result in call.results:
                self._judge(result)
        finally:
            for each in found:
                self._state.release(each.place.segment)
        answers = self._count(call, len(keys), is_late=call.late or call.done < len(jobs))
        if call.errors and not call.results:
            raise TierFailed(f"nothing can be read: {reason(call.errors[0])}") from call.errors[0]
        return answers

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose bytes were found wrong (see `kvstore.ports.BackingTier.discard`)."""
        for key in keys:
            with self._state.lock:
                place = self._state.index.find(flat(key))
                if place is None:
                    continue
                self._state.pin(place.segment)
            try:
                self._condemn(place)
            finally:
                self._state.release(place.segment)

    def _pin(self, keys: Sequence[BlockKey], into: Sequence[ByteArray]) -> list[RecordRead]:
        """Find the blocks that are stored and can be decoded, and pin their segments."""
        codecs = {digest: self._state.codec(digest) for digest in {key.digest for key in keys}}
        found = []
        with self._state.lock:
            for index, key in enumerate(keys):
                place = self._state.index.find(flat(key))
                codec = codecs[key.digest]
                if place is not None and codec is not None:
                    self._state.pin(place.segment)
                    found.append(RecordRead(index, key, place, codec, into[index]))
        return found

    def _read(self, run: Sequence[RecordRead], deadline: Nanos, call: "_ReadCall", scratch: Scratch) -> None:
        """Read adjacent records with one disk operation."""
        segment = run[0].place.segment
        volume = self._volumes[segment.folder]
        results: list[RecordReadResult] = []
        error: OSError | None = None
        try:
            results = read(segment.file, segment.nonce, run, scratch)
        except OSError as failure:
            error = failure
            volume.read_failures.failed(failure)
            for each in run:
                # All blocks of the run are dropped. If they stayed, later reads of them would probably fail too, and
                # would take as long.
                self._state.drop(each.place)
        else:
            volume.read_failures.worked()
        now = self._clock.now()
        with self._state.lock:
            call.done += 1
            call.late |= now > deadline
            call.results += (
                results if now <= deadline else [each for each in results if each.finding is not RecordFinding.GOOD]
            )
            call.errors += [error] if error is not None else []
            self._state.count.bytes_read += sum(record_pages(each.wanted.place.length) * PAGE_BYTES for each in results)

    def _judge(self, result: RecordReadResult) -> None:
        place = result.wanted.place
        match result.finding:
            case RecordFinding.GOOD:
                with self._state.lock:
                    place.segment.hit(place.ordinal, self._clock.now())
            case RecordFinding.DISCARDED:
                self._state.drop(place)
            case RecordFinding.BAD:
                self._report(place)
                self._condemn(place)
            case RecordFinding.OTHER_CODEC:
                self._condemn(place)

    def _report(self, place: RecordLocation) -> None:
        """Log a bad block, but only the first one of each segment. `SsdCounters.corrupt` counts all bad blocks."""
        segment = place.segment
        with self._state.lock:
            is_first, segment.is_damaged = not segment.is_damaged, True
        if is_first:
            log.warning(
                "SSD tier: blocks corrupt or undecodable, they are misses",
                extra={"folder": segment.folder, "file": segment.name, "offset": place.page * PAGE_BYTES},
            )

    def _condemn(self, place: RecordLocation) -> None:
        """Remove a block, and overwrite its header (`kvstore.tiers.ssd.segments.record_format`, rule 7).

        The caller has pinned the segment.
        """
        if not self._state.drop(place):
            return
        volume = self._volumes[place.segment.folder]
        try:
            volume.overwrite_header(place)
        except OSError as error:
            volume.write_failures.failed(error)

    def _count(self, call: "_ReadCall", asked: int, *, is_late: bool) -> list[FetchResult]:
        answers = [GONE] * asked
        for result in call.results:
            answers[result.wanted.index] = result.fetched
        hits = sum(answer.outcome is BlockOutcome.MOVED for answer in answers)
        with self._state.lock:
            count = self._state.count
            count.hits += hits
            count.misses += asked - hits
            count.corrupt += sum(answer.outcome is BlockOutcome.CORRUPT for answer in answers)
            count.failures += len(call.errors) + is_late
        return answers


class _ReadCall:
    """Collects the results of the operations of one `get` call, which run in several threads."""

    def __init__(self) -> None:
        self.done = 0  # number of finished operations
        self.late = False
        self.results: list[RecordReadResult] = []
        self.errors: list[OSError] = []


def _runs(found: Sequence[RecordRead]) -> list[Sequence[RecordRead]]:
    """Divide sorted records into runs. The records of a run are adjacent in one segment."""
    runs, first = [], 0
    for index in range(1, len(found) + 1):
        if index < len(found):
            before, place = found[index - 1].place, found[index].place
            if place.segment is before.segment and place.page == before.page + record_pages(before.length):
                continue
        runs.append(found[first:index])
        first = index
    return runs if found else []
