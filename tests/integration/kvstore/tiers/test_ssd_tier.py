"""Tests of the SSD tier on real files: storage, recovery and reclaimed space."""

import errno
import logging
import os
import random
import resource
import subprocess
import sys
import threading

import google_crc32c
import msgspec
import numpy as np
import pytest

from kvstore.codecs.plain import PlainCodec
from kvstore.errors import StoreNotStarted
from kvstore.messages import BlockOutcome
from kvstore.pool.extents import PAGE_BYTES
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.ssd import disk as disks
from kvstore.tiers.ssd.disk import DiskSpace
from kvstore.tiers.ssd.segments.eviction import oldest
from kvstore.tiers.ssd.segments.segment import largest_payload_bytes
from kvstore.tiers.ssd.settings import Sync
from kvstore.tiers.ssd.tier import SsdTier
from tests.support.kvstore.builders import BLOCK_BYTES, put_blocks
from tests.support.kvstore.ssd_disks import (
    PER_SEGMENT,
    RECORD_BYTES,
    SEGMENT_BYTES,
    DiskFaults,
    ShiftedClock,
    a_tier,
    deadline_in,
    flip_bit,
    get,
    keys_of,
    overwrite,
    put,
    readable_keys,
    record_at,
    segment_files,
    ssd_settings,
    used_bytes,
)
from tests.support.waiting import eventually

MOVED, GONE, CORRUPT = BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.CORRUPT


def abandon(tier: SsdTier) -> None:
    """Release a tier's directories like a killed process, without another write."""
    tier.disk_threads.close()
    for volume in tier.volumes:
        for segment in volume.segments:
            segment.file.close()
        volume.disk.close()


# Recovery


@pytest.mark.parametrize("sync", list(Sync))
def test_reopened_tier_has_its_blocks(tmp_path, sync):
    keys = keys_of(50)
    tier = a_tier(tmp_path, sync=sync)
    put(tier, keys)
    before = tier.status()
    tier.close()

    again = a_tier(tmp_path, sync=sync)

    assert again.status().blocks == before.blocks == 50
    assert again.status().bytes == before.bytes == 50 * RECORD_BYTES
    assert get(again, keys) == [MOVED] * 50
    again.check()
    again.close()


def test_without_a_footer_all_records_are_found_by_their_headers(tmp_path):
    keys = keys_of(50)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.close()
    for path in segment_files(tmp_path):
        overwrite(path, SEGMENT_BYTES - PAGE_BYTES, bytes(PAGE_BYTES))

    again = a_tier(tmp_path)

    assert get(again, keys) == [MOVED] * 50
    again.close()


def test_a_damaged_footer_table_is_not_believed(tmp_path):
    keys = keys_of(19)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.close()
    flip_bit(segment_files(tmp_path)[0], SEGMENT_BYTES - 2 * PAGE_BYTES + 40)  # in the second entry

    again = a_tier(tmp_path)

    assert get(again, keys) == [MOVED] * 19
    again.close()


def test_wrong_footer_entries_give_no_wrong_bytes(tmp_path):
    """Swap two blocks in an otherwise valid footer."""
    keys = keys_of(PER_SEGMENT)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.close()
    path = segment_files(tmp_path)[0]
    rows = bytearray(path.read_bytes()[-2 * PAGE_BYTES : -PAGE_BYTES])
    rows[:32], rows[40:72] = rows[40:72], rows[:32]
    end = bytearray(path.read_bytes()[-PAGE_BYTES:])
    end[52:56] = google_crc32c.value(bytes(rows)).to_bytes(4, "little")
    end[56:60] = google_crc32c.value(bytes(end[:56])).to_bytes(4, "little")
    overwrite(path, SEGMENT_BYTES - 2 * PAGE_BYTES, bytes(rows + end))

    again = a_tier(tmp_path)

    assert again.find(keys, deadline_in()) == PER_SEGMENT, "the damaged block was believed until it was read"
    assert get(again, keys) == [CORRUPT] * 2 + [MOVED] * (PER_SEGMENT - 2)
    again.close()


