"""System clocks: reads the monotonic clock for durations, and the wall clock, which no other module reads."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from kvstore.system_clock import MonotonicClock as SystemClock

__all__ = ["SystemClock", "process_age", "unix_milliseconds", "unix_nanoseconds", "unix_seconds", "utc_now"]


def unix_seconds() -> int:
    """Return the Unix time in seconds; the clock may jump, so do not measure durations with it."""
    return int(time.time())


def unix_milliseconds() -> int:
    """Return the Unix time in milliseconds; the clock may jump, so do not measure durations with it."""
    return unix_nanoseconds() // 1_000_000


def unix_nanoseconds() -> int:
    """Return the Unix time in nanoseconds; the clock may jump, so do not measure durations with it."""
    return time.time_ns()


def utc_now() -> datetime:
    """Return the wall-clock time in UTC; the clock may jump, so do not measure durations with it."""
    return datetime.fromtimestamp(time.time(), UTC)


def process_age() -> float:
    """Return the seconds since this process was started, or 0 on systems other than Linux."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return 0.0
    # field 22 of /proc/PID/stat: start of the process, in clock ticks after the boot of the system
    began = int(stat[stat.rindex(")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
