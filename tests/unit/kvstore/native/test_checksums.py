"""Checksums, and copies with checksums: the native module, and the Python module that replaces it."""

import ctypes
import mmap
import random

import google_crc32c
import numpy as np
import pytest

from kvstore.messages import SLOT, BlockOutcome
from kvstore.native import checksums, checksums_twin
from kvstore.transports.shared_memory import OUTCOMES

native = pytest.param(checksums, marks=pytest.mark.skipif(not checksums.BUILT, reason="the native module is not built"))
each = pytest.mark.parametrize("module", [native, checksums_twin])

SIZES = [*range(300), 1000, 4095, 4096, 4097, 16384, 65536, 131_071, 131_072, 131_073, 131_200, 300_001]


@each
def test_checksum_matches_the_published_vectors(module):
    assert module.extend(0, np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert module.extend(0, np.zeros(32, np.uint8)) == 0x8A9136AA  # RFC 3720, B.4


@each
def test_copy_is_exact_for_every_size_and_alignment(module):
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
def test_copy_may_end_at_the_end_of_memory(module):
    size = 192 << 10  # larger than the cache, so the copy prefetches beyond its end
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    data, into = np.frombuffer(random.Random(5).randbytes(size), np.uint8), np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(into.ctypes.data + size)
    assert libc.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, "the page behind must not be accessible"

    assert module.copy(0, data, into[:size]) == google_crc32c.value(data.tobytes())
    assert np.array_equal(into[:size], data)


@each
def test_a_checksum_can_be_taken_in_pieces(module):
    data = np.frombuffer(random.Random(2).randbytes(10_000), np.uint8)

    assert module.extend(module.extend(0, data[:3333]), data[3333:]) == module.extend(0, data)


@each
def test_destination_of_another_size_is_refused_unchanged(module):
    into = np.zeros(9, np.uint8)

    with pytest.raises(ValueError, match="10 bytes to copy into 9"):
        module.copy(0, np.ones(10, np.uint8), into)
    assert not into.any()


PAGE, BLOCK, BLOCKS = 512, 1536, 6


class Pool:
    """Pool with blocks of three pages; the stamp of each block is the block's number plus one."""

    def __init__(self):
        self.bytes = np.frombuffer(random.Random(3).randbytes(BLOCK * BLOCKS), np.uint8).copy()
        self.stamps = np.zeros(BLOCK * BLOCKS // PAGE, np.uint64)
        self.stamps[:: BLOCK // PAGE] = np.arange(1, BLOCKS + 1)

    def block(self, index: int) -> np.ndarray:
        return self.bytes[index * BLOCK : (index + 1) * BLOCK]

    def slot(self, index: int, generation: int | None = None, crc32c: int | None = None) -> bytes:
        right = google_crc32c.value(self.block(index).tobytes()) if crc32c is None else crc32c
        return SLOT.pack(index * BLOCK, index + 1 if generation is None else generation, right)

    def get(self, module, slots: bytes, parts: list[np.ndarray]) -> list[BlockOutcome]:
        return [OUTCOMES[code] for code in module.get_blocks(self.bytes, self.stamps, PAGE, slots, BLOCK, parts)]

    def put(self, module, slots: bytes, parts: list[np.ndarray]) -> tuple[list[BlockOutcome], list[int]]:
        codes, sums = module.put_blocks(self.bytes, self.stamps, PAGE, slots, BLOCK, parts)
        return [OUTCOMES[code] for code in codes], sums


@each
def test_get_blocks_reports_moved_gone_and_corrupt(module):
    pool = Pool()
    slots = pool.slot(4) + pool.slot(1, generation=77) + pool.slot(2, crc32c=1) + pool.slot(0)
    slots += SLOT.pack(1 << 60, 1, 0) + SLOT.pack(BLOCK * BLOCKS - PAGE, 0, 0)
    parts = [np.zeros(BLOCK, np.uint8) for _ in range(3)]
    pieces = [np.zeros(size, np.uint8) for size in (1, 500, 0, BLOCK - 501)]
    rest = [np.zeros(BLOCK, np.uint8) for _ in range(2)]

    outcomes = pool.get(module, slots, [*parts, *pieces, *rest])

    assert outcomes == [
        BlockOutcome.MOVED,
        BlockOutcome.GONE,
        BlockOutcome.CORRUPT,
        BlockOutcome.MOVED,
        BlockOutcome.GONE,
        BlockOutcome.GONE,
    ]
    assert np.array_equal(parts[0], pool.block(4))
    assert np.array_equal(np.concatenate(pieces), pool.block(0))
    assert not parts[1].any(), "nothing is copied from a place of another block"
    assert not rest[0].any()
    assert not rest[1].any()


@each
def test_put_blocks_skips_places_of_other_blocks(module):
    pool, before = Pool(), Pool()
    fresh = [np.frombuffer(random.Random(seed).randbytes(BLOCK), np.uint8) for seed in range(3)]
    slots = pool.slot(5) + pool.slot(3, generation=9) + pool.slot(0)
    parts = [fresh[0], fresh[1], fresh[2][:700], fresh[2][700:]]

    outcomes, sums = pool.put(module, slots, parts)

    assert outcomes == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.MOVED]
    assert (sums[0], sums[2]) == (google_crc32c.value(fresh[0].tobytes()), google_crc32c.value(fresh[2].tobytes()))
    assert np.array_equal(pool.block(5), fresh[0])
    assert np.array_equal(pool.block(0), fresh[2])
    for untouched in (1, 2, 3, 4):
        assert np.array_equal(pool.block(untouched), before.block(untouched))


@each
@pytest.mark.parametrize("sizes", [[], [BLOCK - 1], [BLOCK + 1], [BLOCK, BLOCK], [BLOCK - 1, 2]])
def test_parts_of_wrong_size_raise_and_copy_nothing(module, sizes):
    pool = Pool()
    parts = [np.zeros(size, np.uint8) for size in sizes]

    with pytest.raises(AssertionError, match="parts do not make"):
        pool.get(module, pool.slot(0), parts)
    with pytest.raises(AssertionError, match="parts do not make"):
        pool.put(module, pool.slot(0), parts)

    assert not any(part.any() for part in parts)
    assert np.array_equal(pool.bytes, Pool().bytes)


@each
def test_many_blocks_are_summed_in_one_call(module):
    data = np.frombuffer(random.Random(4).randbytes(4 * BLOCK), np.uint8)
    parts = [data[:BLOCK], data[BLOCK : BLOCK + 1], data[:0], data[BLOCK + 1 : 2 * BLOCK], data[2 * BLOCK : 3 * BLOCK]]

    sums = module.sums(3, BLOCK, parts)

    assert sums == [google_crc32c.value(data[i * BLOCK : (i + 1) * BLOCK].tobytes()) for i in range(3)]
    assert module.sums(0, BLOCK, []) == []
    for count in (2, 4):
        with pytest.raises(AssertionError, match="parts do not make"):
            module.sums(count, BLOCK, parts)


@pytest.mark.skipif(not checksums.BUILT, reason="the native module is not built")
def test_stamps_that_cannot_be_read_at_once_are_refused():
    pool = Pool()
    odd = np.zeros(pool.stamps.nbytes + 8, np.uint8)[1:][: pool.stamps.nbytes]

    with pytest.raises(ValueError, match="aligned"):
        checksums.get_blocks(pool.bytes, odd, PAGE, pool.slot(0), BLOCK, [np.zeros(BLOCK, np.uint8)])
