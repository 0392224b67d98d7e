"""The index of the SSD tier: which record of a block counts, and how much memory a block takes."""

import random
import tracemalloc

from kvstore.clock import Nanos
from kvstore.tiers.ssd.index import SsdIndex
from kvstore.tiers.ssd.segments.segment import Segment


class NoFile:
    """Replaces the file of a segment in tests that neither read nor write it."""

    size_bytes = 128 << 20

    def read(self, into, offset):
        raise NotImplementedError

    def write(self, parts, offset):
        raise NotImplementedError

    def sync(self):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def a_segment(index: SsdIndex) -> Segment:
    segment = Segment(index.slot(), "/kv", f"segment-{index.slot():06}", NoFile())
    index.enroll(segment)
    segment.begin(b"n" * 8, index.slot(), Nanos(0))
    return segment


def a_key(number: int) -> bytes:
    return b"namespace-digest" + number.to_bytes(16, "big")


def test_later_record_of_a_block_replaces_the_first():
    index = SsdIndex()
    first, second = a_segment(index), a_segment(index)
    index.add(first, a_key(1), page=1, length=8192)
    index.add(second, a_key(1), page=5, length=8192)

    place = index.find(a_key(1))

    assert (place.segment, place.page) == (second, 5)
    assert (first.live, second.live, len(index)) == (0, 1, 1)
    assert index.empty(first) == []
    assert a_key(1) in index
    index.check([first, second])


def test_outdated_location_drops_nothing():
    index = SsdIndex()
    segment = a_segment(index)
    index.add(segment, a_key(1), page=1, length=8192)
    old = index.find(a_key(1))
    index.drop(a_key(1))
    index.add(segment, a_key(1), page=9, length=8192)

    assert not index.drop_record(old)
    assert index.drop_record(index.find(a_key(1)))
    assert len(index) == index.live_pages == segment.live_pages == 0


def test_index_agrees_with_a_dictionary():
    chance = random.Random(3)
    index = SsdIndex()
    segments = [a_segment(index) for _ in range(4)]
    model: dict[bytes, tuple[Segment, int]] = {}
    page = 0
    for _ in range(3000):
        key, segment = a_key(chance.randrange(50)), chance.choice(segments)
        match chance.randrange(5):
            case 0 | 1 | 2:
                page += 1
                index.add(segment, key, page, length=chance.randrange(1, 9000))
                model[key] = (segment, page)
            case 3:
                found = index.drop(key)
                assert (found and (found.segment, found.page)) == model.pop(key, None)
            case 4 if chance.random() < 0.1:
                gone = {key for key, (its, _) in model.items() if its is segment}
                assert set(index.empty(segment)) == gone
                model = {key: value for key, value in model.items() if key not in gone}
        found = index.find(key)
        assert (found and (found.segment, found.page)) == model.get(key)
    index.check(segments)
    assert set(index.names()) == set(model)


def test_index_takes_about_200_bytes_for_a_block():
    count = 100_000
    index = SsdIndex()
    tracemalloc.start()
    for number in range(count):
        if number % 1000 == 0:
            segment = a_segment(index)
        index.add(segment, a_key(number), page=1 + 33 * (number % 1000), length=128 << 10)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert used / count < 240
