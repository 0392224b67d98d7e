"""SSD writer: divides new blocks into batches, which are encoded and written in parallel.

`kvstore.tiers.ssd.tier` says what remains of a write after a crash or a power cut (rules 1 and 6).
"""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from kvstore.buffers import ByteArray
from kvstore.clock import Clock, Nanos
from kvstore.codecs.verification import encoded
from kvstore.errors import TierFailed, reason
from kvstore.messages import BlockKey
from kvstore.ports import Codec
from kvstore.tiers.ssd.disk_threads import DiskThreads, Job, Scratch, batches
from kvstore.tiers.ssd.index import flat
from kvstore.tiers.ssd.record_writes import SsdWrite
from kvstore.tiers.ssd.segments.record_format import Key
from kvstore.tiers.ssd.segments.segment import largest_payload_bytes
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.state import FailureLog, SsdState
from kvstore.tiers.ssd.volume import Volume


class SsdWriter:
    """Writes new blocks to the volumes. The batches go to the volumes in turn."""

    def __init__(
        self, settings: SsdSettings, state: SsdState, volumes: Sequence[Volume], disk_threads: DiskThreads, clock: Clock
    ) -> None:
        self._state = state
        self._volumes = volumes
        self._disk_threads = disk_threads
        self._clock = clock
        self._threads = settings.threads
        self._batch_bytes = settings.batch_bytes
        self._largest_bytes = largest_payload_bytes(settings.segment_bytes)
        self._too_large = FailureLog("blocks larger than a segment, raise segment_bytes", settings.directories[0])
        self._turn = 0

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        """Write blocks by the deadline, and return which of them the tier has now (see `kvstore.ports.BackingTier.put`)."""
        names = [flat(key) for key in keys]
        call = _WriteCall()
        new = self._begin(names)
        try:
            todo = self._encodable([(keys[i], blocks[i], checksums[i]) for i in new])
            jobs: list[Job] = [
                partial(self._write, todo[batch], deadline, call)
                for batch in batches([item.block.nbytes for item in todo], self._batch_bytes, self._threads)
            ]
            self._disk_threads.run(jobs, deadline)
            is_late = call.done < len(jobs) or bool(call.late)
        finally:
            with self._state.lock:
                self._state.writing.difference_update(names[i] for i in new)
        with self._state.lock:
            self._state.count.failures += len(call.errors) + is_late
            there = [name in self._state.index and name not in call.late for name in names]
        if call.errors and not any(there):
            raise TierFailed(f"nothing can be written: {reason(call.errors[0])}") from call.errors[0]
        return there

    def _begin(self, names: Sequence[Key]) -> list[int]:
        """Return the indices of blocks that are neither stored nor being written, and mark them as being written."""
        new = []
        with self._state.lock:
            for index, name in enumerate(names):
                if name not in self._state.index and name not in self._state.writing:
                    self._state.writing.add(name)
                    new.append(index)
        return new

    def _encodable(self, blocks: Sequence[tuple[BlockKey, ByteArray, int]]) -> list["_Item"]:
        items = []
        for key, block, checksum in blocks:
            if (codec := self._state.codec(key.digest)) is not None:
                items.append(_Item(key, block, codec, checksum))
        self._refuse(len(blocks) - len(items))
        return items

    def _write(self, items: Sequence["_Item"], deadline: Nanos, call: "_WriteCall", scratch: Scratch) -> None:
        """Encode one batch, and append it to one of the volumes."""
        payloads = [payload for item in items if (payload := self._payload(item)) is not None]
        with self._state.lock:
            self._state.count.corrupt += len(items) - len(payloads)
        fitting = [p for p in payloads if 0 < p.content.nbytes <= self._largest_bytes]
        if len(fitting) < len(payloads):
            self._too_large.failed(f"{max(p.content.nbytes for p in payloads)} bytes")
            self._refuse(len(payloads) - len(fitting))
        began = self._clock.now()
        volume = self._next_volume(began)
        if volume is None:
            call.errors.append(OSError("no directory can be written to now"))
        elif fitting:
            try:
                volume.write(fitting, scratch, deadline)
            except OSError as error:
                volume.breaker.failed(began, self._clock.now())
                volume.write_failures.failed(error)
                call.errors.append(error)
            else:
                volume.breaker.succeeded()
                volume.write_failures.worked()
        now = self._clock.now()
        with self._state.lock:
            call.done += 1
            if now > deadline:
                call.late.update(payload.key for payload in fitting)

    def _payload(self, item: "_Item") -> SsdWrite | None:
        """Encode a block; return None if its checksum does not match."""
        found = encoded(item.codec, item.key, item.block, item.checksum)
        return SsdWrite(flat(item.key), found[0], item.codec.codec_id, found[1]) if found is not None else None

    def _next_volume(self, now: Nanos) -> Volume | None:
        for _ in self._volumes:
            self._turn += 1
            volume = self._volumes[self._turn % len(self._volumes)]
            if volume.breaker.allows(now):
                return volume
        return None

    def _refuse(self, count: int) -> None:
        with self._state.lock:
            self._state.count.refused += count


class _Item(Struct, frozen=True):
    key: BlockKey
    block: ByteArray
    codec: Codec
    checksum: int


class _WriteCall:
    """Collects the results of the batches of one `put` call, which are written in several threads."""

    def __init__(self) -> None:
        self.done = 0  # number of finished batches
        self.late: set[Key] = set()  # blocks of batches that ended after the deadline
        self.errors: list[OSError] = []
