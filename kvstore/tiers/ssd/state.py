"""SSD state: the index, the running writes and the counters of one tier, with the lock that guards them."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from kvstore.errors import NamespaceUnknown, reason
from kvstore.messages import BlockKey
from kvstore.ports import Codec
from kvstore.tiers.ssd.index import RecordLocation, SsdIndex, block_key
from kvstore.tiers.ssd.segments.record_format import Key
from kvstore.tiers.ssd.segments.segment import Segment, SegmentState

GONE_KEYS = 1 << 20
"""Maximum number of lost blocks that wait to be reported. If there are more, the oldest ones are never reported, so
routers keep believing that the tier has these blocks."""

log = logging.getLogger(__name__)


class SsdCounters(Struct):
    """Counters of the tier since it was opened; `kvstore.messages.TierStatus` explains the fields without a comment."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    refused: int = 0
    evicted: int = 0
    rescued: int = 0  # number of blocks that were copied from evicted segments to new segments
    corrupt: int = 0
    failures: int = 0


class SsdState:
    """State of one tier. `lock` guards this object and the state of all segments. The lock is never held during I/O."""

    def __init__(self, codecs: Callable[[bytes], Codec]) -> None:
        self.lock = threading.Condition()
        self.index = SsdIndex()
        self.writing: set[Key] = set()  # blocks that calls are writing now
        # Blocks that were read from an evicted segment, and have not been written to a new one yet.
        self.rescuing: set[Key] = set()
        self.count = SsdCounters()
        self.sequence = 0  # the sequence number that was assigned last, to a record, a segment or a footer
        self._codecs = codecs
        self._gone: deque[Key] = deque(maxlen=GONE_KEYS)

    def codec(self, digest: bytes) -> Codec | None:
        """Return the codec of a namespace; None if the namespace is not open on this node."""
        try:
            return self._codecs(digest)
        except NamespaceUnknown:
            return None

    def take_sequences(self, count: int = 1) -> int:
        """Assign `count` sequence numbers to records, a segment or a footer, and return the first one."""
        with self.lock:
            first = self.sequence + 1
            self.sequence += count
        return first

    def pin(self, segment: Segment) -> None:
        """Keep the segment's file from being reused until `release`."""
        with self.lock:
            segment.readers += 1

    def release(self, segment: Segment, readers: int = 1) -> None:
        """Record that `readers` calls no longer read from the segment. Without readers, a LEAVING segment becomes FREE."""
        with self.lock:
            segment.readers -= readers
            if segment.state is SegmentState.LEAVING and not segment.readers:
                segment.state = SegmentState.FREE
                self.lock.notify_all()

    def drop(self, place: RecordLocation) -> bool:
        """Remove the block whose record lies at `place`; return False if the index no longer has it there."""
        with self.lock:
            key = place.segment.keys[place.ordinal]
            dropped = self.index.drop_record(place)
            if dropped:
                self._gone.append(key)
            return dropped

    def drop_all(self, segment: Segment) -> int:
        """Remove all blocks of a segment; return their number."""
        with self.lock:
            keys = self.index.empty(segment)
            self._gone.extend(keys)
            return len(keys)

    def gone(self) -> list[BlockKey]:
        """Return blocks that were lost since the last call and have not been written again."""
        with self.lock:
            keys = [key for key in dict.fromkeys(self._gone) if key not in self.index]
            self._gone.clear()
            # Blocks that are being rescued stay for a later call, because they may still be written to a new segment.
            self._gone.extend(key for key in keys if key in self.rescuing)
            return [block_key(key) for key in keys if key not in self.rescuing]


class FailureLog:
    """Logs when operations of one kind begin to fail in a folder, and when they work again.

    If two threads use the same object at the same time, a line may be logged twice.
    """

    def __init__(self, what: str, folder: str) -> None:
        self._what = what
        self._folder = folder
        self._lasts = False

    def failed(self, error: Exception | str) -> None:
        if not self._lasts:
            self._lasts = True
            cause = error if isinstance(error, str) else reason(error)
            log.warning("SSD tier: %s", self._what, extra={"folder": self._folder, "error": cause})

    def worked(self) -> None:
        if self._lasts:
            self._lasts = False
            log.info("SSD tier: no longer: %s", self._what, extra={"folder": self._folder})
