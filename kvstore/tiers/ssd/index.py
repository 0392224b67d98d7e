"""SSD index: which blocks the tier holds, and in which record each block lies. A block takes about 200 bytes of memory.

One dictionary serves all namespaces. It maps the 32 bytes of a key to an integer. The high bits are the number of the
segment (`Segment.slot`), and the low bits are the number of the record within the segment (its ordinal). The page and
the length of a record are in arrays of the segment. The index is changed only under the lock of
`kvstore.tiers.ssd.state.SsdState`; look-ups need no lock.
"""

from collections.abc import Container, Iterable, Sequence

from msgspec import Struct

from kvstore.messages import BlockKey
from kvstore.namespace import DIGEST_BYTES
from kvstore.tiers.ssd.segments.record_format import Key
from kvstore.tiers.ssd.segments.segment import Segment, record_pages

ORDINAL_BITS = 20  # number of bits of an ordinal (the number of a record in its segment): a segment of 2 GiB has fewer than 2**20 records
ORDINALS = (1 << ORDINAL_BITS) - 1


class RecordLocation(Struct, frozen=True):
    """The location of a block's record (`segments.record_format`): its segment, and its position in the segment.

    The object is created with positional arguments, because this is faster and one object is made for each block.
    """

    segment: Segment
    ordinal: int
    page: int
    length: int  # length of the payload in bytes


def flat(key: BlockKey) -> Key:
    """Return a key as 32 bytes, as records and the index use it."""
    return key.digest + key.name


def block_key(key: Key) -> BlockKey:
    return BlockKey(key[:DIGEST_BYTES], key[DIGEST_BYTES:])


class SsdIndex:
    """Maps the keys of one tier's blocks to their records."""

    def __init__(self) -> None:
        self._places: dict[Key, int] = {}
        self._segments: list[Segment] = []
        self.live_pages = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def names(self) -> list[Key]:
        return list(self._places)

    def slot(self) -> int:
        """Return the number that the next segment gets in `enroll`."""
        return len(self._segments)

    def enroll(self, segment: Segment) -> None:
        """Add a segment to the index; records of the segment can be added from now on."""
        assert segment.slot == len(self._segments), (segment.slot, len(self._segments))
        self._segments.append(segment)

    def find(self, key: Key) -> RecordLocation | None:
        if (packed := self._places.get(key)) is None:
            return None
        segment, ordinal = self._segments[packed >> ORDINAL_BITS], packed & ORDINALS
        return RecordLocation(segment, ordinal, segment.pages[ordinal], segment.lengths[ordinal])

    def leading(self, keys: Sequence[BlockKey], digests: Container[bytes]) -> int:
        """Return the number of leading keys that are in the index and whose namespace digest is in `digests`.

        A call with 512 keys takes 0.1 ms.
        """
        places = self._places
        for count, key in enumerate(keys):
            if key.digest + key.name not in places or key.digest not in digests:
                return count
        return len(keys)

    def add(self, segment: Segment, key: Key, page: int, length: int) -> None:
        """Add a record that has been written."""
        self._point(segment, segment.add(key, page, length))

    def restore(self, segment: Segment) -> None:
        """Add all records of an opened segment. If another segment has the same block, the index uses this segment's record."""
        for ordinal in range(len(segment.keys)):
            self._point(segment, ordinal)

    def drop(self, key: Key) -> RecordLocation | None:
        """Remove a block; return its location, or None if it was not in the index."""
        if (place := self.find(key)) is None:
            return None
        del self._places[key]
        self._lose(place.segment, place.length)
        return place

    def drop_record(self, place: RecordLocation) -> bool:
        """Remove a block if its record is still at this place; return whether it was there."""
        key = place.segment.keys[place.ordinal]
        if self._places.get(key) != _packed(place.segment, place.ordinal):
            return False
        self.drop(key)
        return True

    def empty(self, segment: Segment) -> list[Key]:
        """Remove all blocks of a segment; return their keys."""
        dropped = []
        for ordinal, key in enumerate(segment.keys):
            if self._places.get(key) == _packed(segment, ordinal):
                del self._places[key]
                self._lose(segment, segment.lengths[ordinal])
                dropped.append(key)
        assert not segment.live, (segment.name, segment.live)
        return dropped

    def live(self, segment: Segment) -> Iterable[RecordLocation]:
        """Yield the locations of a segment's readable blocks."""
        for ordinal, key in enumerate(segment.keys):
            if self._places.get(key) == _packed(segment, ordinal):
                yield RecordLocation(segment, ordinal, segment.pages[ordinal], segment.lengths[ordinal])

    def check(self, segments: Sequence[Segment]) -> None:
        """Assert that the counts of the segments and of the index agree; for tests."""
        assert sum(segment.live for segment in segments) == len(self._places)
        assert sum(segment.live_pages for segment in segments) == self.live_pages
        for segment in segments:
            assert sum(1 for _ in self.live(segment)) == segment.live, segment.name

    def _point(self, segment: Segment, ordinal: int) -> None:
        key = segment.keys[ordinal]
        if key in self._places:
            self.drop(key)
        self._places[key] = _packed(segment, ordinal)
        pages = record_pages(segment.lengths[ordinal])
        segment.live += 1
        segment.live_pages += pages
        self.live_pages += pages

    def _lose(self, segment: Segment, length: int) -> None:
        pages = record_pages(length)
        segment.live -= 1
        segment.live_pages -= pages
        self.live_pages -= pages


def _packed(segment: Segment, ordinal: int) -> int:
    return segment.slot << ORDINAL_BITS | ordinal