def test_writing_goes_on_in_the_segment_that_was_not_full(tmp_path):
    for number in range(10):
        tier = a_tier(tmp_path)
        put(tier, keys_of(1, first=number))
        tier.close() if number % 2 else abandon(tier)

    tier = a_tier(tmp_path)

    assert len(segment_files(tmp_path)) == 1
    assert get(tier, keys_of(10)) == [MOVED] * 10
    tier.close()


def test_a_torn_record_is_cut_off(tmp_path):
    keys = keys_of(6)
    tier = a_tier(tmp_path)
    put(tier, keys)
    abandon(tier)
    path, offset = record_at(tmp_path, keys[5])
    overwrite(path, offset + 2 * PAGE_BYTES, bytes(PAGE_BYTES))  # the last page of the last record was never written

    again = a_tier(tmp_path)

    assert again.status().blocks == 5
    assert get(again, keys) == [MOVED] * 5 + [GONE]
    assert put(again, keys[5:]) == [True]
    assert record_at(tmp_path, keys[5]) == (path, offset), "its space is used again"
    again.close()


@pytest.mark.parametrize("missing", [0, 1], ids=["all of it", "its payload"])
def test_a_hole_between_records_hides_nothing_behind_it(tmp_path, missing):
    keys = keys_of(6)
    tier = a_tier(tmp_path)
    put(tier, keys)
    abandon(tier)
    path, offset = record_at(tmp_path, keys[2])
    begin = missing * PAGE_BYTES  # writes are parallel, so an earlier one may be missing
    overwrite(path, offset + begin, bytes(RECORD_BYTES - begin))

    again = a_tier(tmp_path)

    assert get(again, keys) == [MOVED, MOVED, GONE, MOVED, MOVED, MOVED]
    again.close()


def test_reused_file_ignores_its_former_footer(tmp_path):
    tier = a_tier(tmp_path, score=oldest)
    batches = [keys_of(PER_SEGMENT, f"n{number}") for number in range(9)]
    for batch in batches:
        put(tier, batch)
    latest = keys_of(5, "latest")
    put(tier, latest)  # where the footer of the former use still lies
    abandon(tier)

    again = a_tier(tmp_path)

    assert get(again, latest) == [MOVED] * 5
    assert get(again, batches[-1]) == [MOVED] * PER_SEGMENT
    again.check()
    again.close()


def test_forged_record_in_a_payload_is_ignored(tmp_path):
    victim, forger = keys_of(1, "victim")[0], keys_of(1, "forger")[0]
    tier = a_tier(tmp_path)
    put(tier, [victim])
    path, offset = record_at(tmp_path, victim)
    template = path.read_bytes()[offset : offset + RECORD_BYTES]
    tier.discard([victim])

    forged = bytearray(template[:PAGE_BYTES] + os.urandom(BLOCK_BYTES))
    page = offset // PAGE_BYTES + 3 + 1  # place of the forged payload
    forged[8:16] = bytes(8)  # clients do not know the nonce
    forged[56:60] = page.to_bytes(4, "little")
    forged[64:68] = google_crc32c.value(bytes(forged[PAGE_BYTES:])).to_bytes(4, "little")
    forged[68:72] = google_crc32c.value(bytes(forged[:68])).to_bytes(4, "little")
    content = np.frombuffer(bytes(forged), np.uint8)
    assert put_blocks(tier, [forger], [content], MonotonicClock().now() + 10**10) == [True]
    abandon(tier)
    path, offset = record_at(tmp_path, forger)
    overwrite(path, offset, bytes(PAGE_BYTES))  # the search then reaches the payload's pages

    again = a_tier(tmp_path)

    assert again.find([victim], 0) == 0
    again.close()


def test_a_discarded_block_does_not_come_back_after_a_crash(tmp_path):
    keys = keys_of(40)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.discard(keys[3:4])  # in a segment with a footer
    tier.discard(keys[39:])  # in a segment without a footer
    abandon(tier)

    again = a_tier(tmp_path)

    outcomes = get(again, keys)
    assert outcomes[3] is GONE
    assert outcomes[39] is GONE
    assert outcomes.count(MOVED) == 38
    assert again.status().corrupt == 0
    again.close()


