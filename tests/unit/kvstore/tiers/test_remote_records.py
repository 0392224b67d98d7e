"""Values that a remote tier stores: their format, and that damaged or foreign values never give a block."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.tiers import remote_records as records
from kvstore.tiers.remote_records import RecordFramer, RemoteKeyState
from kvstore.tiers.statistics import GONE_KEYS, TierStatistics

KEY = BlockKey(bytes(range(16)), bytes(range(16, 32)))
BLOCK = np.arange(100, dtype=np.uint8)


class Buffered:
    """A stored value that is read from memory."""

    def __init__(self, content: bytes):
        self._content = content
        self.left = len(content)

    def fill(self, into: memoryview) -> None:
        assert len(into) <= self.left
        start = len(self._content) - self.left
        into[:] = self._content[start : start + len(into)]
        self.left -= len(into)


def a_value(key: BlockKey = KEY, block: np.ndarray = BLOCK, codec_id: int = 0) -> bytes:
    return records.pack(key, codec_id, block.nbytes, block) + block.tobytes()


def take(value: bytes, key: BlockKey = KEY) -> tuple[BlockOutcome, np.ndarray, TierStatistics]:
    statistics = TierStatistics("test")
    into = np.zeros(BLOCK.nbytes, np.uint8)
    fetched = RecordFramer(lambda digest: PlainCodec(), statistics).take(key, Buffered(value), into)
    assert fetched.crc32c == (google_crc32c.value(bytes(into)) if fetched.outcome is BlockOutcome.MOVED else 0)
    return fetched.outcome, into, statistics


def test_record_head_format_has_not_changed():
    head = records.pack(KEY, 3, 1000, BLOCK)

    assert head.hex(" ", 4) == (
        "464b5652 01030000 00010203 04050607 08090a0b 0c0d0e0f 10111213 14151617 "
        "18191a1b 1c1d1e1f 00000000 000003e8 00000000 00000064 c1caebe5 487a995b"
    )


def test_block_is_returned_unchanged():
    outcome, into, statistics = take(a_value())

    assert outcome is BlockOutcome.MOVED
    assert np.array_equal(into, BLOCK)
    assert statistics.status().corrupt == 0


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 163), bit=st.integers(0, 7))
def test_every_flipped_bit_is_detected(position, bit):
    value = bytearray(a_value())
    value[position] ^= 1 << bit

    outcome, _, statistics = take(bytes(value))

    newer = position == 4 and value[4] > 1
    assert outcome is (BlockOutcome.GONE if newer else BlockOutcome.CORRUPT)
    assert statistics.status().corrupt == (not newer)


@given(length=st.integers(0, 163))
def test_every_truncation_is_detected(length):
    assert take(a_value()[:length])[0] is BlockOutcome.CORRUPT


@given(st.binary(max_size=300))
def test_garbage_is_corrupt(content):
    assert take(content)[0] is BlockOutcome.CORRUPT


@given(st.binary(min_size=32, max_size=32))
def test_value_of_another_block_is_corrupt(name):
    other = BlockKey(name[:16], name[16:])
    outcome, into, _ = take(a_value(other))

    assert (outcome is BlockOutcome.MOVED) == (other == KEY)
    assert outcome is BlockOutcome.MOVED or not into.any(), "the head is checked before the payload is received"


@pytest.mark.parametrize(
    ("head", "key_state"),
    [
        (b"", RemoteKeyState.FREE),
        (a_value()[:63], RemoteKeyState.FREE),
        (a_value()[:64], RemoteKeyState.HELD),
        (a_value(codec_id=1)[:64], RemoteKeyState.FREE),
        (a_value(block=BLOCK[:50])[:64], RemoteKeyState.FREE),
        (b"FKVR\2" + bytes(59), RemoteKeyState.NEWER),
    ],
)
def test_key_state_follows_from_the_head(head, key_state):
    held = RecordFramer(lambda digest: PlainCodec(), TierStatistics("test"))

    assert held.key_state(KEY, head, BLOCK.nbytes) is key_state


def test_oldest_lost_blocks_are_forgotten_at_the_limit():
    names = TierStatistics("test")
    keys = [BlockKey(KEY.digest, index.to_bytes(16, "big")) for index in range(GONE_KEYS + 10)]

    names.mark_gone(keys)
    names.mark_present(keys[-1:])

    assert names.gone() == keys[10:-1]
    assert names.gone() == []
