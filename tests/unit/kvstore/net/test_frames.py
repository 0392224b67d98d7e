"""Decoding of a stream into frames."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.net.frames import HEAD, FrameDecoder

LIMIT = 100

payloads = st.lists(st.binary(max_size=LIMIT), max_size=8)


def framed(said: list[bytes]) -> bytes:
    return b"".join(HEAD.pack(len(each)) + each for each in said)


@st.composite
def splits(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    """Divide a stream into pieces of any size."""
    at = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=40)))
    return [stream[start:end] for start, end in pairwise([0, *at, len(stream)])]


@given(said=payloads, data=st.data())
def test_any_split_of_the_stream_gives_the_same_frames(said, data):
    decoder = FrameDecoder(LIMIT)

    heard = [payload for piece in data.draw(splits(framed(said))) for payload in decoder.cut(piece)]

    assert heard == said
    assert not decoder.torn
    assert decoder.fault is None


@given(said=payloads, length=st.integers(LIMIT + 1, 2**32 - 1), after=st.binary(max_size=20), data=st.data())
def test_too_long_frame_is_a_fault_after_earlier_frames(said, length, after, data):
    decoder = FrameDecoder(LIMIT)
    stream = framed(said) + HEAD.pack(length) + after

    heard: list[bytes] = []
    for piece in data.draw(splits(stream)):
        heard += decoder.cut(piece)
        if decoder.fault is not None:
            break

    assert heard == said
    assert decoder.fault is not None
    assert str(length) in str(decoder.fault)


@given(said=payloads, last=st.binary(min_size=1, max_size=LIMIT), data=st.data())
def test_torn_frame_is_detected(said, last, data):
    whole = HEAD.pack(len(last)) + last
    decoder = FrameDecoder(LIMIT)

    for piece in data.draw(splits(framed(said) + whole[: data.draw(st.integers(1, len(whole) - 1))])):
        decoder.cut(piece)

    assert decoder.torn


def test_announced_frame_takes_no_memory_before_it_arrives():
    decoder = FrameDecoder(1 << 30)

    assert decoder.cut(HEAD.pack(1 << 30) + b"begun") == []

    assert decoder.body.getbuffer().nbytes == len(b"begun")