def test_a_head_that_is_damaged_does_not_lose_a_sealed_segment(tmp_path):
    keys = keys_of(19)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.close()
    flip_bit(segment_files(tmp_path)[0], 20)

    again = a_tier(tmp_path)

    assert get(again, keys) == [MOVED] * 19
    again.close()


# Replaced and truncated files


def test_segment_of_a_newer_version_is_a_miss_until_reused(tmp_path, caplog):
    keys = keys_of(19)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.close()
    path = segment_files(tmp_path)[0]
    head = bytearray(path.read_bytes()[:44])
    head[8] = 2

    overwrite(path, 0, bytes(head[:40]) + google_crc32c.value(bytes(head[:40])).to_bytes(4, "little"))
    caplog.clear()

    again = a_tier(tmp_path)

    assert again.status().blocks == 0
    assert [r.reason for r in caplog.records if r.levelname == "WARNING"] == [
        "written by another version of this program"
    ]
    assert get(again, keys) == [GONE] * 19
    put(again, keys_of(60, "b"))
    assert bytes(head[:8]) == path.read_bytes()[:8]
    assert path.read_bytes()[8] == 2, "the other directories had room"
    put(again, keys_of(100, "c"))
    assert path.read_bytes()[8] == 1
    again.check()
    again.close()


@pytest.mark.parametrize("length", [0, 1, PAGE_BYTES, 5 * PAGE_BYTES, 100_000, SEGMENT_BYTES - 1])
def test_a_file_cut_short_gives_what_is_left(tmp_path, length):
    keys = keys_of(19)
    tier = a_tier(tmp_path)
    put(tier, keys)
    tier.close()
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.truncate(length)

    again = a_tier(tmp_path)

    whole = min(19, max(0, length - PAGE_BYTES) // RECORD_BYTES)
    assert get(again, keys) == [MOVED] * whole + [GONE] * (19 - whole)
    assert put(again, keys) == [True] * 19
    assert get(again, keys) == [MOVED] * 19
    again.close()


def test_a_file_cut_short_under_an_open_tier_gives_what_is_left(tmp_path):
    keys = keys_of(19)
    tier = a_tier(tmp_path)
    put(tier, keys)
    with segment_files(tmp_path)[0].open("r+b") as file:
        file.truncate(PAGE_BYTES + 5 * RECORD_BYTES + 100)

    assert get(tier, keys) == [MOVED] * 5 + [CORRUPT] * 14
    assert tier.status().corrupt == 14
    assert tier.find(keys, 0) == 5
    tier.close()


def test_overwritten_segment_gives_no_block(tmp_path, caplog):
    keys = keys_of(19)
    tier = a_tier(tmp_path)
    put(tier, keys)
    overwrite(segment_files(tmp_path)[0], 0, random.Random(1).randbytes(SEGMENT_BYTES))

    assert get(tier, keys[:9]) == [CORRUPT] * 9
    assert get(tier, keys[9:]) == [CORRUPT] * 10
    assert tier.status().corrupt == 19
    lines = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [line.file for line in lines] == ["segment-000000"], "one line for each file"
    tier.close()


def test_swapped_segment_gives_no_block(tmp_path):
    tier = a_tier(tmp_path)
    put(tier, keys_of(PER_SEGMENT, "a"))
    put(tier, keys_of(PER_SEGMENT, "b"))
    first, second = segment_files(tmp_path)
    first.write_bytes(second.read_bytes())

    assert get(tier, keys_of(PER_SEGMENT, "a")) == [CORRUPT] * PER_SEGMENT
    tier.close()


def test_foreign_files_are_kept_and_count_towards_the_cap(tmp_path):
    foreign = {"notes.txt": 10_000, "segment-1": 100, "segment-000001.bak": 700_000, "sub/segment-000000": 5}
    (tmp_path / "sub").mkdir()
    for name, size in foreign.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "segment-000007").mkdir()
    (tmp_path / "segment-000008").symlink_to("/etc/passwd")

    tier = a_tier(tmp_path)
    for number in range(10):
        put(tier, keys_of(19, f"n{number}"))

    assert used_bytes(tmp_path) <= 2 << 20
    for name, size in foreign.items():
        assert (tmp_path / name).read_bytes() == b"x" * size
    assert (tmp_path / "segment-000008").is_symlink()
    tier.close()


