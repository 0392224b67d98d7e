"""What the parts of one tier share, and the lock that guards it: the index, who writes what, and the counters."""

import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from kvstore.errors import NamespaceUnknown
from kvstore.messages import BlockKey
from kvstore.ports import Codec
from kvstore.tiers.ssd.index import RecordLocation, SsdIndex, block_key
from kvstore.tiers.ssd.segments.record_format import Key
from kvstore.tiers.ssd.segments.segment import Segment, SegmentState

GONE_KEYS = 1 << 20
"""Names that wait for somebody to ask what went; older ones are forgotten, which costs a router a wrong guess."""


class SsdCounters(Struct):
    """Since the tier was opened; see `kvstore.messages.TierStatus`."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    refused: int = 0
    evicted: int = 0
    rescued: int = 0
    corrupt: int = 0
    failures: int = 0


class SsdState:
    """State of a tier. `lock` guards all of it, and all that is known of segments; it is not held over I/O."""

    def __init__(self, codecs: Callable[[bytes], Codec]) -> None:
        self.lock = threading.Condition()
        self.index = SsdIndex()
        self.writing: set[Key] = set()  # by calls that are under way
        self.rescuing: set[Key] = set()  # of blocks between the segment that went and the one that takes them
        self.count = SsdCounters()
        self.sequence = 0  # the last one given out
        self._codecs = codecs
        self._gone: deque[Key] = deque(maxlen=GONE_KEYS)

    def codec(self, digest: bytes) -> Codec | None:
        """Of a namespace; None when it is not open here, so that its blocks cannot be read."""
        try:
            return self._codecs(digest)
        except NamespaceUnknown:
            return None

    def take_sequences(self, count: int = 1) -> int:
        """The first of so many numbers that nobody else gets."""
        with self.lock:
            first = self.sequence + 1
            self.sequence += count
        return first

    def pin(self, segment: Segment) -> None:
        """The segment's file must not be begun anew until `release`."""
        with self.lock:
            segment.readers += 1

    def release(self, segment: Segment, readers: int = 1) -> None:
        """So many readers are through with the segment."""
        with self.lock:
            segment.readers -= readers
            if segment.state is SegmentState.LEAVING and not segment.readers:
                segment.state = SegmentState.FREE
                self.lock.notify_all()

    def drop(self, place: RecordLocation) -> bool:
        """The block at a place is not there any more; False when it was not."""
        with self.lock:
            key = place.segment.keys[place.ordinal]
            dropped = self.index.drop_record(place)
            if dropped:
                self._gone.append(key)
            return dropped

    def drop_all(self, segment: Segment) -> int:
        """The same of all blocks of a segment; returns how many there were."""
        with self.lock:
            keys = self.index.empty(segment)
            self._gone.extend(keys)
            return len(keys)

    def gone(self) -> list[BlockKey]:
        """Blocks that went since this was last asked, and have not come back."""
        with self.lock:
            keys = [key for key in dict.fromkeys(self._gone) if key not in self.index]
            self._gone.clear()
            self._gone.extend(key for key in keys if key in self.rescuing)  # nobody would say that they came back
            return [block_key(key) for key in keys if key not in self.rescuing]
