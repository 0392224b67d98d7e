"""Contract tests of all pools; see `kvstore.ports.MemoryTier`."""

import os

import numpy as np
import pytest

from kvstore.messages import Address, BlockKey
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.shared_memory import SharedMemoryTier
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain

CAPACITY = 8 * BLOCK_BYTES


@pytest.fixture(params=["memfd", "temporary file"])
def tier(request, monkeypatch):
    if request.param == "temporary file":
        monkeypatch.delattr(os, "memfd_create")
    tier = SharedMemoryTier(CAPACITY)
    yield tier
    tier.close()


def an_address(place: int = 0, generation: int = 1, length: int = BLOCK_BYTES) -> Address:
    key = BlockKey(b"d" * 16, a_chain(1, f"{generation}")[0])
    return Address(key=key, offset=place * BLOCK_BYTES, length=length, generation=generation)


def test_written_bytes_are_read(tier):
    addresses = [an_address(place, generation=place + 1) for place in range(8)]
    for seed, address in enumerate(addresses):
        tier.claim(address)
        assert tier.write(address, a_block(seed))

    for seed, address in enumerate(addresses):
        into = np.zeros(BLOCK_BYTES, np.uint8)
        assert tier.read(address, into)
        assert np.array_equal(into, a_block(seed))


def test_pieces_follow_each_other(tier):
    address = an_address(length=BLOCK_BYTES - 100)
    block = a_block(1, BLOCK_BYTES - 100)
    tier.claim(address)
    tier.write(address, [block[:1000], bytes(block[1000:1001]), block[1001:].reshape(1, -1)])

    pieces = (np.zeros((5, 2), np.uint8), bytearray(len(block) - 10))
    assert tier.read(address, pieces)

    assert bytes(pieces[0]) + bytes(pieces[1]) == bytes(block)


def test_unclaimed_slot_cannot_be_used(tier):
    assert not tier.write(an_address(), a_block(1))
    assert not tier.read(an_address(), np.zeros(BLOCK_BYTES, np.uint8))


def test_a_discarded_block_is_not_read(tier):
    tier.claim(an_address())
    tier.write(an_address(), a_block(1))

    tier.discard(an_address())

    assert not tier.read(an_address(), np.zeros(BLOCK_BYTES, np.uint8))


def test_former_generation_is_neither_read_nor_written(tier):
    former, present = an_address(generation=1), an_address(generation=2)
    tier.claim(former)
    tier.discard(former)
    tier.claim(present)
    tier.write(present, a_block(2))

    assert not tier.write(former, a_block(1))
    assert not tier.read(former, np.zeros(BLOCK_BYTES, np.uint8))
    tier.discard(former)  # too late, so it has no effect
    into = np.zeros(BLOCK_BYTES, np.uint8)
    assert tier.read(present, into)
    assert np.array_equal(into, a_block(2))


def test_non_contiguous_piece_is_rejected(tier):
    tier.claim(an_address())

    with pytest.raises(ValueError, match="not contiguous"):
        tier.read(an_address(), np.zeros((BLOCK_BYTES, 2), np.uint8)[:, 0])


def test_capacity_is_rounded_down_to_a_page():
    tier = SharedMemoryTier(3 * PAGE_BYTES + 1)

    assert tier.capacity_bytes == 3 * PAGE_BYTES
    tier.close()