def test_foreign_files_that_fill_the_cap_are_named(tmp_path):
    (tmp_path / "big").write_bytes(os.urandom(1_700_000))

    with pytest.raises(StoreNotStarted, match="capacity_bytes: beside the other files in"):
        a_tier(tmp_path)

    (tmp_path / "big").unlink()
    a_tier(tmp_path).close()


@pytest.mark.parametrize("folders", [1, 2])
def test_capacity_beyond_free_space_plus_own_files_is_logged(tmp_path, caplog, folders):
    faults = DiskFaults()
    places = [tmp_path / str(number) for number in range(folders)]
    faults.space = DiskSpace(device=1, total=1 << 30, free=(2 << 20) - folders * SEGMENT_BYTES, ours=SEGMENT_BYTES)
    a_tier(*places, faults=faults).close()
    assert not warnings_of(caplog)

    faults.space = DiskSpace(device=1, total=1 << 30, free=1 << 20, ours=SEGMENT_BYTES)
    a_tier(*places, faults=faults).close()

    (warning,) = warnings_of(caplog)
    assert warning.message.startswith("capacity_bytes: the file system has less space")
    assert (warning.capacity_bytes, warning.left_bytes) == (2 << 20, (1 << 20) + folders * SEGMENT_BYTES)
    assert warning.folders == ", ".join(map(str, places))


def test_capacity_beyond_the_file_system_is_logged(tmp_path, caplog):
    a_tier(tmp_path, capacity_bytes=1 << 44, segment_bytes=1 << 31).close()

    (warning,) = warnings_of(caplog)
    assert warning.total_bytes >= warning.left_bytes > 0
    assert warning.capacity_bytes == 1 << 44


def warnings_of(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


# Access


def test_a_second_process_is_rejected_a_directory(tmp_path):
    tier = a_tier(tmp_path)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvstore.errors import StoreNotStarted\n"
        "from tests.support.kvstore.ssd_disks import a_tier\n"
        "try:\n    a_tier(Path(sys.argv[1]))\n"
        "except StoreNotStarted as error:\n    print(error)\n"
    )
    run = [sys.executable, "-c", program, str(tmp_path)]

    said = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("directories[0]: ")
    assert "in use by another process" in said

    tier.close()
    assert subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout == ""


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreNotStarted, match=r"directories\[1\]: .*/file"):
        a_tier(tmp_path / "good", tmp_path / "file", capacity_bytes=4 << 20)

    a_tier(tmp_path / "good").close()  # the first directory was released


def test_more_files_than_allowed_are_rejected_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2048))

    with pytest.raises(StoreNotStarted, match=r"segment_bytes: .* open files, and the limit is 2048"):
        a_tier(tmp_path, capacity_bytes=1 << 30)


def test_file_limit_is_raised_where_possible(tmp_path):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    try:
        a_tier(tmp_path, capacity_bytes=128 << 20).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= (128 << 20) // SEGMENT_BYTES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


# its segment is gone, and the next segment does not have the block yet


def test_the_cap_holds_at_all_times(tmp_path):
    cap = 2 << 20
    tier = a_tier(tmp_path, capacity_bytes=cap)
    most = 0
    for number in range(40):
        put(tier, keys_of(10, f"n{number}"))
        most = max(most, used_bytes(tmp_path))
    tier.close()

    assert cap * 3 / 4 < most <= cap
    assert used_bytes(tmp_path) <= cap


def test_a_cap_that_was_lowered_is_kept_from_the_start(tmp_path):
    tier = a_tier(tmp_path)
    for number in range(8):
        put(tier, keys_of(19, f"n{number}"))
    tier.close()

    again = a_tier(tmp_path, capacity_bytes=1 << 20)

    assert used_bytes(tmp_path) <= 1 << 20
    assert get(again, keys_of(19, "n7")) == [MOVED] * 19, "the newest are kept"
    again.check()
    again.close()


def test_segments_of_another_size_are_read_and_then_replaced(tmp_path):
    tier = a_tier(tmp_path)
    put(tier, keys_of(80))
    tier.close()

    again = a_tier(tmp_path, segment_bytes=2 * SEGMENT_BYTES, score=oldest)

    assert get(again, keys_of(80)) == [MOVED] * 80
    for number in range(12):
        put(again, keys_of(19, f"n{number}"))
        assert used_bytes(tmp_path) <= 2 << 20
    assert {path.stat().st_size for path in segment_files(tmp_path)} == {2 * SEGMENT_BYTES}
    again.check()
    again.close()


