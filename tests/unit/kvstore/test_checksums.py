"""Checksums, and copies with checksums: native and not."""

import random

import google_crc32c
import numpy as np
import pytest

from kvstore.native import checksums, checksums_twin

native = pytest.param(checksums, marks=pytest.mark.skipif(not checksums.BUILT, reason="the native module is not built"))
each = pytest.mark.parametrize("module", [native, checksums_twin])

SIZES = [*range(300), 1000, 4095, 4096, 4097, 16384, 65536, 131_071, 131_072, 131_073, 131_200, 300_001]


@each
def test_the_checksum_is_the_one_that_everybody_knows(module):
    assert module.extend(0, np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert module.extend(0, np.zeros(32, np.uint8)) == 0x8A9136AA  # RFC 3720, B.4


@each
def test_every_size_and_alignment_gives_the_librarys_checksum_and_an_exact_copy(module):
    chance = random.Random(1)
    source = np.frombuffer(chance.randbytes(400_000), np.uint8)
    room = np.zeros(400_000, np.uint8)
    for size in SIZES:
        begin, to, before = chance.randrange(64), 64 + chance.randrange(64), chance.getrandbits(32)
        data = source[begin : begin + size]
        right = google_crc32c.extend(before, data)
        room[:] = 0

        assert module.extend(before, data) == right
        assert module.copy(before, data, room[to : to + size]) == right

        assert np.array_equal(room[to : to + size], data)
        assert not room[:to].any()
        assert not room[to + size :].any()


@each
def test_a_checksum_can_be_taken_in_pieces(module):
    data = np.frombuffer(random.Random(2).randbytes(10_000), np.uint8)

    assert module.extend(module.extend(0, data[:3333]), data[3333:]) == module.extend(0, data)


@each
def test_a_destination_of_another_size_is_refused_and_left_alone(module):
    into = np.zeros(9, np.uint8)

    with pytest.raises(ValueError, match="10 bytes to copy into 9"):
        module.copy(0, np.ones(10, np.uint8), into)
    assert not into.any()
