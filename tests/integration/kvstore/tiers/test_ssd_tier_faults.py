"""Tests of the SSD tier on disks that fail, hang, are full or read-only: misses and `TierFailed`, never a wrong byte."""

import contextlib
import errno
import gc
import logging
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.codecs.plain import PlainCodec
from kvstore.errors import StoreNotStarted, TierFailed
from kvstore.messages import BlockOutcome
from kvstore.pool.extents import PAGE_BYTES
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.ssd.disk import aligned, open_disk
from kvstore.tiers.ssd.tier import SsdTier
from tests.support.kvstore.builders import BLOCK_BYTES
from tests.support.kvstore.ssd_disks import (
    PER_SEGMENT,
    DiskFaults,
    HoldPoint,
    ShiftedClock,
    a_tier,
    deadline_in,
    get,
    keys_of,
    put,
    readable_keys,
    segment_files,
    ssd_settings,
)
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

MOVED, GONE, CORRUPT = BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.CORRUPT

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


@pytest.fixture
def faults():
    return DiskFaults()


def in_thread(act):
    """Call `act` in a thread; return the thread and a list for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    return thread, results


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Input and output errors


def test_a_read_error_is_a_failure_and_then_a_miss(tmp_path, faults, caplog):
    tier = a_tier(tmp_path, faults=faults)
    keys = keys_of(4)
    put(tier, keys)
    faults.fail_reads(errno.EIO)

    with pytest.raises(TierFailed, match=r"^nothing can be read: injected$"):
        get(tier, keys[:2])
    with pytest.raises(TierFailed):
        get(tier, keys[2:3])

    assert get(tier, keys[:3]) == [GONE] * 3, "an unreadable block is not read again"
    assert tier.status().failures == 2
    assert warnings(caplog) == ["SSD tier: reads fail, blocks are misses"]
    faults.heal()
    assert get(tier, keys) == [GONE, GONE, GONE, MOVED]
    assert put(tier, keys) == [True] * 4
    assert get(tier, keys) == [MOVED] * 4
    tier.check()
    tier.close()


def test_partly_failing_reads_answer_the_other_blocks(tmp_path, faults):
    tier = a_tier(tmp_path, faults=faults)
    keys = keys_of(2 * PER_SEGMENT)
    put(tier, keys[:PER_SEGMENT])
    put(tier, keys[PER_SEGMENT:])
    bad = segment_files(tmp_path)[0].name
    faults.read_error = lambda name, offset: OSError(errno.EIO, "injected") if name == bad else None

    assert get(tier, keys) == [GONE] * PER_SEGMENT + [MOVED] * PER_SEGMENT
    assert tier.status().failures >= 1
    assert tier.status().misses == PER_SEGMENT
    tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_write_error_is_a_failure_and_reading_goes_on(tmp_path, faults, caplog, code):
    clock = ShiftedClock()
    tier = a_tier(tmp_path, faults=faults, clock=clock)
    before, after = keys_of(3), keys_of(3, "later")
    put(tier, before)
    faults.fail_writes(code)

    with pytest.raises(TierFailed, match="nothing can be written"):
        put(tier, after)
    writes = faults.writes
    with pytest.raises(TierFailed):
        put(tier, after)

    assert faults.writes == writes, "a failing directory is avoided for a while"
    assert put(tier, before) == [True] * 3
    assert get(tier, [*before, *after]) == [MOVED] * 3 + [GONE] * 3
    faults.heal()
    clock.advance(5)
    assert put(tier, after, deadline=deadline_in(60)) == [True] * 3
    assert get(tier, after, deadline=deadline_in(60)) == [MOVED] * 3
    assert warnings(caplog) == ["SSD tier: writes fail, blocks are not kept"]
    tier.check()
    tier.close()


def test_a_write_that_failed_half_way_leaves_nothing_to_read(tmp_path, faults):
    tier = a_tier(tmp_path, faults=faults)
    put(tier, keys_of(2))
    faults.fail_writes(errno.ENOSPC)
    faults.torn = True
    with pytest.raises(TierFailed):
        put(tier, keys_of(4, "torn"))
    faults.heal()

    assert get(tier, keys_of(4, "torn")) == [GONE] * 4
    tier.close()
    again = a_tier(tmp_path)
    assert get(again, keys_of(2)) == [MOVED] * 2
    assert get(again, keys_of(4, "torn")) == [GONE] * 4
    again.close()


def test_one_bad_directory_leaves_the_others_working(tmp_path, faults):
    healthy = DiskFaults()
    tier = SsdTier.open(
        ssd_settings(tmp_path / "good", tmp_path / "bad", capacity_bytes=4 << 20),
        codecs=lambda digest: PlainCodec(),
        clock=MonotonicClock(),
        disks=lambda folder: (faults if folder.endswith("bad") else healthy).disk(folder),
    )
    faults.fail_writes()
    for number in range(4):
        with contextlib.suppress(TierFailed):
            put(tier, keys_of(4, f"n{number}"))

    put(tier, keys_of(4, "last"))

    assert readable_keys(tier, keys_of(4, "last")) == keys_of(4, "last")
    tier.check()
    tier.close()


def test_bits_flipped_in_transfer_are_corrupt_and_replaceable(tmp_path, faults):
    tier = a_tier(tmp_path, faults=faults)
    keys = keys_of(3)
    put(tier, keys)

    def flip_in_second_payload(pieces):
        pieces[3][17] ^= 4

    faults.read_all = flip_in_second_payload
    assert get(tier, keys) == [MOVED, CORRUPT, MOVED]
    faults.heal()

    assert get(tier, keys) == [MOVED, GONE, MOVED]
    assert put(tier, keys) == [True] * 3
    assert get(tier, keys) == [MOVED] * 3
    assert tier.status().corrupt == 1
    tier.close()


def test_a_footer_that_cannot_be_written_costs_time_and_no_block(tmp_path, faults):
    tier = a_tier(tmp_path, faults=faults)
    keys = keys_of(3 * PER_SEGMENT)
    end = 63 * PAGE_BYTES - PAGE_BYTES  # where footers begin
    faults.write_error = lambda name, offset: OSError(errno.EIO, "injected") if offset >= end else None
    put(tier, keys)
    tier.close()

    again = a_tier(tmp_path)

    assert get(again, keys) == [MOVED] * len(keys)
    again.close()


def test_unreadable_file_at_start_is_left_out(tmp_path, faults, caplog):
    tier = a_tier(tmp_path)
    put(tier, keys_of(PER_SEGMENT, "a"))
    put(tier, keys_of(PER_SEGMENT, "b"))
    tier.close()
    bad = segment_files(tmp_path)[0].name
    faults.read_error = lambda name, offset: OSError(errno.EIO, "injected") if name == bad else None
    caplog.clear()

    again = a_tier(tmp_path, faults=faults)

    assert again.status().blocks == PER_SEGMENT
    assert warnings(caplog) == ["segment unreadable, it will be overwritten when space is needed"]
    again.close()


# Entries of others


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_tier_grows_past_a_foreign_entry_and_names_it(tmp_path, caplog, make):
    foreign = tmp_path / "segment-000001"
    make(foreign)
    tier = a_tier(tmp_path)
    keys = keys_of(3 * PER_SEGMENT)

    assert put(tier, keys) == [True] * len(keys)

    assert get(tier, keys) == [MOVED] * len(keys)
    assert [record.entry for record in caplog.records if "foreign entry" in record.getMessage()] == ["segment-000001"]
    tier.check()
    tier.close()
    assert not foreign.is_file(), "it was left alone"
    again = a_tier(tmp_path)
    assert get(again, keys) == [MOVED] * len(keys)
    again.close()


# Slow and hanging disks


def test_a_read_that_hangs_delays_its_own_call_only(tmp_path, faults):
    gate, clock = HoldPoint(), ShiftedClock()
    tier = a_tier(tmp_path, faults=faults, clock=clock)
    keys = keys_of(2 * PER_SEGMENT)
    put(tier, keys[:PER_SEGMENT])
    put(tier, keys[PER_SEGMENT:])
    slow = segment_files(tmp_path)[0].name
    faults.before_read = lambda name, offset: gate() if name == slow else None

    into = [np.zeros(BLOCK_BYTES, np.uint8)]
    stuck, answers = in_thread(lambda: tier.get(keys[:1], into, deadline_in()))
    gate.wait()

    assert get(tier, keys[PER_SEGMENT:]) == [MOVED] * PER_SEGMENT
    assert put(tier, keys_of(3, "new")) == [True] * 3
    clock.advance(60)
    assert stuck.is_alive(), "its buffers are in use"
    gate.open()
    stuck.join(60)
    assert answers[0][0].outcome is GONE, "the read came too late"
    assert tier.status().failures == 1
    tier.check()
    tier.close()


def test_when_all_threads_hang_others_give_up_at_their_deadline(tmp_path, faults):
    gate = HoldPoint()
    tier = a_tier(tmp_path, faults=faults, threads=2)
    keys = keys_of(4)
    put(tier, keys)
    faults.before_read = gate
    stuck = [in_thread(lambda: get(tier, keys_of(1)))[0] for _ in range(2)]
    eventually(tier.disk_threads.scratch.empty)

    with at_most(5):
        assert get(tier, keys, deadline=deadline_in(0.1)) == [GONE] * 4
        assert put(tier, keys_of(2, "b"), deadline=deadline_in(0.1)) == [False] * 2

    gate.open()
    for thread in stuck:
        thread.join(60)
    assert get(tier, keys) == [MOVED] * 4
    assert tier.status().failures == 2
    tier.close()


def test_calls_do_not_pile_up_on_a_disk_that_hangs(tmp_path, faults):
    gate = HoldPoint()
    tier = a_tier(tmp_path, faults=faults, max_calls=2)
    keys = keys_of(2)
    put(tier, keys)
    faults.before_read = gate
    stuck = [in_thread(lambda: get(tier, keys))[0] for _ in range(2)]
    eventually(lambda: tier.calls == 2)

    assert get(tier, keys) == [GONE] * 2, "at once, with any deadline"
    assert put(tier, keys_of(1, "b")) == [False]
    assert tier.find(keys, deadline_in()) == 2

    gate.open()
    for thread in stuck:
        thread.join(60)
    assert get(tier, keys) == [MOVED] * 2
    tier.close()


def test_a_segment_that_is_being_read_is_not_written_over(tmp_path, faults):
    """Hold the reader in the middle of its read while everything around it is evicted."""
    gate = HoldPoint()
    tier = a_tier(tmp_path, faults=faults)
    first = keys_of(PER_SEGMENT, "first")
    put(tier, first)
    slow = segment_files(tmp_path)[0].name
    faults.before_read = lambda name, offset: gate() if name == slow else None
    reader, outcomes = in_thread(lambda: get(tier, first))
    gate.wait()

    for number in range(20):
        assert put(tier, keys_of(PER_SEGMENT, f"n{number}")) == [True] * PER_SEGMENT
    gate.open()
    reader.join(60)

    assert outcomes == [[MOVED] * PER_SEGMENT]
    put(tier, keys_of(PER_SEGMENT, "after"))
    tier.check()
    tier.close()


def test_writer_gives_up_when_all_segments_are_being_read(tmp_path, faults):
    gate = HoldPoint()
    tier = a_tier(tmp_path, faults=faults, capacity_bytes=1 << 20, threads=8)
    batches = [keys_of(PER_SEGMENT, f"n{number}") for number in range(2)]
    for batch in batches:
        put(tier, batch)
    faults.before_read = gate
    readers = [in_thread(lambda keys=batch: get(tier, keys)) for batch in batches]
    eventually(lambda: tier.calls == 2)
    wanted = keys_of(3 * PER_SEGMENT, "more")

    kept = put(tier, wanted, deadline=deadline_in(0.3))

    assert 0 < kept.count(True) < len(wanted)
    gate.open()
    for reader, outcomes in readers:
        reader.join(60)
        assert set(outcomes[0]) <= {MOVED, GONE}
    assert put(tier, wanted[-PER_SEGMENT:]) == [True] * PER_SEGMENT
    tier.check()
    tier.close()


def test_tier_closed_during_a_hung_read_closes_in_bounded_time(tmp_path, faults, monkeypatch, caplog):
    monkeypatch.setattr("kvstore.tiers.ssd.tier.CLOSE_SECONDS", 0.1)
    gate = HoldPoint()
    tier = a_tier(tmp_path, faults=faults)
    put(tier, keys_of(1))
    faults.before_read = gate
    reader, outcomes = in_thread(lambda: get(tier, keys_of(1)))
    gate.wait()

    tier.close()

    assert warnings(caplog) == ["SSD tier: closed while the disk hangs, its files stay open until the process ends"]
    gate.open()
    reader.join(60)
    assert outcomes == [[MOVED]], "its file was not closed under it"
    for volume in tier.volumes:
        volume.close()


# Real file systems: full, read-only, small


@contextlib.contextmanager
def mounted(folder: Path, *command: str):
    folder.mkdir()
    subprocess.run([*command, str(folder)], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def a_tmpfs(folder: Path, size_bytes: int):
    return mounted(folder, "mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none")


@contextlib.contextmanager
def an_ext4(folder: Path, image: Path, size_bytes: int):
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
    with mounted(folder, "mount", "-o", "loop", str(image)) as path:
        yield path


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    """Mount a file system of about two MiB."""
    context = (
        a_tmpfs(tmp_path / "disk", 2 << 20)
        if request.param == "tmpfs"
        else an_ext4(tmp_path / "disk", tmp_path / "image", 2560 << 10)
    )
    with context as folder:
        yield folder


@needs_root
def test_device_smaller_than_the_cap_is_filled(small_disk, caplog):
    tier = a_tier(small_disk / "kv", capacity_bytes=16 << 20)
    for number in range(20):
        assert put(tier, keys_of(PER_SEGMENT, f"n{number}")) == [True] * PER_SEGMENT

    assert get(tier, keys_of(PER_SEGMENT, "n19")) == [MOVED] * PER_SEGMENT
    assert tier.status().blocks >= 4 * PER_SEGMENT
    assert sum("no further segment can be made" in line for line in warnings(caplog)) == 1
    tier.check()
    tier.close()

    again = a_tier(small_disk / "kv", capacity_bytes=16 << 20)
    assert get(again, keys_of(PER_SEGMENT, "n19")) == [MOVED] * PER_SEGMENT
    again.close()


@needs_root
def test_device_filled_by_others_keeps_nothing_and_says_so(small_disk):
    tier = a_tier(small_disk / "kv", capacity_bytes=16 << 20)
    with contextlib.suppress(OSError), (small_disk / "others").open("wb") as file:
        while True:
            file.write(bytes(PAGE_BYTES))
            file.flush()

    with pytest.raises(TierFailed, match="No space left on device"):
        put(tier, keys_of(3))
    assert get(tier, keys_of(3)) == [GONE] * 3
    assert segment_files(small_disk / "kv") == []
    tier.check()
    tier.close()


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], capture_output=True, check=True)


@needs_root
def test_unused_read_only_directory_is_refused_at_the_start(small_disk):
    remount(small_disk, "ro")

    with pytest.raises(StoreNotStarted, match=r"directories\[0\]: .*Read-only file system; make it writable"):
        a_tier(small_disk / "kv")


@needs_root
def test_tier_starts_without_a_disk_that_became_read_only(small_disk, tmp_path, caplog):
    a_tier(small_disk / "kv", capacity_bytes=1 << 20).close()
    remount(small_disk, "ro")
    keys = keys_of(4)

    alone = a_tier(small_disk / "kv", capacity_bytes=1 << 20)
    assert get(alone, keys) == [GONE] * 4
    with pytest.raises(TierFailed, match="no directory can be written to"):
        put(alone, keys)
    alone.close()
    tier = a_tier(small_disk / "kv", tmp_path / "healthy")
    assert put(tier, keys) == [True] * 4
    assert get(tier, keys) == [MOVED] * 4
    tier.check()
    tier.close()

    assert warnings(caplog) == ["SSD tier: disk failed, going on without it until the next start"] * 2
    remount(small_disk, "rw")
    again = a_tier(small_disk / "kv", capacity_bytes=1 << 20)
    assert put(again, keys) == [True] * 4
    again.close()


@pytest.mark.parametrize("operation", ["open", "foreign_bytes", "segments", "space"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN])
def test_tier_starts_without_a_disk_with_input_errors(tmp_path, faults, caplog, operation, code):
    faults.fail_start(operation, OSError(code, "injected"))

    tier = a_tier(tmp_path, faults=faults)

    assert get(tier, keys_of(2)) == [GONE] * 2
    tier.close()
    assert warnings(caplog) == ["SSD tier: disk failed, going on without it until the next start"]
    faults.heal()
    a_tier(tmp_path, faults=faults).close()  # the directory is not locked any more


@pytest.mark.parametrize("operation", ["foreign_bytes", "segments", "space"])
def test_other_error_at_the_start_names_the_directory(tmp_path, faults, operation):
    faults.fail_start(operation, PermissionError(errno.EACCES, "injected"))

    with pytest.raises(StoreNotStarted, match=r"^directories\[0\]: .* cannot be used: injected"):
        a_tier(tmp_path, faults=faults)


@needs_root
def test_short_transfers_are_continued(tmp_path):
    """Check that a full disk, which takes only the first part of a write, causes an error."""
    with a_tmpfs(tmp_path / "disk", 64 * PAGE_BYTES) as folder:
        disk = open_disk(str(folder), direct=False)
        file = disk.create("segment-000000", PAGE_BYTES)
        big = aligned(80 * PAGE_BYTES)
        big[:] = 7

        with pytest.raises(OSError, match="No space left") as failure:
            file.write([big[: 10 * PAGE_BYTES], big[10 * PAGE_BYTES :]], 0)
        assert failure.value.errno == errno.ENOSPC

        into = aligned(80 * PAGE_BYTES)
        count = file.read([into[: 3 * PAGE_BYTES], into[3 * PAGE_BYTES :]], 0)
        assert 40 * PAGE_BYTES < count <= 64 * PAGE_BYTES
        assert (into[:count] == 7).all()
        file.close()
        disk.close()


def test_transfer_with_many_pieces_is_complete(tmp_path):
    disk = open_disk(str(tmp_path), direct=True)
    file = disk.create("segment-000000", 1500 * PAGE_BYTES)
    content = aligned(1500 * PAGE_BYTES)
    content[:] = np.random.default_rng(1).integers(0, 255, content.nbytes, dtype=np.uint8)
    rows = content.reshape(1500, PAGE_BYTES)

    file.write(list(rows), 0)
    into = aligned(1500 * PAGE_BYTES)

    assert file.read(list(into.reshape(1500, PAGE_BYTES)), 0) == content.nbytes
    assert np.array_equal(into, content)
    file.close()
    disk.close()


def test_closed_tier_leaves_nothing_open(tmp_path):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # sockets of earlier tests
    threads = threading.active_count()
    before = descriptors()
    for _ in range(3):
        tier = a_tier(tmp_path)
        put(tier, keys_of(3 * PER_SEGMENT))
        tier.close()
        tier = a_tier(tmp_path)
        with pytest.raises(StoreNotStarted):
            a_tier(tmp_path)
        tier.close()

    eventually(lambda: descriptors() <= before)
    eventually(lambda: threading.active_count() <= threads)
