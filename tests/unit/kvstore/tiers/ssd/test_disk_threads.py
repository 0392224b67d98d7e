"""Disk threads: the number of parallel jobs, deadlines, errors, and how calls are divided into batches."""

import threading

import pytest

from kvstore.system_clock import MonotonicClock
from kvstore.tiers.ssd.disk_threads import BATCH_RECORDS, LEAST_BATCH_BYTES, DiskThreads, batches
from tests.support.kvstore.builders import deadline_in
from tests.support.kvstore.ssd_disks import HoldPoint, ShiftedClock

KIB = 1 << 10


@pytest.fixture
def disk_threads():
    disk_threads = DiskThreads("test", 3, MonotonicClock())
    yield disk_threads
    disk_threads.close()


def test_all_jobs_run_within_the_thread_limit(disk_threads):
    running, most, done, lock = set(), [0], [], threading.Lock()
    pairs = threading.Barrier(2)

    def job(number):
        def act(scratch):
            with lock:
                assert id(scratch) not in running, "two jobs have the same buffers"
                running.add(id(scratch))
                most[0] = max(most[0], len(running))
            pairs.wait(60)
            with lock:
                running.discard(id(scratch))
                done.append(number)

        return act

    calls = [
        threading.Thread(target=disk_threads.run, args=([job((call, n)) for n in range(10)], deadline_in()))
        for call in range(4)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()

    assert len(set(done)) == len(done) == 40
    assert 2 <= most[0] <= 3


def test_single_job_runs_in_the_calling_thread(disk_threads):
    threads = []

    disk_threads.run([lambda scratch: threads.append(threading.current_thread())], deadline_in())

    assert threads == [threading.current_thread()]


def test_no_job_begins_after_the_deadline(disk_threads):
    done = []

    disk_threads.run([lambda scratch: done.append(1)] * 5, deadline_in(-1))

    assert done == []


def test_running_job_is_waited_for_after_the_deadline():
    clock, gate, done = ShiftedClock(), HoldPoint(), []
    disk_threads = DiskThreads("test", 2, clock)

    def hang(scratch):
        gate()
        done.append(1)

    caller = threading.Thread(target=disk_threads.run, args=([hang, hang, hang], deadline_in()))
    caller.start()
    gate.wait()
    clock.advance(3600)
    caller.join(0.05)
    assert caller.is_alive()
    gate.open()
    caller.join(60)

    assert 1 <= len(done) <= 2, "the third job had not begun"
    disk_threads.close()


def test_job_error_is_raised_after_running_jobs_end(disk_threads):
    gate, ended = HoldPoint(), []

    def slow(scratch):
        gate()
        ended.append(1)

    def bad(scratch):
        gate.open()
        raise LookupError("injected")

    with pytest.raises(LookupError):
        disk_threads.run([slow, bad], deadline_in())

    assert ended == [1]
    disk_threads.run([lambda scratch: ended.append(2)], deadline_in())
    assert ended == [1, 2]


@pytest.mark.parametrize(
    ("sizes", "threads", "cuts"),
    [
        ([], 4, []),
        ([100], 4, [1]),
        ([128 * KIB] * 4, 4, [2, 2]),  # a batch has at least LEAST_BATCH_BYTES
        ([1024 * KIB] * 8, 4, [1] * 8),
        ([128 * KIB] * 64, 4, [8] * 8),
        ([8192 * KIB] * 2, 4, [1, 1]),  # a block larger than a batch is not divided
        ([10] * 600, 4, [BATCH_RECORDS, BATCH_RECORDS, 600 - 2 * BATCH_RECORDS]),
    ],
)
def test_batches_give_every_thread_work(sizes, threads, cuts):
    slices = batches(sizes, 4096 * KIB, threads)

    assert [each.stop - each.start for each in slices] == cuts
    assert [index for each in slices for index in range(len(sizes))[each]] == list(range(len(sizes)))
    assert LEAST_BATCH_BYTES == 256 * KIB
