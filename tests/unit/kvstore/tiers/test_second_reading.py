"""Second reading: the verdict from two fresh readings of a value."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey
from kvstore.tiers.remote_records import HEAD_BYTES, RecordFramer, pack
from kvstore.tiers.second_reading import ReadingsDiffer, ReadingVerdict, judge
from kvstore.tiers.statistics import TierStatistics
from tests.support.kvstore.builders import a_block

KEY = BlockKey(b"namespace-digest", b"the block's name")
BLOCK = a_block(1, 1000)
GOOD = pack(KEY, PlainCodec.codec_id, BLOCK.nbytes, BLOCK) + BLOCK.tobytes()
RECORDS = RecordFramer(lambda _: PlainCodec(), TierStatistics("test"))

Damage = Callable[[bytes], bytes]


class DamagedReading:
    """A reading of a value, whose bytes `damage` changes on the way."""

    def __init__(self, content: bytes, damage: Damage):
        self._content = content
        self._damage = damage
        self.length = len(content)

    def read(self, start: int, stop: int) -> bytes:
        answer = self._damage(self._content[start:stop])
        if len(answer) != stop - start:
            raise ConnectionError("incomplete answer")
        return answer


def verdict(*contents: bytes | None, damages: tuple[Damage, ...] = ()) -> ReadingVerdict:
    """Return the verdict of readings that find these contents, one after the other; None: the value is missing."""
    found = iter(contents)
    damaging = iter(damages)

    @contextmanager
    def open_reading() -> Iterator[DamagedReading | None]:
        content = next(found)
        yield None if content is None else DamagedReading(content, next(damaging, bytes))

    return judge(open_reading, lambda length, read: RECORDS.proof(KEY, BLOCK.nbytes, length, read))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "bad", [b"", b"garbage", GOOD[:-1], GOOD + b"x", GOOD[:HEAD_BYTES], flipped(GOOD, 20), flipped(GOOD, 500)]
)
def test_value_bad_in_both_readings_is_corrupt(bad):
    assert verdict(bad, bad) is ReadingVerdict.CORRUPT


def test_good_value_is_sound_after_one_reading():
    assert verdict(GOOD) is ReadingVerdict.SOUND


def test_readings_that_differ_are_unsure():
    assert verdict(flipped(GOOD, 500), flipped(GOOD, 501)) is ReadingVerdict.UNSURE
    assert verdict(flipped(GOOD, 500), GOOD) is ReadingVerdict.UNSURE
    assert verdict(flipped(GOOD, 20), flipped(GOOD, 500)) is ReadingVerdict.UNSURE


def test_value_removed_between_readings_is_gone():
    assert verdict(None) is ReadingVerdict.GONE
    assert verdict(flipped(GOOD, 500), None) is ReadingVerdict.GONE


def test_incomplete_reading_raises():
    with pytest.raises(ConnectionError):
        verdict(flipped(GOOD, 500), flipped(GOOD, 500), damages=(bytes, lambda answer: answer[:-1]))


@pytest.mark.parametrize("nonsense", [ReadingsDiffer("other bytes"), ValueError("no value")])
def test_answer_to_another_question_is_unsure(nonsense):
    def answer(_: bytes) -> bytes:
        raise nonsense

    assert verdict(GOOD, damages=(answer,)) is ReadingVerdict.UNSURE
    assert verdict(flipped(GOOD, 500), GOOD, damages=(bytes, answer)) is ReadingVerdict.UNSURE


@given(st.integers(0, 1 << 20), st.integers(1, 255))
def test_damage_at_one_offset_of_each_answer_is_not_corrupt(place, mask):
    def damage(answer: bytes) -> bytes:
        at = place % len(answer)
        return answer[:at] + bytes([answer[at] ^ mask]) + answer[at + 1 :]

    assert verdict(GOOD, GOOD, damages=(damage, damage)) is not ReadingVerdict.CORRUPT


def test_newer_format_and_other_codec_are_sound():
    newer = b"FKVR\2" + GOOD[5:]
    other = pack(KEY, 9, BLOCK.nbytes, BLOCK) + BLOCK.tobytes()
    assert verdict(newer) is ReadingVerdict.SOUND
    assert verdict(other) is ReadingVerdict.SOUND