def test_segment_with_the_lowest_score_is_evicted_whole(tmp_path):
    tier = a_tier(tmp_path, score=oldest)
    batches = [keys_of(PER_SEGMENT, f"n{number}") for number in range(16)]
    for batch in batches:
        put(tier, batch)

    counts = [len(readable_keys(tier, batch)) for batch in batches]

    held = len(segment_files(tmp_path))
    assert held >= 5
    assert counts == [0] * (16 - held) + [PER_SEGMENT] * held
    assert tier.status().evicted == PER_SEGMENT * (16 - held)
    assert set(tier.gone()) == {key for batch in batches[: 16 - held] for key in batch}
    tier.check()
    tier.close()


def test_read_blocks_stay_and_unread_ones_are_evicted(tmp_path):
    clock = ShiftedClock()
    tier = a_tier(tmp_path, clock=clock)
    busy = keys_of(19, "busy")
    put(tier, busy)
    for number in range(30):
        clock.advance(10)
        assert get(tier, busy, deadline=clock.now() + 10**10) == [MOVED] * 19
        put(tier, keys_of(19, f"n{number}"), deadline=clock.now() + 10**10)
    tier.close()


def test_blocks_in_demand_are_rescued_within_the_budget(tmp_path):
    budget = [4 * RECORD_BYTES]

    def admit(size_bytes):
        if size_bytes > budget[0]:
            return False
        budget[0] -= size_bytes
        return True

    tier = a_tier(tmp_path, score=oldest, admit_rewrite=admit, rescue_hits=2)
    first = keys_of(19, "first")
    put(tier, first)
    for _ in range(3):
        get(tier, first[5:7])
    for _ in range(2):
        get(tier, first[9:14])
    for number in range(7):
        put(tier, keys_of(19, f"n{number}"))

    assert readable_keys(tier, first) == [*first[5:7], *first[9:11]], "the four most read blocks come first"
    assert tier.rescued == 4
    assert not set(tier.gone()) & set(readable_keys(tier, first))
    tier.check()
    tier.close()

    again = a_tier(tmp_path)
    assert readable_keys(again, first) == [*first[5:7], *first[9:11]]
    again.close()


def test_rescued_block_is_never_reported_gone(tmp_path):
    faults, told = DiskFaults(), set()
    tier = a_tier(tmp_path, faults=faults, score=oldest, admit_rewrite=lambda size_bytes: True)
    faults.before_write = lambda name, offset: told.update(tier.gone())  # Concurrency
    first = keys_of(19, "first")
    put(tier, first)
    for _ in range(2):
        get(tier, first[:4])
    for number in range(6):
        put(tier, keys_of(19, f"n{number}"))
    told.update(tier.gone())

    assert readable_keys(tier, first) == first[:4]
    assert told & set(first) == set(first[4:])
    tier.close()


def test_unrescued_block_is_reported_gone(tmp_path):
    faults, told = DiskFaults(), set()
    tier = a_tier(tmp_path, faults=faults, score=oldest, admit_rewrite=lambda size_bytes: True)
    faults.before_write = lambda name, offset: told.update(tier.gone())
    first = keys_of(19, "first")
    put(tier, first)
    for _ in range(2):
        get(tier, first[:4])
    faults.write_error = lambda name, offset: (
        None if tier.find(first[:1], deadline_in()) else OSError(errno.EIO, "injected")
    )
    for number in range(6):
        put(tier, keys_of(19, f"n{number}"))

    assert readable_keys(tier, first) == []
    assert told | set(tier.gone()) >= set(first)
    tier.close()


def test_a_damaged_block_is_not_rescued(tmp_path):
    tier = a_tier(tmp_path, score=oldest, admit_rewrite=lambda size_bytes: True)
    first = keys_of(19, "first")
    put(tier, first)
    for _ in range(2):
        get(tier, first[:4])
    path, offset = record_at(tmp_path, first[1])
    flip_bit(path, offset + PAGE_BYTES + 5)
    for number in range(7):
        put(tier, keys_of(19, f"n{number}"))

    assert readable_keys(tier, first) == [first[0], *first[2:4]]
    assert tier.rescued == 3
    tier.close()


