"""Trend of a process: samples of its memory, open files, threads and event loop tasks, and whether they grow."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

import psutil
from msgspec import Struct

MEBIBYTE = 1 << 20
HOUR = 3600.0
FLAT_MB_PER_HOUR = 30.0
"""Tolerated growth of memory in the second half of a run. Fragmentation stays below it. A leak of 100 bytes per request exceeds it at
85 requests a second."""

ENOUGH_SECONDS = 300.0  # if the second half is shorter, growth is not judged, because it may be warm-up
MORE_FILES = 16  # tolerated additional files at rest, which gRPC keeps open
MORE_TASKS = 16


class TrendSample(Struct, frozen=True, kw_only=True):
    seconds: float  # seconds since the first sample
    rss_bytes: int
    files: int
    threads: int


def sample(process: psutil.Process, seconds: float) -> TrendSample:
    with process.oneshot():
        return TrendSample(
            seconds=seconds,
            rss_bytes=process.memory_info().rss,
            files=process.num_fds(),
            threads=process.num_threads(),
        )


def second_half(samples: Sequence[TrendSample]) -> list[TrendSample]:
    middle = (samples[0].seconds + samples[-1].seconds) / 2
    return [each for each in samples if each.seconds >= middle]


def slope_mb_per_hour(samples: Sequence[TrendSample]) -> float:
    """Return the growth of memory in the second half of the samples, in MiB per hour, by least squares."""
    half = second_half(samples)
    if len({each.seconds for each in half}) < 2:
        return 0.0
    line = statistics.linear_regression([each.seconds for each in half], [each.rss_bytes for each in half])
    return line.slope * HOUR / MEBIBYTE


def grows(samples: Sequence[TrendSample], slope: float) -> str:
    """Return a complaint about growing memory; empty if there is none, or if the run was too short."""
    half = second_half(samples)
    assert all(earlier.seconds <= later.seconds for earlier, later in pairwise(half))
    if half[-1].seconds - half[0].seconds < ENOUGH_SECONDS or slope <= FLAT_MB_PER_HOUR:
        return ""
    return f"memory grows by {slope:.0f} MB an hour, more than {FLAT_MB_PER_HOUR:.0f}"
