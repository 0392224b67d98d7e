import os
from pathlib import Path
from threading import Event

import pytest

from kvstore.errors import StoreNotStarted
from kvstore.messages import Address, BlockKey
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers import file_mapping as pages
from kvstore.tiers.file_mapping import FileMapping, HugePages, Pages, take
from kvstore.tiers.shared_memory import Mapping, SharedMemoryTier, file_bytes
from tests.support.kvstore.builders import a_block

SIZE = 3 * PAGE_BYTES
FILES = Path("/proc/self/fd")


def test_all_of_a_pool_is_there_before_it_is_used():
    file, memory, _ = take(64 << 20, HugePages.NEVER)

    assert os.fstat(file).st_blocks * 512 >= 64 << 20
    assert not memory.bytes.any()
    os.close(file)


def test_an_older_kernel_has_all_of_it_there_too(monkeypatch):
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 9999)

    file, _, got = take(4 << 20, HugePages.NEVER)

    assert os.fstat(file).st_blocks * 512 >= 4 << 20
    assert got is Pages.SMALL
    os.close(file)


def test_a_pool_cannot_be_cut_short_by_who_maps_it():
    file, _, _ = take(SIZE, HugePages.AUTO)

    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    os.close(file)


def test_what_is_written_in_one_view_is_read_in_another():
    file, memory, _ = take(SIZE, HugePages.AUTO)

    memory.bytes[PAGE_BYTES] = 7

    assert FileMapping(file).bytes[PAGE_BYTES] == 7
    os.close(file)


def test_huge_pages_that_are_required_and_not_free_are_refused_by_field(monkeypatch):
    meminfo(monkeypatch, HugePages_Free=1, Hugepagesize=2 << 20)

    with pytest.raises(StoreNotStarted, match=r"^huge_pages: .*: 2 pages are needed, and 1 are free"):
        take((2 << 20) + 1, HugePages.REQUIRE)


def test_a_system_without_huge_pages_refuses_them_by_field(monkeypatch):
    meminfo(monkeypatch)

    with pytest.raises(StoreNotStarted, match=r"^huge_pages: .*: the system has none"):
        take(SIZE, HugePages.REQUIRE)


def test_huge_pages_that_turn_out_not_to_be_there_leave_small_ones_and_no_file(monkeypatch):
    """As in a control group that may use fewer than the machine has."""
    before = len(list(FILES.iterdir()))
    real = pages._meminfo
    monkeypatch.setattr(pages, "_meminfo", lambda name: 1 << 30 if name == "HugePages_Free" else real(name))

    file, memory, got = take(SIZE, HugePages.AUTO)

    assert got is not Pages.RESERVED or real("HugePages_Total")
    assert memory.bytes.nbytes >= SIZE
    os.close(file)
    del memory
    assert len(list(FILES.iterdir())) == before


def test_more_than_there_is_is_refused_before_anything_is_taken(monkeypatch):
    meminfo(monkeypatch, MemAvailable=SIZE - 1)

    with pytest.raises(StoreNotStarted, match=r"^capacity_bytes: 12288 bytes are needed, and 12287 bytes"):
        take(SIZE, HugePages.AUTO)


@pytest.mark.parametrize("advice", [pages.MADV_POPULATE_WRITE, 9999], ids=["populated", "written"])
def test_a_pool_that_is_given_up_is_not_taken_to_its_end_and_leaves_no_file(monkeypatch, advice):
    before, given_up, chunks = len(list(FILES.iterdir())), Event(), []
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(pages, "CHUNK_BYTES", PAGE_BYTES)
    in_chunks = pages._in_chunks

    def noted(size, act, given_up_too):
        def and_give_up(start):
            act(start)
            chunks.append(start)
            given_up.set()

        in_chunks(size, and_give_up, given_up_too)

    monkeypatch.setattr(pages, "_in_chunks", noted)

    with pytest.raises(StoreNotStarted, match="cancelled while the memory was being allocated"):
        take(1000 * PAGE_BYTES, HugePages.NEVER, given_up)

    assert 1 <= len(chunks) <= pages.TAKING_THREADS
    assert len(list(FILES.iterdir())) == before


@pytest.mark.skipif(pages._meminfo("HugePages_Free") < 2, reason="no huge pages are reserved on this machine")
def test_reserved_huge_pages_are_used_and_mapped_by_others():
    capacity_bytes = (2 << 20) - PAGE_BYTES  # with its stamps it fills no huge page, so that the file is longer
    tier = SharedMemoryTier(capacity_bytes, HugePages.REQUIRE)
    address = Address(key=BlockKey(b"d" * 16, b"n" * 16), offset=PAGE_BYTES, length=PAGE_BYTES, generation=9)
    tier.claim(address)

    assert tier.pages is Pages.RESERVED
    assert tier.write(address, a_block(1, PAGE_BYTES))
    other = Mapping(tier.fileno(), capacity_bytes)
    assert os.fstat(tier.fileno()).st_size > file_bytes(capacity_bytes)
    assert other._memory.huge_bytes == 0, "not touched yet"
    assert (other.block(PAGE_BYTES, PAGE_BYTES) == a_block(1, PAGE_BYTES)).all()
    assert other.stamps[1] == 9
    assert other._memory.huge_bytes == 2 << 20
    with pytest.raises(PermissionError):
        os.ftruncate(tier.fileno(), 2 << 20 << 10)
    tier.close()


def meminfo(monkeypatch, **fields: int) -> None:
    """A system that says only this of its memory."""
    monkeypatch.setattr(pages, "_meminfo", lambda name: fields.get(name, 0))