def test_a_block_larger_than_a_segment_is_rejected(tmp_path, caplog):
    tier, largest = a_tier(tmp_path), largest_payload_bytes(SEGMENT_BYTES)

    assert put(tier, keys_of(2), length=SEGMENT_BYTES) == [False, False]
    assert put(tier, keys_of(1, "b"), length=largest) == [True]
    assert put(tier, keys_of(1, "c"), length=largest + 1) == [False]

    assert get(tier, keys_of(1, "b"), length=largest) == [MOVED]
    assert tier.status().refused == 3
    assert sum("raise segment_bytes" in record.getMessage() for record in caplog.records) == 1
    tier.close()


def test_blocks_are_spread_over_directories(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    tier = a_tier(*folders, capacity_bytes=6 << 20)
    for number in range(12):
        put(tier, keys_of(8, f"n{number}"))
    everything = [key for number in range(12) for key in keys_of(8, f"n{number}")]

    assert get(tier, everything) == [MOVED] * len(everything)
    assert all(segment_files(folder) for folder in folders)
    tier.close()

    again = a_tier(*reversed(folders), capacity_bytes=6 << 20)
    assert get(again, everything) == [MOVED] * len(everything)
    again.close()


def test_readers_never_see_a_reused_segment(tmp_path):
    """Run three readers, a writer that evicts all the time, and one that discards; every byte that is read is right."""
    tier = a_tier(tmp_path, admit_rewrite=lambda size_bytes: True)
    names = [key for number in range(12) for key in keys_of(19, f"n{number}")]
    stop = threading.Event()
    failures: list[Exception] = []
    outcomes: list[BlockOutcome] = []

    def guarded(act, seed):
        chance = random.Random(seed)

        def run():
            try:
                while not stop.is_set():
                    act(chance)
            except Exception as error:  # noqa: BLE001 - told by the test, not by the thread
                failures.append(error)
                stop.set()

        return run

    def read(chance):
        first = chance.randrange(len(names) - 8)
        outcomes.extend(get(tier, names[first : first + 8]))

    def write(chance):
        first = chance.randrange(len(names) - 8)
        put(tier, names[first : first + 8])

    def discard(chance):
        tier.discard([chance.choice(names)])
        stop.wait(0.002)

    acts = (read, read, read, write, write, discard)
    threads = [threading.Thread(target=guarded(act, seed), daemon=True) for seed, act in enumerate(acts)]
    for thread in threads:
        thread.start()
    stop.wait(2.0)
    eventually(lambda: failures or (outcomes.count(MOVED) > 100 and tier.status().evicted > 100))
    stop.set()
    for thread in threads:
        thread.join(60)

    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
    assert CORRUPT not in outcomes
    tier.check()
    tier.close()


# File system


def test_page_cache_is_used_where_direct_io_is_rejected(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    opened = os.open

    def refuse(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(disks.os, "open", refuse)
    tier = a_tier(tmp_path)

    put(tier, keys_of(30))
    assert get(tier, keys_of(30)) == [MOVED] * 30
    assert sum("direct I/O not supported" in record.getMessage() for record in caplog.records) == 1
    tier.close()


def test_direct_io_can_be_turned_off(tmp_path):
    disk = disks.open_disk(str(tmp_path), direct=False)

    assert not disk.is_direct
    disk.close()


def test_settings_can_be_encoded_and_decoded(tmp_path):
    settings = ssd_settings(tmp_path, sync=Sync.WRITE)

    assert msgspec.json.decode(msgspec.json.encode(settings), type=type(settings)) == settings


def test_a_codec_is_looked_up_for_each_namespace(tmp_path):
    asked: set[bytes] = set()

    def codecs(digest):
        asked.add(digest)
        return PlainCodec()

    tier = SsdTier.open(ssd_settings(tmp_path), codecs=codecs, clock=MonotonicClock())
    put(tier, keys_of(2))

    assert asked == {keys_of(1)[0].digest}
    tier.close()
