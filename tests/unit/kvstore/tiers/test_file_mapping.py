"""The memory behind a pool: its pages, its errors, and its cancellation."""

import gc
import os
import re
from pathlib import Path
from threading import Event

import pytest

from kvstore.errors import StoreNotStarted
from kvstore.messages import Address, BlockKey
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers import file_mapping
from kvstore.tiers.file_mapping import FileMapping, HugePages, Pages, allocate
from kvstore.tiers.shared_memory import Mapping, SharedMemoryTier, file_bytes
from tests.support.kvstore.builders import a_block

SIZE = 3 * PAGE_BYTES
MEMINFO = file_mapping.MEMINFO.read_text(encoding="ascii")


class CancelledAfterOneChunk(Event):
    """An event that becomes set after the first call of `is_set`."""

    def is_set(self) -> bool:
        was_set = super().is_set()
        self.set()
        return was_set


@pytest.fixture
def meminfo(monkeypatch, tmp_path):
    """Return a function that replaces /proc/meminfo by a file with the given text."""

    def replace(text: str) -> None:
        (tmp_path / "meminfo").write_text(text, encoding="ascii")
        monkeypatch.setattr(file_mapping, "MEMINFO", tmp_path / "meminfo")

    return replace


def open_files() -> int:
    gc.collect()  # closes the files of earlier tests
    return len(list(Path("/proc/self/fd").iterdir()))


def free_huge_pages() -> int:
    found = re.search(r"HugePages_Free: *(\d+)", MEMINFO)
    return int(found[1]) if found else 0


def test_all_pages_of_a_pool_are_allocated_at_once():
    file, memory, _ = allocate(64 << 20, HugePages.NEVER)

    assert os.fstat(file).st_blocks * 512 >= 64 << 20
    assert not memory.bytes.any()
    os.close(file)


def test_pages_are_allocated_without_populate_support(monkeypatch):
    monkeypatch.setattr(file_mapping, "MADV_POPULATE_WRITE", 9999)

    file, _, got = allocate(4 << 20, HugePages.NEVER)

    assert os.fstat(file).st_blocks * 512 >= 4 << 20
    assert got is Pages.SMALL
    os.close(file)


def test_pool_file_cannot_be_shrunk():
    file, _, _ = allocate(SIZE, HugePages.AUTO)

    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    os.close(file)


def test_two_mappings_share_the_bytes():
    file, memory, _ = allocate(SIZE, HugePages.AUTO)

    memory.bytes[PAGE_BYTES] = 7

    assert FileMapping(file).bytes[PAGE_BYTES] == 7
    os.close(file)


def test_too_few_required_huge_pages_are_an_error(meminfo):
    meminfo("HugePages_Free: 1\nHugepagesize: 2048 kB\n")

    with pytest.raises(StoreNotStarted, match=r"^huge_pages: .*: 2 pages are needed, and 1 are free"):
        allocate((2 << 20) + 1, HugePages.REQUIRE)


def test_required_huge_pages_without_support_are_an_error(meminfo):
    meminfo("")

    with pytest.raises(StoreNotStarted, match=r"^huge_pages: .*: the system has none"):
        allocate(SIZE, HugePages.REQUIRE)


def test_failed_huge_pages_fall_back_to_small_pages(meminfo):
    """Report more free huge pages than there are, as in a control group that limits them: small pages are used instead."""
    before = open_files()
    meminfo(re.sub(r"HugePages_Free: *\d+", "HugePages_Free: 1073741824", MEMINFO))

    file, memory, got = allocate(SIZE, HugePages.AUTO)

    assert got is not Pages.RESERVED or "HugePages_Total:       0" not in MEMINFO
    assert memory.bytes.nbytes >= SIZE
    os.close(file)
    del memory
    assert open_files() == before


def test_pool_larger_than_free_memory_is_refused_at_once(meminfo):
    meminfo("MemAvailable: 8 kB\n")

    with pytest.raises(StoreNotStarted, match=r"^capacity_bytes: 12288 bytes are needed, and 8192 bytes"):
        allocate(SIZE, HugePages.AUTO)


@pytest.mark.parametrize("advice", [file_mapping.MADV_POPULATE_WRITE, 9999], ids=["populated", "written"])
def test_cancelled_allocation_leaves_no_file(monkeypatch, advice):
    before = open_files()
    monkeypatch.setattr(file_mapping, "MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(file_mapping, "CHUNK_BYTES", PAGE_BYTES)

    with pytest.raises(StoreNotStarted, match="cancelled while the memory was being allocated"):
        allocate(1000 * PAGE_BYTES, HugePages.NEVER, CancelledAfterOneChunk())

    assert open_files() == before


@pytest.mark.skipif(free_huge_pages() < 2, reason="no huge pages are reserved on this machine")
def test_reserved_huge_pages_are_used_by_all_mappings():
    capacity_bytes = (2 << 20) - PAGE_BYTES  # with the stamps no multiple of a huge page, so the file is longer
    tier = SharedMemoryTier(capacity_bytes, HugePages.REQUIRE)
    address = Address(key=BlockKey(b"d" * 16, b"n" * 16), offset=PAGE_BYTES, length=PAGE_BYTES, generation=9)
    tier.claim(address)

    assert tier.pages is Pages.RESERVED
    assert tier.write(address, a_block(1, PAGE_BYTES))
    memory = FileMapping(tier.fileno())
    other = Mapping(memory, capacity_bytes)
    assert os.fstat(tier.fileno()).st_size > file_bytes(capacity_bytes)
    assert memory.huge_bytes == 0, "not touched yet"
    assert (other.block(PAGE_BYTES, PAGE_BYTES) == a_block(1, PAGE_BYTES)).all()
    assert other.stamps[1] == 9
    assert memory.huge_bytes == 2 << 20
    with pytest.raises(PermissionError):
        os.ftruncate(tier.fileno(), 2 << 20 << 10)
    tier.close()
